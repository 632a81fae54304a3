package lazy_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/lazy"
)

const chunk = erofs.ChunkSize

// source is a store that counts, and can be told to misbehave.
type source struct {
	blob.Store
	gets atomic.Int64
	mu   sync.Mutex
	hang chan struct{} // Get waits for it to be closed
	fail error
	bad  bool // bytes come altered
}

func (s *source) set(f func()) { s.mu.Lock(); defer s.mu.Unlock(); f() }

func (s *source) Get(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	s.gets.Add(1)
	s.mu.Lock()
	hang, fail, bad := s.hang, s.fail, s.bad
	s.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if fail != nil {
		return nil, fail
	}
	r, err := s.Store.Get(ctx, d, off, n)
	if err != nil || !bad {
		return r, err
	}
	b, err := io.ReadAll(r)
	b[len(b)/2] ^= 1
	return io.NopCloser(bytes.NewReader(b)), errors.Join(err, r.Close())
}

// thing is a blob with its table.
type thing struct {
	bytes []byte
	data  image.Data
	table *image.Table
}

type rig struct {
	*testing.T
	src *source
	dir string
	rnd *rand.Rand
}

func newRig(t *testing.T) *rig {
	return &rig{T: t, src: &source{Store: new(blob.Memory)}, dir: t.TempDir(), rnd: rand.New(rand.NewPCG(1, 2))}
}

// put stores a blob, packed or plain.
func (r *rig) put(size int, packed string) thing {
	r.Helper()
	b := make([]byte, size)
	for i := 0; i < size; i += 64 { // it shrinks, but not to nothing
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], r.rnd.Uint64())
		copy(b[i:], word[:])
	}
	th := thing{bytes: b, data: image.Data{Part: image.Part{Digest: blob.Of(b), Size: int64(size)}}}
	z, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
	if err != nil {
		r.Fatal(err)
	}
	var sums, ends, pack []byte
	for at := 0; at < size; at += chunk {
		c := b[at:min(at+chunk, size)]
		sum := sha256.Sum256(c)
		sums = append(sums, sum[:]...)
		if f := z.EncodeAll(c, nil); len(f) < len(c) {
			c = f
		}
		pack = append(pack, c...)
		ends = binary.LittleEndian.AppendUint64(ends, uint64(len(pack)))
	}
	stored := b
	if packed == "packed" {
		stored, sums = pack, append(sums, ends...)
		th.data.Packed = &image.Part{Digest: blob.Of(pack), Size: int64(len(pack))}
	}
	th.data.Chunks = image.Part{Digest: blob.Of(sums), Size: int64(len(sums))}
	if th.table, err = image.ParseTable(th.data, sums); err != nil {
		r.Fatal(err)
	}
	if _, err := blob.PutBytes(r.Context(), r.src.Store, stored); err != nil {
		r.Fatal(err)
	}
	return th
}

func (r *rig) open(cfg lazy.Config, things ...thing) *lazy.Cache {
	r.Helper()
	cfg.Store = r.src
	if cfg.Dir == "" {
		cfg.Dir = r.dir
	}
	c, err := lazy.Open(cfg)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { c.Close() }) //nolint:errcheck // again is refused by nobody
	for _, th := range things {
		if err := c.Add(th.data, th.table); err != nil {
			r.Fatal(err)
		}
	}
	return c
}

func read(c *lazy.Cache, th thing, off int64, n int) ([]byte, lazy.Result, error) {
	buf := make([]byte, n)
	res, err := c.Read(context.Background(), th.data.Digest, off, n, func() ([]byte, error) { return buf, nil })
	return buf[:res.N], res, err
}

func (r *rig) want(c *lazy.Cache, th thing, off int64, n int) lazy.Result {
	r.Helper()
	got, res, err := read(c, th, off, n)
	want := th.bytes[min(off, int64(len(th.bytes))):min(off+int64(n), int64(len(th.bytes)))]
	if err != nil || !bytes.Equal(got, want) {
		r.Errorf("%d bytes at %d: %d bytes, right is %v, %v", n, off, len(got), bytes.Equal(got, want), err)
	}
	return res
}

// TestBytes reads anywhere, many at a time: right bytes, each fetched once.
func TestBytes(t *testing.T) {
	for _, packed := range []string{"plain", "packed"} {
		t.Run(packed, func(t *testing.T) {
			r := newRig(t)
			th := r.put(9*chunk+777, packed)
			c := r.open(lazy.Config{}, th)
			var work sync.WaitGroup
			for i := range 16 {
				rnd := rand.New(rand.NewPCG(7, uint64(i)))
				work.Go(func() {
					for range 50 {
						r.want(c, th, rnd.Int64N(int64(len(th.bytes))+chunk), 1+rnd.IntN(3*chunk))
					}
				})
			}
			work.Wait()
			s, stored := c.Stats(), th.data.Stored().Size
			if s.Fetched != stored || s.Cached != int64(len(th.bytes)) || s.Failed != 0 || s.Unkept != 0 {
				t.Errorf("%+v, %d are stored", s, stored)
			}
			if _, _, ok := c.Path(th.data.Digest); !ok {
				t.Error("it is here, and there is no path")
			}
			if _, err := c.Read(t.Context(), th.data.Digest, -1, 1, nil); !errors.Is(err, unix.EINVAL) {
				t.Errorf("before the beginning: %v", err)
			}
			if _, err := c.Read(t.Context(), blob.Of(nil), 0, 1, nil); !errors.Is(err, lazy.ErrUnknown) {
				t.Errorf("of another blob: %v", err)
			}
		})
	}
}

// TestReadahead counts the requests of who goes forward, and of who does not.
func TestReadahead(t *testing.T) {
	r := newRig(t)
	a, b := r.put(64*chunk, "plain"), r.put(64*chunk, "plain")
	c := r.open(lazy.Config{}, a, b)
	for at := 0; at < len(a.bytes); at += chunk / 2 {
		r.want(c, a, int64(at), chunk/2)
	}
	if n := r.src.gets.Load(); n > 12 {
		t.Errorf("%d requests for 64 chunks in order", n)
	}
	before := c.Stats().Fetched
	for i := range 16 {
		r.want(c, b, int64(4*(15-i))*chunk, 100)
	}
	// One guess shows that nobody reads what lies behind.
	if got := c.Stats().Fetched - before; got != 17*chunk {
		t.Errorf("%d bytes for 16 chunks here and there", got)
	}
	// Three of four chunks are read, in no order that shows where it goes: most of the second of
	// two come along.
	d := r.put(240*chunk, "plain")
	if err := c.Add(d.data, d.table); err != nil {
		t.Fatal(err)
	}
	gets, fetched := r.src.gets.Load(), c.Stats().Fetched
	for i := 0; i < 240; i += 4 {
		for _, k := range []int{0, 2, 1} {
			r.want(c, d, int64(i+k)*chunk+777, 100)
		}
	}
	if n, got := r.src.gets.Load()-gets, (c.Stats().Fetched-fetched)/chunk; n > 140 || got > 230 {
		t.Errorf("%d requests and %d chunks for 180 chunks of 240", n, got)
	}
}

// TestBound reads more than there is room for.
func TestBound(t *testing.T) {
	r := newRig(t)
	var all []thing
	for range 5 {
		all = append(all, r.put(8*chunk, "packed"))
	}
	const bound = 17 * chunk
	c := r.open(lazy.Config{Bytes: bound}, all...)
	r.want(c, all[0], 0, 8*chunk)
	path, release, ok := c.Path(all[0].data.Digest)
	if !ok {
		t.Fatal("not complete")
	}
	var work sync.WaitGroup
	for i := range 8 {
		rnd := rand.New(rand.NewPCG(3, uint64(i)))
		work.Go(func() {
			for range 150 {
				th := all[rnd.IntN(len(all))]
				r.want(c, th, rnd.Int64N(8*chunk), 1+rnd.IntN(chunk))
				if s := c.Stats(); s.Cached > bound {
					t.Errorf("%d bytes are kept of %d", s.Cached, bound)
				}
			}
		})
	}
	work.Wait()
	if s := c.Stats(); s.Evicted == 0 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, all[0].bytes) {
		t.Errorf("a file that was handed out has changed: %v", err)
	}
	release()
	release()
	if got := disk(t, r.dir); got > bound+chunk {
		t.Errorf("%d bytes on the disk, %d allowed", got, int64(bound))
	}
	// One that is larger than all the room is read all the same.
	big := r.put(20*chunk, "plain")
	if err := c.Add(big.data, big.table); err != nil {
		t.Fatal(err)
	}
	r.want(c, big, 0, 20*chunk)
	if s := c.Stats(); s.Cached > bound || s.Unkept == 0 {
		t.Errorf("%+v", s)
	}
}

// TestForget: a blob that is forgotten leaves no file, and one that is in use stays.
func TestForget(t *testing.T) {
	r := newRig(t)
	th, other := r.put(3*chunk, "packed"), r.put(chunk, "plain")
	c := r.open(lazy.Config{}, th, other)
	r.want(c, th, 0, 3*chunk)
	r.want(c, other, 0, chunk)
	d := th.data.Digest
	path, release, ok := c.Path(d)
	if !ok || c.Forget(d) {
		t.Error("a blob whose path was told is forgotten")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if c.Forget(d) {
		t.Error("a blob that somebody has open is forgotten")
	}
	r.want(c, th, 0, 3*chunk)
	f.Close()
	c.Prefetch(d, []int{0, 1, 2})
	for until := time.Now().Add(10 * time.Second); !c.Forget(d); time.Sleep(time.Millisecond) {
		if time.Now().After(until) { // a fetch ahead has it for a moment
			t.Fatal("it is not forgotten")
		}
	}
	if _, _, err := read(c, th, 0, 1); !errors.Is(err, lazy.ErrUnknown) {
		t.Errorf("read of a forgotten blob: %v", err)
	}
	if names, _ := filepath.Glob(filepath.Join(r.dir, d.Hex()+"*")); len(names) > 0 || c.Stats().Cached != chunk {
		t.Errorf("%q are left, %d bytes cached", names, c.Stats().Cached)
	}
	if !c.Forget(d) {
		t.Error("what is unknown is not forgotten")
	}
	if err := c.Add(th.data, th.table); err != nil {
		t.Fatal(err)
	}
	r.want(c, th, 0, 3*chunk)
}

// disk is what the data files of a cache take.
func disk(t *testing.T, dir string) (n int64) {
	t.Helper()
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err == nil && filepath.Ext(name) == "" {
			n += st.Blocks * 512
		}
	}
	return n
}

// TestRestart finds what the cache before kept. The word of another boot is not believed.
func TestRestart(t *testing.T) {
	r := newRig(t)
	th := r.put(6*chunk, "plain")
	c := r.open(lazy.Config{Boot: "one"}, th)
	r.want(c, th, 0, 4*chunk)
	if _, err := lazy.Open(lazy.Config{Dir: r.dir, Store: r.src}); err == nil {
		t.Error("two processes have one folder")
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	r.src.set(func() { r.src.fail = errors.New("the store is down") })
	c = r.open(lazy.Config{Boot: "one"}, th)
	r.want(c, th, 0, 4*chunk)
	if _, _, err := read(c, th, 5*chunk, 1); err == nil {
		t.Error("what is not here was read without a store")
	}
	c.Close() //nolint:errcheck

	// The power went before the last bytes were on the disk.
	f := filepath.Join(r.dir, th.data.Digest.Hex())
	file, err := os.OpenFile(f, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt(make([]byte, 100), 2*chunk+5); err != nil {
		t.Fatal(err)
	}
	file.Close() //nolint:errcheck
	c = r.open(lazy.Config{Boot: "two"}, th)
	if _, _, ok := c.Path(th.data.Digest); ok {
		t.Error("a path to what was not checked")
	}
	r.want(c, th, 0, 2*chunk)
	if got, _, err := read(c, th, 2*chunk, chunk); err == nil {
		t.Errorf("wrong bytes, %v", bytes.Equal(got, th.bytes[2*chunk:3*chunk]))
	}
	r.src.set(func() { r.src.fail = nil })
	r.want(c, th, 0, 6*chunk)
	if s := c.Stats(); s.Corrupt != 1 || s.Fetched != 3*chunk || s.Cached != 6*chunk {
		t.Errorf("%+v", s)
	}
	if _, _, ok := c.Path(th.data.Digest); !ok {
		t.Error("all is checked, and there is no path")
	}
	c.Close() //nolint:errcheck

	for name, spoil := range map[string]func(string) error{
		"torn marks":      func(p string) error { return os.Truncate(p+".marks", 80) },
		"no marks":        func(p string) error { return os.Remove(p + ".marks") },
		"another version": func(p string) error { return os.WriteFile(p+".marks", []byte("dsec-marks 9\n"), 0o600) },
		"short data":      func(p string) error { return os.Truncate(p, 3*chunk) },
		"no data":         func(p string) error { return os.Remove(p) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := spoil(f); err != nil {
				t.Fatal(err)
			}
			c := r.open(lazy.Config{Boot: "two"}, th)
			r.want(c, th, 0, 6*chunk)
			if s := c.Stats(); s.Cached != 6*chunk || s.Fetched != 6*chunk {
				t.Errorf("%+v", s)
			}
			c.Close() //nolint:errcheck
		})
	}

	// What nobody asks for any more goes when room is needed.
	other := r.put(6*chunk, "plain")
	c = r.open(lazy.Config{Boot: "two", Bytes: 7 * chunk}, other)
	r.want(c, other, 0, 6*chunk)
	if _, err := os.Stat(f); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an old file stays: %v", err)
	}
}

// TestBadBytes have no way to a reader.
func TestBadBytes(t *testing.T) {
	for _, packed := range []string{"plain", "packed"} {
		r := newRig(t)
		th, other := r.put(3*chunk, packed), r.put(2*chunk, packed)
		c := r.open(lazy.Config{}, th, other)
		r.want(c, other, 0, 2*chunk)
		r.src.set(func() { r.src.bad = true })
		if _, _, err := read(c, th, 2*chunk+10, 20); !errors.Is(err, image.ErrCorrupt) { // the last comes alone
			t.Errorf("%s: %v", packed, err)
		}
		r.want(c, other, 0, 2*chunk)
		if s := c.Stats(); s.Corrupt != 1 || s.Failed != 1 || s.Cached != 2*chunk {
			t.Errorf("%+v", s)
		}
		r.src.set(func() { r.src.bad = false })
		r.want(c, th, 0, 3*chunk)
	}
}

// TestSlowStore costs the reader who waits for it, until it is back.
func TestSlowStore(t *testing.T) {
	r := newRig(t)
	th, other := r.put(3*chunk, "plain"), r.put(2*chunk, "plain")
	c := r.open(lazy.Config{Limit: 100 * time.Millisecond}, th, other)
	r.want(c, other, 0, 2*chunk)
	hang := make(chan struct{})
	r.src.set(func() { r.src.hang = hang })
	if _, res, err := read(c, th, 0, 10); err == nil || len(res.Missed) != 1 || res.Waited < 50*time.Millisecond {
		t.Errorf("%+v, %v", res, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Read(ctx, th.data.Digest, 0, 1, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("called off: %v", err)
	}
	r.want(c, other, 0, 2*chunk)
	r.src.set(func() { r.src.hang = nil })
	close(hang)
	for { // who comes in time for the fetch that failed fails with it
		if _, _, err := read(c, th, 0, 10); err == nil {
			break
		}
		if t.Context().Err() != nil {
			t.Fatal("it does not recover")
		}
	}
	r.want(c, th, 0, 3*chunk)
}

// TestFullDisk keeps what there is room for, and serves all.
func TestFullDisk(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("feature root: mounts are needed: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	th := r.put(8*chunk, "packed")
	c := r.open(lazy.Config{Dir: dir}, th)
	for range 2 {
		r.want(c, th, 0, 8*chunk)
	}
	if s := c.Stats(); s.Unkept == 0 || s.Cached >= 8*chunk || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}

// TestPrefetch brings what is listed, in the order of the list, whatever is on it.
func TestPrefetch(t *testing.T) {
	r := newRig(t)
	th, other := r.put(40*chunk, "plain"), r.put(4*chunk, "plain")
	c := r.open(lazy.Config{Bytes: 44 * chunk}, th, other)
	r.want(c, other, 0, 4*chunk)
	c.Prefetch(blob.Of(nil), []int{1})
	c.Prefetch(th.data.Digest, []int{3, 1, 2, -5, 1000, 3, 39, 30, 31})
	deadline := time.Now().Add(10 * time.Second)
	for c.Stats().Cached < (4+6)*chunk && time.Now().Before(deadline) {
		<-time.After(time.Millisecond)
	}
	for _, i := range []int64{1, 2, 3, 30, 31, 39} {
		if res := r.want(c, th, i*chunk, chunk); len(res.Missed) > 0 {
			t.Errorf("chunk %d was not there", i)
		}
	}
	if s := c.Stats(); s.Prefetched != 6 || s.Evicted != 0 {
		t.Errorf("%+v", s)
	}
}

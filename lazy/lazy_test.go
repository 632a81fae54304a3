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
	"slices"
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
	done := c.Expect([]lazy.Extent{{Blob: d, First: 0, Many: 3}})
	defer done()
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

// TestBring gives pages of chunks that are absent: reads of no others have nothing fetched, those of
// more have their chunks. Bytes are counted once, and go with the chunk and with the blob.
func TestBring(t *testing.T) {
	r := newRig(t)
	const page = lazy.PageSize
	th, other := r.put(4*chunk+page+100, "plain"), r.put(chunk, "plain")
	c := r.open(lazy.Config{Bytes: 9 * chunk}, th, other)
	d := th.data.Digest
	bring := func(first, many int) bool {
		off := int64(first) * page
		return c.Bring(lazy.Extent{Blob: d, First: first, Many: many}, th.bytes[off:min(off+int64(many)*page, int64(len(th.bytes)))])
	}
	// Over a boundary of chunks, and to the end of the blob.
	if !bring(60, 8) || !bring(4*64, 2) || !bring(62, 4) {
		t.Fatal("pages were not taken")
	}
	for _, x := range []lazy.Extent{
		{Blob: d, First: -1, Many: 1}, {Blob: d, First: 0, Many: 0}, {Blob: d, First: 4*64 + 2, Many: 1}, {Blob: blob.Of(nil), First: 0, Many: 1},
		{Blob: d, First: 4*64 + 1, Many: 2}, {Blob: d, First: 4*64 + 1, Many: 128},
	} {
		for _, n := range []int{page, 100, x.Many * page} {
			if n >= 0 && c.Bring(x, make([]byte, n)) {
				t.Errorf("%+v was taken with %d bytes", x, n)
			}
		}
	}
	if got, want := c.Stats().Cached, int64(8*page+page+100); got != want {
		t.Errorf("%d bytes are cached, want %d", got, want)
	}
	for _, at := range [][2]int{{60 * page, 8 * page}, {63*page + 5, page}, {4 * chunk, page + 100}, {4*chunk + page, 100}} {
		if res := r.want(c, th, int64(at[0]), at[1]); len(res.Missed) > 0 || res.Waited > 0 {
			t.Errorf("%d bytes at %d were fetched", at[1], at[0])
		}
	}
	if n := r.src.gets.Load(); n != 0 {
		t.Errorf("%d requests of the store", n)
	}
	if x := (lazy.Extent{Blob: d, First: 60, Many: 8}); c.Chunk(d, 0) != nil || c.Wants([]lazy.Extent{x}) || !c.Wants([]lazy.Extent{x, {Blob: d, First: 59, Many: 1}}) {
		t.Error("what is here is not what is wanted")
	}
	// One page more than there is: the chunk comes, with the one behind, and counts once.
	if res := r.want(c, th, 59*page, 2*page); !slices.Equal(res.Missed, []int{0}) {
		t.Errorf("missed %v", res.Missed)
	}
	awaitCached(t, c, 2*chunk+page+100)
	if !bring(0, 1) || c.Stats().Cached != 2*chunk+page+100 {
		t.Errorf("a page of a chunk that is here counts: %d", c.Stats().Cached)
	}
	// What was checked is not written over by what was not.
	if !c.Bring(lazy.Extent{Blob: d, First: 0, Many: 1}, make([]byte, page)) || !bytes.Equal(c.Chunk(d, 0), th.bytes[:chunk]) {
		t.Error("a chunk that was here has other bytes now")
	}
	for until := time.Now().Add(10 * time.Second); !c.Forget(d) && time.Now().Before(until); time.Sleep(time.Millisecond) {
	}
	if !c.Forget(d) || c.Stats().Cached != 0 || disk(t, r.dir) != 0 {
		t.Errorf("after it is forgotten %d bytes are cached, %d on the disk", c.Stats().Cached, disk(t, r.dir))
	}
	// Without room nothing is dropped for them.
	if err := c.Add(th.data, th.table); err != nil {
		t.Fatal(err)
	}
	full := r.open(lazy.Config{Dir: t.TempDir(), Bytes: chunk}, th, other)
	r.want(full, other, 0, chunk)
	awaitCached(t, full, chunk)
	if full.Bring(lazy.Extent{Blob: d, First: 0, Many: 1}, th.bytes[:page]) || full.Stats().Evicted != 0 {
		t.Error("something was dropped for a page")
	}
}

// awaitCached waits until chunks that were served are kept too.
func awaitCached(t *testing.T, c *lazy.Cache, want int64) {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); c.Stats().Cached != want; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d bytes are cached, want %d", c.Stats().Cached, want)
		}
	}
}

// TestExpect has reads wait for pages that are said to come, and fetch once they are not.
func TestExpect(t *testing.T) {
	r := newRig(t)
	const page = lazy.PageSize
	th := r.put(4*chunk, "plain")
	c := r.open(lazy.Config{}, th)
	d := th.data.Digest
	done := c.Expect([]lazy.Extent{{Blob: d, First: 0, Many: 70}, {Blob: d, First: 1 << 40, Many: 1}, {Blob: blob.Of(nil), First: 0, Many: 1}})
	results := make(chan lazy.Result, 2)
	for _, off := range []int64{3 * page, 66 * page} {
		go func() {
			_, res, err := read(c, th, off, page)
			if err != nil {
				t.Error(err)
			}
			results <- res
		}()
	}
	select {
	case res := <-results:
		t.Fatalf("%+v was there too early", res)
	case <-time.After(50 * time.Millisecond):
	}
	c.Bring(lazy.Extent{Blob: d, First: 0, Many: 10}, th.bytes[:10*page])
	if res := <-results; len(res.Missed) > 0 || res.Waited == 0 {
		t.Errorf("%+v, want to have waited and nothing missed", res)
	}
	if n := r.src.gets.Load(); n != 0 {
		t.Errorf("%d requests of the store", n)
	}
	// A page that nobody promised is fetched at once, and what is not coming any more too.
	if res := r.want(c, th, 100*page, page); !slices.Equal(res.Missed, []int{1}) {
		t.Errorf("%+v", res)
	}
	<-results // of the same chunk
	// What does not come keeps one reader waiting for a moment, and no other.
	if res := r.want(c, th, 12*page, page); !slices.Equal(res.Missed, []int{0}) || res.Waited < 400*time.Millisecond {
		t.Errorf("what does not come: %+v", res)
	}
	th = r.put(2*chunk, "plain")
	if err := c.Add(th.data, th.table); err != nil {
		t.Fatal(err)
	}
	done()
	done = c.Expect([]lazy.Extent{{Blob: th.data.Digest, First: 0, Many: 30}})
	go func() {
		time.Sleep(20 * time.Millisecond)
		done()
	}()
	if res := r.want(c, th, 20*page, page); !slices.Equal(res.Missed, []int{0}) {
		t.Errorf("what is not coming any more: %+v", res)
	}
}

// TestPagesOfBefore: pages are not known after a restart, and take no room then.
func TestPagesOfBefore(t *testing.T) {
	r := newRig(t)
	th := r.put(4*chunk, "plain")
	c := r.open(lazy.Config{}, th)
	r.want(c, th, 3*chunk, chunk)
	awaitCached(t, c, chunk)
	c.Bring(lazy.Extent{Blob: th.data.Digest, First: 64, Many: 64}, th.bytes[chunk:2*chunk])
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c = r.open(lazy.Config{}, th)
	if got, on := c.Stats().Cached, disk(t, r.dir); got != chunk || on > chunk+8192 {
		t.Errorf("%d bytes are cached and %d on the disk", got, on)
	}
	if res := r.want(c, th, chunk, chunk); !slices.Equal(res.Missed, []int{1}) {
		t.Errorf("%+v", res)
	}
}

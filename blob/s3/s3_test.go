package s3_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
	"github.com/dsec-go/dsec/blob/s3"
	"github.com/dsec-go/dsec/blob/s3/s3test"
)

// hasty is for servers that are gone, brief for interruptions: a second of a node's life.
var hasty = blob.Retry{For: 500 * time.Millisecond, First: 5 * time.Millisecond, Max: 50 * time.Millisecond}

func open(t testing.TB, c s3.Config) *s3.Store {
	t.Helper()
	s, err := s3.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

var prefixes atomic.Int64

// prefix is one that nobody else uses.
func prefix() string { return "test/" + strconv.FormatInt(prefixes.Add(1), 10) }

func TestConformance(t *testing.T) {
	server := s3test.Gateway(t, t.TempDir())
	blobtest.Run(t, func(t *testing.T) blob.Store {
		s := open(t, server.Config(server.Addr, prefix()))
		s.SetPageSize(7)
		return s
	})
}

// TestTouch has the server copy blobs of one part and of several onto themselves.
func TestTouch(t *testing.T) {
	dir := t.TempDir()
	server := s3test.Gateway(t, dir)
	s := open(t, server.Config(server.Addr, prefix()))
	for _, n := range []int{0, 5000, 17 << 20} {
		data := blobtest.Data(uint64(n), n)
		d, err := blob.PutBytes(t.Context(), s, data)
		if err != nil {
			t.Fatal(err)
		}
		// The gateway's objects are files: their time is set back by hand.
		old := time.Now().Add(-2 * time.Hour)
		aged := 0
		filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error { //nolint:errcheck // counted
			if filepath.Base(path) == d.Hex() && os.Chtimes(path, old, old) == nil {
				aged++
			}
			return nil
		})
		if aged == 0 {
			t.Fatal("no file of the blob found")
		}
		if before, err := s.Written(t.Context(), d); err != nil || time.Since(before) < time.Hour {
			t.Fatalf("written %v, %v", before, err)
		}
		if err := s.Touch(t.Context(), d); err != nil {
			t.Fatalf("touch of %d bytes: %v", n, err)
		}
		if after, err := s.Written(t.Context(), d); err != nil || time.Since(after) > time.Minute {
			t.Errorf("written %v, %v", after, err)
		}
		if gone, err := s.DeleteIdle(t.Context(), d, time.Hour); gone || err != nil {
			t.Errorf("a blob just touched is gone: %v, %v", gone, err)
		}
		if got, err := blob.ReadAll(t.Context(), s, d); err != nil || !bytes.Equal(got, data) {
			t.Errorf("read %d bytes, %v", len(got), err)
		}
		if err := s.TouchNow(t.Context(), d); err != nil {
			t.Errorf("touch again: %v", err)
		}
	}
}

func TestFaults(t *testing.T) {
	dir := t.TempDir()
	// A server whose disk can be full, which needs a disk of its own.
	if err := syscall.Mount("s3-test", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Skipf("feature mount (tmpfs, needs root): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	server := s3test.Gateway(t, dir)
	blobtest.RunFaults(t, func(t *testing.T) blobtest.Faults {
		wire := blobtest.NewWire(t, server.Addr)
		p := prefix()
		c := server.Config(wire.Addr(), p)
		c.Stall, c.Retry, c.PartSize = 200*time.Millisecond, hasty, 5<<20
		at := filepath.Join(dir, server.Bucket, p)
		t.Cleanup(func() { os.RemoveAll(at) })
		return blobtest.Faults{
			Store: blob.NewRetrying(open(t, c), hasty),
			Wire:  wire,
			Damage: func(t *testing.T, d blob.Digest, change func([]byte) []byte) {
				path := filepath.Join(at, "sha256", d.Hex()[:2], d.Hex())
				b, err := os.ReadFile(path)
				if err == nil {
					err = os.WriteFile(path, change(b), 0o644)
				}
				if err != nil {
					t.Fatal(err)
				}
			},
			Fill: func(t *testing.T) func() {
				var st syscall.Statfs_t
				if err := syscall.Statfs(dir, &st); err != nil {
					t.Fatal(err)
				}
				ballast := filepath.Join(dir, "ballast")
				if err := os.WriteFile(ballast, make([]byte, int64(st.Bavail)*st.Bsize-2<<20), 0o600); err != nil {
					t.Fatal(err)
				}
				return func() { os.Remove(ballast) }
			},
		}
	})
}

// Blobs of several parts, by Put and by Stage, and what their failures leave.
func TestParts(t *testing.T) {
	dir := t.TempDir()
	server := s3test.Gateway(t, dir)
	c := server.Config(server.Addr, "parts")
	c.PartSize, c.Parallel = 5<<20, 2
	s := open(t, c)
	leftovers := func() (list []string) {
		root := filepath.Join(dir, server.Bucket)
		filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error { //nolint:errcheck // nothing there is fine
			if rel, _ := filepath.Rel(root, path); err == nil && !e.IsDir() && !strings.HasPrefix(rel, "parts/sha256/") && rel != "parts/format" {
				list = append(list, rel)
			}
			return nil
		})
		return list
	}
	for i, size := range []int{5 << 20, 5<<20 + 1, 16 << 20} {
		data := blobtest.Data(uint64(i), size)
		d, err := blob.PutBytes(t.Context(), s, data)
		if err != nil {
			t.Fatalf("put %d: %v", size, err)
		}
		if _, err := blob.ReadAll(t.Context(), s, d); err != nil {
			t.Errorf("put %d: %v", size, err)
		}
		data = blobtest.Data(uint64(10+i), size)
		for range 2 { // the second time it is there already
			w, err := s.Stage(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(data); err != nil {
				t.Fatal(err)
			}
			info, err := w.Commit(t.Context())
			if want := (blob.Info{Digest: blob.Of(data), Size: int64(size)}); err != nil || info != want {
				t.Fatalf("commit: %v, %v, want %v", info, err, want)
			}
		}
		if _, err := blob.ReadAll(t.Context(), s, blob.Of(data)); err != nil {
			t.Errorf("stage %d: %v", size, err)
		}
	}
	if list := leftovers(); len(list) != 0 {
		t.Errorf("left: %v", list)
	}

	data := blobtest.Data(20, 11<<20)
	broken := errors.New("cable cut")
	if err := s.Put(t.Context(), blob.Of(data), io.MultiReader(bytes.NewReader(data), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("put: %v", err)
	}
	if err := s.Put(t.Context(), blob.Of(data), bytes.NewReader(data[1:])); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("put: %v", err)
	}
	w, err := s.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Abort(); err != nil {
		t.Errorf("abort: %v", err)
	}
	if list := leftovers(); len(list) != 0 {
		t.Errorf("left: %v", list)
	}
	if _, err := s.Stat(t.Context(), blob.Of(data)); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("stat: %v, want ErrNotFound", err)
	}

	// A writer that died: nobody aborts for it.
	if w, err = s.Stage(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); len(leftovers()) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) { // its two full parts are sent behind Write
			t.Fatal("parts do not arrive")
		}
	}
	if err := s.Sweep(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	if list := leftovers(); len(list) == 0 {
		t.Errorf("a young upload is swept")
	}
	if err := s.Sweep(t.Context(), -time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(t.Context()); err == nil {
		t.Errorf("commit succeeds after its parts are swept")
	}
	if list := leftovers(); len(list) != 0 {
		t.Errorf("left after sweep: %v", list)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// The bucket of a server over a folder is a blob.Folder, in both directions.
func TestSameLayoutAsFolder(t *testing.T) {
	dir := t.TempDir()
	server := s3test.Gateway(t, dir)
	s := open(t, server.Config(server.Addr, "x/y"))
	data := blobtest.Data(1, 100_000)
	d, err := blob.PutBytes(t.Context(), s, data)
	if err != nil {
		t.Fatal(err)
	}
	f, err := blob.OpenFolder(filepath.Join(dir, server.Bucket, "x/y"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := blob.ReadAll(t.Context(), f, d); err != nil || !bytes.Equal(got, data) {
		t.Errorf("folder reads %d bytes, %v", len(got), err)
	}
	if d, err = blob.PutBytes(t.Context(), f, blobtest.Data(2, 1000)); err != nil {
		t.Fatal(err)
	}
	if _, err := blob.ReadAll(t.Context(), s, d); err != nil {
		t.Error(err)
	}
	if n := blobtest.Count(t, s); n != 2 {
		t.Errorf("%d blobs, want 2", n)
	}
}

// What an operator gets wrong is said, at once, and is no absence.
func TestMisconfigured(t *testing.T) {
	server := s3test.Gateway(t, t.TempDir())
	good := server.Config(server.Addr, "p")
	open(t, good)
	for name, test := range map[string]struct {
		change func(*s3.Config)
		want   error
	}{
		"wrong secret": {func(c *s3.Config) { c.Credentials = s3test.Keys(t, "other") }, blob.ErrDenied},
		"unsigned":     {func(c *s3.Config) { c.Credentials = s3.FromNowhere }, blob.ErrDenied},
		"no bucket":    {func(c *s3.Config) { c.Bucket = "absent" }, nil},
		"tls":          {func(c *s3.Config) { c.Endpoint = "https://" + server.Addr }, nil},
		"nobody there": {func(c *s3.Config) { c.Endpoint, c.Retry = "http://127.0.0.1:1", hasty }, blob.ErrUnavailable},
	} {
		c := good
		test.change(&c)
		s, err := s3.New(c)
		if err != nil {
			t.Fatal(err)
		}
		err = s.Check(t.Context())
		if err == nil || errors.Is(err, blob.ErrNotFound) || test.want != nil && !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
		if test.want == nil && errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("%s: %v, as if it would pass", name, err)
		}
	}
	c := good
	c.Credentials = "/absent"
	if _, err := s3.New(c); err == nil {
		t.Errorf("a credentials file that is not there is no error")
	}
}

// A key that is replaced in its file is taken without a restart.
func TestRotatedKeys(t *testing.T) {
	server := s3test.Gateway(t, t.TempDir())
	c := server.Config(server.Addr, "p")
	good, err := os.ReadFile(c.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, c)
	if err := os.WriteFile(c.Credentials, bytes.Replace(good, []byte(s3test.SecretKey), []byte("an old key"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); !errors.Is(err, blob.ErrDenied) {
		t.Errorf("with a wrong key: %v, want ErrDenied", err)
	}
	if err := os.WriteFile(c.Credentials, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("with the right key again: %v", err)
	}
}

// A second layout at the same place is refused.
func TestOtherFormat(t *testing.T) {
	dir := t.TempDir()
	server := s3test.Gateway(t, dir)
	c := server.Config(server.Addr, "p")
	open(t, c)
	if err := os.WriteFile(filepath.Join(dir, server.Bucket, "p/format"), []byte("dsec blob folder 2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := s3.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err == nil {
		t.Errorf("a newer format is opened")
	}
}

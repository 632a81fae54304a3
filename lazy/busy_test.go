package lazy_test

import (
	"bytes"
	"io"
	"os"
	"testing"

	"github.com/dsec-go/dsec/lazy"
)

// TestOpenFileIsNotEvicted: who has a plain file open reads right bytes from it, although
// nobody holds its path and the cache was opened anew.
func TestOpenFileIsNotEvicted(t *testing.T) {
	r := newRig(t)
	a, b := r.put(8*chunk, "plain"), r.put(8*chunk, "plain")
	cfg := lazy.Config{Bytes: 9 * chunk}
	c := r.open(cfg, a, b)
	r.want(c, a, 0, 8*chunk)
	path, release, ok := c.Path(a.data.Digest)
	if !ok {
		t.Fatal("not complete")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	release()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c = r.open(cfg, a, b)
	r.want(c, b, 0, 8*chunk)
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, a.bytes) {
		t.Errorf("an open file has changed (%v)", err)
	}
	if s := c.Stats(); s.Evicted != 0 || s.Unkept == 0 {
		t.Errorf("%+v", s)
	}
	f.Close()
	r.want(c, b, 0, 8*chunk)
	if s := c.Stats(); s.Evicted != 1 {
		t.Errorf("a file that nobody has open stays: %+v", s)
	}
}

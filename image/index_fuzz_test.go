package image_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
)

// runOf gives the bytes of a run of n sums.
func runOf(t testing.TB, n int) ([]byte, []erofs.Sum) {
	t.Helper()
	sums := make([]erofs.Sum, n)
	for i := range sums {
		sums[i] = sha256.Sum256(fmt.Append(nil, i))
	}
	path := t.TempDir() + "/run"
	must(t, image.WriteRun(path, sums))
	b, err := os.ReadFile(path)
	must(t, err)
	return b, sums
}

func TestRunFindsAll(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 129, 5000} {
		b, sums := runOf(t, n)
		dir := t.TempDir()
		for i := 0; i < n; i += 1 + n/50 {
			// One by its key, and all of them in order.
			if got, err := image.FindInRun(dir, b, sums[i]); err != nil || got != n+1 {
				t.Errorf("%d of %d: found %d, %v", i, n, got-n, err)
			}
		}
		if got, err := image.FindInRun(dir, b, sha256.Sum256([]byte("no"))); err != nil || got != n {
			t.Errorf("what is not in %d: found %d, %v", n, got-n, err)
		}
	}
}

func FuzzRun(f *testing.F) {
	for _, n := range []int{0, 1, 300} {
		b, _ := runOf(f, n)
		f.Add(b)
		f.Add(b[:len(b)*2/3])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := image.FindInRun(t.TempDir(), b, sha256.Sum256([]byte("0")))
		if err == nil && n > 2*len(b)/16 {
			t.Errorf("%d records in %d bytes", n, len(b))
		}
	})
}

func FuzzPieces(f *testing.F) {
	one := append(make([]byte, 32), 0, 0)
	f.Add(one, int64(4096))
	f.Add(append(one, append(make([]byte, 32), 255, 0)...), int64(257*4096))
	f.Add(one, int64(8192))
	f.Add(append(make([]byte, 32), 255, 255), int64(1<<40))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		n, found, err := image.Pieces(b, size)
		switch {
		case err != nil && !errors.Is(err, image.ErrCorrupt):
			t.Errorf("%v is not corruption", err)
		case err == nil && (n*34 != len(b) || !found || size%erofs.BlockSize != 0):
			t.Errorf("%d pieces of %d bytes, in %d, found: %v", n, size, len(b), found)
		}
	})
}

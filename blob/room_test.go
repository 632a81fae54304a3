package blob_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
)

const piece = 100_000

// fillSlow puts n blobs of a piece each into s.
func fillSlow(t *testing.T, s blob.Store, n int) (list []blob.Digest) {
	t.Helper()
	for i := range n {
		d, err := blob.PutBytes(t.Context(), s, blobtest.Data(uint64(300+i), piece))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, d)
	}
	return list
}

func has(t *testing.T, s blob.Store, d blob.Digest) bool {
	t.Helper()
	_, err := s.Stat(t.Context(), d)
	if err != nil && !errors.Is(err, blob.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

func readWhole(t *testing.T, s blob.Store, d blob.Digest) {
	t.Helper()
	if _, err := blob.ReadAll(t.Context(), s, d); err != nil {
		t.Errorf("read: %v", err)
	}
}

// The longest unused goes, and no more than must.
func TestCachedEvictsInOrder(t *testing.T) {
	fast, slow := new(blob.Memory), new(blob.Memory)
	ds := fillSlow(t, slow, 5)
	c := blob.NewCached(fast, slow, blob.CacheOptions{Bytes: 3*piece + 50})
	for _, i := range []int{0, 1, 2, 0, 3, 4} { // 1 and 2 are the oldest
		readWhole(t, c, ds[i])
	}
	for i, want := range []bool{true, false, false, true, true} {
		if got := has(t, fast, ds[i]); got != want {
			t.Errorf("blob %d: cached is %v, want %v", i, got, want)
		}
	}
	// What an earlier process left is counted, and older than anything read.
	c = blob.NewCached(fast, slow, blob.CacheOptions{Bytes: 3*piece + 50})
	readWhole(t, c, ds[1])
	if n := blobtest.Count(t, fast); n != 3 || !has(t, fast, ds[1]) {
		t.Errorf("%d blobs after a restart, want 3 with the new one", n)
	}
	// Too big for the cache: read past it.
	c = blob.NewCached(fast, slow, blob.CacheOptions{Bytes: piece - 1})
	readWhole(t, c, ds[2])
	if has(t, fast, ds[2]) {
		t.Errorf("a blob above the bound is cached")
	}
}

// What is read or held is not evicted, whatever comes; what comes is read past the cache.
func TestCachedNeverEvictsWhatIsUsed(t *testing.T) {
	fast, slow := openFolder(t), new(blob.Memory)
	ds := fillSlow(t, slow, 6)
	c := blob.NewCached(fast, slow, blob.CacheOptions{Bytes: 3 * piece})

	r, err := c.Get(t.Context(), ds[0], 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	release := c.Hold(ds[1])
	readWhole(t, c, ds[1])
	path, err := c.LocalPath(t.Context(), ds[2])
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path) // as a mounted layer has it
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range ds[3:] {
		readWhole(t, c, d)
	}
	if _, err := c.LocalPath(t.Context(), ds[4]); !errors.Is(err, blob.ErrFull) {
		t.Errorf("local path: %v, want ErrFull", err)
	}
	for i, want := range []bool{true, true, true, false, false, false} {
		if got := has(t, fast, ds[i]); got != want {
			t.Errorf("blob %d: cached is %v, want %v", i, got, want)
		}
	}
	if got, err := io.ReadAll(r); err != nil || blob.Of(got) != ds[0] {
		t.Errorf("reader: %d bytes, %v", len(got), err)
	}
	// One after the other becomes free.
	for i, free := range []func(){func() { r.Close() }, release, func() { file.Close() }} {
		free()
		if _, err := c.LocalPath(t.Context(), ds[3+i]); err != nil {
			t.Errorf("local path: %v", err)
		}
		if has(t, fast, ds[i]) {
			t.Errorf("blob %d is kept though it is free", i)
		}
		defer c.Hold(ds[3+i])()
	}
	release() // twice is once
}

// A disk that is full before the bound is reached is a smaller bound.
func TestCachedOnSmallDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("blob-test", dir, "tmpfs", 0, "size=500k"); err != nil {
		t.Skipf("feature mount (tmpfs, needs root): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	fast, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	slow := new(blob.Memory)
	ds := fillSlow(t, slow, 10)
	c := blob.NewCached(fast, slow, blob.CacheOptions{Bytes: 1 << 30})
	for _, d := range ds {
		if _, err := c.LocalPath(t.Context(), d); err != nil {
			t.Errorf("local path: %v", err)
		}
	}
	if n := blobtest.Count(t, fast); n < 3 {
		t.Errorf("%d blobs are cached, want what fits", n)
	}
}

// Many readers of many blobs, through a cache that is always too small.
func TestCachedUnderPressure(t *testing.T) {
	fast, slow := openFolder(t), new(blob.Memory)
	ds := fillSlow(t, slow, 12)
	c := blob.NewCached(fast, slow, blob.CacheOptions{Bytes: 4 * piece})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 60 {
				d := ds[(i*(w+1)+w)%len(ds)]
				if i%3 == 0 {
					release := c.Hold(d)
					if path, err := c.LocalPath(t.Context(), d); err == nil {
						if b, err := os.ReadFile(path); err != nil || blob.Of(b) != d {
							t.Errorf("held file: %d bytes, %v", len(b), err)
						}
					} else if !errors.Is(err, blob.ErrFull) {
						t.Errorf("local path: %v", err)
					}
					release()
					continue
				}
				if b, err := blob.ReadAll(t.Context(), c, d); err != nil || blob.Of(b) != d {
					t.Errorf("read: %v", err)
				}
			}
		})
	}
	wg.Wait()
	var sum int64
	for info, err := range fast.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		sum += info.Size
	}
	if sum > 4*piece {
		t.Errorf("the cache has %d bytes, its bound is %d", sum, 4*piece)
	}
	// Staging goes through the cache and ends within the bound.
	for i := range 6 {
		w, err := c.Stage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		data := blobtest.Data(uint64(400+i), piece)
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		info, err := w.Commit(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got, err := blob.ReadAll(t.Context(), slow, info.Digest); err != nil || !bytes.Equal(got, data) {
			t.Errorf("staged: %v", err)
		}
	}
	if n := blobtest.Count(t, fast); n > 4 {
		t.Errorf("%d blobs are cached, want at most 4", n)
	}
}

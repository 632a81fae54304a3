package blob_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
)

func openFolder(t testing.TB) *blob.Folder {
	t.Helper()
	f, err := blob.OpenFolder(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestConformance(t *testing.T) {
	for name, newStore := range map[string]func(t *testing.T) blob.Store{
		"Folder":   func(t *testing.T) blob.Store { return openFolder(t) },
		"Memory":   func(t *testing.T) blob.Store { return new(blob.Memory) },
		"Verified": func(t *testing.T) blob.Store { return blob.NewVerified(new(blob.Memory)) },
		"Limited": func(t *testing.T) blob.Store {
			return blob.NewLimited(new(blob.Memory), blob.Limits{BytesPerSecond: 1 << 31, Concurrent: 16})
		},
		"Cached": func(t *testing.T) blob.Store {
			return blob.NewCached(new(blob.Memory), new(blob.Memory), blob.CacheOptions{})
		},
		"CachedBound": func(t *testing.T) blob.Store {
			return blob.NewCached(openFolder(t), new(blob.Memory), blob.CacheOptions{Bytes: 2 << 20})
		},
		"Retrying": func(t *testing.T) blob.Store { return blob.NewRetrying(openFolder(t), blob.Retry{}) },
		"CachedUnstaged": func(t *testing.T) blob.Store {
			return blob.NewCached(struct{ blob.Store }{new(blob.Memory)}, new(blob.Memory), blob.CacheOptions{})
		},
		"Faulty": func(t *testing.T) blob.Store { return blobtest.NewFaulty(new(blob.Memory)) },
		"Tower": func(t *testing.T) blob.Store {
			slow := blob.NewVerified(blob.NewLimited(new(blob.Memory), blob.Limits{Concurrent: 32}))
			return blob.NewCached(openFolder(t), slow, blob.CacheOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) { blobtest.Run(t, newStore) })
	}
}

func TestDigest(t *testing.T) {
	const want = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	d, err := blob.Parse(want)
	if err != nil || d != want {
		t.Fatalf("parse: %q, %v", d, err)
	}
	for _, got := range []blob.Digest{blob.Of(nil), blob.FromHash(sha256.New()), blob.FromSum(d.Sum())} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if d.Hex() != want[7:] {
		t.Errorf("hex %q", d.Hex())
	}
}

func FuzzParse(f *testing.F) {
	f.Add("sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
	f.Add("sha256:")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		d, err := blob.Parse(s)
		if err != nil {
			if !errors.Is(err, blob.ErrDigest) {
				t.Errorf("%v, want ErrDigest", err)
			}
			return
		}
		if blob.FromSum(d.Sum()) != d {
			t.Errorf("%q does not survive its sum", s)
		}
	})
}

func TestVerifiedFindsWrongBytes(t *testing.T) {
	data := blobtest.Data(1, 100_000)
	for _, op := range []blobtest.Op{blobtest.OpReadFlip, blobtest.OpReadShort} {
		for nth := 1; nth <= 3; nth++ {
			faulty := blobtest.NewFaulty(new(blob.Memory))
			v := blob.NewVerified(faulty)
			d, err := blob.PutBytes(t.Context(), v, data)
			if err != nil {
				t.Fatal(err)
			}
			faulty.FailAt(op, nth, nil)
			r, err := v.Get(t.Context(), d, 0, int64(len(data)))
			if err != nil {
				t.Fatal(err)
			}
			// A caller who counts: io.ReadFull drops an error that comes with the last byte.
			var n int
			buf := make([]byte, 32_000)
			for n < len(data) && err == nil {
				var m int
				m, err = io.ReadFull(r, buf[:min(len(buf), len(data)-n)])
				n += m
			}
			if !errors.Is(err, blob.ErrCorrupt) || !bytes.Contains([]byte(err.Error()), []byte(d)) {
				t.Errorf("%s %d: %v after %d bytes, want ErrCorrupt naming the digest", op, nth, err, n)
			}
			if _, again := r.Read(buf); !errors.Is(again, blob.ErrCorrupt) {
				t.Errorf("%s %d: then %v", op, nth, again)
			}
			r.Close()
		}
	}
}

func TestCachedFillsOnce(t *testing.T) {
	fast, slow := new(blob.Memory), blobtest.NewFaulty(new(blob.Memory))
	c := blob.NewCached(fast, slow, blob.CacheOptions{})
	data := blobtest.Data(2, 300_000)
	d, err := blob.PutBytes(t.Context(), c, data)
	if err != nil {
		t.Fatal(err)
	}
	// A range passes through and fills nothing.
	r, err := c.Get(t.Context(), d, 10, 10)
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	if n := blobtest.Count(t, fast); n != 0 {
		t.Fatalf("a range filled the fast store")
	}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if got, err := blob.ReadAll(t.Context(), c, d); err != nil || !bytes.Equal(got, data) {
				t.Errorf("read: %d bytes, %v", len(got), err)
			}
		})
	}
	wg.Wait()
	if n := slow.Count(blobtest.OpGet); n != 2 {
		t.Errorf("slow store asked %d times, want 2", n)
	}
	if n := blobtest.Count(t, fast); n != 1 {
		t.Errorf("fast store has %d blobs, want 1", n)
	}
}

func TestCachedOutlivesItsFastStore(t *testing.T) {
	data := blobtest.Data(3, 300_000)
	fast, slow := blobtest.NewFaulty(new(blob.Memory)), blobtest.NewFaulty(new(blob.Memory))
	c := blob.NewCached(fast, slow, blob.CacheOptions{})
	d, err := blob.PutBytes(t.Context(), c, data)
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range []blobtest.Op{blobtest.OpGet, blobtest.OpPut, blobtest.OpPutRead} {
		fast.FailAt(op, 1, syscall.ENOSPC)
		if got, err := blob.ReadAll(t.Context(), c, d); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes, %v", op, len(got), err)
		}
	}
	if n := blobtest.Count(t, fast); n != 0 {
		t.Fatalf("fast store has %d blobs, want none", n)
	}
	// What the slow store says is final.
	slow.FailAt(blobtest.OpReadFlip, 1, nil)
	if _, err := c.Get(t.Context(), d, 0, -1); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("flipped bit: %v, want ErrCorrupt", err)
	}
	// A commit the slow store refuses shows nothing.
	slow.FailAt(blobtest.OpPut, 1, syscall.EIO)
	w, err := c.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(t.Context()); !errors.Is(err, syscall.EIO) {
		t.Errorf("commit: %v, want EIO", err)
	}
	if r, err := c.Get(t.Context(), blob.Of([]byte("x")), 0, -1); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("get: %v, %v, want ErrNotFound", r, err)
	}
}

func TestCachedFillOutlivesFirstCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := blob.NewLimited(new(blob.Memory), blob.Limits{Latency: time.Minute})
		fast := new(blob.Memory)
		c := blob.NewCached(fast, slow, blob.CacheOptions{})
		data := blobtest.Data(4, 1000)
		d, err := blob.PutBytes(t.Context(), c, data)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var first error
		wg.Go(func() { first = c.Fill(ctx, d) })
		synctest.Wait()
		wg.Go(func() {
			if got, err := blob.ReadAll(t.Context(), c, d); err != nil || !bytes.Equal(got, data) {
				t.Errorf("second caller: %d bytes, %v", len(got), err)
			}
		})
		synctest.Wait()
		cancel()
		wg.Wait()
		if !errors.Is(first, context.Canceled) {
			t.Errorf("first caller: %v, want Canceled", first)
		}
		// When all leave, the transfer ends and the next caller begins anew.
		if err := fast.Delete(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		wg.Go(func() { first = c.Fill(ctx, d) })
		synctest.Wait()
		cancel()
		wg.Wait()
		if err := c.Fill(t.Context(), d); err != nil {
			t.Errorf("fill after a given up one: %v", err)
		}
	})
}

func TestLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := blob.NewLimited(new(blob.Memory), blob.Limits{Latency: 10 * time.Millisecond, BytesPerSecond: 1 << 20, Concurrent: 2})
		data := blobtest.Data(5, 4<<20)
		start := time.Now()
		d, err := blob.PutBytes(t.Context(), l, data)
		if err != nil {
			t.Fatal(err)
		}
		if got := time.Since(start).Round(time.Millisecond); got != 4010*time.Millisecond {
			t.Errorf("put took %v of fake time, want 4.01s", got)
		}
		// Two readers share the rate; a third waits for a place.
		start = time.Now()
		var wg sync.WaitGroup
		var mu sync.Mutex
		var open, most int
		for range 3 {
			wg.Go(func() {
				r, err := l.Get(t.Context(), d, 0, 1<<20)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				open++
				most = max(most, open)
				mu.Unlock()
				if n, err := io.Copy(io.Discard, r); n != 1<<20 || err != nil {
					t.Errorf("read %d, %v", n, err)
				}
				mu.Lock()
				open--
				mu.Unlock()
				r.Close()
				r.Close()
			})
		}
		wg.Wait()
		if most != 2 {
			t.Errorf("%d readers at once, want 2", most)
		}
		// The third reader's latency may pass while the second reads.
		if got := time.Since(start); got < 3010*time.Millisecond-time.Microsecond || got > 3020*time.Millisecond {
			t.Errorf("reads took %v of fake time, want 3.01 to 3.02s", got)
		}
	})
}

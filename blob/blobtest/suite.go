// Package blobtest holds what every blob.Store must pass (Run) and a store that fails on
// demand (Faulty). It is imported by tests only. It does not test that blobs survive a
// power cut: that needs the store's own means.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/dsec-go/dsec/blob"
)

// Run checks that the stores made by newStore keep the contract of blob.Store, and of
// blob.Stager, blob.LocalPather and blob.Keeper where they have those powers. Each call of newStore
// returns an empty store.
func Run(t *testing.T, newStore func(t *testing.T) blob.Store) {
	type test struct {
		name string
		run  func(t *testing.T, s blob.Store)
	}
	tests := []test{
		{"Sizes", testSizes},
		{"Ranges", testRanges},
		{"Absent", testAbsent},
		{"MalformedDigest", testMalformed},
		{"WrongContent", testWrongContent},
		{"BrokenReader", testBrokenReader},
		{"Canceled", testCanceled},
		{"PutTwice", testPutTwice},
		{"ConcurrentPuts", testConcurrentPuts},
		{"Delete", testDelete},
		{"List", testList},
	}
	s := newStore(t)
	if st, ok := s.(blob.Stager); ok {
		if w, err := st.Stage(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
			if err == nil {
				err = w.Abort()
			}
			if err != nil {
				t.Fatalf("stage and abort: %v", err)
			}
			tests = append(tests, test{"Stage", testStage}, test{"StageAbort", testStageAbort}, test{"StageCanceled", testStageCanceled})
		}
	}
	if local, ok := s.(blob.LocalPather); ok {
		if _, err := local.LocalPath(t.Context(), blob.Of(nil)); !errors.Is(err, errors.ErrUnsupported) {
			tests = append(tests, test{"LocalPath", testLocalPath})
		}
	}
	if k, ok := s.(blob.Keeper); ok {
		if err := k.Touch(t.Context(), blob.Of(nil)); !errors.Is(err, errors.ErrUnsupported) {
			tests = append(tests, test{"Keep", testKeep})
		}
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.run(t, newStore(t)) })
	}
}

// Data returns n bytes that look random and are the same for the same seed.
func Data(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b) //nolint:errcheck // never fails
	return b
}

// Count returns how many blobs s lists.
func Count(t testing.TB, s blob.Store) int {
	t.Helper()
	n := 0
	for _, err := range s.List(t.Context()) {
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		n++
	}
	return n
}

func put(t *testing.T, s blob.Store, b []byte) blob.Digest {
	t.Helper()
	d, err := blob.PutBytes(t.Context(), s, b)
	if err != nil {
		t.Fatalf("put %d bytes: %v", len(b), err)
	}
	return d
}

func get(t *testing.T, s blob.Store, d blob.Digest, off, n int64) []byte {
	t.Helper()
	r, err := s.Get(t.Context(), d, off, n)
	if err != nil {
		t.Fatalf("get %d at %d: %v", n, off, err)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read %d at %d: %v", n, off, err)
	}
	if err := r.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return b
}

func wantAbsent(t *testing.T, s blob.Store, d blob.Digest) {
	t.Helper()
	if _, err := s.Stat(t.Context(), d); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("stat: %v, want ErrNotFound", err)
	}
	for _, n := range []int64{-1, 0, 1} {
		if r, err := s.Get(t.Context(), d, 0, n); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("get: %v, %v, want ErrNotFound", r, err)
		}
	}
	for info, err := range s.List(t.Context()) {
		if err != nil || info.Digest == d {
			t.Errorf("list yields %v, %v", info, err)
		}
	}
}

func testSizes(t *testing.T, s blob.Store) {
	for _, size := range []int{0, 1, 4095, 4096, 4097, 1<<20 + 3} {
		data := Data(1, size)
		d := put(t, s, data)
		info, err := s.Stat(t.Context(), d)
		if want := (blob.Info{Digest: d, Size: int64(size)}); err != nil || info != want {
			t.Errorf("stat: %v, %v, want %v", info, err, want)
		}
		if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
			t.Errorf("%d bytes come back as %d, different", size, len(got))
		}
		if got := get(t, s, d, 0, int64(size)); !bytes.Equal(got, data) {
			t.Errorf("%d counted bytes come back as %d, different", size, len(got))
		}
	}
}

func testRanges(t *testing.T, s blob.Store) {
	const size = 10000
	data := Data(2, size)
	d := put(t, s, data)
	for _, r := range []struct{ off, n int64 }{
		{0, 0}, {0, 1}, {0, 4096}, {1, 1}, {4095, 2}, {5000, -1}, {5000, 5000}, {9999, 1}, {size, 0}, {size, -1},
	} {
		want := data[r.off:]
		if r.n >= 0 {
			want = want[:r.n]
		}
		if got := get(t, s, d, r.off, r.n); !bytes.Equal(got, want) {
			t.Errorf("range %v: %d bytes, want %d or other content", r, len(got), len(want))
		}
	}
	const huge = int64(^uint64(0) >> 1)
	for _, r := range []struct{ off, n int64 }{
		{-1, 1}, {-1, -1}, {0, size + 1}, {size, 1}, {size + 1, 0}, {size + 1, -1}, {1, huge}, {huge, huge}, {huge, -1},
	} {
		if _, err := s.Get(t.Context(), d, r.off, r.n); !errors.Is(err, blob.ErrRange) {
			t.Errorf("range %v: %v, want ErrRange", r, err)
		}
	}
}

func testAbsent(t *testing.T, s blob.Store) {
	put(t, s, Data(3, 100))
	wantAbsent(t, s, blob.Of(Data(4, 100)))
}

func testMalformed(t *testing.T, s blob.Store) {
	ctx := t.Context()
	good := string(blob.Of(nil))
	for _, d := range []blob.Digest{
		"", "sha256:", "../../../../etc/passwd", blob.Digest(good[:70]), blob.Digest(good + "0"),
		blob.Digest("sha256:../" + good[10:]), blob.Digest("sha512" + good[6:]), blob.Digest(good[:70] + "G"), blob.Digest(good[:70] + "A"),
	} {
		if _, err := s.Stat(ctx, d); !errors.Is(err, blob.ErrDigest) {
			t.Errorf("stat %q: %v, want ErrDigest", d, err)
		}
		if _, err := s.Get(ctx, d, 0, -1); !errors.Is(err, blob.ErrDigest) {
			t.Errorf("get %q: %v, want ErrDigest", d, err)
		}
		if err := s.Put(ctx, d, bytes.NewReader(nil)); !errors.Is(err, blob.ErrDigest) {
			t.Errorf("put %q: %v, want ErrDigest", d, err)
		}
		if err := s.Delete(ctx, d); !errors.Is(err, blob.ErrDigest) {
			t.Errorf("delete %q: %v, want ErrDigest", d, err)
		}
	}
	if n := Count(t, s); n != 0 {
		t.Errorf("%d blobs, want none", n)
	}
}

func testWrongContent(t *testing.T, s blob.Store) {
	want, other := Data(5, 5000), Data(6, 5000)
	for _, content := range [][]byte{other, want[:4999], append(bytes.Clone(want), 0), nil} {
		err := s.Put(t.Context(), blob.Of(want), bytes.NewReader(content))
		if !errors.Is(err, blob.ErrCorrupt) {
			t.Fatalf("put: %v, want ErrCorrupt", err)
		}
		for _, d := range []blob.Digest{blob.Of(want), blob.Of(content)} {
			if !bytes.Contains([]byte(err.Error()), []byte(d)) {
				t.Errorf("error %q does not name %s", err, d)
			}
			wantAbsent(t, s, d)
		}
	}
	put(t, s, want) // the failures are not in the way
}

func testBrokenReader(t *testing.T, s blob.Store) {
	data := Data(7, 700_000)
	broken := errors.New("cable cut")
	for _, at := range []int{0, 1, 300_000, len(data)} {
		r := io.MultiReader(bytes.NewReader(data[:at]), errReader{broken})
		if err := s.Put(t.Context(), blob.Of(data), r); !errors.Is(err, broken) {
			t.Errorf("put broken at %d: %v, want the reader's error", at, err)
		}
		wantAbsent(t, s, blob.Of(data))
		wantAbsent(t, s, blob.Of(data[:at]))
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func testCanceled(t *testing.T, s blob.Store) {
	data := Data(8, 600_000)
	d := put(t, s, data)
	absent := Data(9, 600_000)
	cause := errors.New("trainer left")
	ctx, cancel := context.WithCancelCause(t.Context())

	r, err := s.Get(ctx, d, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	// The context ends in the middle of the Put.
	half := io.MultiReader(bytes.NewReader(absent[:300_000]), funcReader(func() { cancel(cause) }), bytes.NewReader(absent[300_000:]))
	if err := s.Put(ctx, blob.Of(absent), half); !errors.Is(err, cause) {
		t.Errorf("put: %v, want the cause", err)
	}
	if _, err := io.ReadAll(r); !errors.Is(err, cause) {
		t.Errorf("read: %v, want the cause", err)
	}
	if _, err := s.Stat(ctx, d); !errors.Is(err, cause) {
		t.Errorf("stat: %v, want the cause", err)
	}
	if _, err := s.Get(ctx, d, 0, -1); !errors.Is(err, cause) {
		t.Errorf("get: %v, want the cause", err)
	}
	if err := s.Delete(ctx, d); !errors.Is(err, cause) {
		t.Errorf("delete: %v, want the cause", err)
	}
	for _, err := range s.List(ctx) {
		if !errors.Is(err, cause) {
			t.Errorf("list: %v, want the cause", err)
		}
	}
	wantAbsent(t, s, blob.Of(absent))
	if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("blob changed")
	}
}

// funcReader calls itself when it is read and is then at its end.
type funcReader func()

func (f funcReader) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

func testPutTwice(t *testing.T, s blob.Store) {
	data := Data(10, 5000)
	d := put(t, s, data)
	put(t, s, data)
	if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("content differs")
	}
	if n := Count(t, s); n != 1 {
		t.Errorf("%d blobs, want 1", n)
	}
}

func testConcurrentPuts(t *testing.T, s blob.Store) {
	const writers, blobs = 6, 3
	var wg sync.WaitGroup
	errs := make(chan error, 2*writers*blobs)
	for w := range writers {
		wg.Go(func() {
			for i := range blobs {
				data := Data(uint64(100+(w+i)%blobs), 100_000)
				if _, err := blob.PutBytes(t.Context(), s, data); err != nil {
					errs <- fmt.Errorf("put: %w", err)
				}
				if got, err := blob.ReadAll(t.Context(), s, blob.Of(data)); err != nil || !bytes.Equal(got, data) {
					errs <- fmt.Errorf("get after put: %w", err)
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if n := Count(t, s); n != blobs {
		t.Errorf("%d blobs, want %d", n, blobs)
	}
}

func testDelete(t *testing.T, s blob.Store) {
	data := Data(11, 500_000)
	d, kept := put(t, s, data), put(t, s, Data(12, 10))
	r, err := s.Get(t.Context(), d, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range 2 {
		if err := s.Delete(t.Context(), d); err != nil {
			t.Fatalf("delete: %v", err)
		}
		wantAbsent(t, s, d)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, data) {
		t.Errorf("open reader after delete: %d bytes, %v", len(got), err)
	}
	get(t, s, kept, 0, -1)
	put(t, s, data)
	if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("content differs after delete and put")
	}
}

func testList(t *testing.T, s blob.Store) {
	want := map[blob.Digest]int64{}
	for i := range 60 {
		data := Data(uint64(1000+i), i)
		want[put(t, s, data)] = int64(i)
	}
	got := map[blob.Digest]int64{}
	for info, err := range s.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := got[info.Digest]; twice {
			t.Errorf("%s twice", info.Digest)
		}
		got[info.Digest] = info.Size
	}
	if len(got) != len(want) {
		t.Errorf("%d blobs, want %d", len(got), len(want))
	}
	for d, size := range want {
		if got[d] != size {
			t.Errorf("%s: size %d, want %d", d, got[d], size)
		}
	}
	for range s.List(t.Context()) {
		break // must not go on yielding
	}
}

func stage(t *testing.T, s blob.Store, data []byte) blob.Staged {
	t.Helper()
	w, err := s.(blob.Stager).Stage(t.Context())
	if err != nil {
		t.Fatalf("stage: %v", err)
	}
	for len(data) > 0 {
		n := min(len(data), 77_777)
		if m, err := w.Write(data[:n]); m != n || err != nil {
			t.Fatalf("write: %d, %v", m, err)
		}
		data = data[n:]
	}
	return w
}

func testStage(t *testing.T, s blob.Store) {
	for _, size := range []int{0, 1, 300_000} {
		data := Data(13, size)
		want := blob.Info{Digest: blob.Of(data), Size: int64(size)}
		for round := range 2 { // the second time the blob is there already
			w := stage(t, s, data)
			if round == 0 {
				wantAbsent(t, s, want.Digest)
			}
			info, err := w.Commit(t.Context())
			if err != nil || info != want {
				t.Fatalf("commit: %v, %v, want %v", info, err, want)
			}
			if err := w.Abort(); err != nil {
				t.Errorf("abort after commit: %v", err)
			}
			if _, err := w.Commit(t.Context()); err == nil {
				t.Errorf("second commit succeeds")
			}
			if _, err := w.Write([]byte("x")); err == nil {
				t.Errorf("write after commit succeeds")
			}
			if got := get(t, s, want.Digest, 0, -1); !bytes.Equal(got, data) {
				t.Errorf("content differs")
			}
		}
	}
	if n := Count(t, s); n != 3 {
		t.Errorf("%d blobs, want 3", n)
	}
}

func testStageAbort(t *testing.T, s blob.Store) {
	data := Data(14, 5000)
	w := stage(t, s, data)
	for range 2 {
		if err := w.Abort(); err != nil {
			t.Errorf("abort: %v", err)
		}
	}
	if _, err := w.Commit(t.Context()); err == nil {
		t.Errorf("commit after abort succeeds")
	}
	wantAbsent(t, s, blob.Of(data))
}

func testStageCanceled(t *testing.T, s blob.Store) {
	data := Data(15, 5000)
	w := stage(t, s, data)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Commit(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("commit: %v, want Canceled", err)
	}
	if _, err := w.Commit(t.Context()); err == nil {
		t.Errorf("commit after a failed commit succeeds")
	}
	wantAbsent(t, s, blob.Of(data))
}

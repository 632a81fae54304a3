package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
)

var errAway = fmt.Errorf("line is dead: %w", blob.ErrUnavailable)

func TestRetryingRepeatsWhatMaySucceed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faulty := blobtest.NewFaulty(new(blob.Memory))
		s := blob.NewRetrying(faulty, blob.Retry{})
		data := blobtest.Data(70, 1000)
		d, err := blob.PutBytes(t.Context(), s, data)
		if err != nil {
			t.Fatal(err)
		}
		calls := map[blobtest.Op]func() error{
			blobtest.OpStat:   func() error { _, err := s.Stat(t.Context(), d); return err },
			blobtest.OpGet:    func() error { _, err := s.Get(t.Context(), d, 0, 1); return err },
			blobtest.OpPut:    func() error { return s.Put(t.Context(), d, strings.NewReader(string(data))) },
			blobtest.OpDelete: func() error { return s.Delete(t.Context(), blob.Of(nil)) },
			blobtest.OpStage:  func() error { _, err := s.Stage(t.Context()); return err },
			blobtest.OpList: func() error {
				for _, err := range s.List(t.Context()) {
					if err != nil {
						return err
					}
				}
				return nil
			},
		}
		for op, call := range calls {
			for n := range 3 {
				faulty.FailAt(op, n+1, errAway)
			}
			before := faulty.Count(op)
			if err := call(); err != nil {
				t.Errorf("%s: %v", op, err)
			}
			if n := faulty.Count(op) - before; n != 4 {
				t.Errorf("%s: asked %d times, want 4", op, n)
			}
			for _, final := range []error{
				blob.ErrNotFound, blob.ErrRange, blob.ErrCorrupt, blob.ErrDenied, blob.ErrFull, errors.ErrUnsupported, syscall.EIO, context.DeadlineExceeded,
			} {
				faulty.FailAt(op, 1, final)
				before, start := faulty.Count(op), time.Now()
				if err := call(); !errors.Is(err, final) {
					t.Errorf("%s: %v, want %v", op, err, final)
				}
				if n := faulty.Count(op) - before; n != 1 || time.Since(start) != 0 {
					t.Errorf("%s: %v is asked %d times in %v", op, final, n, time.Since(start))
				}
			}
		}
	})
}

// gone is a store that is away for good.
type gone struct {
	blob.Store
	asked int
}

func (g *gone) Stat(context.Context, blob.Digest) (blob.Info, error) {
	g.asked++
	return blob.Info{}, errAway
}

func TestRetryingGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gone{}
		retry := blob.Retry{For: 10 * time.Second, First: 100 * time.Millisecond, Max: time.Second}
		// One around the other must not try ten times ten seconds.
		s := blob.NewRetrying(blob.NewRetrying(g, retry), retry)
		start := time.Now()
		_, err := s.Stat(t.Context(), blob.Of(nil))
		if !errors.Is(err, blob.ErrUnavailable) || !strings.Contains(err.Error(), "in 10s") {
			t.Errorf("%v, want ErrUnavailable after 10s", err)
		}
		if took := time.Since(start); took != 10*time.Second {
			t.Errorf("gave up after %v, want 10s", took)
		}
		if g.asked < 12 || g.asked > 26 { // pauses of 0.5 to 1 s, after shorter ones
			t.Errorf("asked %d times", g.asked)
		}
		// Never again means never again.
		g.asked = 0
		if _, err := blob.NewRetrying(g, blob.Retry{For: -1}).Stat(t.Context(), blob.Of(nil)); !errors.Is(err, blob.ErrUnavailable) || g.asked != 1 {
			t.Errorf("%v, asked %d times, want once", err, g.asked)
		}
		// Who leaves leaves at once.
		cause := errors.New("trainer left")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(3*time.Second, func() { cancel(cause) })
		start = time.Now()
		if _, err := s.Stat(ctx, blob.Of(nil)); !errors.Is(err, cause) || time.Since(start) != 3*time.Second {
			t.Errorf("%v after %v, want the cause after 3s", err, time.Since(start))
		}
	})
}

// breaking breaks every read after so many bytes and notes what was asked for.
type breaking struct {
	blob.Store
	after int64
	gets  [][2]int64
}

func (b *breaking) Get(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	b.gets = append(b.gets, [2]int64{off, n})
	r, err := b.Store.Get(ctx, d, off, n)
	if err != nil {
		return nil, err
	}
	return &brokenLater{r, b.after}, nil
}

type brokenLater struct {
	io.ReadCloser
	left int64
}

func (b *brokenLater) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errAway
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

func TestRetryingResumesReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := new(blob.Memory)
		data := blobtest.Data(71, 1_000_000)
		d, err := blob.PutBytes(t.Context(), memory, data)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []struct{ off, n int64 }{{0, -1}, {0, 1_000_000}, {100_000, 500_000}, {100_000, -1}} {
			b := &breaking{Store: memory, after: 270_000}
			want := data[r.off:]
			if r.n >= 0 {
				want = want[:r.n]
			}
			in, err := blob.NewRetrying(b, blob.Retry{}).Get(t.Context(), d, r.off, r.n)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(in)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%v: %d bytes, %v", r, len(got), err)
			}
			for i, g := range b.gets { // each from where the one before broke, and no further
				at, left := r.off+int64(i)*270_000, r.n
				if r.n >= 0 {
					left -= int64(i) * 270_000
				}
				if g != [2]int64{at, left} {
					t.Errorf("%v: request %d was %v, want %d at %d", r, i, g, left, at)
				}
			}
		}
		// A server that drips is as good as none: the read ends.
		b := &breaking{Store: memory, after: 100}
		start := time.Now()
		got, err := blob.ReadAll(t.Context(), blob.NewRetrying(b, blob.Retry{For: 10 * time.Second}), d)
		if !errors.Is(err, blob.ErrUnavailable) || time.Since(start) != 10*time.Second {
			t.Errorf("drip: %d bytes, %v after %v, want ErrUnavailable after 10s", len(got), err, time.Since(start))
		}
	})
}

func TestRetryingPut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		faulty := blobtest.NewFaulty(new(blob.Memory))
		s := blob.NewRetrying(faulty, blob.Retry{})
		data := blobtest.Data(72, 500_000)
		file := bytes.NewReader(append([]byte("skip"), data...))
		if _, err := file.Seek(4, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		faulty.FailAt(blobtest.OpPutRead, 3, errAway)
		if err := s.Put(t.Context(), blob.Of(data), file); err != nil {
			t.Errorf("seekable: %v", err)
		}
		if _, err := blob.ReadAll(t.Context(), s, blob.Of(data)); err != nil {
			t.Error(err)
		}
		other := blobtest.Data(73, 500_000)
		pipe := func() io.Reader { return struct{ io.Reader }{bytes.NewReader(other)} }
		faulty.FailAt(blobtest.OpPutRead, 3, errAway)
		if err := s.Put(t.Context(), blob.Of(other), pipe()); !errors.Is(err, blob.ErrUnavailable) {
			t.Errorf("a pipe that was read: %v, want the first error", err)
		}
		faulty.FailAt(blobtest.OpPut, 1, errAway)
		if err := s.Put(t.Context(), blob.Of(other), pipe()); err != nil {
			t.Errorf("a pipe nobody touched: %v", err)
		}
	})
}

package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Limits say how slow a Limited store is. A zero field does not limit.
type Limits struct {
	Latency        time.Duration // added to every call
	BytesPerSecond int64         // shared by all readers and writers
	Concurrent     int           // calls and open readers at once; others wait

	// Exact waits occupy threads: the runtime's timers are up to a millisecond late, which is
	// a second store. For benchmarks.
	Exact bool
}

// Limited makes a store behave like one far away, for benchmarks, or keeps callers from
// asking too much of it at once. It offers no LocalPath: there is no file far away.
type Limited struct {
	store  Store
	limits Limits
	slots  chan struct{} // nil: any number

	mu   sync.Mutex
	next time.Time // when the line is free again
}

var (
	_ Store  = (*Limited)(nil)
	_ Stager = (*Limited)(nil)
)

// NewLimited returns s under limits.
func NewLimited(s Store, limits Limits) *Limited {
	l := &Limited{store: s, limits: limits}
	if limits.Concurrent > 0 {
		l.slots = make(chan struct{}, limits.Concurrent)
	}
	return l
}

// Stat implements Store.
func (l *Limited) Stat(ctx context.Context, d Digest) (Info, error) {
	if err := l.enter(ctx); err != nil {
		return Info{}, err
	}
	defer l.leave()
	return l.store.Stat(ctx, d)
}

// Get implements Store. The reader keeps its place until it is closed.
func (l *Limited) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	if err := l.enter(ctx); err != nil {
		return nil, err
	}
	r, err := l.store.Get(ctx, d, off, n)
	if err != nil {
		l.leave()
		return nil, err
	}
	return &limitedReader{l: l, ctx: ctx, r: r}, nil
}

// Put implements Store.
func (l *Limited) Put(ctx context.Context, d Digest, r io.Reader) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	return l.store.Put(ctx, d, paced{l, ctx, r})
}

// Delete implements Store.
func (l *Limited) Delete(ctx context.Context, d Digest) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	return l.store.Delete(ctx, d)
}

// List implements Store.
func (l *Limited) List(ctx context.Context) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		if err := l.enter(ctx); err != nil {
			yield(Info{}, err)
			return
		}
		defer l.leave()
		l.store.List(ctx)(yield)
	}
}

// Stage implements Stager if the store below does. Otherwise it is errors.ErrUnsupported.
// What is staged pays for its bytes as it is written and holds no place.
func (l *Limited) Stage(ctx context.Context) (Staged, error) {
	if err := l.enter(ctx); err != nil {
		return nil, err
	}
	defer l.leave()
	s, err := stage(ctx, l.store)
	if err != nil {
		return nil, err
	}
	return limitedStaged{s, l, ctx}, nil
}

// enter takes a place and waits out the latency.
func (l *Limited) enter(ctx context.Context) error {
	if l.slots != nil {
		select {
		case l.slots <- struct{}{}:
		case <-ctx.Done():
			return fmt.Errorf("wait for blob store: %w", context.Cause(ctx))
		}
	}
	if err := l.nap(ctx, l.limits.Latency); err != nil {
		l.leave()
		return fmt.Errorf("wait for blob store: %w", err)
	}
	return nil
}

func (l *Limited) leave() {
	if l.slots != nil {
		<-l.slots
	}
}

// pace waits until n bytes have passed the line.
func (l *Limited) pace(ctx context.Context, n int) error {
	if l.limits.BytesPerSecond <= 0 || n <= 0 {
		return nil
	}
	took := time.Duration(float64(n) / float64(l.limits.BytesPerSecond) * float64(time.Second))
	l.mu.Lock()
	if now := time.Now(); l.next.Before(now) {
		l.next = now
	}
	l.next = l.next.Add(took)
	until := l.next
	l.mu.Unlock()
	return l.nap(ctx, time.Until(until))
}

// nap is sleep, exact if it shall be.
func (l *Limited) nap(ctx context.Context, d time.Duration) error {
	if !l.limits.Exact || d <= 0 {
		return sleep(ctx, d)
	}
	for until := time.Now().Add(d); d > 0 && ctx.Err() == nil; d = time.Until(until) {
		ts := unix.NsecToTimespec(int64(min(d, 10*time.Millisecond)))
		if err := unix.Nanosleep(&ts, nil); err != nil && err != unix.EINTR {
			return err
		}
	}
	return context.Cause(ctx)
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// paced is a reader that pays for its bytes.
type paced struct {
	l   *Limited
	ctx context.Context
	r   io.Reader
}

// paceUnit bounds what one read takes of the line, so that readers share it fairly.
const paceUnit = 128 << 10

func (p paced) Read(b []byte) (int, error) {
	if p.l.limits.BytesPerSecond > 0 && len(b) > paceUnit {
		b = b[:paceUnit]
	}
	n, err := p.r.Read(b)
	if perr := p.l.pace(p.ctx, n); perr != nil && (err == nil || err == io.EOF) {
		err = perr
	}
	return n, err
}

type limitedReader struct {
	l    *Limited
	ctx  context.Context
	r    io.ReadCloser
	once sync.Once
}

func (r *limitedReader) Read(b []byte) (int, error) {
	return paced{r.l, r.ctx, r.r}.Read(b)
}

func (r *limitedReader) Close() error {
	err := r.r.Close()
	r.once.Do(r.l.leave)
	return err
}

type limitedStaged struct {
	Staged
	l   *Limited
	ctx context.Context
}

func (s limitedStaged) Write(p []byte) (int, error) {
	if err := s.l.pace(s.ctx, len(p)); err != nil {
		return 0, err
	}
	return s.Staged.Write(p)
}

// stage stages on s if it can.
func stage(ctx context.Context, s Store) (Staged, error) {
	st, ok := s.(Stager)
	if !ok {
		return nil, fmt.Errorf("stage blob on %T: %w", s, errors.ErrUnsupported)
	}
	return st.Stage(ctx)
}

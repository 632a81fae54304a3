package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"
)

// Cached is a slow Store behind a fast one, usually a Folder on the local disk. The slow one
// is the authority: Stat, Put, Delete and List ask it, so that garbage collected elsewhere is
// never taken for stored. A whole read goes to the fast one and fills it first if it must,
// once for all who ask at the same time. A partial range of a blob that is not in the fast one
// goes to the slow one and fills nothing: fetching by parts is for rootfs.
//
// With a bound, room for a blob is made before it comes, by deleting from the fast store
// what was not used for the longest time; see room.go. A fast store that fails, or has no
// room, only costs speed, except for LocalPath.
type Cached struct {
	fast, slow Store
	room       room

	mu    sync.Mutex
	fills map[Digest]*fill
}

var (
	_ Store       = (*Cached)(nil)
	_ Stager      = (*Cached)(nil)
	_ LocalPather = (*Cached)(nil)
	_ Holder      = (*Cached)(nil)
)

// CacheOptions bound a Cached. The zero value does not.
type CacheOptions struct {
	// Bytes is what the fast store may hold. What is in it already counts; nobody else
	// puts anything there.
	Bytes int64
}

// fill is one blob on its way from slow to fast.
type fill struct {
	done    chan struct{} // closed at the end; err is set before
	err     error
	waiters int                // guarded by Cached.mu
	cancel  context.CancelFunc // called when the last waiter leaves
}

// NewCached returns slow with fast before it.
func NewCached(fast, slow Store, opts CacheOptions) *Cached {
	c := &Cached{fast: fast, slow: slow, fills: make(map[Digest]*fill)}
	c.room.init(fast, opts.Bytes)
	return c
}

// Stat implements Store.
func (c *Cached) Stat(ctx context.Context, d Digest) (Info, error) { return c.slow.Stat(ctx, d) }

// Get implements Store. A whole read that has to fill starts when the blob is complete.
func (c *Cached) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	r, err := c.near(ctx, d, off, n)
	if err == nil || errors.Is(err, ErrRange) || errors.Is(err, ErrDigest) || ctx.Err() != nil {
		return r, err
	}
	if off == 0 && n < 0 && errors.Is(err, ErrNotFound) {
		switch err := c.Fill(ctx, d); {
		case err == nil:
			if r, err := c.near(ctx, d, off, n); err == nil {
				return r, nil
			}
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrCorrupt), ctx.Err() != nil:
			return nil, err
		}
	}
	return c.slow.Get(ctx, d, off, n)
}

// near reads from the fast store and holds the blob there until the reader is closed.
func (c *Cached) near(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	release := c.room.hold(d)
	r, err := c.fast.Get(ctx, d, off, n)
	if err != nil {
		release()
		return nil, err
	}
	c.room.touch(d)
	return heldReader{r, release}, nil
}

type heldReader struct {
	io.ReadCloser
	release func()
}

func (r heldReader) Close() error {
	err := r.ReadCloser.Close()
	r.release()
	return err
}

// Put implements Store.
func (c *Cached) Put(ctx context.Context, d Digest, r io.Reader) error {
	return c.slow.Put(ctx, d, r)
}

// Delete implements Store. It deletes in both.
func (c *Cached) Delete(ctx context.Context, d Digest) error {
	if err := c.slow.Delete(ctx, d); err != nil {
		return err
	}
	if err := c.fast.Delete(ctx, d); err != nil {
		return err
	}
	c.room.gone(d)
	return nil
}

// List implements Store.
func (c *Cached) List(ctx context.Context) iter.Seq2[Info, error] { return c.slow.List(ctx) }

// LocalPath implements LocalPather if the fast store does. Otherwise it is
// errors.ErrUnsupported. It fills first if it must; without room for that it is ErrFull. The
// path stays good as long as the blob is held.
func (c *Cached) LocalPath(ctx context.Context, d Digest) (string, error) {
	local, ok := c.fast.(LocalPather)
	if !ok {
		return "", fmt.Errorf("local path of blob on %T: %w", c.fast, errors.ErrUnsupported)
	}
	defer c.Hold(d)()
	path, err := local.LocalPath(ctx, d)
	if errors.Is(err, ErrNotFound) {
		if err := c.Fill(ctx, d); err != nil {
			return "", err
		}
		path, err = local.LocalPath(ctx, d)
	}
	if err == nil {
		c.room.touch(d)
	}
	return path, err
}

// Hold implements Holder.
func (c *Cached) Hold(d Digest) (release func()) { return c.room.hold(d) }

// Fill brings a blob into the fast store if it is not there. Calls for one blob share one
// transfer, which goes on as long as one of them still waits.
func (c *Cached) Fill(ctx context.Context, d Digest) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	c.mu.Lock()
	f := c.fills[d]
	if f == nil {
		// The transfer is not this caller's alone: it must not end with this context.
		fctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		f = &fill{done: make(chan struct{}), cancel: cancel}
		c.fills[d] = f
		go c.run(fctx, f, d)
	}
	f.waiters++
	c.mu.Unlock()

	var err error
	select {
	case <-f.done:
		err = f.err
	case <-ctx.Done():
		err = fmt.Errorf("fill blob %s: %w", d, context.Cause(ctx))
	}

	c.mu.Lock()
	f.waiters--
	if f.waiters == 0 {
		f.cancel()
		// A caller who comes now must not join a transfer that is being given up.
		if c.fills[d] == f {
			delete(c.fills, d)
		}
	}
	c.mu.Unlock()
	return err
}

func (c *Cached) run(ctx context.Context, f *fill, d Digest) {
	if _, err := c.fast.Stat(ctx, d); err != nil {
		f.err = c.bring(ctx, d)
	}
	c.mu.Lock()
	if c.fills[d] == f {
		delete(c.fills, d)
	}
	c.mu.Unlock()
	close(f.done)
}

// bring copies one blob to the fast store, where there is room for it or none is bound. A
// disk that is full before the bound is reached is a smaller bound.
func (c *Cached) bring(ctx context.Context, d Digest) error {
	if c.room.limit <= 0 {
		return Copy(ctx, c.fast, c.slow, d)
	}
	info, err := c.slow.Stat(ctx, d)
	if err != nil {
		return err
	}
	for again := true; ; again = false {
		if err := c.room.reserve(ctx, d, info.Size); err != nil {
			return err
		}
		err := Copy(ctx, c.fast, c.slow, d)
		c.room.settle(d, info.Size, err == nil)
		if err == nil || !again || !errors.Is(err, ErrFull) {
			return err
		}
		if err := c.room.evict(ctx, info.Size); err != nil {
			return err
		}
	}
}

// Stage implements Stager. If the fast store can stage, the bytes are written there and
// brought to the slow one by Commit, which leaves them in both; else the slow one stages.
func (c *Cached) Stage(ctx context.Context) (Staged, error) {
	if _, ok := c.fast.(Stager); !ok {
		return stage(ctx, c.slow)
	}
	s, err := stage(ctx, c.fast)
	if err != nil {
		return nil, err
	}
	return cachedStaged{s, c}, nil
}

type cachedStaged struct {
	Staged
	c *Cached
}

func (s cachedStaged) Commit(ctx context.Context) (Info, error) {
	info, err := s.Staged.Commit(ctx)
	if err != nil {
		return Info{}, err
	}
	defer s.c.room.trim(context.WithoutCancel(ctx))
	defer s.c.Hold(info.Digest)()
	s.c.room.add(info.Digest, info.Size)
	if err := Copy(ctx, s.c.slow, s.c.fast, info.Digest); err != nil {
		// A Commit that failed shows nothing, and losing a cached copy costs only speed.
		s.c.fast.Delete(context.WithoutCancel(ctx), info.Digest) //nolint:errcheck // the first error counts
		s.c.room.gone(info.Digest)
		return Info{}, err
	}
	return info, nil
}

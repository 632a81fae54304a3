package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// DefaultMinAge is how long a blob that nothing refers to is left alone, so
// that a layer just made can be given its name.
const DefaultMinAge = time.Hour

// manifestReads is how many manifests a collection reads at a time.
const manifestReads = 32

// staleAge is how old what dead writers left must be to be swept.
const staleAge = 24 * time.Hour

// CollectOptions are what is optional about a collection.
type CollectOptions struct {
	MinAge time.Duration // default DefaultMinAge
	Now    time.Time     // default the time of the call
	Keep   []blob.Digest // blobs that stay besides; they are no layers
}

// Collect deletes every blob that no layer of roots needs and that is old
// enough, and what writers that died have left. Age is counted from when a call
// of a library, on whatever node, last wrote the blob or found it; in a store that
// does not keep such times, from when a collection of this library first saw it
// idle. Collections of several nodes may run at the same time, with the same roots.
//
// A root whose manifest cannot be read ends the collection before anything is
// deleted, unless it is absent: then there is nothing to keep for it.
func (l *Library) Collect(ctx context.Context, roots []blob.Digest, opts CollectOptions) (dsec.Collected, error) {
	if opts.MinAge == 0 {
		opts.MinAge = DefaultMinAge
	}
	if opts.Now.IsZero() {
		opts.Now = time.Now()
	}
	keep, err := l.mark(ctx, roots)
	if err != nil {
		return dsec.Collected{}, stored("image.Collect", err)
	}
	for _, d := range opts.Keep {
		keep[d.Sum()] = struct{}{}
	}
	done, err := l.sweep(ctx, keep, opts)
	if err == nil {
		err = l.sweepPlain(ctx, keep)
	}
	if s, ok := l.store.(blob.Sweeper); ok && err == nil {
		err = s.Sweep(ctx, staleAge)
	}
	return done, fault("image.Collect", err)
}

// A keepSet is the blobs that stay, by their sums: there may be millions.
type keepSet map[erofs.Sum]struct{}

func (k keepSet) has(d blob.Digest) bool {
	_, ok := k[d.Sum()]
	return ok
}

// mark finds out what the roots need. It reads several manifests at a time and
// keeps none.
func (l *Library) mark(ctx context.Context, roots []blob.Digest) (keepSet, error) {
	keep := keepSet{}
	var mu sync.Mutex
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(manifestReads)
	for _, root := range roots {
		if err := root.Check(); err != nil {
			return nil, errors.Join(fmt.Errorf("layer %.80q: %w", root, err), group.Wait())
		}
		mu.Lock()
		known := keep.has(root)
		mu.Unlock()
		if known || gctx.Err() != nil {
			continue
		}
		group.Go(func() error {
			m, err := l.manifest(gctx, root)
			if errors.Is(err, blob.ErrNotFound) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("layer %s: %w", root, err)
			}
			mu.Lock()
			defer mu.Unlock()
			keep[root.Sum()] = struct{}{}
			for _, p := range m.Parts() {
				keep[p.Digest.Sum()] = struct{}{}
			}
			for _, d := range m.Data {
				keep[d.Digest.Sum()] = struct{}{} // of packed data: a plain copy on this node
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil { // roots may have been passed over
		return nil, context.Cause(ctx)
	}
	return keep, nil
}

// sweep deletes what is not to be kept, manifests before what they name: a layer
// that can be seen is whole, also when this process dies half way. A layer that is
// too young to go is kept with all it has.
func (l *Library) sweep(ctx context.Context, keep keepSet, opts CollectOptions) (dsec.Collected, error) {
	var done dsec.Collected
	var later []idleBlob
	for info, err := range l.store.List(ctx) {
		if err != nil {
			return done, fmt.Errorf("list blobs: %w", err)
		}
		switch {
		case keep.has(info.Digest):
			l.mu.Lock()
			delete(l.idle, info.Digest)
			l.mu.Unlock()
			continue
		case info.Size > maxUnnamed:
			later = append(later, idleBlob{info.Digest.Sum(), info.Size})
			continue
		}
		m, err := l.unnamed(ctx, info)
		if err != nil {
			return done, err
		}
		if m == nil {
			later = append(later, idleBlob{info.Digest.Sum(), info.Size})
			continue
		}
		gone, err := l.drop(ctx, info, opts, &done)
		if err != nil {
			return done, err
		}
		if !gone {
			for _, p := range m.Parts() {
				keep[p.Digest.Sum()] = struct{}{}
			}
		}
	}
	for _, b := range later {
		if _, kept := keep[b.sum]; kept {
			continue
		}
		if _, err := l.drop(ctx, blob.Info{Digest: blob.FromSum(b.sum), Size: b.size}, opts, &done); err != nil {
			return done, err
		}
	}
	l.mu.Lock()
	for d, t := range l.used {
		if opts.Now.Sub(t) >= opts.MinAge {
			delete(l.used, d)
		}
	}
	l.mu.Unlock()
	return done, nil
}

// An idleBlob is one that no layer of the roots needs.
type idleBlob struct {
	sum  erofs.Sum
	size int64
}

// maxUnnamed is the largest blob that a collection takes for a manifest: those that
// this package writes are a good deal smaller.
const maxUnnamed = 1 << 20

// unnamed gives the manifest that a blob is, nil if it is none.
func (l *Library) unnamed(ctx context.Context, info blob.Info) (*Manifest, error) {
	mark := []byte(`{"format":"` + manifestFormat + `"`)
	if info.Size < int64(len(mark)) {
		return nil, nil
	}
	r, err := l.store.Get(ctx, info.Digest, 0, int64(len(mark)))
	if errors.Is(err, blob.ErrNotFound) {
		return nil, nil // somebody else was faster
	}
	if err != nil {
		return nil, fmt.Errorf("look at blob %s: %w", info.Digest, err)
	}
	b, err := io.ReadAll(r)
	r.Close()
	if err != nil {
		return nil, fmt.Errorf("look at blob %s: %w", info.Digest, err)
	}
	if !bytes.Equal(b, mark) {
		return nil, nil
	}
	m, err := l.manifest(ctx, info.Digest)
	switch {
	case isCorrupt(err), errors.Is(err, blob.ErrNotFound), dsec.KindOf(err) == dsec.Unsupported:
		return nil, nil // no layer that anybody here can open
	case err != nil:
		return nil, fmt.Errorf("look at layer %s: %w", info.Digest, err)
	}
	return m, nil
}

// sweepPlain deletes plain copies of packed data that no layer has any more. What
// is mounted stays until it is not: the file is open.
func (l *Library) sweepPlain(ctx context.Context, keep keepSet) error {
	if l.opts.Plain == nil {
		return nil
	}
	for info, err := range l.opts.Plain.List(ctx) {
		if err != nil {
			return fmt.Errorf("list plain copies: %w", err)
		}
		if !keep.has(info.Digest) {
			if err := l.opts.Plain.Delete(ctx, info.Digest); err != nil {
				return fmt.Errorf("delete plain copy: %w", err)
			}
			l.forget(info.Digest)
		}
	}
	return nil
}

// drop deletes an unreferenced blob if it is old enough, and counts it.
func (l *Library) drop(ctx context.Context, info blob.Info, opts CollectOptions, done *dsec.Collected) (gone bool, err error) {
	l.sweeping.Lock()
	defer l.sweeping.Unlock()
	d := info.Digest
	l.mu.Lock()
	used := l.used[d]
	l.mu.Unlock()
	if opts.Now.Sub(used) < opts.MinAge {
		return false, nil
	}
	l.at("delete")
	if k, ok := l.store.(blob.Keeper); ok {
		gone, err = k.DeleteIdle(ctx, d, opts.MinAge-time.Until(opts.Now))
	} else {
		err = errors.ErrUnsupported
	}
	if errors.Is(err, errors.ErrUnsupported) {
		if gone = l.wasIdle(d, opts); gone {
			err = l.store.Delete(ctx, d)
		} else {
			err = nil
		}
	}
	if err != nil {
		return false, fmt.Errorf("delete blob %s: %w", d, err)
	}
	if !gone {
		return false, nil
	}
	l.at("deleted")
	l.forget(d)
	done.Blobs++
	done.Bytes += info.Size
	return true, nil
}

// wasIdle reports whether collections of this process have seen an unreferenced
// blob for long enough.
func (l *Library) wasIdle(d blob.Digest, opts CollectOptions) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.idle[d]; !ok {
		l.idle[d] = opts.Now
	}
	return opts.Now.Sub(l.idle[d]) >= opts.MinAge
}

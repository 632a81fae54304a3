package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// DefaultMinAge is how long a blob that nothing refers to is left alone, so
// that a layer just made can be given its name.
const DefaultMinAge = time.Hour

// CollectOptions are what is optional about a collection.
type CollectOptions struct {
	MinAge time.Duration // default DefaultMinAge
	Now    time.Time     // default the time of the call
}

// Collect deletes every blob that no layer of roots needs and that is old
// enough. Age is counted from when the blob was last written or found by a call
// of this library, from the time of its file, or, in stores without files, from
// when a collection of this library first saw it idle; whichever is last.
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
	done, err := l.sweep(ctx, keep, opts)
	return done, fault("image.Collect", err)
}

func (l *Library) mark(ctx context.Context, roots []blob.Digest) (map[blob.Digest]bool, error) {
	keep := map[blob.Digest]bool{}
	for _, root := range roots {
		if keep[root] {
			continue
		}
		m, err := l.manifest(ctx, root)
		if errors.Is(err, blob.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", root, err)
		}
		keep[root] = true
		for _, p := range m.Parts() {
			keep[p.Digest] = true
		}
	}
	return keep, nil
}

func (l *Library) sweep(ctx context.Context, keep map[blob.Digest]bool, opts CollectOptions) (dsec.Collected, error) {
	var done dsec.Collected
	for info, err := range l.store.List(ctx) {
		if err != nil {
			return done, fmt.Errorf("list blobs: %w", err)
		}
		d := info.Digest
		if keep[d] {
			l.mu.Lock()
			delete(l.idle, d)
			l.mu.Unlock()
			continue
		}
		gone, err := l.drop(ctx, d, opts)
		if err != nil {
			return done, fmt.Errorf("delete blob %s: %w", d, err)
		}
		if gone {
			done.Blobs++
			done.Bytes += info.Size
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

// drop deletes an unreferenced blob if it is old enough.
func (l *Library) drop(ctx context.Context, d blob.Digest, opts CollectOptions) (gone bool, err error) {
	l.sweeping.Lock()
	defer l.sweeping.Unlock()
	if !l.expired(ctx, d, opts) {
		return false, nil
	}
	if err := l.store.Delete(ctx, d); err != nil {
		return false, err
	}
	l.forget(d)
	return true, nil
}

// expired reports whether an unreferenced blob is old enough to go.
func (l *Library) expired(ctx context.Context, d blob.Digest, opts CollectOptions) bool {
	var last time.Time
	if f, ok := l.store.(*blob.Folder); ok {
		path, err := f.LocalPath(ctx, d)
		if err != nil {
			return false // somebody else was faster
		}
		st, err := os.Stat(path)
		if err != nil {
			return false
		}
		last = st.ModTime()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if last.IsZero() {
		if _, ok := l.idle[d]; !ok {
			l.idle[d] = opts.Now
		}
		last = l.idle[d]
	}
	if used := l.used[d]; used.After(last) {
		last = used
	}
	return opts.Now.Sub(last) >= opts.MinAge
}

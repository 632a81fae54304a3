package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
)

// Retrying is a Store that asks again while the store below is unavailable (ErrUnavailable),
// for as long as its Retry says. It never repeats what cannot succeed: a blob that is not
// there, a range outside of it, wrong content, a refusal, a full store, an end of ctx.
//
// A read that breaks in the middle goes on where it stopped; its time begins anew when it
// has got a good piece further. A Put goes again from the start if its reader can seek, or
// was not touched yet; otherwise the first error stands. A List is begun again only before
// its first item. What is staged is the store's own to protect.
type Retrying struct {
	store Store
	retry Retry
}

var (
	_ Store       = (*Retrying)(nil)
	_ Stager      = (*Retrying)(nil)
	_ LocalPather = (*Retrying)(nil)
)

// NewRetrying returns s, asked again as r says.
func NewRetrying(s Store, r Retry) *Retrying { return &Retrying{store: s, retry: r} }

// Stat implements Store.
func (s *Retrying) Stat(ctx context.Context, d Digest) (info Info, err error) {
	err = s.retry.Do(ctx, func(ctx context.Context) error {
		info, err = s.store.Stat(ctx, d)
		return err
	})
	return info, err
}

// Get implements Store.
func (s *Retrying) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	r := &retryingReader{s: s, ctx: ctx, d: d, off: off, left: n}
	err := s.retry.Do(ctx, func(ctx context.Context) (err error) {
		r.r, err = s.store.Get(ctx, d, off, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Put implements Store.
func (s *Retrying) Put(ctx context.Context, d Digest, r io.Reader) error {
	in := &watchedReader{r: r}
	seeker, _ := r.(io.Seeker)
	var start int64
	if seeker != nil {
		var err error
		if start, err = seeker.Seek(0, io.SeekCurrent); err != nil {
			seeker = nil // a pipe behind an *os.File
		}
	}
	var p patience
	for {
		err := s.store.Put(ctx, d, in)
		if err == nil || !Retryable(err) || in.touched && seeker == nil {
			return err
		}
		if err := p.wait(ctx, s.retry, err); err != nil {
			return err
		}
		if in.touched {
			if _, serr := seeker.Seek(start, io.SeekStart); serr != nil {
				return fmt.Errorf("put blob %s again: %w (after %w)", d, serr, err)
			}
			in.touched = false
		}
	}
}

// watchedReader knows whether anybody has read from it.
type watchedReader struct {
	r       io.Reader
	touched bool
}

func (w *watchedReader) Read(p []byte) (int, error) {
	w.touched = true
	return w.r.Read(p)
}

// Delete implements Store.
func (s *Retrying) Delete(ctx context.Context, d Digest) error {
	return s.retry.Do(ctx, func(ctx context.Context) error { return s.store.Delete(ctx, d) })
}

// List implements Store.
func (s *Retrying) List(ctx context.Context) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		started := false
		err := s.retry.Do(ctx, func(ctx context.Context) error {
			for info, err := range s.store.List(ctx) {
				if err != nil && !started {
					return err
				}
				started = true
				if !yield(info, err) || err != nil {
					return nil
				}
			}
			return nil
		})
		if err != nil {
			yield(Info{}, err)
		}
	}
}

// Stage implements Stager if the store below does. Otherwise it is errors.ErrUnsupported.
func (s *Retrying) Stage(ctx context.Context) (w Staged, err error) {
	err = s.retry.Do(ctx, func(ctx context.Context) error {
		w, err = stage(ctx, s.store)
		return err
	})
	return w, err
}

// LocalPath implements LocalPather if the store below does. Otherwise it is
// errors.ErrUnsupported.
func (s *Retrying) LocalPath(ctx context.Context, d Digest) (path string, err error) {
	local, ok := s.store.(LocalPather)
	if !ok {
		return "", fmt.Errorf("local path of blob on %T: %w", s.store, errors.ErrUnsupported)
	}
	err = s.retry.Do(ctx, func(ctx context.Context) error {
		path, err = local.LocalPath(ctx, d)
		return err
	})
	return path, err
}

// goodPiece is how far a read must get for its patience to begin anew. A server that hands
// out a few bytes between failures is not taken for one that works.
const goodPiece = 64 << 10

type retryingReader struct {
	s    *Retrying
	ctx  context.Context // of the Get, which governs the reads
	d    Digest
	off  int64 // where r stands
	left int64 // what is still to come; negative: all that follows

	r      io.ReadCloser // nil: broken, and failed says why
	failed error
	p      patience
	piece  int64 // bytes since the last failure
}

func (r *retryingReader) Read(b []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF // what the store says behind the last byte does not matter
	}
	for {
		if r.r == nil {
			if err := r.resume(); err != nil {
				return 0, err
			}
		}
		n, err := r.r.Read(b)
		r.off += int64(n)
		r.piece += int64(n)
		if r.left >= 0 {
			r.left = max(r.left-int64(n), 0)
		}
		if r.piece >= goodPiece {
			r.p = patience{}
		}
		switch {
		case r.left == 0:
			return n, nil
		case err == io.EOF && r.left > 0:
			return n, fmt.Errorf("read blob %s: %w", r.d, io.ErrUnexpectedEOF)
		case err == nil || !Retryable(err):
			return n, err
		}
		r.r.Close()
		r.r, r.failed, r.piece = nil, err, 0
		if n > 0 {
			return n, nil // the rest with the next Read
		}
	}
}

// resume opens the rest of the range. A failure that patience does not cover is final: the
// next Read finds it again.
func (r *retryingReader) resume() error {
	for {
		if !Retryable(r.failed) {
			return r.failed
		}
		if err := r.p.wait(r.ctx, r.s.retry, r.failed); err != nil {
			r.failed = err
			return err
		}
		in, err := r.s.store.Get(r.ctx, r.d, r.off, r.left)
		if err == nil {
			r.r = in
			return nil
		}
		r.failed = err
	}
}

func (r *retryingReader) Close() error {
	if r.r == nil {
		return nil
	}
	return r.r.Close()
}

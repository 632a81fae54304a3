package blobtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"

	"github.com/dsec-go/dsec/blob"
)

// Op names a point at which a Faulty store can fail.
type Op string

// The points. Each is counted on its own, from 1.
const (
	OpStat      Op = "stat"       // the call
	OpGet       Op = "get"        // the call
	OpRead      Op = "read"       // one Read of a reader that Get gave out: half the bytes, then the error
	OpReadShort Op = "read.short" // one Read ends the reader early with io.EOF; the error is not used
	OpReadFlip  Op = "read.flip"  // one Read returns a byte with one bit changed; the error is not used
	OpPut       Op = "put"        // the call, before the store sees it
	OpPutRead   Op = "put.read"   // one Read of the reader given to Put: half the bytes, then the error
	OpDelete    Op = "delete"     // the call
	OpList      Op = "list"       // one item
	OpStage     Op = "stage"      // the call
	OpWrite     Op = "write"      // one Write of a Staged: half the bytes, then the error
	OpCommit    Op = "commit"     // the call, before the store sees it
)

// Faulty is a store that fails where it is told to: the third "write" with ENOSPC, for
// example. With nothing asked of it, it is the store below.
type Faulty struct {
	store blob.Store

	mu     sync.Mutex
	counts map[Op]int
	faults map[Op]map[int]error
}

var (
	_ blob.Store  = (*Faulty)(nil)
	_ blob.Stager = (*Faulty)(nil)
)

// NewFaulty returns s with no faults yet.
func NewFaulty(s blob.Store) *Faulty {
	return &Faulty{store: s, counts: map[Op]int{}, faults: map[Op]map[int]error{}}
}

// FailAt makes the nth op from now on fail with err, once. n = 1 is the next one.
func (f *Faulty) FailAt(op Op, n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.faults[op] == nil {
		f.faults[op] = map[int]error{}
	}
	f.faults[op][f.counts[op]+n] = err
}

// Count returns how often op has been reached.
func (f *Faulty) Count(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[op]
}

// reach counts op and returns the error due, if any.
func (f *Faulty) reach(op Op) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[op]++
	n := f.counts[op]
	err, ok := f.faults[op][n]
	if !ok {
		return nil
	}
	delete(f.faults[op], n)
	if err == nil {
		err = errors.New("injected fault")
	}
	return fmt.Errorf("%s number %d: %w", op, n, err)
}

// Stat implements blob.Store.
func (f *Faulty) Stat(ctx context.Context, d blob.Digest) (blob.Info, error) {
	if err := f.reach(OpStat); err != nil {
		return blob.Info{}, err
	}
	return f.store.Stat(ctx, d)
}

// Get implements blob.Store.
func (f *Faulty) Get(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	if err := f.reach(OpGet); err != nil {
		return nil, err
	}
	r, err := f.store.Get(ctx, d, off, n)
	if err != nil {
		return nil, err
	}
	return &faultyReader{f: f, r: r}, nil
}

// Put implements blob.Store.
func (f *Faulty) Put(ctx context.Context, d blob.Digest, r io.Reader) error {
	if err := f.reach(OpPut); err != nil {
		return err
	}
	return f.store.Put(ctx, d, faultyInput{f, r})
}

// Delete implements blob.Store.
func (f *Faulty) Delete(ctx context.Context, d blob.Digest) error {
	if err := f.reach(OpDelete); err != nil {
		return err
	}
	return f.store.Delete(ctx, d)
}

// List implements blob.Store.
func (f *Faulty) List(ctx context.Context) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for info, err := range f.store.List(ctx) {
			if ferr := f.reach(OpList); ferr != nil {
				yield(blob.Info{}, ferr)
				return
			}
			if !yield(info, err) {
				return
			}
		}
	}
}

// Stage implements blob.Stager if the store below does. Otherwise it is errors.ErrUnsupported.
func (f *Faulty) Stage(ctx context.Context) (blob.Staged, error) {
	if err := f.reach(OpStage); err != nil {
		return nil, err
	}
	st, ok := f.store.(blob.Stager)
	if !ok {
		return nil, fmt.Errorf("stage blob on %T: %w", f.store, errors.ErrUnsupported)
	}
	s, err := st.Stage(ctx)
	if err != nil {
		return nil, err
	}
	return &faultyStaged{Staged: s, f: f}, nil
}

type faultyReader struct {
	f     *Faulty
	r     io.ReadCloser
	ended bool
}

func (r *faultyReader) Read(p []byte) (int, error) {
	if r.ended {
		return 0, io.EOF
	}
	if err := r.f.reach(OpRead); err != nil {
		n, _ := r.r.Read(p[:len(p)/2])
		return n, err
	}
	if r.f.reach(OpReadShort) != nil {
		r.ended = true
		n, _ := r.r.Read(p[:len(p)/2])
		return n, io.EOF
	}
	n, err := r.r.Read(p)
	if n > 0 && r.f.reach(OpReadFlip) != nil {
		p[n/2] ^= 0x10
	}
	return n, err
}

func (r *faultyReader) Close() error { return r.r.Close() }

type faultyInput struct {
	f *Faulty
	r io.Reader
}

func (r faultyInput) Read(p []byte) (int, error) {
	if err := r.f.reach(OpPutRead); err != nil {
		n, _ := r.r.Read(p[:len(p)/2])
		return n, err
	}
	return r.r.Read(p)
}

type faultyStaged struct {
	blob.Staged
	f   *Faulty
	err error // of a Write: final, as the contract says
}

func (s *faultyStaged) Write(p []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	if err := s.f.reach(OpWrite); err != nil {
		n, _ := s.Staged.Write(p[:len(p)/2])
		s.err = err
		s.Staged.Abort() //nolint:errcheck // the injected error counts
		return n, err
	}
	return s.Staged.Write(p)
}

func (s *faultyStaged) Commit(ctx context.Context) (blob.Info, error) {
	if s.err != nil {
		return blob.Info{}, s.err
	}
	if err := s.f.reach(OpCommit); err != nil {
		s.Staged.Abort() //nolint:errcheck // the injected error counts
		return blob.Info{}, err
	}
	return s.Staged.Commit(ctx)
}

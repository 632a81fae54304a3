package blob

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
)

// Verified is a Store that checks a blob as it is read from its first to its last byte.
// Content that is wrong ends in ErrCorrupt in place of its last bytes, so that even a
// reader who counts and never asks for io.EOF is told. A partial range is not checked:
// its units are checked by whoever holds a table of their digests.
//
// It offers no LocalPath on purpose: a file read behind its back is not checked.
type Verified struct {
	Store
}

// NewVerified returns s with checked reads.
func NewVerified(s Store) Verified { return Verified{s} }

// Stage implements Stager if the store below does. Otherwise it is errors.ErrUnsupported.
func (v Verified) Stage(ctx context.Context) (Staged, error) { return stage(ctx, v.Store) }

// Get implements Store.
func (v Verified) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	if off != 0 {
		return v.Store.Get(ctx, d, off, n)
	}
	info, err := v.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	if n >= 0 && n != info.Size {
		return v.Store.Get(ctx, d, off, n)
	}
	r, err := v.Store.Get(ctx, d, 0, -1)
	if err != nil {
		return nil, err
	}
	return Check(r, d, info.Size), nil
}

// Check gives what r reads, from the first to the last byte of the blob d of that size, checked
// as Verified does: for callers who know the size.
func Check(r io.ReadCloser, d Digest, size int64) io.ReadCloser {
	return &verifier{ReadCloser: r, want: d, left: size, hash: sha256.New()}
}

type verifier struct {
	io.ReadCloser
	want Digest
	left int64 // of its size
	hash hash.Hash
	err  error // sticky
}

func (v *verifier) Read(p []byte) (int, error) {
	if v.err != nil || len(p) == 0 {
		return 0, v.err
	}
	n, err := v.ReadCloser.Read(p)
	v.hash.Write(p[:n])
	v.left -= int64(n)
	switch {
	case v.left < 0:
		v.err = fmt.Errorf("blob %s: %d bytes more than its size: %w", v.want, -v.left, ErrCorrupt)
		return 0, v.err
	case v.left == 0:
		if got := FromHash(v.hash); got != v.want {
			v.err = corrupt(v.want, got)
			return 0, v.err
		}
	case err == io.EOF:
		v.err = fmt.Errorf("blob %s: ends %d bytes before its size: %w", v.want, v.left, ErrCorrupt)
		return n, v.err
	}
	v.err = err
	return n, err
}

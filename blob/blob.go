// Package blob keeps immutable bytes under the name of their own SHA-256.
//
// It does: stat, read a range, put if absent, delete and list, on a folder of any
// POSIX mount (Folder) or in memory (Memory); and it decorates such a Store with a
// near cache (Cached), a check of what is read (Verified), patience with a store that is
// away (Retrying) or artificial limits (Limited). Package blob/s3 is a Store in a bucket,
// blob/store opens one by its URL. It does not know what the bytes mean, count references, decide what is
// garbage, fetch parts lazily or keep anything mutable: that is for image and rootfs.
//
// Invariants, the same for every Store and tested by blobtest.Run:
//
//   - A blob that can be seen is whole and has the digest it is named by.
//   - A Put or Commit that returned nil is durable. One that failed leaves no blob
//     that was not there before (see Folder for its one exception) and no temporary file.
//   - Puts of the same digest may race, also from several nodes: all succeed.
//   - A blob may be deleted while it is read. A reader that is open then goes on.
//   - A malformed Digest never reaches a file system: it is ErrDigest.
//
// Stores are safe for concurrent use. Readers and Staged values belong to one goroutine;
// whoever got one closes it (Close; Commit or Abort).
//
// Optional powers are interfaces found by assertion: Stager, Named, LocalPather, Holder,
// Keeper, Sweeper. Read folder.go
// next, then blobtest for the contract in executable form.
package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"iter"
)

const (
	digestPrefix = "sha256:"
	digestLen    = len(digestPrefix) + 2*sha256.Size
)

// Digest names a blob: "sha256:" and 64 lowercase hexadecimal digits, as OCI writes it.
type Digest string

// Of returns the digest of b.
func Of(b []byte) Digest { return FromSum(sha256.Sum256(b)) }

// FromSum returns the digest for a SHA-256 sum.
func FromSum(sum [sha256.Size]byte) Digest {
	return Digest(digestPrefix + hex.EncodeToString(sum[:]))
}

// FromHash returns the digest of what was written to h, which must be a crypto/sha256 hash.
func FromHash(h hash.Hash) Digest {
	return Digest(digestPrefix + hex.EncodeToString(h.Sum(nil)))
}

// Parse returns s as a Digest, or ErrDigest.
func Parse(s string) (Digest, error) {
	d := Digest(s)
	return d, d.Check()
}

// Check returns nil if d is well formed and ErrDigest otherwise.
func (d Digest) Check() error {
	if len(d) != digestLen || d[:len(digestPrefix)] != digestPrefix {
		return fmt.Errorf("digest %.80q: %w", string(d), ErrDigest)
	}
	for _, c := range []byte(d[len(digestPrefix):]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return fmt.Errorf("digest %.80q: %w", string(d), ErrDigest)
		}
	}
	return nil
}

// Hex returns the 64 digits alone.
// Requires: d.Check() == nil.
func (d Digest) Hex() string { return string(d[len(digestPrefix):]) }

// Sum returns the 32 bytes of d.
// Requires: d.Check() == nil.
func (d Digest) Sum() (sum [sha256.Size]byte) {
	hex.Decode(sum[:], []byte(d.Hex())) //nolint:errcheck // checked by the precondition
	return sum
}

// Info is what a Store knows of a blob without reading it.
type Info struct {
	Digest Digest
	Size   int64
}

// Store is a set of blobs.
type Store interface {
	// Stat returns the size of a blob, or ErrNotFound.
	Stat(ctx context.Context, d Digest) (Info, error)

	// Get reads n bytes from off on; with n < 0 all that follow off. The range must lie
	// within the blob (ErrRange); it may be empty. ctx governs the reads too. The caller
	// closes the reader. Content is not checked: see Verified.
	Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error)

	// Put stores what r yields until io.EOF, unless d is there already: then r may stay
	// unread. It is ErrCorrupt, naming both digests, if r yields something else than d.
	// An error of r is wrapped.
	Put(ctx context.Context, d Digest, r io.Reader) error

	// Delete removes a blob. One that is absent is no error.
	Delete(ctx context.Context, d Digest) error

	// List yields every blob, in no order. A blob put or deleted meanwhile may or may
	// not be among them. After an error it yields nothing more.
	List(ctx context.Context) iter.Seq2[Info, error]
}

// Stager is a Store that takes bytes whose digest is known only once they are written.
type Stager interface {
	Stage(ctx context.Context) (Staged, error)
}

// Staged is a blob being written. It is invisible until Commit. An error of Write is
// final: Commit then returns it as well.
type Staged interface {
	io.Writer

	// Commit makes the blob visible and durable and names it. Finding the same blob
	// there already is success. After it, failed or not, the Staged is used up.
	Commit(ctx context.Context) (Info, error)

	// Abort throws the bytes away. After Commit or Abort it does nothing, so that it
	// can be deferred.
	Abort() error
}

// Named is a Staged that can say what digest the bytes so far have, because it makes that
// sum anyway.
type Named interface {
	Digest() Digest
}

// LocalPather is a Store whose blobs are plain files of this host. The path stays good
// until the blob is deleted, or evicted by a Holder; the file must not be written to.
type LocalPather interface {
	LocalPath(ctx context.Context, d Digest) (string, error)
}

// Holder is a Store that drops blobs by itself, to make room for others. Hold keeps one from
// that, whether it is there yet or not, until release is called; calling it again does nothing.
type Holder interface {
	Hold(d Digest) (release func())
}

// ReadAll reads a whole blob into memory and checks it, whatever the store.
func ReadAll(ctx context.Context, s Store, d Digest) ([]byte, error) {
	r, err := s.Get(ctx, d, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	if got := Of(b); got != d {
		return nil, corrupt(d, got)
	}
	return b, nil
}

// PutBytes stores b under its digest.
func PutBytes(ctx context.Context, s Store, b []byte) (Digest, error) {
	d := Of(b)
	return d, s.Put(ctx, d, bytes.NewReader(b))
}

// Copy brings one blob from src to dst. The Put of dst checks it on the way.
func Copy(ctx context.Context, dst, src Store, d Digest) error {
	r, err := src.Get(ctx, d, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	return dst.Put(ctx, d, r)
}

// span checks a range against a size and returns its length.
func span(d Digest, size, off, n int64) (int64, error) {
	// Written without off+n, which could overflow.
	if off < 0 || off > size || n > size-off {
		return 0, fmt.Errorf("blob %s: %d bytes at %d of %d: %w", d, n, off, size, ErrRange)
	}
	if n < 0 {
		n = size - off
	}
	return n, nil
}

// ctxReader ends a copy when its context ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}

package trajectory

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// body is what belongs to a record beside its head. The zero body is none.
type body struct {
	kind   string
	size   int64
	inline []byte
	blob   blob.Digest // instead of inline
}

func (b body) describe(h *head) {
	if b.kind != "" {
		h.Body, h.Size, h.Blob = b.kind, b.size, string(b.blob)
	}
}

// openBody gives the body of a record.
func (l *Log) openBody(ctx context.Context, r raw, h *head) (io.ReadCloser, error) {
	switch {
	case h.Body == "":
		return nil, dsec.Errorf(dsec.NotFound, "record %d has no body", h.Seq)
	case h.Blob == "":
		if int64(len(r.body)) != h.Size {
			return nil, fmt.Errorf("%w: a body of %d bytes instead of %d", errMalformed, len(r.body), h.Size)
		}
		return io.NopCloser(bytes.NewReader(r.body)), nil
	}
	d, err := blob.Parse(h.Blob)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	in, err := l.cfg.Store.Get(ctx, d, 0, -1)
	if err != nil {
		return nil, damaged(h, err)
	}
	return stored{blob.Check(in, d, h.Size), h}, nil
}

// stored is a body in the store. Its last bytes come only if all of it is what was recorded.
type stored struct {
	io.ReadCloser
	h *head
}

func (s stored) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = damaged(s.h, err)
	}
	return n, err
}

// damaged gives the error of reading the body of a record: Lost when the store has it no more,
// or other bytes in its place, and what it was otherwise: a store may be away.
func damaged(h *head, err error) error {
	switch {
	case errors.Is(err, blob.ErrCorrupt), errors.Is(err, blob.ErrNotFound), dsec.KindOf(err) == dsec.Invalid:
		return dsec.Errorf(dsec.Lost, "the %s of record %d is damaged in the store: %w", h.Body, h.Seq, err)
	case dsec.KindOf(err) == dsec.Internal:
		return dsec.Errorf(dsec.Unavailable, "read the %s of record %d from the store: %w", h.Body, h.Seq, err)
	}
	return err
}

// outputs yields the recorded output of a command. All of it is read and checked, whatever
// part the caller is after: an error comes in place of the last ones.
func (l *Log) outputs(ctx context.Context, r recorded) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		in, err := l.openBody(ctx, r.raw, r.answer)
		if err != nil {
			yield(dsec.Output{}, err)
			return
		}
		defer in.Close()
		for o, err := range dsec.ReadOutput(in) {
			if dsec.KindOf(err) == dsec.Invalid && err != nil {
				err = damaged(r.answer, err)
			}
			if !yield(o, err) || err != nil {
				return
			}
		}
	}
}

// spool takes a body whose size nobody knows yet: in memory while it is small,
// in the store beyond that. It hashes what it gets.
type spool struct {
	ctx   context.Context
	store Store
	kind  string
	most  int64 // beyond so many bytes only digest and size are kept; 0 means no limit

	n      int64
	sum    hash.Hash
	small  []byte
	staged blob.Staged
}

func (l *Log) spool(ctx context.Context, kind string) *spool {
	return &spool{ctx: ctx, store: l.cfg.Store, kind: kind, sum: sha256.New()}
}

// Write takes more of the body.
func (s *spool) Write(p []byte) (int, error) {
	s.sum.Write(p)
	s.n += int64(len(p))
	if s.most != 0 && s.n > s.most {
		s.abort()
		s.kind, s.small = "", nil
		return len(p), nil
	}
	if s.staged == nil && len(s.small)+len(p) > maxInline {
		staged, err := s.store.Stage(s.ctx)
		if err != nil {
			return 0, fmt.Errorf("store a body: %w", err)
		}
		s.staged = staged
		if _, err := staged.Write(s.small); err != nil {
			return 0, fmt.Errorf("store a body: %w", err)
		}
		s.small = nil
	}
	if s.staged != nil {
		if n, err := s.staged.Write(p); err != nil {
			return n, fmt.Errorf("store a body: %w", err)
		}
	} else {
		s.small = append(s.small, p...)
	}
	return len(p), nil
}

// digest names what was written so far.
func (s *spool) digest() string { return "sha256:" + hex.EncodeToString(s.sum.Sum(nil)) }

// finish makes the body durable if it is not to lie in its record.
func (s *spool) finish() (body, error) {
	b := body{kind: s.kind, size: s.n, inline: s.small}
	if s.staged != nil {
		info, err := s.staged.Commit(s.ctx)
		s.staged = nil
		if err != nil {
			return body{}, fmt.Errorf("store a body: %w", err)
		}
		b.blob = info.Digest
	}
	return b, nil
}

// abort throws the body away; after finish it does nothing.
func (s *spool) abort() {
	if s.staged != nil {
		s.staged.Abort() //nolint:errcheck // nothing depends on it
		s.staged = nil
	}
}

// contentBody is a body that is in memory already.
func (l *Log) contentBody(ctx context.Context, p []byte) (body, string, error) {
	s := l.spool(ctx, dsec.BodyContent)
	defer s.abort()
	if _, err := s.Write(p); err != nil {
		return body{}, "", err
	}
	d := s.digest()
	b, err := s.finish()
	return b, d, err
}

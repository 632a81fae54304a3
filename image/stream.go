package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

const (
	maxWindow  = 128 << 20 // of a zstd stream; what its own tool allows by default
	bufferSize = 256 << 10
)

// A source reads an input, counts and maybe hashes it, and remembers how it
// ended.
type source struct {
	ctx  context.Context
	r    io.Reader
	hash hash.Hash // nil if nobody wants to know
	n    int64
	err  error       // other than io.EOF
	done func(int64) // told of every read, unless nil
}

func newSource(ctx context.Context, r io.Reader, done func(int64)) *source {
	return &source{ctx: ctx, r: r, done: done}
}

// hashed makes s hash what it reads.
func (s *source) hashed() *source {
	s.hash = sha256.New()
	return s
}

func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		s.err = context.Cause(s.ctx)
		return 0, s.err
	}
	n, err := s.r.Read(p)
	if s.hash != nil {
		s.hash.Write(p[:n])
	}
	s.n += int64(n)
	if s.done != nil {
		s.done(int64(n))
	}
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// check reads to the end and compares with what was promised.
// Requires: s is hashed.
func (s *source) check(want blob.Digest, size int64) error {
	if _, err := io.Copy(io.Discard, s); err != nil {
		return err
	}
	if got := blob.FromHash(s.hash); got != want {
		return fmt.Errorf("%s has %d bytes with digest %s, should have %d: %w", want, s.n, got, size, ErrCorrupt)
	}
	return nil
}

// expand undoes compression, told by its first bytes. Errors of the decoder,
// unlike those of s, are ErrCorrupt. The caller calls close.
func expand(s *source) (r io.Reader, close func(), err error) {
	b := bufio.NewReaderSize(s, bufferSize)
	magic, _ := b.Peek(6)
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, nil, decoderError{s, nil}.wrap(err)
		}
		return decoderError{s, z}, func() {}, nil
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil, err
		}
		return decoderError{s, z}, z.Close, nil
	case bytes.HasPrefix(magic, []byte("BZh")), bytes.HasPrefix(magic, []byte("\xfd7zXZ")):
		return nil, nil, dsec.Errorf(dsec.Unsupported, "compression other than gzip and zstd")
	}
	return b, func() {}, nil
}

type decoderError struct {
	s *source
	r io.Reader
}

func (d decoderError) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	return n, d.wrap(err)
}

func (d decoderError) wrap(err error) error {
	if err == nil || err == io.EOF || d.s.err != nil {
		return err
	}
	return fmt.Errorf("%w: %w", ErrCorrupt, err)
}

// ahead reads r in a goroutine of its own, so that unpacking and hashing of the
// input overlap with writing the output. The caller calls stop, which waits.
func ahead(r io.Reader) (out io.Reader, stop func()) {
	a := &aheadReader{full: make(chan chunk, 4), quit: make(chan struct{})}
	go a.fill(r)
	return a, func() {
		close(a.quit)
		for range a.full { //nolint:revive // until fill is gone
		}
	}
}

type chunk struct {
	b   []byte
	err error
}

type aheadReader struct {
	full chan chunk
	quit chan struct{}
	cur  chunk
}

func (a *aheadReader) fill(r io.Reader) {
	defer close(a.full)
	for {
		b := make([]byte, bufferSize)
		// Not io.ReadFull, which would hide how r ended.
		var n int
		var err error
		for n < len(b) && err == nil {
			var m int
			m, err = r.Read(b[n:])
			n += m
		}
		select {
		case a.full <- chunk{b[:n], err}:
		case <-a.quit:
			return
		}
		if err != nil {
			return
		}
	}
}

func (a *aheadReader) Read(p []byte) (int, error) {
	for len(a.cur.b) == 0 {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		c, ok := <-a.full
		if !ok {
			return 0, io.ErrClosedPipe
		}
		a.cur = c
	}
	n := copy(p, a.cur.b)
	a.cur.b = a.cur.b[n:]
	return n, nil
}

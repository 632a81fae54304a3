package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
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

// bounded reads what is uncompressed and ends with an error where the work's
// bound of it is passed.
type bounded struct {
	w *work
	r io.Reader
}

func (b bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.w.input -= int64(n); b.w.input < 0 {
		return n, fmt.Errorf("more than %d bytes, uncompressed: %w", b.w.opts.MaxInput, erofs.ErrTooBig)
	}
	return n, err
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
	a := &aheadReader{full: make(chan chunk, 4), free: make(chan []byte, 8), quit: make(chan struct{})}
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
	free chan []byte // what was read, to be filled again
	quit chan struct{}
	cur  chunk
	left []byte // of cur
}

func (a *aheadReader) fill(r io.Reader) {
	defer close(a.full)
	for {
		var b []byte
		select {
		case b = <-a.free:
		default:
			b = make([]byte, bufferSize)
		}
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
	for len(a.left) == 0 {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		if a.cur.b != nil {
			a.free <- a.cur.b[:bufferSize] // there is room for all there are
		}
		c, ok := <-a.full
		if !ok {
			return 0, io.ErrClosedPipe
		}
		a.cur, a.left = c, c.b
	}
	n := copy(p, a.left)
	a.left = a.left[n:]
	return n, nil
}

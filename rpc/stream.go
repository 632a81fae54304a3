package rpc

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/dsec-go/dsec"
)

// chunks are buffers of MaxChunk bytes.
var chunks = sync.Pool{New: func() any {
	b := make([]byte, dsec.MaxChunk)
	return &b
}}

// send reads r to its end, puts it into data a chunk at a time and calls out for
// each; out must not keep them. It closes r. A reader need not know ctx: what has data goes on for as long as
// its caller takes them, so the end of the call is looked for here.
func send(ctx context.Context, r io.ReadCloser, data *[]byte, out func() error) error {
	defer r.Close()
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	for ctx.Err() == nil {
		n, err := r.Read(*buf)
		if n > 0 {
			*data = (*buf)[:n]
			if err := out(); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// upload gives the first message of a request stream, which says what the data
// are for, and the data of all messages as a reader.
func upload[M interface{ GetData() []byte }](receive func() (M, error)) (first M, data io.Reader, err error) {
	first, err = receive()
	if errors.Is(err, io.EOF) {
		err = dsec.Errorf(dsec.Invalid, "the request has no message")
	}
	return first, &body{rest: first.GetData(), next: func() ([]byte, error) {
		m, err := receive()
		return m.GetData(), err
	}}, err
}

// body is the data of a request stream as a reader.
type body struct {
	next func() ([]byte, error)
	rest []byte
	err  error
}

// Read gives data as it arrives. A stream that breaks off is an error of the
// caller's, never an end: what is written from it must not look complete.
func (b *body) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		b.rest, b.err = b.next()
		switch {
		case b.err == nil && len(b.rest) > dsec.MaxChunk:
			b.rest, b.err = nil, tooMuch(len(b.rest))
		case b.err == nil:
		case errors.Is(b.err, io.EOF) && !errors.Is(b.err, io.ErrUnexpectedEOF):
			b.err = io.EOF
		default:
			b.err = receiveError(b.err)
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

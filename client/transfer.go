package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
)

// download gives the data of a server stream as a reader.
func download[M any](ctx context.Context, c *core, t to, open func(context.Context) (receiver[M], error), data func(*M) []byte) (io.ReadCloser, error) {
	s, err := opened(ctx, c, t, open)
	if err != nil {
		return nil, err
	}
	return &reader[M]{ctx: ctx, to: t, stream: s, data: data, rest: data(s.first), err: s.err}, nil
}

// reader reads the data of a stream. Its context is the call's, kept to tell a
// cancelled call from a broken one.
type reader[M any] struct {
	ctx    context.Context
	to     to
	stream *stream[M]
	data   func(*M) []byte
	rest   []byte
	err    error
	once   sync.Once
}

func (r *reader[M]) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.end()
		}
		var m *M
		m, r.err = r.stream.Receive()
		if r.err == nil {
			r.rest = r.data(m)
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *reader[M]) end() error {
	if errors.Is(r.err, io.EOF) && !errors.Is(r.err, io.ErrUnexpectedEOF) {
		return io.EOF
	}
	return rpc.CallError(r.ctx, r.to.op, r.to.sandbox, r.err)
}

// Close ends the stream, at once if it is not at its end.
func (r *reader[M]) Close() error {
	r.once.Do(r.stream.close)
	return nil
}

// sender is the writing side of a client stream.
type sender[Q, A any] interface {
	Send(q *Q) error
	CloseAndReceive() (*A, error)
}

// upload sends all of r in chunks. fill gives the message for a piece, the first
// with all that describes it; bare strips that for the others. It is not
// repeated: r can be read once.
func upload[Q, A any, S sender[Q, A]](ctx context.Context, c *core, t to, open func(context.Context) (S, error), r io.Reader, fill func([]byte) *Q, bare func()) (*A, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	// Ending the context without closing the stream is what makes the server
	// drop a half-sent body.
	uctx, cancel := context.WithCancel(ctx)
	defer cancel()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	s, err := open(c.headers(uctx, t))
	if err != nil {
		return nil, rpc.CallError(ctx, t.op, t.sandbox, err)
	}
	for first, more := true, true; more; first = false {
		n, err := io.ReadFull(r, *buf)
		if errors.Is(err, io.EOF) || err == io.ErrUnexpectedEOF { //nolint:errorlint // ReadFull's own
			more = false
		} else if err != nil {
			// Not closed: a closed stream is a complete one.
			return nil, &dsec.Error{Op: t.op, Kind: dsec.KindOf(err), Sandbox: t.sandbox, Err: err}
		}
		if n == 0 && !first {
			break
		}
		if err := s.Send(fill((*buf)[:n])); err != nil {
			if errors.Is(err, io.EOF) {
				break // the server has answered already; its answer follows
			}
			return nil, rpc.CallError(ctx, t.op, t.sandbox, err)
		}
		if first {
			bare()
		}
	}
	a, err := s.CloseAndReceive()
	if err != nil {
		return nil, rpc.CallError(ctx, t.op, t.sandbox, err)
	}
	return a, nil
}

var buffers = sync.Pool{New: func() any {
	b := make([]byte, dsec.MaxChunk)
	return &b
}}

// doer sends requests. It breaks a request's body off when its context ends:
// net/http goes on waiting for the rest of a body that comes from a pipe, and
// the server with it.
type doer struct{ *http.Client }

// Do implements connecthttp.HTTPClient.
func (d doer) Do(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.ContentLength < 0 {
		body := r.Body
		context.AfterFunc(r.Context(), func() { body.Close() }) // upload ends the context in any case
	}
	return d.Client.Do(r)
}

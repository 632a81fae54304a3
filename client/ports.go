package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type ports struct {
	*core
	rpc dsecv1.PortsClient
}

// closeTimeout bounds the last call of a connection, which nobody waits for.
const closeTimeout = 5 * time.Second

// Dial connects and starts to receive. The connection outlives ctx: as with
// net.Dialer, ctx governs the dialling.
func (s *ports) Dial(ctx context.Context, c dsec.Call, port int) (dsec.PortConn, error) {
	t := on("client.Dial", c)
	t.step, t.again = dsec.Step{}, false // a connection cannot be had twice
	a, err := unary(ctx, s.core, t, s.rpc.Dial, rpc.DialToWire(port))
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // ends with Close
	p := &conn{ports: s, id: a.GetConn(), to: t, life: life, cancel: cancel}
	p.to.op = "client.Ports"
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	p.stream, err = s.rpc.Receive(s.headers(life, p.to), &dsecv1.PortsReceiveRequest{Conn: p.id})
	if !stop() && err == nil {
		p.stream.Close()
		err = context.Cause(ctx)
	}
	if err != nil {
		cancel(err) // what is left on the server ends as idle
		return nil, rpc.CallError(ctx, t.op, t.sandbox, err)
	}
	return p, nil
}

// conn is a connection to a port. One may read while another writes.
type conn struct {
	ports  *ports
	id     string
	to     to
	life   context.Context // of the connection: Dial to Close
	cancel context.CancelCauseFunc
	stream dsecv1.PortsReceiveClientStream

	read sync.Mutex // one Read at a time
	rest []byte
	rerr error

	write  sync.Mutex // one Write at a time
	offset int64
	shut   bool

	once sync.Once
}

func (c *conn) Read(p []byte) (int, error) {
	c.read.Lock()
	defer c.read.Unlock()
	for len(c.rest) == 0 {
		if c.rerr != nil {
			return 0, c.rerr
		}
		m, err := c.stream.Receive()
		switch {
		case err == nil:
			c.rest = m.GetData()
		case c.life.Err() != nil:
			c.rerr = io.ErrClosedPipe
		case errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			c.rerr = io.EOF
		default:
			c.rerr = rpc.CallError(c.life, c.to.op, c.to.sandbox, err)
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *conn) Write(p []byte) (int, error) {
	c.write.Lock()
	defer c.write.Unlock()
	if c.shut {
		return 0, io.ErrClosedPipe
	}
	done := 0
	for done < len(p) {
		piece := p[done:min(done+dsec.MaxChunk, len(p))]
		if err := c.send(piece, false); err != nil {
			return done, err
		}
		done += len(piece)
	}
	return done, nil
}

func (c *conn) CloseWrite() error {
	c.write.Lock()
	defer c.write.Unlock()
	if c.shut {
		return nil
	}
	c.shut = true
	return c.send(nil, true)
}

// send is repeated on a lost answer: the offset makes that harmless.
//
// Requires: c.write held.
func (c *conn) send(data []byte, last bool) error {
	if c.life.Err() != nil {
		return io.ErrClosedPipe
	}
	_, err := unary(c.life, c.ports.core, c.to.repeatable(), c.ports.rpc.Send,
		&dsecv1.PortsSendRequest{Conn: c.id, Offset: c.offset, Data: data, Close: last})
	if err != nil {
		if c.life.Err() != nil {
			return io.ErrClosedPipe
		}
		return err
	}
	c.offset += int64(len(data))
	return nil
}

// Close ends the connection on both ends. Closing twice is success.
func (c *conn) Close() error {
	c.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.life), closeTimeout)
		defer cancel()
		// The server also drops it when the stream breaks; the call makes it
		// happen before Close returns.
		_, _ = c.ports.rpc.Close(c.ports.headers(ctx, c.to), &dsecv1.PortsCloseRequest{Conn: c.id})
		c.cancel(io.ErrClosedPipe)
		c.stream.Close()
	})
	return nil
}

package wire

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// ports is the host's end of dsec.Ports.
type ports struct{ c *Client }

func (p ports) Dial(ctx context.Context, _ dsec.Call, port int) (dsec.PortConn, error) {
	s, err := p.c.stream(ctx, mDial, appendInt(nil, int64(port)), nil, true)
	if err != nil {
		return nil, err
	}
	first, err := s.next(ctx) // empty: connected
	if err != nil {
		if err = p.c.endOf(ctx, s, err); err == nil {
			err = dsec.Errorf(dsec.Unavailable, "the connection ended at once")
		}
		return nil, err
	}
	return newPortConn(p.c, s, first), nil
}

func newPortConn(c *Client, s *stream, first *buffer) *portConn {
	life, end := context.WithCancel(context.Background())
	return &portConn{c: c, s: s, life: life, end: end, p: first, rest: first.b}
}

// portConn is a connection to a port of the sandbox. Reading, writing and
// closing may be done by different goroutines.
type portConn struct {
	c    *Client
	s    *stream
	life context.Context // ends with Close; the dialler's governs the dialling alone
	end  context.CancelFunc

	rmu  sync.Mutex // held by Read
	p    *buffer
	rest []byte
	rerr error

	wmu    sync.Mutex  // held by Write
	closed atomic.Bool // no more writes
}

func (c *portConn) Read(b []byte) (int, error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	for len(c.rest) == 0 {
		if c.rerr != nil {
			return 0, c.rerr
		}
		c.p.release()
		c.p = nil
		p, err := c.s.next(c.life)
		switch {
		case errors.Is(err, io.EOF):
			c.rerr = io.EOF
		case c.life.Err() != nil: // Close has the stream; what it still delivers must not be given up here
			c.rerr = io.ErrClosedPipe
		case err != nil:
			if c.rerr = c.c.endOf(c.life, c.s, err); c.rerr == nil {
				c.rerr = io.EOF
			}
		default:
			c.p, c.rest = p, p.b
		}
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *portConn) Write(b []byte) (int, error) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.closed.Load() {
		return 0, dsec.Errorf(dsec.Conflict, "the connection is closed for writing")
	}
	done := 0
	for done < len(b) {
		n := min(len(b)-done, chunk)
		if err := c.s.send(c.life, 0, b[done:done+n], nil); err != nil {
			return done, c.writeError(err)
		}
		done += n
	}
	return done, nil
}

func (c *portConn) writeError(err error) error {
	if errors.Is(err, errAnswered) {
		return dsec.Errorf(dsec.Unavailable, "the other end has closed the connection")
	}
	if err = c.c.judge(c.life, err); err == nil {
		err = dsec.Errorf(dsec.Unavailable, "the connection to the guest broke")
	}
	return err
}

func (c *portConn) CloseWrite() error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.closed.Load() {
		return nil
	}
	c.closed.Store(true)
	if err := c.s.send(c.life, fEnd, nil, nil); err != nil && !errors.Is(err, errAnswered) {
		return c.writeError(err)
	}
	return nil
}

// Close drops what is under way, save what was written before a CloseWrite: that
// reaches the other end, as with any connection, if it takes it within lingerFor.
func (c *portConn) Close() error {
	if c.life.Err() != nil {
		return nil
	}
	c.end()
	if c.closed.Load() && c.c.spawn(c.linger) {
		return nil
	}
	c.s.abandon()
	return nil
}

// lingerFor is how long the other end may take for what is left.
const lingerFor = 30 * time.Second

func (c *portConn) linger() {
	ctx, cancel := context.WithTimeout(c.c.life, lingerFor)
	defer cancel()
	if _, err := c.s.response(ctx); err != nil {
		c.s.abandon()
	}
}

package rpc

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// conns are the open connections to ports of sandboxes. An entry ends when it is
// closed, when the one that receives from it goes away, or when nobody receives
// and nobody sends for the idle time.
type conns struct {
	idle time.Duration

	mu sync.Mutex // held for table look-ups only
	m  map[string]*conn
}

func newConns(idle time.Duration) *conns {
	if idle <= 0 {
		idle = time.Minute
	}
	return &conns{idle: idle, m: map[string]*conn{}}
}

// conn is one connection.
type conn struct {
	id      string
	sandbox dsec.SandboxID
	port    dsec.PortConn
	table   *conns

	mu        sync.Mutex
	receiving bool // somebody reads: not idle, however long it is quiet
	taken     bool // Receive was called
	timer     *time.Timer

	writing chan struct{} // holds a token for the one that writes
	offset  int64         // bytes written; guarded by writing
	closed  bool          // the writing side; guarded by writing
}

func (t *conns) add(id dsec.SandboxID, port dsec.PortConn) string {
	c := &conn{id: rand.Text(), sandbox: id, port: port, table: t, writing: make(chan struct{}, 1)}
	t.mu.Lock()
	t.m[c.id] = c
	t.mu.Unlock()
	c.mu.Lock()
	c.timer = time.AfterFunc(t.idle, func() { t.expire(c) })
	c.mu.Unlock()
	return c.id
}

func (t *conns) get(sandbox dsec.SandboxID, id string) (*conn, error) {
	t.mu.Lock()
	c := t.m[id]
	t.mu.Unlock()
	if c == nil || c.sandbox != sandbox {
		return nil, dsec.Errorf(dsec.NotFound, "no open connection has the id %q", clip(id))
	}
	c.touch()
	return c, nil
}

func (t *conns) drop(c *conn) {
	t.mu.Lock()
	delete(t.m, c.id)
	t.mu.Unlock()
	c.mu.Lock()
	c.timer.Stop()
	c.mu.Unlock()
	c.port.Close()
}

// expire drops c unless it came to use while the timer fired.
func (t *conns) expire(c *conn) {
	c.mu.Lock()
	busy := c.receiving || len(c.writing) > 0
	if busy {
		c.timer.Reset(t.idle)
	}
	c.mu.Unlock()
	if !busy {
		t.drop(c)
	}
}

// received notes that the port has closed its side. The other may go on.
func (t *conns) received(c *conn) {
	c.mu.Lock()
	c.receiving = false
	c.timer.Reset(t.idle)
	c.mu.Unlock()
}

func (c *conn) touch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timer.Reset(c.table.idle)
}

func (c *conn) receive() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.taken {
		return dsec.Errorf(dsec.Conflict, "the connection is received from already")
	}
	c.taken, c.receiving = true, true
	return nil
}

// send writes data at offset, skipping what was written before. One call writes
// at a time, so a repeated one waits for the first to end.
func (c *conn) send(ctx context.Context, offset int64, data []byte, last bool) (int64, error) {
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	skip := c.offset - offset
	switch {
	case offset < 0 || skip < 0:
		return 0, dsec.Errorf(dsec.Invalid, "data at offset %d, but only %d bytes were sent", offset, c.offset)
	case skip >= int64(len(data)):
		data = nil
	default:
		data = data[skip:]
	}
	if len(data) > 0 {
		if c.closed {
			return c.offset, dsec.Errorf(dsec.Conflict, "the connection is closed for sending")
		}
		n, err := c.port.Write(data)
		c.offset += int64(n)
		if err != nil {
			return c.offset, &dsec.Error{Kind: dsec.Conflict, Sandbox: c.sandbox, Err: err}
		}
	}
	if last && !c.closed {
		c.closed = true
		if err := c.port.CloseWrite(); err != nil {
			return c.offset, &dsec.Error{Kind: dsec.Conflict, Sandbox: c.sandbox, Err: err}
		}
	}
	return c.offset, nil
}

// reader is the reading side; closing it is not closing the connection.
type reader struct{ c *conn }

func (r reader) Read(p []byte) (int, error) { return r.c.port.Read(p) }
func (r reader) Close() error               { return nil }

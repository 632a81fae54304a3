package qemu

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
)

// Port is a channel to a guest: a socket of QEMU's, which holds
// one connection at a time. A connection outlives the process that it leads to
// where the machine is saved and loaded into another one: whoever uses it sees
// a guest that says nothing for a while, not a break.
type Port struct {
	path string

	mu    sync.Mutex
	conn  *portConn
	stood chan struct{} // not nil while the machine is saved; closed when it is back
	ended bool
}

// NewPort makes a port of the socket at path. It does no I/O.
func NewPort(path string) *Port { return &Port{path: path} }

// dialTimeout is how long QEMU may take to let go of an earlier connection.
const dialTimeout = 2 * time.Second

// Dial makes a connection; an earlier one ends. While the machine is saved it
// waits.
func (p *Port) Dial(ctx context.Context) (io.ReadWriteCloser, error) {
	for {
		p.mu.Lock()
		if p.ended {
			p.mu.Unlock()
			return nil, dsec.Errorf(dsec.Conflict, "the sandbox has ended")
		}
		stood, old := p.stood, p.conn
		if stood == nil {
			raw, err := dialSocket(p.path)
			if err != nil {
				p.mu.Unlock()
				return nil, dsec.Errorf(dsec.Unavailable, "connect to the guest: %w", err)
			}
			c := &portConn{port: p, raw: raw}
			p.conn = c
			p.mu.Unlock()
			if old != nil {
				old.Close()
			}
			return c, nil
		}
		p.mu.Unlock()
		select {
		case <-stood:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// settleTimeout is how long a guest may take to read what it was sent before
// it is saved.
const settleTimeout = 2 * time.Second

// Suspend lets the connection's bytes come to rest: nothing more is sent, and
// what was sent is read by the guest, which still runs. A guest that does not
// read loses the connection.
func (p *Port) Suspend() {
	p.mu.Lock()
	if p.stood == nil {
		p.stood = make(chan struct{})
	}
	c := p.conn
	p.mu.Unlock()
	if c != nil && !c.hold() {
		c.Close()
	}
}

// Standing reports whether the machine is saved.
func (p *Port) Standing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stood != nil
}

// Connect makes the connection that the saved machine had, to the process that
// will load it, before it does: the guest is not told of any change then.
func (p *Port) Connect() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	raw, err := dialSocket(p.path)
	if err != nil {
		return err
	}
	p.conn.attach(raw)
	return nil
}

// Resume lets the bytes flow again, in a machine that was not saved after all
// or is loaded.
func (p *Port) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stood == nil {
		return
	}
	close(p.stood)
	p.stood = nil
	if p.conn != nil {
		p.conn.release()
	}
}

// Close ends the port and its connection for good.
func (p *Port) Close() {
	p.mu.Lock()
	p.ended = true
	c := p.conn
	if p.stood != nil {
		close(p.stood)
		p.stood = nil
	}
	p.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// portConn is one connection.
type portConn struct {
	port *Port

	write sync.Mutex // held while bytes are sent, and while the machine is saved

	mu     sync.Mutex
	raw    net.Conn
	next   chan struct{} // not nil while raw is being replaced
	held   bool
	closed bool
}

// current gives the socket, and what is closed when there is another one.
func (c *portConn) current() (net.Conn, chan struct{}, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, net.ErrClosed
	}
	return c.raw, c.next, nil
}

// Read implements io.Reader. At the end of a process that was saved it waits
// for the next one.
func (c *portConn) Read(b []byte) (int, error) {
	for {
		raw, next, err := c.current()
		if err != nil {
			return 0, err
		}
		n, err := raw.Read(b)
		if n > 0 || err == nil {
			return n, err
		}
		if next == nil {
			if _, next, _ = c.current(); next == nil {
				return 0, err
			}
		}
		<-next
		if again, _, err := c.current(); err != nil || again == raw {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
	}
}

// Write implements io.Writer.
func (c *portConn) Write(b []byte) (int, error) {
	c.write.Lock()
	defer c.write.Unlock()
	raw, _, err := c.current()
	if err != nil {
		return 0, err
	}
	return raw.Write(b)
}

// Close implements io.Closer.
func (c *portConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
	if c.held {
		c.held = false
		c.write.Unlock()
	}
	err := c.raw.Close()
	go func() { // the port's lock may be held by whoever closes
		c.port.mu.Lock()
		if c.port.conn == c {
			c.port.conn = nil
		}
		c.port.mu.Unlock()
	}()
	return err
}

// hold stops sending and waits until the guest has all that was sent.
func (c *portConn) hold() bool {
	deadline := time.Now().Add(settleTimeout)
	for !c.write.TryLock() {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(time.Millisecond)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.write.Unlock()
		return true
	}
	c.held, c.next = true, make(chan struct{})
	raw := c.raw
	c.mu.Unlock()
	for unread(raw) {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(200 * time.Microsecond)
	}
	return true
}

func (c *portConn) attach(raw net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		raw.Close()
		return
	}
	c.raw.Close()
	c.raw = raw
}

func (c *portConn) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.held {
		return
	}
	close(c.next)
	c.held, c.next = false, nil
	c.write.Unlock()
}

// unread reports whether the other end has not read all that was sent.
func unread(c net.Conn) bool {
	n := 0
	if raw, err := c.(*net.UnixConn).SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }) //nolint:errcheck // closed: nothing is unread
	}
	return n > 0
}

// dialSocket connects to a socket whose path may be longer than an address.
func dialSocket(path string) (net.Conn, error) {
	deadline := time.Now().Add(dialTimeout)
	for {
		var c net.Conn
		err := jail.ViaFolder(path, func(short string) (err error) {
			c, err = net.Dial("unix", short)
			return err
		})
		if err == nil || !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			return c, err
		}
		time.Sleep(time.Millisecond)
	}
}

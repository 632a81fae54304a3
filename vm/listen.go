package vm

import (
	"errors"
	"io"
	"sync"
)

// Device is a port as the guest's kernel gives it. Read returns io.EOF while no
// host is connected, and WaitHost returns when one may be.
type Device interface {
	io.ReadWriteCloser
	WaitHost() error
}

// Port is the guest's side of a port: connections, one at a time. When the host
// begins a new one the old one ends, whatever it was in.
type Port struct {
	dev  Device
	conn chan *guestConn
	wmu  sync.Mutex // held while something is written

	mu  sync.Mutex
	cur *guestConn
	err error // why reading ended; set before conn is closed
}

// NewPort makes a Port of dev and reads it until it fails or Close.
func NewPort(dev Device) *Port {
	p := &Port{dev: dev, conn: make(chan *guestConn)}
	// A host that talks to an earlier program at this end learns that it is
	// gone. It is told before any answer, if a host is there at all.
	p.wmu.Lock()
	go func() { // ends when a host reads, or with the device
		defer p.wmu.Unlock()
		dev.Write(everyWord.mark(bye)) //nolint:errcheck // the reader sees it
	}()
	go p.read() // ends with the device
	return p
}

// Accept waits for the next connection.
func (p *Port) Accept() (io.ReadWriteCloser, error) {
	for c := range p.conn {
		if !c.ended() {
			return c, nil
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return nil, p.err
}

// Close ends the port and its connection.
func (p *Port) Close() error { return p.dev.Close() }

// read hands what arrives to the connection that it is for.
func (p *Port) read() {
	d := decoder{rd: portReader{p}}
	buf := make([]byte, readAhead)
	for {
		ev, n, err := d.next(buf)
		if errors.Is(err, ErrPort) {
			p.end() // what follows is passed over until the next hello
			continue
		}
		if err != nil {
			p.mu.Lock()
			p.err = err
			p.mu.Unlock()
			p.end()
			close(p.conn)
			return
		}
		p.mu.Lock()
		cur := p.cur
		p.mu.Unlock()
		switch {
		case n > 0:
			if cur != nil {
				cur.put(buf[:n])
			}
		case ev.kind == hello && cur != nil && cur.w.word == ev.word: // said again before it was answered
		case ev.kind == hello:
			p.end()
			cur = newGuestConn(p, ev.word)
			p.mu.Lock()
			p.cur = cur
			p.mu.Unlock()
			p.begin(cur)
		}
	}
}

// begin answers a hello and offers the connection. Neither holds up reading:
// the host may have changed its mind already.
func (p *Port) begin(c *guestConn) {
	go func() { // ends when the host reads, or with the connection
		p.wmu.Lock()
		if !c.ended() {
			p.dev.Write(c.w.word.mark(answer)) //nolint:errcheck // the reader sees it
		}
		p.wmu.Unlock()
		select {
		case p.conn <- c:
		case <-c.over:
		}
	}()
}

// end ends the current connection.
func (p *Port) end() {
	p.mu.Lock()
	c := p.cur
	p.cur = nil
	p.mu.Unlock()
	if c != nil {
		c.finish()
	}
}

// portReader reads the device and waits while no host is there.
type portReader struct{ p *Port }

func (r portReader) Read(b []byte) (int, error) {
	for {
		n, err := r.p.dev.Read(b)
		if n > 0 || !errors.Is(err, io.EOF) {
			return n, err
		}
		r.p.end()
		if err := r.p.dev.WaitHost(); err != nil {
			return 0, err
		}
	}
}

// guestConn is the guest's end of one connection. What arrives is kept until it
// is read, up to a bound that stops the port: the frames above it have their
// own flow control, so only a host that breaks it gets there.
type guestConn struct {
	p    *Port
	w    writer
	over chan struct{}

	mu   sync.Mutex
	cond sync.Cond
	buf  []byte
	off  int
	done bool
}

const maxBuffered = 1 << 20

func newGuestConn(p *Port, w word) *guestConn {
	c := &guestConn{p: p, over: make(chan struct{})}
	c.w = writer{mu: &p.wmu, rw: p.dev, word: w, closed: c.ended}
	c.cond.L = &c.mu
	return c
}

// put appends to what is to be read. A full buffer waits for its reader.
func (c *guestConn) put(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.buf)-c.off+len(b) > maxBuffered && !c.done {
		c.cond.Wait()
	}
	if c.done {
		return
	}
	if c.off == len(c.buf) {
		c.buf, c.off = c.buf[:0], 0
	}
	c.buf = append(c.buf, b...)
	c.cond.Broadcast()
}

func (c *guestConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.off == len(c.buf) {
		if c.done {
			return 0, io.EOF
		}
		c.cond.Wait()
	}
	n := copy(b, c.buf[c.off:])
	if c.off += n; c.off == len(c.buf) && cap(c.buf) > readAhead {
		c.buf, c.off = nil, 0 // a burst is over
	}
	c.cond.Broadcast()
	return n, nil
}

func (c *guestConn) Write(b []byte) (int, error) { return c.w.write(b) }

func (c *guestConn) ended() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done
}

// finish ends the connection for its readers and writers. It says nothing to
// the host.
func (c *guestConn) finish() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return false
	}
	c.done = true
	close(c.over)
	c.cond.Broadcast()
	return true
}

// Close ends the connection and tells the host so.
func (c *guestConn) Close() error {
	if !c.finish() {
		return nil
	}
	c.p.mu.Lock()
	if c.p.cur == c {
		c.p.cur = nil
	}
	c.p.mu.Unlock()
	go func() { // ends when the host reads
		c.p.wmu.Lock()
		defer c.p.wmu.Unlock()
		c.p.dev.Write(c.w.word.mark(bye)) //nolint:errcheck // the host may be gone
	}()
	return nil
}

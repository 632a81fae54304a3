package vm

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// A port carries bytes and marks. A mark begins with the byte esc, which data
// has doubled up as esc, plain; so a mark is seen wherever the stream was cut.
const (
	esc = 0xf5 // in no text, so that most data is sent as it is

	plain  = 0x00 // the data byte esc
	hello  = 0x01 // host: a connection begins, with the word that follows
	answer = 0x02 // guest: the connection with that word has begun
	bye    = 0x03 // either: the connection with that word is over
)

const wordSize = 16

type word [wordSize]byte

// everyWord in a bye stands for all connections before.
var everyWord word

// How often the host says hello until it is answered: a guest that starts, or
// wakes up, may have dropped what came before.
const (
	helloMin = 10 * time.Millisecond
	helloMax = 200 * time.Millisecond
)

// ErrPort is wrapped by errors of ends that do not keep to the rules.
var ErrPort = errors.New("broken port")

// Dial begins a connection on the host's side of a port. It takes raw over and
// closes it on an error, or with the connection. What the guest sent before is
// dropped.
func Dial(ctx context.Context, raw io.ReadWriteCloser) (io.ReadWriteCloser, error) {
	c := &hostConn{raw: raw}
	c.w.rw = raw
	c.w.word = newWord()
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	begun := make(chan struct{})
	var said sync.WaitGroup
	said.Go(func() {
		mark := c.w.word.mark(hello)
		for wait := helloMin; ; wait = min(2*wait, helloMax) {
			if _, err := raw.Write(mark); err != nil {
				return // the reader sees it too
			}
			select {
			case <-begun:
				return
			case <-time.After(wait):
			}
		}
	})
	err := c.begin()
	close(begun)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		raw.Close()
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		said.Wait()
		return nil, fmt.Errorf("begin connection to the guest: %w", err)
	}
	said.Wait() // a mark of ours must not follow data that contains its begin
	return c, nil
}

// newWord gives a random word without the byte esc, so that a mark that was cut
// is told from the next.
func newWord() (w word) {
	rand.Read(w[:]) //nolint:errcheck // never fails
	for i := range w {
		if w[i] == esc {
			w[i]--
		}
	}
	return w
}

// mark gives a mark's bytes.
func (w word) mark(kind byte) []byte { return append([]byte{esc, kind}, w[:]...) }

// hostConn is the host's end of one connection.
type hostConn struct {
	raw  io.ReadWriteCloser
	in   decoder
	w    writer
	once sync.Once
}

// begin reads until the guest's answer.
func (c *hostConn) begin() error {
	c.in.rd = c.raw
	for {
		ev, _, err := c.in.next(nil)
		switch {
		case errors.Is(err, ErrPort): // of the past, and cut
		case err != nil:
			return noEOF(err)
		case ev.kind == answer && ev.word == c.w.word:
			return nil
		}
	}
}

func (c *hostConn) Read(p []byte) (int, error) {
	for len(p) > 0 {
		ev, n, err := c.in.next(p)
		switch {
		case n > 0:
			return n, nil
		case err != nil:
			return 0, err
		case ev.kind == bye && (ev.word == c.w.word || ev.word == everyWord):
			return 0, io.EOF
		case ev.kind == answer, ev.kind == bye: // to a hello said again; of an earlier connection
		case ev.kind != 0:
			return 0, fmt.Errorf("%w: the guest sent mark %d", ErrPort, ev.kind)
		}
	}
	return 0, nil
}

func (c *hostConn) Write(p []byte) (int, error) { return c.w.write(p) }

// SetWriteDeadline is that of the stream below, if it has any.
func (c *hostConn) SetWriteDeadline(t time.Time) error {
	if d, ok := c.raw.(interface{ SetWriteDeadline(time.Time) error }); ok {
		return d.SetWriteDeadline(t)
	}
	return errors.ErrUnsupported
}

func (c *hostConn) Close() (err error) {
	c.once.Do(func() { err = c.raw.Close() })
	return err
}

// writer writes data of one connection.
type writer struct {
	mu     *sync.Mutex // of the port; nil where there is one connection only
	rw     io.Writer
	word   word
	closed func() bool
	own    sync.Mutex
}

// write sends p with its escapes, in one piece if it has none.
func (w *writer) write(p []byte) (int, error) {
	mu := w.mu
	if mu == nil {
		mu = &w.own
	}
	mu.Lock()
	defer mu.Unlock()
	if w.closed != nil && w.closed() {
		return 0, io.ErrClosedPipe
	}
	if bytes.IndexByte(p, esc) < 0 {
		return w.rw.Write(p)
	}
	const part = 32 << 10
	buf := make([]byte, 0, min(len(p), part)+len(p)/64+64)
	for rest := p; len(rest) > 0; {
		cut := rest[:min(len(rest), part)]
		rest = rest[len(cut):]
		buf = buf[:0]
		for {
			i := bytes.IndexByte(cut, esc)
			if i < 0 {
				buf = append(buf, cut...)
				break
			}
			buf = append(append(buf, cut[:i]...), esc, plain)
			cut = cut[i+1:]
		}
		if _, err := w.rw.Write(buf); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// event is a mark that was read; kind 0 is none.
type event struct {
	kind byte
	word word
}

// decoder parts a stream into data and marks.
type decoder struct {
	rd   io.Reader
	buf  []byte // room for what is read ahead
	a, b int    // the unread part of it
}

const readAhead = 16 << 10

// next gives either data, as many bytes of it as were put into p, or a mark, or
// an error. With an empty p data is dropped.
func (d *decoder) next(p []byte) (event, int, error) {
	for {
		if d.a == d.b {
			if err := d.fill(); err != nil {
				return event{}, 0, err
			}
		}
		if d.buf[d.a] != esc {
			run := d.buf[d.a:d.b]
			if i := bytes.IndexByte(run, esc); i >= 0 {
				run = run[:i]
			}
			if len(p) == 0 {
				d.a += len(run)
				continue
			}
			n := copy(p, run)
			d.a += n
			return event{}, n, nil
		}
		d.a++
		kind, err := d.byte()
		if err != nil {
			return event{}, 0, err
		}
		switch kind {
		case plain:
			if len(p) > 0 {
				p[0] = esc
				return event{}, 1, nil
			}
		case hello, answer, bye:
			ev := event{kind: kind}
			whole, err := d.word(&ev.word)
			if err != nil {
				return event{}, 0, err
			}
			if whole {
				return ev, 0, nil
			}
		case esc: // the stream was cut between the two bytes of an escape
			d.a--
		default:
			return event{}, 0, fmt.Errorf("%w: no mark begins with %#x", ErrPort, kind)
		}
	}
}

// word reads a mark's word. It is not whole when another mark begins in it: a
// word never holds the byte esc.
func (d *decoder) word(w *word) (whole bool, err error) {
	for i := range w {
		b, err := d.byte()
		if err != nil {
			return false, err
		}
		if b == esc {
			d.a--
			return false, nil
		}
		w[i] = b
	}
	return true, nil
}

func (d *decoder) byte() (byte, error) {
	if d.a == d.b {
		if err := d.fill(); err != nil {
			return 0, err
		}
	}
	d.a++
	return d.buf[d.a-1], nil
}

// fill reads on. Requires: nothing is unread.
func (d *decoder) fill() error {
	if d.buf == nil {
		d.buf = make([]byte, readAhead)
	}
	for range 100 {
		n, err := d.rd.Read(d.buf)
		if n > 0 {
			d.a, d.b = 0, n
			return nil
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

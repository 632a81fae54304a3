package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// A frame is a header of ten bytes, little-endian, and its payload:
//
//	0  length of the payload   uint32
//	4  type                    uint8
//	5  flags                   uint8
//	6  stream                  uint32, 0 for Hello
type header struct {
	n      int
	typ    uint8
	flags  uint8
	stream uint32
}

const headerSize = 10

// The types of frame.
const (
	tHello    = 1 // magic, version; first on a connection, both ways
	tRequest  = 2 // method, length of arguments, arguments, first data
	tResponse = 3 // 0 and the answer, or 1 + error kind and text; ends the stream
	tData     = 4 // within the credit
	tCancel   = 5 // host: the caller went away; a Response follows all the same
	tCredit   = 6 // uint32: more bytes that may be sent on the stream
)

// The flags of a frame.
const (
	fMore = 1 // the Request or Response goes on in the next frame of its stream
	fEnd  = 2 // the sender sends no more Data on the stream
)

const magic = "dsec-wire"

// errProtocol is a peer that breaks the rules.
var errProtocol = errors.New("peer breaks the protocol")

func protocolf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errProtocol}, args...)...)
}

func (h header) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(h.n))
	b = append(b, h.typ, h.flags)
	return binary.LittleEndian.AppendUint32(b, h.stream)
}

// parseHeader decodes and checks a header without looking at any stream.
func parseHeader(b *[headerSize]byte) (header, error) {
	h := header{
		n:      int(binary.LittleEndian.Uint32(b[0:])),
		typ:    b[4],
		flags:  b[5],
		stream: binary.LittleEndian.Uint32(b[6:]),
	}
	switch {
	case h.n > maxPayload:
		return h, protocolf("frame of %d bytes", h.n)
	case h.typ < tHello || h.typ > tCredit:
		return h, protocolf("frame type %d", h.typ)
	case h.flags&^(fMore|fEnd) != 0:
		return h, protocolf("frame flags %#x", h.flags)
	case (h.stream == 0) != (h.typ == tHello):
		return h, protocolf("frame type %d on stream %d", h.typ, h.stream)
	case h.typ == tCredit && h.n != 4, h.typ == tCancel && h.n != 0:
		return h, protocolf("frame type %d of %d bytes", h.typ, h.n)
	}
	return h, nil
}

// reader reads frames through a buffer small enough that thousands of idle
// connections do not matter. Short frames cost one read, the payload of long
// ones goes straight where it belongs.
type reader struct {
	r    io.Reader
	a, b int // unread part of buf
	buf  [256]byte
}

func (r *reader) Read(p []byte) (int, error) {
	if r.a == r.b {
		if len(p) >= len(r.buf) {
			return r.r.Read(p)
		}
		n, err := r.r.Read(r.buf[:])
		if n == 0 {
			return 0, err
		}
		r.a, r.b = 0, n
	}
	n := copy(p, r.buf[r.a:r.b])
	r.a += n
	return n, nil
}

func (r *reader) header() (header, error) {
	var b [headerSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, err
	}
	return parseHeader(&b)
}

// payload reads n bytes into a buffer of its own, or into one of the pool's if
// pooled is wanted and pays.
func (r *reader) payload(n int) (*buffer, error) {
	p := getBuffer(n)
	if _, err := io.ReadFull(r, p.b); err != nil {
		p.release()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return p, nil
}

// buffer is a byte slice that goes back to a pool if it came from one.
type buffer struct {
	b    []byte
	pool *sync.Pool
}

const pooledSize = chunk + 1024

var buffers = sync.Pool{New: func() any { return &buffer{b: make([]byte, pooledSize)} }}

// getBuffer gives a buffer of n bytes. Small ones are not worth a pool's place.
func getBuffer(n int) *buffer {
	if n < 4<<10 || n > pooledSize {
		return &buffer{b: make([]byte, n)}
	}
	p := buffers.Get().(*buffer)
	p.b = p.b[:n]
	p.pool = &buffers
	return p
}

func (p *buffer) release() {
	if p != nil && p.pool != nil {
		pool := p.pool
		p.pool = nil
		p.b = p.b[:cap(p.b)]
		pool.Put(p)
	}
}

// writeStall is how long one frame may wait for the peer to take it before the
// connection counts as broken, where the stream has deadlines.
const writeStall = 5 * time.Second

type writeDeadliner interface{ SetWriteDeadline(time.Time) error }

// writeFrame writes one frame whose payload is a then b, in one system call
// where it can.
func writeFrame(w io.Writer, h header, a, b []byte) error {
	h.n = len(a) + len(b)
	if h.n <= 4<<10 {
		var small [512]byte
		buf := h.append(small[:0])
		if h.n > len(small)-headerSize {
			buf = h.append(make([]byte, 0, headerSize+h.n))
		}
		buf = append(append(buf, a...), b...)
		_, err := w.Write(buf)
		return err
	}
	if _, ok := w.(net.Conn); ok {
		pre := append(h.append(make([]byte, 0, headerSize+len(a))), a...)
		v := net.Buffers{pre, b}
		if len(b) == 0 {
			v = v[:1]
		}
		_, err := v.WriteTo(w)
		return err
	}
	p := getBuffer(headerSize + h.n)
	defer p.release()
	buf := append(append(h.append(p.b[:0]), a...), b...)
	_, err := w.Write(buf)
	return err
}

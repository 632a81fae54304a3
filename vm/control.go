package vm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// A message is its length, four bytes, and then a number that joins request and
// answer, the version, the call, and what the call has. An answer has an error's
// kind, empty for none, and its text first.
const prefix = 4

func readMessage(r io.Reader) ([]byte, error) {
	var head [prefix]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxMessage {
		return nil, fmt.Errorf("control message of %d bytes: %w", n, errMessage)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, noEOF(err)
	}
	return b, nil
}

func writeMessage(w io.Writer, b []byte) error {
	if len(b)-prefix > maxMessage {
		return dsec.Errorf(dsec.Invalid, "control message of %d bytes", len(b)-prefix)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-prefix))
	_, err := w.Write(b)
	return err
}

// Client is the host's end of a machine's control port. It makes its connection
// when it is first needed, and again when it broke. It is safe for concurrent
// use; calls follow each other.
//
// A call that its context ends, or whose connection breaks, closes the
// connection; it may have been carried out or not.
type Client struct {
	dial func(context.Context) (io.ReadWriteCloser, error)

	mu     sync.Mutex
	raw    io.ReadWriteCloser
	serial uint64
	turn   chan struct{} // one token: the right to use raw
	closed bool
}

// NewClient makes a client. dial gives the raw port, for Dial to begin a
// connection on.
func NewClient(dial func(context.Context) (io.ReadWriteCloser, error)) *Client {
	return &Client{dial: dial, turn: make(chan struct{}, 1)}
}

// Close ends the connection and every call.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.drop()
}

// Disconnect closes the connection, if there is one; the next call makes
// another. It is for a machine that is about to stand still.
func (c *Client) Disconnect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drop()
}

// drop closes the connection. Requires: c.mu held.
func (c *Client) drop() error {
	if c.raw == nil {
		return nil
	}
	err := c.raw.Close()
	c.raw = nil
	return err
}

// connect gives the connection. Requires: the turn.
func (c *Client) connect(ctx context.Context) (io.ReadWriteCloser, error) {
	c.mu.Lock()
	raw, closed := c.raw, c.closed
	c.mu.Unlock()
	if closed {
		return nil, dsec.Errorf(dsec.Conflict, "the machine is gone")
	}
	if raw != nil {
		return raw, nil
	}
	raw, err := c.dial(ctx)
	if err == nil {
		raw, err = Dial(ctx, raw)
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		raw.Close()
		return nil, dsec.Errorf(dsec.Conflict, "the machine is gone")
	}
	c.raw = raw
	return raw, nil
}

// call sends a request and gives the fields of its answer.
func (c *Client) call(ctx context.Context, what call, args func([]byte) []byte) (*fields, error) {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, dsec.WithOp("", "", context.Cause(ctx))
	}
	defer func() { <-c.turn }()
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, c.judge(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c.serial++
	b := binary.AppendUvarint(make([]byte, prefix, 256), c.serial)
	b = append(b, Version, byte(what))
	if args != nil {
		b = args(b)
	}
	f, err := exchange(conn, c.serial, b)
	if !stop() || err != nil {
		c.mu.Lock()
		if c.raw == conn {
			c.drop() //nolint:errcheck // it is broken
		}
		c.mu.Unlock()
	}
	if err != nil {
		return nil, c.judge(ctx, err)
	}
	return f, answerError(f)
}

// exchange sends a request and reads until its answer.
func exchange(conn io.ReadWriter, id uint64, b []byte) (*fields, error) {
	if err := writeMessage(conn, b); err != nil {
		return nil, err
	}
	b, err := readMessage(conn)
	if err != nil {
		return nil, noEOF(err)
	}
	f := &fields{b: b}
	if f.uint() != id || f.bad {
		return nil, errMessage
	}
	return f, nil
}

// judge makes an error of the connection one of the call.
func (c *Client) judge(ctx context.Context, err error) error {
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	var typed *dsec.Error
	switch {
	case closed:
		return dsec.Errorf(dsec.Conflict, "the machine is gone")
	case ctx.Err() != nil:
		return dsec.WithOp("", "", context.Cause(ctx))
	case errors.As(err, &typed):
		return err
	}
	return dsec.Errorf(dsec.Unavailable, "ask the machine's guest: %w", err)
}

const maxText = 4096

// answerError reads the part of an answer that tells how the call went.
func answerError(f *fields) error {
	kind, text := f.str(), f.str()
	if f.bad {
		return dsec.Errorf(dsec.Unavailable, "ask the machine's guest: %w", errMessage)
	}
	if kind == "" {
		return nil
	}
	return dsec.Errorf(dsec.ParseErrorKind(kind), "%s", text[:min(len(text), maxText)])
}

// simple is a call without arguments and results.
func (c *Client) simple(ctx context.Context, what call) error {
	f, err := c.call(ctx, what, nil)
	if err != nil {
		return err
	}
	return fault(f.err())
}

func fault(err error) error {
	if err != nil {
		return dsec.Errorf(dsec.Unavailable, "ask the machine's guest: %w", err)
	}
	return nil
}

var _ Handler = (*Client)(nil)

// Ping implements Handler.
func (c *Client) Ping(ctx context.Context) (Info, error) {
	f, err := c.call(ctx, cPing, nil)
	if err != nil {
		return Info{}, err
	}
	i := Info{Version: f.str(), Kernel: f.str(), Entered: f.byte() != 0, Boot: time.Duration(f.int())}
	return i, fault(f.err())
}

// Warm implements Handler.
func (c *Client) Warm(ctx context.Context, s Setup) error {
	f, err := c.call(ctx, cWarm, s.append)
	if err != nil {
		return err
	}
	return fault(f.err())
}

// Enter implements Handler.
func (c *Client) Enter(ctx context.Context, s Setup) error {
	f, err := c.call(ctx, cEnter, s.append)
	if err != nil {
		return err
	}
	return fault(f.err())
}

// Restored implements Handler.
func (c *Client) Restored(ctx context.Context, r Restored) (Clock, error) {
	f, err := c.call(ctx, cRestored, r.append)
	if err != nil {
		return Clock{}, err
	}
	k := Clock{Now: f.time(), Source: f.str()}
	return k, fault(f.err())
}

// Freeze implements Handler.
func (c *Client) Freeze(ctx context.Context) error { return c.simple(ctx, cFreeze) }

// Thaw implements Handler.
func (c *Client) Thaw(ctx context.Context) error { return c.simple(ctx, cThaw) }

// Sync implements Handler.
func (c *Client) Sync(ctx context.Context) error { return c.simple(ctx, cSync) }

// PowerOff implements Handler.
func (c *Client) PowerOff(ctx context.Context) error { return c.simple(ctx, cPowerOff) }

// Again implements Handler. That the connection broke is what is to be expected.
func (c *Client) Again(ctx context.Context) error {
	err := c.simple(ctx, cAgain)
	if dsec.KindOf(err) == dsec.Unavailable {
		return nil
	}
	return err
}

// Usage implements Handler.
func (c *Client) Usage(ctx context.Context) (dsec.Usage, error) {
	f, err := c.call(ctx, cUsage, nil)
	if err != nil {
		return dsec.Usage{}, err
	}
	u := f.usage()
	return u, fault(f.err())
}

// Serve answers the calls of one connection until it ends, and closes it. One
// that ended between two calls is no error.
func Serve(conn io.ReadWriteCloser, h Handler) error {
	defer conn.Close()
	for {
		b, err := readMessage(conn)
		if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
		f := &fields{b: b}
		id := f.uint()
		if f.bad {
			return errMessage
		}
		result, err := handle(f, h)
		b = binary.AppendUvarint(make([]byte, prefix, 256), id)
		if err != nil {
			text := strings.ToValidUTF8(err.Error(), "?")
			b = appendString(appendString(b, dsec.KindOf(err).String()), text[:min(len(text), maxText)])
		} else {
			b = append(append(b, 0, 0), result...)
		}
		if err := writeMessage(conn, b); err != nil {
			return err
		}
	}
}

// handle carries out one request.
func handle(f *fields, h Handler) (b []byte, err error) {
	ctx := context.Background()
	if v := f.byte(); v != Version {
		return nil, dsec.Errorf(dsec.Unsupported, "control protocol: version %d here, %d there", Version, v)
	}
	what := call(f.byte())
	var s Setup
	var r Restored
	switch what {
	case cWarm, cEnter:
		s = f.setup()
	case cRestored:
		r = f.restored()
	}
	if f.err() != nil {
		return nil, dsec.Errorf(dsec.Invalid, "%w", errMessage)
	}
	switch what {
	case cPing:
		i, err := h.Ping(ctx)
		b = appendBool(appendString(appendString(nil, i.Version), i.Kernel), i.Entered)
		return binary.AppendVarint(b, int64(i.Boot)), err
	case cWarm:
		return nil, h.Warm(ctx, s)
	case cEnter:
		return nil, h.Enter(ctx, s)
	case cRestored:
		k, err := h.Restored(ctx, r)
		return appendString(appendTime(nil, k.Now), k.Source), err
	case cFreeze:
		return nil, h.Freeze(ctx)
	case cThaw:
		return nil, h.Thaw(ctx)
	case cUsage:
		u, err := h.Usage(ctx)
		return appendUsage(nil, u), err
	case cSync:
		return nil, h.Sync(ctx)
	case cPowerOff:
		return nil, h.PowerOff(ctx)
	case cAgain:
		return nil, h.Again(ctx)
	}
	return nil, dsec.Errorf(dsec.Unsupported, "no control call has the number %d", what)
}

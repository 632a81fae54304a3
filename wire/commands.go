package wire

import (
	"context"
	"errors"
	"iter"

	"github.com/dsec-go/dsec"
)

// commands is the host's end of dsec.Commands.
type commands struct{ c *Client }

// runInline is the most standard input that Run sends along; more is written
// piece by piece.
const runInline = 1 << 20

func (s commands) Start(ctx context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	args := appendCommand(appendStep(nil, on.Step), &c)
	return s.status(ctx, request{m: mStart, args: args, step: on.Step})
}

func (s commands) status(ctx context.Context, q request) (dsec.CommandStatus, error) {
	p, err := s.c.call(ctx, q)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	d := decoder{b: p}
	st := d.status()
	return st, guestFault(d.err())
}

func (s commands) Run(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	if len(stdin) > runInline {
		return s.runFed(ctx, on, c, stdin)
	}
	args := appendCommand(appendStep(nil, on.Step), &c)
	args = appendBytes(args, stdin)
	p, err := s.c.call(ctx, request{m: mRun, args: args, step: on.Step, limit: maxBig})
	if err != nil {
		return dsec.Result{}, err
	}
	d := decoder{b: p}
	r := dsec.Result{CommandStatus: d.status(), Out: d.bytes(), Err: d.bytes()}
	return r, guestFault(d.err())
}

// runFed is Run with an input too long for one message. The input goes on to
// be fed when the caller has gone away, since the command runs on.
func (s commands) runFed(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	c.Stdin = dsec.StdinPipe
	st, err := s.Start(ctx, on, c)
	if err != nil {
		return dsec.Result{}, err
	}
	replayed := st.Replayed
	s.c.mu.Lock()
	if s.c.gone() {
		s.c.mu.Unlock()
		return dsec.Result{}, errGone()
	}
	s.c.wg.Go(func() { s.feed(s.c.life, st.ID, stdin) })
	s.c.mu.Unlock()
	if st, err = s.Wait(ctx, on, st.ID); err != nil {
		return dsec.Result{}, err
	}
	r := dsec.Result{CommandStatus: st}
	r.Replayed = replayed
	if r.Out, err = s.Read(ctx, on, st.ID, dsec.Stdout, 0, dsec.MaxRunOutput); err == nil {
		r.Err, err = s.Read(ctx, on, st.ID, dsec.Stderr, 0, dsec.MaxRunOutput)
	}
	return r, err
}

func (s commands) feed(ctx context.Context, id dsec.CommandID, p []byte) {
	for off := 0; off < len(p); {
		n := min(len(p)-off, dsec.MaxChunk)
		in := dsec.StdinWrite{Offset: int64(off), Data: p[off : off+n], Close: off+n == len(p)}
		// A command need not read its input; then its end stops the writer.
		if _, err := s.Write(ctx, dsec.Call{}, id, in); err != nil {
			return
		}
		off += n
	}
}

func (s commands) Attach(ctx context.Context, _ dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		for try := 0; ; try++ {
			next, stop, err := s.attach(ctx, id, offset, yield)
			if stop {
				return
			}
			if next > offset {
				offset, try = next, 0
			}
			if err = s.c.judge(ctx, err); err == nil && try > maxTries {
				err = dsec.Errorf(dsec.Unavailable, "the connection to the guest broke again and again")
			}
			if err != nil {
				yield(dsec.Output{}, err)
				return
			}
			s.c.pause(ctx, try)
		}
	}
}

// attach yields over one connection. It returns the offset reached, and
// whether there is nothing more to yield.
func (s commands) attach(ctx context.Context, id dsec.CommandID, offset int64, yield func(dsec.Output, error) bool) (int64, bool, error) {
	l, err := s.c.connect(ctx)
	if err != nil {
		return offset, !yield(dsec.Output{}, err) || true, nil
	}
	args := appendInt(appendString(nil, id), offset)
	st, _, err := l.open(mAttach, args, nil, false, maxResponse, nil)
	if err != nil {
		return offset, false, err
	}
	for {
		p, err := st.next(ctx)
		if errors.Is(err, errAnswered) {
			body, err := st.response(ctx)
			if err != nil {
				return offset, false, err
			}
			d := decoder{b: body}
			status := d.status()
			if err := guestFault(d.err()); err != nil {
				yield(dsec.Output{}, err)
				return offset, true, nil
			}
			yield(dsec.Output{Offset: d.int(), Gap: d.int(), Status: &status}, nil)
			return offset, true, nil
		}
		if err != nil {
			st.abandon()
			return offset, false, err
		}
		d := decoder{b: p.b}
		o := dsec.Output{Stream: dsec.Stream(d.byte()), Offset: d.int(), Gap: d.int()}
		o.Data = d.b
		if d.bad {
			p.release()
			st.abandon()
			yield(dsec.Output{}, guestFault(d.err()))
			return offset, true, nil
		}
		more := yield(o, nil)
		offset = o.Offset + int64(len(o.Data))
		p.release()
		if !more {
			st.abandon()
			return offset, true, nil
		}
	}
}

func (s commands) Read(ctx context.Context, _ dsec.Call, id dsec.CommandID, stream dsec.Stream, offset int64, max int) ([]byte, error) {
	args := append(appendString(nil, id), byte(stream))
	args = appendInt(appendInt(args, offset), int64(max))
	return s.c.call(ctx, request{m: mRead, args: args, idempotent: true, limit: maxBig})
}

func (s commands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	if len(in.Data) > dsec.MaxChunk {
		return 0, dsec.Errorf(dsec.Invalid, "input of %d bytes is more than %d", len(in.Data), dsec.MaxChunk)
	}
	args := appendString(appendStep(nil, on.Step), id)
	args = appendBytes(appendInt(args, in.Offset), in.Data)
	// The offset makes a repetition harmless.
	p, err := s.c.call(ctx, request{m: mWrite, args: appendBool(args, in.Close), idempotent: true})
	if err != nil {
		return 0, err
	}
	d := decoder{b: p}
	n := d.int()
	return n, guestFault(d.err())
}

func (s commands) Resize(ctx context.Context, _ dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	_, err := s.c.call(ctx, request{m: mResize, args: appendSize(appendString(nil, id), size), idempotent: true})
	return err
}

func (s commands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	args := appendString(appendString(appendStep(nil, on.Step), id), sig)
	_, err := s.c.call(ctx, request{m: mSignal, args: args, step: on.Step})
	return err
}

func (s commands) Wait(ctx context.Context, _ dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	return s.status(ctx, request{m: mWait, args: appendString(nil, id), idempotent: true})
}

func (s commands) List(ctx context.Context, _ dsec.Call) ([]dsec.CommandStatus, error) {
	var out []dsec.CommandStatus
	err := s.c.collect(ctx, mList, nil, func(d *decoder) { out = append(out, d.status()) })
	return out, err
}

// maxListed bounds what a list of a guest may make us keep.
const maxListed = 64 << 20

// collect reads a whole list, again over a new connection if the first breaks.
func (c *Client) collect(ctx context.Context, m method, args []byte, item func(*decoder)) error {
	for try := 0; ; try++ {
		l, err := c.connect(ctx)
		if err != nil {
			return err
		}
		s, _, err := l.open(m, args, nil, false, maxResponse, nil)
		total := 0
		for err == nil {
			var p *buffer
			if p, err = s.next(ctx); err == nil {
				total += len(p.b)
				err = eachItem(p.b, item)
				p.release()
				if total > maxListed {
					err = dsec.Errorf(dsec.Exhausted, "list of more than %d bytes", maxListed)
				}
				if err != nil {
					s.abandon()
				}
			} else if errors.Is(err, errAnswered) {
				if _, err = s.response(ctx); err == nil {
					return nil
				}
			} else {
				s.abandon()
			}
		}
		if err = c.judge(ctx, err); err != nil {
			return err
		}
		if total > 0 || try > maxTries {
			return dsec.Errorf(dsec.Unavailable, "the connection to the guest broke in a list")
		}
	}
}

// eachItem decodes the items of one frame of a list.
func eachItem(p []byte, item func(*decoder)) error {
	d := decoder{b: p}
	for len(d.b) > 0 && !d.bad {
		e := decoder{b: d.bytes()}
		if d.bad {
			break
		}
		item(&e)
		d.bad = e.bad
	}
	return guestFault(d.err())
}

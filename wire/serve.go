package wire

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"github.com/dsec-go/dsec"
)

// Serve answers one connection until it breaks, and closes it. It returns when
// no call of the connection is left; what the calls have started goes on. Any
// number of connections may be served at once. A connection that ended between
// two frames is no error.
func Serve(rw io.ReadWriteCloser, h Handler) error {
	v := &server{h: h, l: newLink(rw, false), calls: make(chan func())}
	r := &reader{r: rw}
	err := v.l.hello(r)
	if err == nil {
		err = v.l.read(r, v.request)
	}
	v.l.fail(err)
	v.wg.Wait()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// server is the state of one served connection. Only the reading goroutine
// touches partial.
type server struct {
	h       Handler
	l       *link
	wg      sync.WaitGroup
	partial map[uint32][]byte // requests of which more is to come
	pending int               // bytes in partial

	calls chan func() // to the goroutine that waits for one
	waits atomic.Bool // there is such a goroutine
}

// do runs a call on a goroutine of its own. One goroutine stays for the next
// call: its stack has grown, which costs a new one more than a short call does.
func (v *server) do(call func()) {
	select {
	case v.calls <- call:
	default:
		v.wg.Go(func() { v.carryOut(call) })
	}
}

// carryOut runs a call, and then those that come while no other goroutine waits
// for them.
func (v *server) carryOut(call func()) {
	for {
		call()
		if !v.waits.CompareAndSwap(false, true) {
			return
		}
		select {
		case call = <-v.calls:
			v.waits.Store(false)
		case <-v.l.done:
			return
		}
	}
}

// request takes one Request frame.
func (v *server) request(h header, p []byte) error {
	if old, ok := v.partial[h.stream]; ok {
		v.pending += len(p)
		p = append(old, p...)
	} else {
		if h.stream <= v.l.last {
			return protocolf("stream %d is used twice", h.stream)
		}
		v.l.mu.Lock()
		v.l.last = h.stream
		v.l.mu.Unlock()
		if h.flags&fMore != 0 {
			v.pending += len(p)
		}
	}
	if len(p) > maxRequest || v.pending > 3*maxRequest {
		return protocolf("request of more than %d bytes", maxRequest)
	}
	if h.flags&fMore != 0 {
		if v.partial == nil {
			v.partial = make(map[uint32][]byte)
		}
		v.partial[h.stream] = p
		return nil
	}
	if _, ok := v.partial[h.stream]; ok {
		v.pending -= len(p)
		delete(v.partial, h.stream)
	}
	return v.begin(h, p)
}

func (v *server) begin(h header, p []byte) error {
	d := decoder{b: p}
	m, args := method(d.byte()), d.bytes()
	if d.bad {
		return protocolf("request without arguments")
	}
	ctx, cancel := context.WithCancel(context.Background())
	v.l.mu.Lock()
	defer v.l.mu.Unlock()
	s := v.l.newStream(h.stream)
	s.cancel = cancel
	if len(d.b) > 0 {
		s.queue = append(s.queue, &buffer{b: d.b})
		s.recvWin -= len(d.b) + frameCost
	}
	s.ended = h.flags&fEnd != 0
	busy := len(v.l.streams) > maxStreams
	v.do(func() {
		defer cancel()
		var resp []byte
		var err error
		if busy {
			err = dsec.Errorf(dsec.Exhausted, "%d calls are under way in this sandbox", maxStreams)
		} else {
			resp, err = v.answer(ctx, s, m, args)
		}
		if err != nil {
			resp = appendError(nil, err)
		}
		s.forget()
		v.l.writeMessage(header{typ: tResponse, stream: s.id}, resp) //nolint:errcheck // nobody is left to tell
	})
	return nil
}

// ok begins an answer.
func ok() []byte { return make([]byte, 1, 128) }

// answer carries out one request and gives its encoded answer.
func (v *server) answer(ctx context.Context, s *stream, m method, args []byte) ([]byte, error) {
	d := &decoder{b: args}
	switch {
	case m >= mStart && m <= mList:
		return v.command(ctx, s, m, d)
	case m >= mStat && m <= mUnpack:
		return v.file(ctx, s, m, d)
	case m >= mWarm:
		return v.cell(ctx, m, d)
	}
	switch m {
	case mDial:
		port := int(d.int())
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return v.dial(ctx, s, port)
	case mListen, mAccept:
		port := int(d.int())
		if err := badArgs(d); err != nil {
			return nil, err
		}
		if m == mListen {
			return ok(), v.h.Listen(ctx, port)
		}
		return v.accept(ctx, s, port)
	case mActivity:
		a, err := v.h.Activity(ctx)
		return appendActivity(ok(), a), err
	case mSubscribe:
		for a := range v.h.Activities(ctx) {
			if err := s.send(ctx, 0, appendActivity(nil, a), nil); err != nil {
				return nil, err
			}
		}
		return ok(), nil
	case mForget:
		var steps []dsec.Step
		for len(d.b) > 0 && !d.bad {
			steps = append(steps, d.step())
		}
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return ok(), v.h.Forget(ctx, steps)
	case mStopClocks:
		return ok(), v.h.StopClocks(ctx)
	case mStartClocks:
		return ok(), v.h.StartClocks(ctx)
	}
	return nil, dsec.Errorf(dsec.Unsupported, "guest has no method %d", m)
}

func badArgs(d *decoder) error {
	if d.bad {
		return dsec.Errorf(dsec.Invalid, "malformed request")
	}
	return nil
}

func (v *server) command(ctx context.Context, s *stream, m method, d *decoder) ([]byte, error) {
	h := v.h.Commands()
	var on dsec.Call
	var id dsec.CommandID
	switch m {
	case mStart, mRun:
		on.Step = d.step()
		c := d.command()
		var stdin []byte
		if m == mRun {
			stdin = d.bytes()
		}
		if err := badArgs(d); err != nil {
			return nil, err
		}
		if m == mStart {
			st, err := h.Start(ctx, on, c)
			return appendStatus(ok(), &st), err
		}
		r, err := h.Run(ctx, on, c, stdin)
		if err != nil {
			return nil, err
		}
		b := make([]byte, 1, 256+len(r.Out)+len(r.Err))
		return appendBytes(appendBytes(appendStatus(b, &r.CommandStatus), r.Out), r.Err), nil
	case mWrite:
		on.Step = d.step()
		id = dsec.CommandID(d.str())
		in := dsec.StdinWrite{Offset: d.int(), Data: d.bytes(), Close: d.bool()}
		if err := badArgs(d); err != nil {
			return nil, err
		}
		n, err := h.Write(ctx, on, id, in)
		return appendInt(ok(), n), err
	case mSignal:
		on.Step = d.step()
		id = dsec.CommandID(d.str())
		sig := d.str()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return ok(), h.Signal(ctx, on, id, sig)
	case mResize:
		id = dsec.CommandID(d.str())
		size := d.size()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return ok(), h.Resize(ctx, on, id, size)
	case mRead:
		id = dsec.CommandID(d.str())
		stream, off, n := dsec.Stream(d.byte()), d.int(), d.int()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		p, err := h.Read(ctx, on, id, stream, off, int(min(n, dsec.MaxRunOutput)))
		return append(ok(), p...), err
	case mWait:
		id = dsec.CommandID(d.str())
		if err := badArgs(d); err != nil {
			return nil, err
		}
		st, err := h.Wait(ctx, on, id)
		return appendStatus(ok(), &st), err
	case mAttach:
		id = dsec.CommandID(d.str())
		off := d.int()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return v.attach(ctx, s, id, off)
	}
	list, err := h.List(ctx, on)
	if err != nil {
		return nil, err
	}
	b := batch{s: s}
	for i := range list {
		if err := b.add(ctx, appendStatus(nil, &list[i])); err != nil {
			return nil, err
		}
	}
	return ok(), b.flush(ctx)
}

func (v *server) attach(ctx context.Context, s *stream, id dsec.CommandID, off int64) ([]byte, error) {
	for o, err := range v.h.Commands().Attach(ctx, dsec.Call{}, id, off) {
		if err != nil {
			return nil, err
		}
		if o.Status != nil {
			return appendInt(appendInt(appendStatus(ok(), o.Status), o.Offset), o.Gap), nil
		}
		for first := true; first || len(o.Data) > 0; first = false {
			n := min(len(o.Data), chunk)
			var pre [32]byte
			a := appendInt(appendInt(append(pre[:0], byte(o.Stream)), o.Offset), o.Gap)
			if err := s.send(ctx, 0, a, o.Data[:n]); err != nil {
				return nil, err
			}
			o.Data, o.Offset, o.Gap = o.Data[n:], o.Offset+int64(n), 0
		}
	}
	return nil, dsec.Errorf(dsec.Internal, "output ended without a status")
}

// batch puts items of a list into as few frames as is good.
type batch struct {
	s *stream
	b []byte
}

func (b *batch) add(ctx context.Context, item []byte) error {
	if len(b.b) > 0 && len(b.b)+len(item) > chunk/2 {
		if err := b.flush(ctx); err != nil {
			return err
		}
	}
	b.b = appendBytes(b.b, item)
	return nil
}

func (b *batch) flush(ctx context.Context) error {
	if len(b.b) == 0 {
		return nil
	}
	err := b.s.send(ctx, 0, b.b, nil)
	b.b = b.b[:0]
	return err
}

func (v *server) file(ctx context.Context, s *stream, m method, d *decoder) ([]byte, error) {
	h := v.h.Files()
	var on dsec.Call
	if m >= mWriteFile && m != mWatch && m != mPack {
		on.Step = d.step()
	}
	f := d.fileOp()
	switch m {
	case mStat:
		i, err := h.Stat(ctx, on, f)
		return appendInfo(ok(), &i), err
	case mListFiles:
		depth := int(d.int())
		b := batch{s: s}
		for i, err := range h.List(ctx, on, f, depth) {
			if err == nil {
				err = b.add(ctx, appendInfo(nil, &i))
			}
			if err != nil {
				return nil, errors.Join(err, b.flush(ctx))
			}
		}
		return ok(), b.flush(ctx)
	case mReadFile:
		r := dsec.ReadRange{Offset: d.int(), Length: d.int()}
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return download1(ctx, s, func() (io.ReadCloser, error) { return h.Read(ctx, on, f, r) })
	case mPack:
		return download1(ctx, s, func() (io.ReadCloser, error) { return h.Pack(ctx, on, f) })
	case mWriteFile:
		opt := d.writeOptions()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		i, err := h.Write(ctx, on, f, opt, &upload{ctx: ctx, s: s})
		return appendInfo(ok(), &i), err
	case mUnpack:
		return ok(), h.Unpack(ctx, on, f, &upload{ctx: ctx, s: s})
	case mWatch:
		opt := dsec.WatchOptions{Recursive: d.bool()}
		for e, err := range h.Watch(ctx, on, f, opt) {
			if err == nil {
				err = s.send(ctx, 0, appendBytes(nil, appendEvent(nil, e)), nil)
			}
			if err != nil {
				return nil, err
			}
		}
		return ok(), nil
	case mMkdir, mChmod:
		mode := uint32(d.uint())
		if err := badArgs(d); err != nil {
			return nil, err
		}
		if m == mMkdir {
			return ok(), h.Mkdir(ctx, on, f, mode)
		}
		return ok(), h.Chmod(ctx, on, f, mode)
	case mRemove:
		return ok(), h.Remove(ctx, on, f)
	}
	arg := d.str()
	if err := badArgs(d); err != nil {
		return nil, err
	}
	switch m {
	case mMove:
		return ok(), h.Move(ctx, on, f, arg)
	case mChown:
		return ok(), h.Chown(ctx, on, f, arg)
	}
	return ok(), h.Symlink(ctx, on, f, arg)
}

// download1 sends what open gives.
func download1(ctx context.Context, s *stream, open func() (io.ReadCloser, error)) ([]byte, error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	buf := getBuffer(chunk)
	defer buf.release()
	for {
		n, err := r.Read(buf.b)
		if n > 0 {
			if err := s.send(ctx, 0, buf.b[:n], nil); err != nil {
				return nil, err
			}
		}
		if errors.Is(err, io.EOF) {
			return ok(), nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// upload reads what the host sends. A host that goes away before the end is an
// error and never an end of file.
type upload struct {
	ctx  context.Context // of the request
	s    *stream
	p    *buffer
	rest []byte
}

func (u *upload) Read(b []byte) (int, error) {
	for len(u.rest) == 0 {
		u.p.release()
		u.p = nil
		p, err := u.s.next(u.ctx)
		if err != nil {
			return 0, err
		}
		u.p, u.rest = p, p.b
	}
	n := copy(b, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// dial joins a port with the stream until both directions have ended.
func (v *server) dial(ctx context.Context, s *stream, port int) ([]byte, error) {
	conn, err := v.h.Ports().Dial(ctx, dsec.Call{}, port)
	if err != nil {
		return nil, err
	}
	if err := s.send(ctx, 0, nil, nil); err != nil { // connected
		conn.Close()
		return nil, err
	}
	return join(ctx, s, conn, port)
}

// accept is dial the other way round. The host says that it has the connection;
// one that it does not come to know of is the next call's.
func (v *server) accept(ctx context.Context, s *stream, port int) ([]byte, error) {
	var conn dsec.PortConn
	err := v.h.Accept(ctx, port, func(c dsec.PortConn) error {
		conn = c
		if err := s.send(ctx, 0, nil, nil); err != nil {
			return err
		}
		p, err := s.next(ctx)
		p.release()
		return err
	})
	if err != nil {
		return nil, err
	}
	return join(ctx, s, conn, port)
}

// join copies between a connection and the stream until both directions have
// ended, and closes the connection.
func join(ctx context.Context, s *stream, conn dsec.PortConn, port int) ([]byte, error) {
	var err error
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	up := make(chan error, 1)
	go func() { // ends with ctx at the latest, and is waited for below
		for {
			p, err := s.next(ctx)
			if errors.Is(err, io.EOF) {
				up <- conn.CloseWrite()
				return
			}
			if err == nil {
				_, err = conn.Write(p.b)
				p.release()
			}
			if err != nil {
				up <- err
				return
			}
		}
	}()
	buf := make([]byte, 16<<10)
	for err == nil {
		var n int
		n, err = conn.Read(buf)
		if n > 0 {
			if serr := s.send(ctx, 0, buf[:n], nil); serr != nil {
				err = serr
			}
		}
	}
	if errors.Is(err, io.EOF) {
		if err = s.send(ctx, fEnd, nil, nil); err == nil {
			err = <-up
		}
	} else {
		conn.Close()
		s.cancel()
		<-up
	}
	if err != nil {
		return nil, dsec.Errorf(dsec.Unavailable, "port %d: %w", port, err)
	}
	return ok(), nil
}

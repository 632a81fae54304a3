package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// link is one connection, at either end: it writes whole frames, keeps the
// streams and their credit, and hands what arrives to them.
type link struct {
	rw   io.ReadWriteCloser
	host bool // which end this is

	wmu sync.Mutex // held while a frame is written

	mu      sync.Mutex
	streams map[uint32]*stream
	last    uint32 // highest stream id opened
	err     error  // why the connection ended; set before done is closed
	done    chan struct{}

	idle  func()      // host: called when the last stream has ended; may be nil
	heard atomic.Bool // a frame came since it was last looked at
}

// stream is one call on a link. The fields below the line are guarded by
// link.mu.
type stream struct {
	l      *link
	id     uint32
	wake   chan struct{}      // one token: something arrived
	onData func([]byte)       // host: takes data on the reading goroutine instead of the queue
	limit  int                // host: bytes of response accepted
	cancel context.CancelFunc // guest: ends the handler's context

	// ---
	queue    []*buffer
	recvWin  int  // what the peer may still send
	eaten    int  // consumed and not yet given back as credit
	ended    bool // the peer sends no more data
	resp     []byte
	answered bool // the whole response is in resp
	sendWin  int
	credit   chan struct{} // one token: sendWin grew; made by the first sender that waits
}

func newLink(rw io.ReadWriteCloser, host bool) *link {
	return &link{rw: rw, host: host, streams: make(map[uint32]*stream), done: make(chan struct{})}
}

// newStream registers a stream. Requires: l.mu held.
func (l *link) newStream(id uint32) *stream {
	s := &stream{l: l, id: id, wake: make(chan struct{}, 1), recvWin: window, sendWin: window, limit: maxResponse}
	l.streams[id] = s
	return s
}

// fail ends the connection once; the first cause stays. The end of the
// connection must not look like the end of a stream's data.
func (l *link) fail(err error) {
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return
	}
	l.err = err
	for _, s := range l.streams {
		if s.cancel != nil {
			s.cancel()
		}
	}
	close(l.done)
	l.mu.Unlock()
	l.rw.Close()
}

func (l *link) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// write writes one frame. An error has ended the connection and means that the
// peer has not got the whole frame.
func (l *link) write(h header, a, b []byte) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if err := l.failure(); err != nil {
		return err
	}
	if d, ok := l.rw.(writeDeadliner); ok && l.host {
		d.SetWriteDeadline(time.Now().Add(writeStall)) //nolint:errcheck // a stream without deadlines blocks
	}
	if err := writeFrame(l.rw, h, a, b); err != nil {
		l.fail(err)
		return err
	}
	return nil
}

// writeMessage writes a Request or Response, in several frames if it is long.
func (l *link) writeMessage(h header, p []byte) error {
	flags := h.flags
	for len(p) > dsec.MaxChunk {
		h.flags = fMore
		if err := l.write(h, p[:dsec.MaxChunk], nil); err != nil {
			return err
		}
		p = p[dsec.MaxChunk:]
	}
	h.flags = flags
	return l.write(h, p, nil)
}

// hello exchanges versions. The host speaks first.
func (l *link) hello(r *reader) error {
	var b [len(magic) + 2]byte
	copy(b[:], magic)
	binary.LittleEndian.PutUint16(b[len(magic):], Version)
	if l.host {
		if err := l.write(header{typ: tHello}, b[:], nil); err != nil {
			return err
		}
	}
	h, err := r.header()
	if err != nil {
		return err
	}
	if h.typ != tHello || h.n != len(b) {
		return protocolf("no hello")
	}
	var p [len(b)]byte
	if _, err := io.ReadFull(r, p[:]); err != nil {
		return err
	}
	if !l.host {
		if err := l.write(header{typ: tHello}, b[:], nil); err != nil {
			return err
		}
	}
	if string(p[:len(magic)]) != magic {
		return protocolf("no hello")
	}
	if v := binary.LittleEndian.Uint16(p[len(magic):]); v != Version {
		return dsec.Errorf(dsec.Unsupported, "guest protocol: version %d here, %d there", Version, v)
	}
	return nil
}

// read handles frames until the connection ends. request is called by the
// guest's end for each Request frame.
func (l *link) read(r *reader, request func(h header, p []byte) error) error {
	for {
		h, err := r.header()
		if err != nil {
			return err
		}
		if !l.heard.Load() {
			l.heard.Store(true)
		}
		if err := l.handle(r, h, request); err != nil {
			return err
		}
	}
}

func (l *link) handle(r *reader, h header, request func(h header, p []byte) error) error {
	switch {
	case h.typ == tRequest && !l.host:
		p := make([]byte, h.n)
		if _, err := io.ReadFull(r, p); err != nil {
			return err
		}
		return request(h, p)
	case h.typ == tData, h.typ == tCredit,
		h.typ == tResponse && l.host, h.typ == tCancel && !l.host:
	default:
		return protocolf("frame type %d from the wrong end", h.typ)
	}
	l.mu.Lock()
	s, known := l.streams[h.stream], h.stream <= l.last
	l.mu.Unlock()
	if !known {
		return protocolf("stream %d was never opened", h.stream)
	}
	if s == nil { // it ended here while the frame was under way
		_, err := io.CopyN(io.Discard, r, int64(h.n))
		return err
	}
	switch h.typ {
	case tData:
		return s.handleData(r, h)
	case tResponse:
		return s.handleResponse(r, h)
	case tCredit:
		var b [4]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return err
		}
		return s.handleCredit(int(binary.LittleEndian.Uint32(b[:])))
	}
	s.cancel() // tCancel
	return nil
}

func (s *stream) handleData(r *reader, h header) error {
	p, err := r.payload(h.n)
	if err != nil {
		return err
	}
	if s.onData != nil {
		if h.n > maxText {
			return protocolf("event of %d bytes", h.n)
		}
		s.onData(p.b)
		p.release()
		s.l.mu.Lock()
		s.recvWin -= h.n + frameCost
		over := s.recvWin < 0
		give := window/2 - s.recvWin
		if give >= 0 {
			s.recvWin += give
		}
		s.l.mu.Unlock()
		if over {
			return protocolf("more data than credit on stream %d", s.id)
		}
		if give > 0 { // the reading goroutine itself must not wait for the peer
			go s.giveCredit(give)
		}
		return nil
	}
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if s.ended || s.answered {
		p.release()
		return protocolf("data after its end on stream %d", s.id)
	}
	s.recvWin -= h.n + frameCost
	if s.recvWin < 0 {
		p.release()
		return protocolf("more data than credit on stream %d", s.id)
	}
	if h.n > 0 || h.flags&fEnd == 0 { // an empty frame says that the stream is open
		s.queue = append(s.queue, p)
	}
	s.ended = h.flags&fEnd != 0
	signal(s.wake)
	return nil
}

func (s *stream) handleResponse(r *reader, h header) error {
	// resp belongs to the reading goroutine until answered is set.
	n := len(s.resp)
	if s.answered || n+h.n > s.limit {
		return protocolf("response of more than %d bytes on stream %d", s.limit, s.id)
	}
	if cap(s.resp)-n < h.n {
		c := n + h.n
		if h.flags&fMore != 0 {
			c = min(s.limit, 2*c)
		}
		s.resp = append(make([]byte, 0, c), s.resp...)
	}
	s.resp = s.resp[:n+h.n]
	if _, err := io.ReadFull(r, s.resp[n:]); err != nil {
		return err
	}
	if h.flags&fMore != 0 {
		return nil
	}
	s.l.mu.Lock()
	s.answered = true
	signal(s.wake)
	signal(s.credit)
	s.l.mu.Unlock()
	return nil
}

func (s *stream) handleCredit(n int) error {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if n > window || s.sendWin+n > window {
		return protocolf("credit of %d bytes too much on stream %d", n, s.id)
	}
	s.sendWin += n
	signal(s.credit)
	return nil
}

// signal leaves a token in c; a nil c is nobody waiting.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// errAnswered is what next and send give when the response has arrived.
var errAnswered = errors.New("stream has been answered")

// next gives the next data of the peer. It is io.EOF after its end,
// errAnswered when there is a response and no more data, and the failure of
// the link. The caller releases the buffer.
func (s *stream) next(ctx context.Context) (*buffer, error) {
	for {
		s.l.mu.Lock()
		if len(s.queue) > 0 {
			p := s.queue[0]
			s.queue[0] = nil
			s.queue = s.queue[1:]
			s.eaten += len(p.b) + frameCost
			give := 0
			if s.eaten >= window/4 && !s.answered && !s.ended {
				give, s.eaten = s.eaten, 0
				s.recvWin += give
			}
			s.l.mu.Unlock()
			if give > 0 {
				s.giveCredit(give)
			}
			return p, nil
		}
		answered, ended, err := s.answered, s.ended, s.l.err
		s.l.mu.Unlock()
		switch {
		case answered:
			return nil, errAnswered
		case ended:
			return nil, io.EOF
		case err != nil:
			return nil, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-s.l.done:
		}
	}
}

func (s *stream) giveCredit(n int) {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], uint32(n))
	s.l.write(header{typ: tCredit, stream: s.id}, b[:], nil) //nolint:errcheck // the next call sees it
}

// send sends a then b as one Data frame, waiting for credit. Both together are
// at most chunk and some.
func (s *stream) send(ctx context.Context, flags uint8, a, b []byte) error {
	cost := len(a) + len(b) + frameCost
	for {
		s.l.mu.Lock()
		if s.answered {
			s.l.mu.Unlock()
			return errAnswered
		}
		if s.l.err != nil {
			defer s.l.mu.Unlock()
			return s.l.err
		}
		if s.sendWin >= cost {
			s.sendWin -= cost
			s.l.mu.Unlock()
			return s.l.write(header{typ: tData, flags: flags, stream: s.id}, a, b)
		}
		if s.credit == nil {
			s.credit = make(chan struct{}, 1)
		}
		credit := s.credit
		s.l.mu.Unlock()
		select {
		case <-credit:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.l.done:
		}
	}
}

// forget ends the stream at this end.
func (s *stream) forget() {
	s.l.mu.Lock()
	_, known := s.l.streams[s.id]
	delete(s.l.streams, s.id)
	for _, p := range s.queue {
		p.release()
	}
	s.queue = nil
	last := known && len(s.l.streams) == 0
	s.l.mu.Unlock()
	if last && s.l.idle != nil {
		s.l.idle()
	}
}

// open sends a request and gives its stream. sent tells whether the peer may
// have got it.
func (l *link) open(m method, args, data []byte, more bool, limit int, onData func([]byte)) (s *stream, sent bool, err error) {
	l.mu.Lock()
	if l.err != nil {
		defer l.mu.Unlock()
		return nil, false, l.err
	}
	if len(l.streams) >= maxStreams {
		l.mu.Unlock()
		return nil, false, dsec.Errorf(dsec.Exhausted, "%d calls are under way in this sandbox", maxStreams)
	}
	l.mu.Unlock()
	h := header{typ: tRequest}
	if !more {
		h.flags = fEnd
	}
	p := make([]byte, 0, 1+10+len(args)+len(data))
	p = append(p, byte(m))
	p = append(append(appendUint(p, uint64(len(args))), args...), data...)

	// Ids must reach the peer in order, so the first frame is written under
	// the same lock that hands the id out.
	l.wmu.Lock()
	l.mu.Lock()
	if l.err != nil {
		defer l.wmu.Unlock()
		defer l.mu.Unlock()
		return nil, false, l.err
	}
	l.last++
	s = l.newStream(l.last)
	s.limit, s.onData = limit, onData
	if len(data) > 0 { // it counts like a frame of its own
		s.sendWin -= len(data) + frameCost
	}
	if l.last == 1<<32-2 {
		go l.fail(errors.New("stream numbers are used up"))
	}
	l.mu.Unlock()
	h.stream = s.id
	first := p
	if len(p) > dsec.MaxChunk {
		first = p[:dsec.MaxChunk]
	}
	p = p[len(first):]
	fh := h
	if len(p) > 0 {
		fh.flags = fMore
	}
	if d, ok := l.rw.(writeDeadliner); ok {
		d.SetWriteDeadline(time.Now().Add(writeStall)) //nolint:errcheck // as in write
	}
	err = writeFrame(l.rw, fh, first, nil)
	l.wmu.Unlock()
	if err != nil {
		l.fail(err)
	} else if len(p) > 0 {
		err = l.writeMessage(h, p)
	}
	if err != nil {
		s.forget()
		return nil, false, err
	}
	return s, true, nil
}

// abandon ends the stream early and tells the guest.
func (s *stream) abandon() {
	s.forget()
	// The peer may be slow to take frames; whoever goes away must not wait.
	go s.l.write(header{typ: tCancel, stream: s.id}, nil, nil) //nolint:errcheck // then it is gone anyway
}

// response waits for the answer and decodes its verdict. Data that is still
// queued is dropped.
func (s *stream) response(ctx context.Context) ([]byte, error) {
	for {
		p, err := s.next(ctx)
		if err == nil {
			p.release()
			continue
		}
		if errors.Is(err, io.EOF) { // its data ended before its answer
			if err = s.answer(ctx); err == nil {
				continue
			}
		}
		if !errors.Is(err, errAnswered) {
			return nil, err
		}
		s.forget()
		return verdict(s.resp)
	}
}

func (s *stream) answer(ctx context.Context) error {
	for {
		s.l.mu.Lock()
		answered, err := s.answered, s.l.err
		s.l.mu.Unlock()
		if answered {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.l.done:
		}
	}
}

// verdict splits a response into answer and error.
func verdict(p []byte) ([]byte, error) {
	if len(p) == 0 {
		return nil, dsec.Errorf(dsec.Unavailable, "the guest gave an empty answer")
	}
	if p[0] == 0 {
		return p[1:], nil
	}
	text := p[1:]
	if len(text) > maxText {
		text = text[:maxText]
	}
	kind := dsec.ErrorKind(p[0] - 1)
	if int(kind) >= len(dsec.ErrorKinds()) {
		kind = dsec.Internal
	}
	return nil, &remoteError{kind: kind, text: string(text)}
}

// remoteError tells an error that the guest answered from one of the
// connection. It never leaves the package.
type remoteError struct {
	kind dsec.ErrorKind
	text string
}

func (e *remoteError) Error() string { return e.text }

// appendError encodes err as a response.
func appendError(b []byte, err error) []byte {
	text := err.Error()
	if len(text) > maxText {
		text = text[:maxText]
	}
	return append(append(b, byte(dsec.KindOf(err))+1), text...)
}

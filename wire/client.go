package wire

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Options say how a Client reaches its guest.
type Options struct {
	// Dial makes a connection. A *dsec.Error of kind Conflict, Lost or
	// Unsupported is final for the call that asked; others are tried again for
	// a moment. Required.
	Dial func(ctx context.Context) (io.ReadWriteCloser, error)

	// IdleAfter, if set, closes a connection on which nothing happened for so
	// long, unless there is a subscriber. The next call makes it again.
	IdleAfter time.Duration

	// Silence is for how long the guest may say nothing while a call waits;
	// default Silence.
	Silence time.Duration

	// Standing reports whether the guest cannot answer for reasons of the host,
	// such as a machine that is being saved: that is no silence. Optional.
	Standing func() bool
}

// How long a broken connection is tried again before the caller hears of it.
const (
	redialFor = 2 * time.Second
	redialMin = 5 * time.Millisecond
	redialMax = 250 * time.Millisecond
	lingerMax = 5 * time.Second // between attempts for a subscriber's sake

	// maxTries is how often a call that may be repeated is sent over
	// connections that break under it.
	maxTries = 30
)

// Client is the host's end: the services of one guest. It is safe for
// concurrent use and makes its connection when it is first needed.
//
// When the connection breaks under calls, those that only read go on over a new
// one, Attach from where it was; those that carry a step are sent once more;
// of the others it is not known whether they happened, and they say so with
// Unavailable. After Close every call is Conflict.
type Client struct {
	opt Options

	mu      sync.Mutex
	link    *link    // nil while there is none
	dialing *attempt // under way; nil for none
	sub     func(dsec.Activity)
	timer   *time.Timer // of IdleAfter

	life context.Context // ends with Close
	end  context.CancelFunc
	wg   sync.WaitGroup // reading goroutines
}

// NewClient makes a Client. It does no I/O.
func NewClient(opt Options) *Client {
	if opt.Silence == 0 {
		opt.Silence = Silence
	}
	life, end := context.WithCancel(context.Background())
	return &Client{opt: opt, life: life, end: end}
}

// Close ends the client: the machine is gone. Calls under way and to come are
// Conflict. It returns when no goroutine of the client is left, and may be
// called twice, though not from a subscriber's function.
func (c *Client) Close() error {
	c.mu.Lock()
	c.end() // under mu, so that whoever adds to wg has seen it or is waited for
	l := c.link
	if c.timer != nil {
		c.timer.Stop()
	}
	c.mu.Unlock()
	if l != nil {
		l.fail(errClosed)
	}
	c.wg.Wait()
	return nil
}

var errClosed = errors.New("client is closed")

func (c *Client) gone() bool { return c.life.Err() != nil }

// ErrEnded is wrapped by what calls are told once the machine is gone. Whoever
// knows why it is says that instead.
var ErrEnded = errors.New("the sandbox has ended")

func errGone() error { return dsec.Errorf(dsec.Conflict, "%w", ErrEnded) }

// Commands gives the guest's commands.
func (c *Client) Commands() dsec.Commands { return commands{c} }

// Files gives the guest's files.
func (c *Client) Files() dsec.Files { return files{c} }

// Ports gives the guest's ports.
func (c *Client) Ports() dsec.Ports { return ports{c} }

// Activity reports what the guest is doing.
func (c *Client) Activity(ctx context.Context) (dsec.Activity, error) {
	p, err := c.call(ctx, request{m: mActivity, idempotent: true})
	if err != nil {
		return dsec.Activity{}, err
	}
	d := decoder{b: p}
	a := d.activity()
	return a, guestFault(d.err())
}

// Forget tells the guest that the answers of steps are safe and need not be
// kept.
func (c *Client) Forget(ctx context.Context, steps []dsec.Step) error {
	var args []byte
	for _, s := range steps {
		args = appendStep(args, s)
	}
	_, err := c.call(ctx, request{m: mForget, args: args, idempotent: true})
	return err
}

// StopClocks tells the guest that its commands are about to stand still, so
// that their times do not pass and it begins none.
func (c *Client) StopClocks(ctx context.Context) error {
	_, err := c.call(ctx, request{m: mStopClocks, idempotent: true})
	return err
}

// StartClocks undoes StopClocks.
func (c *Client) StartClocks(ctx context.Context) error {
	_, err := c.call(ctx, request{m: mStartClocks, idempotent: true})
	return err
}

// Listen opens a port of the sandbox's loopback, so that Accept gives what
// connects to it. Conflict if the workload has it.
func (c *Client) Listen(ctx context.Context, port int) error {
	_, err := c.call(ctx, request{m: mListen, args: appendInt(nil, int64(port)), idempotent: true})
	return err
}

// Accept waits for the next connection that the workload makes to such a port.
// It outlives connections to the guest; one of the workload's that is not taken
// is given out by the next call, of whomever.
func (c *Client) Accept(ctx context.Context, port int) (dsec.PortConn, error) {
	for try := 0; ; try++ {
		s, err := c.stream(ctx, mAccept, appendInt(nil, int64(port)), nil, true)
		if err != nil {
			return nil, err
		}
		first, err := s.next(ctx) // empty: connected
		if err == nil {
			if err = s.send(ctx, 0, nil, nil); err == nil { // and taken
				return newPortConn(c, s, first), nil
			}
		}
		if s.l.failure() == nil || ctx.Err() != nil || c.gone() || try > maxTries {
			if err = c.endOf(ctx, s, err); err == nil {
				err = dsec.Errorf(dsec.Unavailable, "the connection ended at once")
			}
			return nil, err
		}
		s.forget()
		c.pause(ctx, try)
	}
}

// Subscribe calls f with what the guest is doing, at once and after each
// change, and again after each reconnection, until Close. f runs on the
// goroutine that reads the connection and must not block or call the client.
// There is one subscriber; a second call is ignored.
func (c *Client) Subscribe(f func(dsec.Activity)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sub != nil || c.gone() {
		return
	}
	c.sub = f
	if l := c.link; l != nil {
		c.wg.Go(func() { c.subscribe(l, f) })
		return
	}
	c.wg.Go(c.reconnect)
}

func (c *Client) subscribe(l *link, f func(dsec.Activity)) {
	// An error has ended the link, and its reader takes care of that.
	l.open(mSubscribe, nil, nil, false, maxResponse, func(p []byte) { //nolint:errcheck
		d := decoder{b: p}
		if a := d.activity(); !d.bad {
			f(a)
		}
	})
}

// connect gives the link, making it if there is none.
func (c *Client) connect(ctx context.Context) (*link, error) {
	deadline := time.Now().Add(redialFor)
	for wait := redialMin; ; wait = min(2*wait, redialMax) {
		l, err := c.connectOnce(ctx)
		if err == nil {
			return l, nil
		}
		if c.gone() {
			return nil, errGone()
		}
		if ctx.Err() != nil {
			return nil, dsec.WithOp("", "", context.Cause(ctx))
		}
		switch kind := dsec.KindOf(err); {
		case kind == dsec.Conflict, kind == dsec.Lost, kind == dsec.Unsupported:
			return nil, err
		case time.Now().After(deadline):
			return nil, dsec.Errorf(dsec.Unavailable, "reach the guest: %w", err)
		}
		if !c.sleep(ctx, wait) {
			continue // the loop's checks say why
		}
	}
}

// spawn runs f in a goroutine that Close waits for, unless the client is closed.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone() {
		return false
	}
	c.wg.Go(f)
	return true
}

// sleep waits d, unless ctx or the client ends.
func (c *Client) sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
	case <-c.life.Done():
	}
	return false
}

// pause keeps a guest that breaks every connection from making us spin.
func (c *Client) pause(ctx context.Context, try int) {
	if try > 0 {
		c.sleep(ctx, min(time.Duration(try)*time.Millisecond, redialMax))
	}
}

func (c *Client) connectOnce(ctx context.Context) (*link, error) {
	var mine *attempt
	for {
		c.mu.Lock()
		if c.gone() {
			c.mu.Unlock()
			return nil, errGone()
		}
		if l := c.link; l != nil {
			c.mu.Unlock()
			return l, nil
		}
		wait := c.dialing
		if wait == nil {
			mine = &attempt{done: make(chan struct{})}
			c.dialing = mine
			c.mu.Unlock()
			break
		}
		c.mu.Unlock()
		select {
		case <-wait.done:
			if wait.err != nil {
				return nil, wait.err
			}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-c.life.Done():
		}
	}
	l, err := c.dial(ctx)
	if ctx.Err() == nil {
		mine.err = err
	}
	c.mu.Lock()
	close(mine.done)
	c.dialing = nil
	c.mu.Unlock()
	return l, err
}

// attempt is one at making a connection, for whoever waits for it too.
type attempt struct {
	done chan struct{}
	err  error // set before done is closed: why it failed, for reasons that are not its caller's
}

func (c *Client) dial(ctx context.Context) (*link, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := &vigil{every: c.opt.Silence / silenceLooks, quiet: func() bool { return !c.standing() }}
	v.over = func() { cancel(errSilent(c.opt.Silence)) }
	defer v.watch()()
	rw, err := c.opt.Dial(ctx)
	if err != nil {
		if silent := context.Cause(ctx); silent != nil {
			err = silent
		}
		return nil, err
	}
	l := newLink(rw, true)
	if c.opt.IdleAfter > 0 {
		l.idle = c.armIdle
	}
	ready := make(chan error, 1)
	c.mu.Lock()
	if c.gone() {
		c.mu.Unlock()
		rw.Close()
		return nil, errGone()
	}
	c.wg.Go(func() { c.run(l, ready) })
	c.mu.Unlock()
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-c.life.Done():
		err = errGone()
	}
	if err != nil {
		l.fail(err)
		return nil, err
	}
	return l, nil
}

// run is the goroutine that reads a connection.
func (c *Client) run(l *link, ready chan<- error) {
	r := &reader{r: l.rw}
	if err := l.hello(r); err != nil {
		l.fail(err)
		ready <- err
		return
	}
	c.mu.Lock()
	f := c.sub
	c.link = l
	closed := c.gone()
	c.mu.Unlock()
	ready <- nil
	if closed {
		l.fail(errClosed)
	}
	if f != nil {
		c.subscribe(l, f)
	}
	defer c.watchLink(l)()
	l.fail(l.read(r, nil))
	c.mu.Lock()
	if c.link == l {
		c.link = nil
	}
	again := c.sub != nil && !c.gone()
	c.mu.Unlock()
	if again {
		c.wg.Go(c.reconnect)
	}
}

// reconnect makes a connection for the subscriber's sake, however long it
// takes.
func (c *Client) reconnect() {
	for wait := redialMin; !c.gone(); wait = min(2*wait, lingerMax) {
		if _, err := c.connectOnce(c.life); err == nil || !c.sleep(c.life, wait) {
			return
		}
	}
}

// armIdle starts the time after which an unused connection is closed.
func (c *Client) armIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sub != nil || c.gone() {
		return
	}
	if c.timer == nil {
		c.timer = time.AfterFunc(c.opt.IdleAfter, c.dropIdle)
		return
	}
	c.timer.Reset(c.opt.IdleAfter)
}

func (c *Client) dropIdle() {
	c.mu.Lock()
	l := c.link
	if l == nil || c.sub != nil {
		c.mu.Unlock()
		return
	}
	l.mu.Lock()
	busy := len(l.streams) > 0
	l.mu.Unlock()
	if !busy {
		c.link = nil
	}
	c.mu.Unlock()
	// A call that took the link in between sees it break before it was sent,
	// or reads; both are made again.
	if !busy {
		l.fail(errIdle)
	}
}

var errIdle = errors.New("connection was not used")

// request is one call that is answered with one message.
type request struct {
	m          method
	args       []byte
	step       dsec.Step
	idempotent bool
	limit      int // bytes of answer; 0 means maxResponse
}

// call makes a unary call, again over a new connection where that is right.
func (c *Client) call(ctx context.Context, q request) ([]byte, error) {
	if q.limit == 0 {
		q.limit = maxResponse
	}
	for try := 0; ; try++ {
		l, err := c.connect(ctx)
		if err != nil {
			return nil, err
		}
		s, sent, err := l.open(q.m, q.args, nil, false, q.limit, nil)
		if err == nil {
			var p []byte
			if p, err = s.response(ctx); err == nil {
				return p, nil
			}
			if ctx.Err() != nil {
				s.abandon()
			} else {
				s.forget()
			}
		}
		if err = c.judge(ctx, err); err != nil {
			return nil, err
		}
		// The connection broke.
		again := !sent || q.idempotent || !q.step.IsZero() && try == 0
		if !again || try > maxTries {
			return nil, errUnknown(sent)
		}
		c.pause(ctx, try)
	}
}

func errUnknown(sent bool) error {
	if !sent {
		return dsec.Errorf(dsec.Unavailable, "the connection to the guest broke before the request was sent")
	}
	return dsec.Errorf(dsec.Unavailable, "the connection to the guest broke; whether the request was carried out is not known")
}

// judge turns an error of a link into that of the service. It is nil when the
// connection broke and the call may be made again.
func (c *Client) judge(ctx context.Context, err error) error {
	var remote *remoteError
	var own *dsec.Error
	switch {
	case errors.As(err, &remote):
		return &dsec.Error{Kind: remote.kind, Err: errors.New(remote.text)}
	case ctx.Err() != nil:
		return dsec.WithOp("", "", context.Cause(ctx))
	case c.gone():
		return errGone()
	case errors.As(err, &own):
		return own
	}
	return nil
}

// guestFault is an answer that cannot be decoded.
func guestFault(err error) error {
	if err == nil {
		return nil
	}
	return dsec.Errorf(dsec.Unavailable, "answer of the guest: %w", err)
}

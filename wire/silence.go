package wire

import (
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Silence is for how long a guest may say nothing while a call waits for it.
// Then the call is Unavailable; the connection is made anew for the next one. It
// is what the slowest thing that a machine does at all may take, and no limit on
// how long a call takes: a guest with nothing to tell answers questions.
const Silence = 2 * time.Minute

// silenceLooks is how often a guest is looked at in that time. What counts is
// looks, not time: a host that stood still itself has no silent guests.
const silenceLooks = 4

func errSilent(d time.Duration) error {
	return dsec.Errorf(dsec.Unavailable, "the guest has not answered for %s", d)
}

// vigil looks at a guest again and again.
type vigil struct {
	every time.Duration
	quiet func() bool // nothing came although it should have
	ask   func()      // makes it say something if it can; optional
	over  func()      // it has been quiet at every look

	mu    sync.Mutex
	timer *time.Timer // nil once it ended
	count int
}

// watch begins a vigil; the function ends it.
func (v *vigil) watch() (stop func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timer = time.AfterFunc(v.every, v.look)
	return func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.timer != nil {
			v.timer.Stop()
			v.timer = nil
		}
	}
}

func (v *vigil) look() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.timer == nil {
		return
	}
	if !v.quiet() {
		v.count = 0
	} else if v.count++; v.count >= silenceLooks {
		v.timer = nil
		go v.over()
		return
	} else if v.ask != nil && v.count == 1 {
		go v.ask()
	}
	v.timer.Reset(v.every)
}

// watchLink ends a link whose guest has stopped to answer.
func (c *Client) watchLink(l *link) (stop func()) {
	v := &vigil{every: c.opt.Silence / silenceLooks}
	v.quiet = func() bool {
		heard := l.heard.Swap(false)
		return !heard && !c.standing() && l.waitedFor()
	}
	v.ask = func() {
		if s, _, err := l.open(mActivity, nil, nil, false, maxResponse, nil); err == nil {
			s.response(c.life) //nolint:errcheck // that it comes is what counts
			s.forget()
		}
	}
	v.over = func() {
		c.mu.Lock()
		if c.link == l {
			c.link = nil // who calls now is not told of the past
		}
		c.mu.Unlock()
		l.fail(errSilent(c.opt.Silence))
	}
	return v.watch()
}

// standing reports whether the guest is kept from answering.
func (c *Client) standing() bool { return c.opt.Standing != nil && c.opt.Standing() }

// waitedFor reports whether a call waits for its answer.
func (l *link) waitedFor() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.streams {
		if s.onData == nil { // a subscription waits for nothing
			return true
		}
	}
	return false
}

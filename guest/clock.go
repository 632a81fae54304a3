package guest

import (
	"context"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// StopClocks stops the timeouts and idle times of all commands. What is just
// being started is started before it returns; what comes later waits for
// StartClocks: whoever forks into a group that stands still stands himself, and
// the whole guest may with him.
func (a *Agent) StopClocks(context.Context) error {
	a.forks.hold()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.still = true
	for _, c := range a.commands {
		c.mu.Lock()
		c.stopClock()
		c.mu.Unlock()
	}
	return nil
}

// StartClocks lets the clocks go on from where they stood.
func (a *Agent) StartClocks(context.Context) error {
	defer a.forks.release()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.still = false
	for _, c := range a.commands {
		c.mu.Lock()
		c.startClock()
		c.mu.Unlock()
	}
	return nil
}

// forks counts the programs that are being started, and can hold back more.
// The zero value lets all pass.
type forks struct {
	mu    sync.Mutex
	under int
	held  bool
	news  chan struct{} // closed at a change that somebody waits for; may be nil
}

// enter waits until nothing holds it back; leave follows.
func (f *forks) enter() { f.change(func() bool { return !f.held }, func() { f.under++ }) }
func (f *forks) leave() { f.change(nil, func() { f.under-- }) }

// hold returns when none is under way, or release was called.
func (f *forks) hold() {
	f.change(nil, func() { f.held = true })
	f.change(func() bool { return f.under == 0 || !f.held }, func() {})
}

func (f *forks) release() { f.change(nil, func() { f.held = false }) }

// change waits for a condition and then changes something.
func (f *forks) change(when func() bool, what func()) {
	f.mu.Lock()
	for when != nil && !when() {
		if f.news == nil {
			f.news = make(chan struct{})
		}
		news := f.news
		f.mu.Unlock()
		<-news
		f.mu.Lock()
	}
	what()
	if f.news != nil {
		close(f.news)
		f.news = nil
	}
	f.mu.Unlock()
}

// arm sets the times after which a command that was just started is ended.
func (c *command) arm(still bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if d := c.spec.Timeout; d > 0 {
		c.due = now.Add(d)
		c.timeout = time.AfterFunc(d, func() { c.kill(dsec.TimedOut) }) //nolint:errcheck // it has ended then
	}
	if d := c.spec.Idle; d > 0 {
		c.spoke = now
		c.idle = time.AfterFunc(d, c.checkIdle)
	}
	if still {
		c.stopClock()
	}
}

// disarm ends the clocks of a command that has ended. Requires: c.mu held.
func (c *command) disarm() {
	if c.timeout != nil {
		c.timeout.Stop()
	}
	if c.idle != nil {
		c.idle.Stop()
	}
	c.timeout, c.idle = nil, nil
}

// stopClock does nothing to clocks that stand already. Requires: c.mu held.
func (c *command) stopClock() {
	if !c.still.IsZero() || c.timeout == nil && c.idle == nil {
		return
	}
	c.still = time.Now()
	if c.timeout != nil {
		c.timeout.Stop()
	}
	if c.idle != nil {
		c.idle.Stop()
	}
}

// startClock is the inverse of stopClock. Requires: c.mu held.
func (c *command) startClock() {
	if c.still.IsZero() {
		return
	}
	stood := time.Since(c.still)
	c.still = time.Time{}
	if c.timeout != nil {
		c.due = c.due.Add(stood)
		c.timeout.Reset(time.Until(c.due))
	}
	if c.idle != nil {
		c.spoke = c.spoke.Add(stood)
		c.idle.Reset(time.Until(c.spoke.Add(c.spec.Idle)))
	}
}

// checkIdle kills a command that has been silent for too long, or looks again
// when it may have been.
func (c *command) checkIdle() {
	c.mu.Lock()
	left := time.Until(c.spoke.Add(c.spec.Idle))
	over := left <= 0 && c.still.IsZero()
	if left > 0 && c.still.IsZero() && c.idle != nil {
		c.idle.Reset(left)
	}
	c.mu.Unlock()
	if over {
		c.kill(dsec.Inactive) //nolint:errcheck // it has ended then
	}
}

// spokeNow notes output.
func (c *command) spokeNow() {
	if c.spec.Idle > 0 {
		c.mu.Lock()
		c.spoke = time.Now()
		c.mu.Unlock()
	}
}

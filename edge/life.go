package edge

import (
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// stopRetry is the pause before a stop that failed is tried again.
const stopRetry = time.Second

// ending is the end of a sandbox under way.
type ending struct {
	verdict
	begin  time.Time
	itself bool          // the machine ended by itself
	done   chan struct{} // closed once err is set
	err    error         // the machine could not be stopped
}

// haste says whether a caller waits for an end.
type haste int

const (
	somebodyWaits haste = iota
	nobodyWaits         // it takes one of the slots for such ends
)

// end begins to end e as v says, unless that has been decided already, and
// gives the end under way; nil if e has ended.
func (n *Node) end(e *entry, v verdict, h haste) *ending {
	e.mu.Lock()
	end, begun := n.beginEnd(e, v)
	e.mu.Unlock()
	if begun {
		n.carryOut(e, end, h)
	}
	return end
}

// beginEnd decides that e ends as v says. begun is false if somebody else has
// decided, and for one that is being created: its creator concludes it.
// Requires: e.mu held.
func (n *Node) beginEnd(e *entry, v verdict) (end *ending, begun bool) {
	if e.rec.state.Ended() {
		return nil, false
	}
	if e.ending != nil {
		return e.ending, false
	}
	if e.rec.verdict.cause != "" {
		v = e.rec.verdict // decided by an earlier attempt
	}
	e.ending = &ending{verdict: v, begin: e.clock.now(), done: make(chan struct{})}
	if e.machine == nil {
		if e.cancel != nil {
			e.cancel(errStopped)
		}
		return e.ending, false
	}
	return e.ending, true
}

// carryOut runs an end that beginEnd began.
func (n *Node) carryOut(e *entry, end *ending, h haste) {
	ok := n.spawn(func() {
		if h == nobodyWaits {
			select {
			case n.enders <- struct{}{}:
				defer func() { <-n.enders }()
			case <-n.life.Done():
				n.giveUp(e, end, errClosing)
				return
			}
		}
		n.finish(e, end)
	})
	if !ok {
		n.giveUp(e, end, errClosing)
	}
}

// finish stops the machine of e and concludes its end.
func (n *Node) finish(e *entry, end *ending) {
	if !end.itself {
		// So that a kill of this process does not change the cause.
		_ = n.append(change{Op: opEnding, ID: e.id, State: end.state, Cause: end.cause, Detail: end.detail}, func() {
			e.mu.Lock()
			r := *e.rec
			r.verdict = end.verdict
			e.rec = &r
			e.mu.Unlock()
		})
	}
	e.mu.Lock()
	m, stands := e.machine, e.rec.state == dsec.Paused
	e.mu.Unlock()
	if !end.itself && !stands {
		n.events.Ending(EndingEvent{ID: e.id, Guest: m.Guest()})
	}
	// Also a machine that ended by itself: Stop returns when nothing is left.
	if err := m.Stop(n.life); err != nil {
		n.giveUp(e, end, err)
		n.events.StopFailed(e.id, err)
		n.timers.set(e, n.clock.now().Add(stopRetry).UnixNano())
		return
	}
	var exit driver.Exit
	select {
	case <-m.Done():
		exit = m.Exit()
	case <-n.life.Done():
		n.giveUp(e, end, errClosing)
		return
	}
	n.conclude(e, end, exit)
}

// giveUp ends an end without success; the sandbox is as it was, with its
// verdict kept for the next attempt.
func (n *Node) giveUp(e *entry, end *ending, err error) {
	e.mu.Lock()
	e.ending = nil
	r := *e.rec
	r.verdict = end.verdict
	e.rec = &r
	e.mu.Unlock()
	end.err = err
	close(end.done)
}

// conclude makes e an ended sandbox: nothing of it is left.
func (n *Node) conclude(e *entry, end *ending, exit driver.Exit) {
	n.timers.drop(e)
	e.mu.Lock()
	rec, release, m := *e.rec, e.release, e.machine
	e.mu.Unlock()
	if release != nil {
		release()
	}
	now := n.clock.now()
	u := exit.Usage
	if c, ok := m.(driver.Charged); ok && n.cfg.Ledger != nil {
		u.Fetched, u.Waited = n.cfg.Ledger.Take(c.Group())
	}
	u.Commands, u.Pids, u.Memory = 0, 0, 0
	created := rec.state == dsec.Creating // it has no record yet
	rec.state, rec.verdict, rec.ended, rec.usage = end.state, end.verdict, now.UnixNano(), &u
	rec.paused, rec.reclaimed = 0, 0
	c := change{
		Op: opEnded, ID: e.id, State: end.state, Cause: end.cause, Detail: end.detail, Ended: rec.ended, Usage: rec.usage,
	}
	if created {
		c = rec.change(e.id, rec.created)
	}
	apply := func() {
		n.mu.Lock()
		e.mu.Lock()
		e.rec = &rec
		n.takeKey(e)
		e.letGo()
		n.alive--
		e.mu.Unlock()
		n.mu.Unlock()
	}
	if n.append(c, apply) != nil {
		// It has ended all the same. The checkpoint that heals the journal
		// writes it; if there is none, the next Open finds no machine.
		n.logMu.Lock()
		apply()
		n.logMu.Unlock()
	}
	n.give(e.id, rec.spec)
	if rec.spec.spec.API != nil {
		n.endOrphans(e.id)
	}
	ev := EndedEvent{
		ID: e.id, Kind: rec.spec.spec.Kind, Project: rec.spec.spec.Project, Job: rec.spec.spec.Job, Key: rec.key,
		State: end.state, Cause: end.cause, Detail: end.detail,
		Lived: time.Duration(rec.ended - rec.created),
	}
	if !end.itself {
		ev.Took = now.Sub(end.begin)
	}
	n.events.Ended(ev)
	close(end.done)
}

// awaitEnd gives what is closed once e has ended; nil if it has. Requires: e.mu
// held.
func (e *entry) awaitEnd() <-chan struct{} {
	if e.over == nil && !e.rec.state.Ended() {
		e.over = make(chan struct{})
	}
	return e.over
}

// letGo drops what only a living sandbox has and wakes who waits for its end.
// Requires: e.mu held.
func (e *entry) letGo() {
	if e.over != nil {
		close(e.over)
	}
	e.machine, e.release, e.cancel, e.ending, e.over = nil, nil, nil, nil, nil
}

// follow watches a machine that is now e's: its end, what runs in it, its
// times.
func (n *Node) follow(e *entry, m driver.Machine) {
	m.Guest().Subscribe(func(a driver.Activity) { e.tell(a.Running) })
	gone := func() {
		// A goroutine of its own: the callback may come from anywhere.
		n.spawn(func() { n.gone(e, m) })
	}
	if d, ok := m.(DoneNotifier); ok {
		d.AfterDone(gone)
	} else {
		n.spawn(func() {
			select {
			case <-m.Done():
				n.gone(e, m)
			case <-n.life.Done():
			}
		})
	}
	n.schedule(e)
	n.serveInside(e, m)
}

// tell notes how many commands run.
func (e *entry) tell(running int) {
	now := e.clock.nano()
	e.mu.Lock()
	e.running = int32(running)
	e.lastUsed = now
	e.mu.Unlock()
}

// gone ends a sandbox whose machine is gone. If somebody stops it, they do.
func (n *Node) gone(e *entry, m driver.Machine) {
	exit := m.Exit()
	e.mu.Lock()
	end, begun := n.beginEnd(e, judge(exit.Cause, exit.Detail))
	if begun {
		end.itself = true
	}
	e.mu.Unlock()
	if begun {
		n.finish(e, end)
	}
}

// schedule sets the time at which e is to be looked at.
func (n *Node) schedule(e *entry) {
	e.mu.Lock()
	due, ok := e.dueAt(n.clock.nano())
	e.mu.Unlock()
	if ok {
		n.timers.set(e, due)
	}
}

// dueAt gives the next time at which e may have to end. A use only moves that
// later, so a use sets no timer: whoever is woken early looks and sleeps on.
// Requires: e.mu held.
func (e *entry) dueAt(now int64) (int64, bool) {
	if e.rec.state.Ended() || e.ending != nil || e.machine == nil {
		return 0, false
	}
	due := e.rec.expires
	if idle := int64(e.rec.spec.spec.Idle); idle > 0 && e.rec.state != dsec.Paused {
		last := e.lastUsed
		if e.busy() {
			last = now
		}
		due = min(due, last+idle)
	}
	return due, true
}

// busy reports whether e is in use now. Requires: e.mu held.
func (e *entry) busy() bool { return e.calls > 0 || e.running != 0 || e.commit }

// fire looks at an entry whose time has come.
func (n *Node) fire(e *entry) {
	now := n.clock.nano()
	e.mu.Lock()
	due, ok := e.dueAt(now)
	var end *ending
	begun := false
	switch {
	case !ok:
	case e.rec.verdict.cause != "": // a stop that failed
		end, begun = n.beginEnd(e, e.rec.verdict)
	case now >= e.rec.expires:
		end, begun = n.beginEnd(e, judge(dsec.CauseTTL, "its time to live passed"))
	case now >= due:
		end, begun = n.beginEnd(e, judge(dsec.CauseIdle, "nothing was asked of it for "+e.rec.spec.spec.Idle.String()))
	}
	e.mu.Unlock()
	switch {
	case begun:
		n.carryOut(e, end, nobodyWaits)
	case ok:
		n.timers.set(e, due)
	}
}

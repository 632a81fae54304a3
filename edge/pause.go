package edge

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Why a sandbox is paused or resumed, where nobody asked for it by name.
const (
	DetailPressure = "memory pressure" // the node needed its memory
	DetailCall     = "a call"          // something was asked of it
	DetailRestart  = "restart"         // the edge that paused it died before it could say so
)

// turn is a sandbox on its way to another state. There is one at a time; calls
// that come meanwhile wait for its end and look again, so that a thousand of
// them resume a sandbox once.
type turn struct {
	to   dsec.State
	done chan struct{}
	err  error // valid once done is closed; the sandbox is as it was then
}

// Bounds of a turn. A process in an uninterruptible call stands still only after
// it. A machine's memory is written to a disk and read again, and a guest that
// is emulated, or has little of a processor, takes long to come back; one that
// is given up then is lost, since its disk has moved on.
const (
	turnTimeout    = 10 * time.Second
	machineTimeout = 2 * time.Minute
)

// turnTime is how long a turn of e may take.
func (e *entry) turnTime() time.Duration {
	switch e.record().spec.spec.Kind {
	case dsec.MicroVM, dsec.FullVM:
		return machineTimeout
	}
	return turnTimeout
}

// beginTurn makes e turn to a state. The caller runs n.carry.
// Requires: e.mu held, e.turn nil.
func (e *entry) beginTurn(to dsec.State) *turn {
	e.turn = &turn{to: to, done: make(chan struct{})}
	return e.turn
}

// carry runs a turn that was begun. It belongs to nobody: a caller who goes
// away leaves it to the others.
func (n *Node) carry(e *entry, m driver.Machine, t *turn, detail string) {
	run := n.goOn
	if t.to == dsec.Paused {
		run = n.stand
	}
	limit := e.turnTime()
	ok := n.spawn(func() {
		ctx, cancel := context.WithTimeoutCause(n.life, limit, dsec.Errorf(dsec.Timeout, "the sandbox is not %s after %v", t.to, limit))
		defer cancel()
		e.endTurn(t, causeOf(ctx, run(ctx, e, m, detail)))
	})
	if !ok {
		e.endTurn(t, errClosing)
	}
}

func (e *entry) endTurn(t *turn, err error) {
	e.mu.Lock()
	e.turn = nil
	e.mu.Unlock()
	t.err = err
	close(t.done)
}

// await waits for a turn. What its error means is the caller's matter.
func (t *turn) await(ctx context.Context) error {
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stand pauses a machine and records it. A pause that has no record is undone:
// the next edge would not know of it.
func (n *Node) stand(ctx context.Context, e *entry, m driver.Machine, detail string) error {
	begin := time.Now()
	p := m.(driver.Pauser) //nolint:forcetypeassert // whoever began the turn has looked
	var whole int64        // what comes back with the pause itself
	if _, later := m.(driver.Reclaimer); !later {
		u, _ := m.Usage(ctx) //nolint:errcheck // a figure for people
		whole = u.Memory
	}
	if err := p.Pause(ctx); err != nil {
		return err
	}
	at := n.clock.nano()
	if err := n.append(change{Op: opPaused, ID: e.id, At: at}, func() { e.change(func(r *record) *record { return r.pausedAt(at) }) }); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.turnTime())
		defer cancel()
		p.Resume(undo) //nolint:errcheck // a call that comes tries again
		return err
	}
	n.events.Paused(PausedEvent{ID: e.id, Detail: detail, Took: time.Since(begin)})
	if whole > 0 {
		n.mark(change{Op: opReclaimed, ID: e.id, At: at, Reclaimed: whole}, e, func(r *record) *record { return r.gaveBack(at, whole) })
		n.events.Reclaimed(ReclaimedEvent{ID: e.id, Bytes: whole, Took: time.Since(begin)})
	}
	n.reclaim.add(e)
	return nil
}

// goOn resumes a machine. The record comes first: an edge that finds it beside
// a machine that stands still knows that it was to go on. A journal that
// cannot be written holds nobody up, since an edge that finds the opposite
// believes the machine.
func (n *Node) goOn(ctx context.Context, e *entry, m driver.Machine, detail string) error {
	begin := n.clock.now()
	since, reclaimed := e.record().paused, e.record().reclaimed
	n.mark(change{Op: opResumed, ID: e.id}, e, (*record).goingOn)
	if err := m.(driver.Pauser).Resume(ctx); err != nil { //nolint:forcetypeassert // it was paused
		if since == 0 {
			since = begin.UnixNano()
		}
		n.mark(change{Op: opPaused, ID: e.id, At: since}, e, func(r *record) *record { return r.pausedAt(since) })
		return err
	}
	now := n.clock.now()
	e.mu.Lock()
	e.lastUsed = now.UnixNano()
	e.mu.Unlock()
	n.schedule(e)
	n.events.Resumed(ResumedEvent{ID: e.id, Detail: detail, Reclaimed: reclaimed, Took: now.Sub(begin)})
	return nil
}

// mark is append for what is so whether it can be written or not; the
// checkpoint that heals the journal writes it.
func (n *Node) mark(c change, e *entry, to func(*record) *record) {
	apply := func() { e.change(to) }
	if n.append(c, apply) != nil {
		n.logMu.Lock()
		apply()
		n.logMu.Unlock()
	}
}

// change replaces the record of a sandbox that has not ended.
func (e *entry) change(to func(*record) *record) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.rec.state.Ended() {
		e.rec = to(e.rec)
	}
}

// awake brings a sandbox that is paused, or on the way from or to it, nearer to
// running; the caller looks again.
// Requires: e.mu held, and gives it back.
func (n *Node) awake(ctx context.Context, e *entry, detail string) error {
	t, m := e.turn, e.machine
	begun := t == nil
	if begun {
		t = e.beginTurn(dsec.Running)
	}
	e.mu.Unlock()
	if begun {
		n.carry(e, m, t, detail)
	}
	if err := t.await(ctx); err != nil {
		return err
	}
	if t.to == dsec.Running && t.err != nil {
		return e.verdictOr(t.err)
	}
	return nil
}

// verdictOr gives the reason why e cannot be used, and err where there is none.
func (e *entry) verdictOr(err error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if over := e.usable(); over != nil && err != nil {
		return over
	}
	return err
}

// Pause makes the sandbox stand still and returns once it does; its memory
// comes back behind that. It goes on if the caller goes away.
func (n *Node) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	const op = "edge.Pause"
	e, err := n.get(id)
	for paused := false; err == nil && !paused; {
		paused, err = n.pauseOnce(ctx, e)
	}
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	return n.view(ctx, e), nil
}

// pauseOnce waits for the turn under way, or makes one. It reports whether e is
// paused then.
func (n *Node) pauseOnce(ctx context.Context, e *entry) (bool, error) {
	e.mu.Lock()
	t, m := e.turn, e.machine
	err := e.usable()
	if _, able := m.(driver.Pauser); err == nil && !able {
		err = dsec.Errorf(dsec.Unsupported, "sandboxes of kind %s cannot be paused", e.rec.spec.spec.Kind)
	}
	paused := t == nil && e.rec.state == dsec.Paused
	begun := err == nil && t == nil && !paused
	if begun {
		t = e.beginTurn(dsec.Paused)
	}
	e.mu.Unlock()
	if err != nil || paused {
		return paused, err
	}
	if begun {
		n.carry(e, m, t, dsec.ReasonFrom(ctx).Detail)
	}
	if err := t.await(ctx); err != nil {
		return false, err
	}
	if t.to != dsec.Paused {
		return false, nil
	}
	return t.err == nil, e.verdictOr(t.err)
}

// Resume lets the sandbox go on; it counts as a use.
func (n *Node) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	const op = "edge.Resume"
	e, err := n.get(id)
	for err == nil {
		e.mu.Lock()
		if err = e.usable(); err != nil || e.turn == nil && e.rec.state != dsec.Paused {
			e.mu.Unlock()
			break
		}
		err = n.awake(ctx, e, "")
	}
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	return n.view(ctx, e), nil
}

// adoptPause makes record and machine of an adopted sandbox agree. A pause is
// recorded once the machine stands and taken back before it goes on, so a
// machine that stands against its record is to go on. One that does not stand
// against its record goes already.
func (n *Node) adoptPause(e *entry) {
	e.mu.Lock()
	m := e.machine
	p, able := m.(driver.Pauser)
	stands, said := able && p.Paused(), e.rec.state == dsec.Paused
	var t *turn
	if stands && !said {
		t = e.beginTurn(dsec.Running)
	}
	unfinished := said && e.rec.reclaimed == 0
	e.mu.Unlock()
	switch {
	case t != nil:
		n.carry(e, m, t, DetailRestart)
	case said && !stands:
		n.mark(change{Op: opResumed, ID: e.id}, e, (*record).goingOn)
		n.schedule(e)
	case unfinished:
		n.reclaim.add(e)
	}
}

package edge

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/sched"
)

// reclaims are the paused sandboxes whose memory is to come back, oldest pause
// first. One worker takes them: reclaiming is work for a processor and a disk,
// and two would only be in each other's way.
type reclaims struct {
	mu   sync.Mutex
	list []*entry
	more chan struct{} // list is not empty
	busy bool          // the worker has one
}

func newReclaims() *reclaims { return &reclaims{more: make(chan struct{}, 1)} }

func (r *reclaims) add(e *entry) {
	r.mu.Lock()
	r.list = append(r.list, e)
	r.mu.Unlock()
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// take gives the next one, nil if there is none.
func (r *reclaims) take() *entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = len(r.list) > 0
	if !r.busy {
		r.list = nil
		return nil
	}
	e := r.list[0]
	r.list[0] = nil
	r.list = r.list[1:]
	return e
}

// waiting counts those whose memory is not back yet.
func (r *reclaims) waiting() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.list)
	if r.busy {
		n++
	}
	return n
}

// reclaimNice is the priority of the worker's thread: whoever is awake comes
// first.
const reclaimNice = 10

// runReclaims is the worker.
func (n *Node) runReclaims(ctx context.Context) {
	// The thread is not given back: it ends with this goroutine.
	runtime.LockOSThread()
	unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), reclaimNice) //nolint:errcheck // it only helps
	for {
		e := n.reclaim.take()
		if e == nil {
			select {
			case <-n.reclaim.more:
				continue
			case <-ctx.Done():
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
		n.giveBack(ctx, e)
	}
}

// giveBack reclaims the memory of e if it is still paused.
func (n *Node) giveBack(ctx context.Context, e *entry) {
	e.mu.Lock()
	since, m := e.rec.paused, e.machine
	waking := e.turn != nil && e.turn.to == dsec.Running // the turn that paused it may not have ended
	ready := e.rec.state == dsec.Paused && !waking && e.ending == nil
	e.mu.Unlock()
	r, able := m.(driver.Reclaimer)
	if !ready || !able {
		return
	}
	begin := time.Now()
	bytes, err := r.Reclaim(ctx, 0)
	if bytes > 0 && ctx.Err() == nil { // else the next edge goes on with it
		// A figure for people: what cannot be written is only forgotten.
		_ = n.append(change{Op: opReclaimed, ID: e.id, At: since, Reclaimed: bytes}, func() {
			e.change(func(r *record) *record { return r.gaveBack(since, bytes) })
		})
	}
	n.events.Reclaimed(ReclaimedEvent{ID: e.id, Bytes: bytes, Took: time.Since(begin), Error: err})
}

const (
	pressureEvery = time.Second
	pressureStep  = 128 // a round frees one part in so many of the host's memory, or what is missing
	pressureLook  = 256 // sandboxes that are measured in a round
)

// watchPressure pauses idle sandboxes while the host is short of memory.
func (n *Node) watchPressure(ctx context.Context) {
	if n.limits.PausePressure < 0 {
		return
	}
	tick := time.NewTicker(pressureEvery)
	defer tick.Stop()
	on := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		h, err := n.gauge.sample()
		if err != nil {
			continue
		}
		was := on
		if on = n.limits.pressed(on, h); on != was {
			n.events.Pressure(PressureEvent{On: on, Pressure: h.Pressure.Memory, Available: h.Available})
		}
		// What was chosen before is to come back first: the figures do not know
		// of it yet.
		if on && n.reclaim.waiting() == 0 {
			n.relieve(ctx, h)
		}
	}
}

// pressed reports whether the host is short of memory, given whether it was.
// Time that is waited for memory says so unless half of the memory is there:
// then it is a sandbox at its own limit that waits.
func (l Limits) pressed(on bool, h HostSample) bool {
	waits := sched.Levels{Low: l.PauseRelief, High: l.PausePressure}.Next(on, h.Pressure.Memory)
	used := sched.Levels{Low: float64(h.Memory - l.refilled()), High: float64(h.Memory - l.PauseWater)}.Next(on, float64(h.Memory-h.Available))
	return used || waits && h.Available < h.Memory/2
}

// refilled is how much is to be available before the shortage is over.
func (l Limits) refilled() int64 { return l.PauseWater + l.PauseWater/4 }

// relieve pauses sandboxes that nobody uses, the longest idle first, until what
// is missing would be back.
func (n *Node) relieve(ctx context.Context, h HostSample) {
	idle := n.idlest()
	byID := make(map[dsec.SandboxID]*entry, len(idle))
	candidates := make([]sched.Candidate, 0, len(idle))
	for _, e := range idle {
		if ctx.Err() != nil {
			return
		}
		c, ok := e.candidate(ctx)
		if ok {
			byID[e.id] = e
			candidates = append(candidates, c)
		}
	}
	need := max(n.limits.refilled()-h.Available, h.Memory/pressureStep)
	for _, id := range sched.Reclaim(candidates, need) {
		n.pauseIdle(ctx, byID[id])
	}
}

// idlest gives the sandboxes that were not used for the longest time.
func (n *Node) idlest() []*entry {
	type used struct {
		e  *entry
		at int64
	}
	limit := n.clock.now().Add(-n.limits.PauseIdle).UnixNano()
	var all []used
	n.mu.RLock()
	for _, e := range n.order {
		e.mu.Lock()
		if e.lastUsed <= limit && e.mayPause() {
			all = append(all, used{e, e.lastUsed})
		}
		e.mu.Unlock()
	}
	n.mu.RUnlock()
	slices.SortFunc(all, func(a, b used) int { return cmp.Compare(a.at, b.at) })
	out := make([]*entry, 0, pressureLook)
	for _, u := range all[:min(len(all), pressureLook)] {
		out = append(out, u.e)
	}
	return out
}

// mayPause reports whether e may be paused without anybody asking for it.
// Requires: e.mu held.
func (e *entry) mayPause() bool {
	// One that pauses and does not reclaim gives all back when it pauses.
	_, able := e.machine.(driver.Pauser)
	return able && e.rec.state == dsec.Running && e.turn == nil && e.usable() == nil && !e.busy()
}

func (e *entry) candidate(ctx context.Context) (sched.Candidate, bool) {
	e.mu.Lock()
	m, used, busy := e.machine, e.lastUsed, !e.mayPause()
	e.mu.Unlock()
	if m == nil {
		return sched.Candidate{}, false
	}
	u, err := m.Usage(ctx)
	return sched.Candidate{ID: e.id, Idle: time.Duration(e.clock.nano() - used), Memory: u.Memory, Busy: busy}, err == nil
}

// pauseIdle pauses e if it is still idle. Whatever is asked of it from here on
// waits for the pause and then resumes it, so nothing that runs is paused.
func (n *Node) pauseIdle(ctx context.Context, e *entry) {
	e.mu.Lock()
	m := e.machine
	var t *turn
	if e.mayPause() {
		t = e.beginTurn(dsec.Paused)
	}
	e.mu.Unlock()
	if t != nil {
		n.carry(e, m, t, DetailPressure)
		t.await(ctx) //nolint:errcheck // the next round looks again
	}
}

package edge

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// warm keeps the machines that functions are called on. A machine is for one
// project, one environment, one list of preloaded modules and one class of
// memory, and has one call at a time, so that what goes on at the same time
// never shares a machine. It is counted in its project's quota as a sandbox is,
// and is no sandbox otherwise: it is not in the table, and what an earlier
// process had is stopped when the node opens.
type warm struct {
	n      *Node
	limits WarmLimits

	mu      sync.Mutex
	idle    []*warmMachine // the longest idle first
	count   int            // machines, those being started among them
	waiting []*warmWaiter  // oldest first
	layers  map[string]int // in use
	sweep   bool           // a goroutine looks for idle ones
	busy    map[*warmMachine]bool
	closed  bool
	work    sync.WaitGroup // calls, starts and stops
}

// WarmLimits bound the machines of function calls. The zero value of each
// means its default.
type WarmLimits struct {
	Machines int           // at once; default four for each processor, at least 8
	Queue    int           // calls that wait for a machine; default 1,024
	Idle     time.Duration // after which one is stopped; default 60 s
	Calls    int           // after which one is replaced; default 10,000
}

// warmKey is what machines that can stand in for each other have in common.
type warmKey struct {
	project dsec.ProjectID
	layers  string
	preload string
	memory  int64 // of a call, at most
}

type warmMachine struct {
	key     warmKey
	caller  driver.Caller
	id      dsec.SandboxID
	spec    dsec.Spec // as the quota counts it
	digests []string
	release func()
	since   time.Time // idle
	calls   int
}

// warmWaiter is a call that waits until a machine is there or may be started.
type warmWaiter struct {
	key warmKey
	got chan *warmMachine // nil: start one, it is counted
}

// What a machine has beyond its calls' memory: guest, warm program, builds.
const (
	warmOverhead = 512 << 20
	warmDisk     = 1 << 30
	warmPids     = dsec.MaxFunctionPids + 256
)

func newWarm(n *Node, l WarmLimits) *warm {
	set(&l.Machines, max(8, 4*runtime.GOMAXPROCS(0)))
	set(&l.Queue, 1024)
	set(&l.Idle, time.Minute)
	set(&l.Calls, 10_000)
	return &warm{n: n, limits: l, layers: map[string]int{}, busy: map[*warmMachine]bool{}}
}

// atATime is how many cases of a batch run at once by default.
func (w *warm) atATime() int { return min(w.limits.Machines, 2*runtime.GOMAXPROCS(0)) }

func keyOf(env environment, fn dsec.Function) warmKey {
	memory := fn.Limits.WithDefaults().Memory
	if fn.Runtime.Compiled() {
		memory = max(memory, driver.CompileMemory)
	}
	memory = max(memory, dsec.DefaultFunctionMemory)
	return warmKey{
		project: fn.Project, layers: strings.Join(env.digests(), " "), preload: strings.Join(fn.Preload, " "),
		memory: 1 << bits.Len64(uint64(memory-1)), // the next power of two
	}
}

// enter begins what needs a machine; leave ends it.
func (w *warm) enter() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return errClosing
	}
	w.work.Add(1)
	return nil
}

func (w *warm) leave() { w.work.Done() }

// acquire gives a machine to be given back with giveBack.
func (w *warm) acquire(ctx context.Context, env environment, fn dsec.Function) (*warmMachine, error) {
	m, err := w.find(ctx, keyOf(env, fn), env)
	if err == nil {
		w.mu.Lock()
		w.busy[m] = true
		closed := w.closed
		w.mu.Unlock()
		if closed { // close did not see it
			w.giveBack(m, true)
			return nil, errClosing
		}
	}
	return m, err
}

func (w *warm) find(ctx context.Context, key warmKey, env environment) (*warmMachine, error) {
	m, start, err := w.reserve(ctx, key)
	if err != nil || !start {
		return m, err
	}
	m, err = w.start(ctx, key, env)
	if err == nil {
		return m, nil
	}
	w.uncount()
	if dsec.KindOf(err) == dsec.Exhausted && w.evict() {
		// Memory or quota is short, and some of it was only kept ready.
		if m, start, err = w.reserve(ctx, key); err == nil && start {
			if m, err = w.start(ctx, key, env); err != nil {
				w.uncount()
			}
		}
	}
	return m, err
}

// reserve gives an idle machine, or the right to start one, as soon as there
// is either.
func (w *warm) reserve(ctx context.Context, key warmKey) (m *warmMachine, start bool, err error) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil, false, errClosing
	}
	if m := w.take(key); m != nil {
		w.mu.Unlock()
		return m, false, nil
	}
	if w.count < w.limits.Machines {
		w.count++
		w.mu.Unlock()
		return nil, true, nil
	}
	if len(w.idle) > 0 { // another's, which has waited longest for work
		old := w.idle[0]
		w.idle = w.idle[1:]
		w.count++ // its place goes on to ours; stop takes its own away
		w.work.Add(1)
		w.mu.Unlock()
		w.stop(old)
		return nil, true, nil
	}
	if len(w.waiting) >= w.limits.Queue {
		w.mu.Unlock()
		return nil, false, dsec.Errorf(dsec.Exhausted, "%d function calls wait for a machine already", w.limits.Queue)
	}
	q := &warmWaiter{key: key, got: make(chan *warmMachine, 1)}
	w.waiting = append(w.waiting, q)
	w.mu.Unlock()
	select {
	case m, ok := <-q.got:
		switch {
		case !ok:
			return nil, false, errClosing
		case m == nil:
			return nil, true, nil
		}
		return m, false, nil
	case <-ctx.Done():
	}
	w.mu.Lock()
	if i := slices.Index(w.waiting, q); i >= 0 {
		w.waiting = slices.Delete(w.waiting, i, i+1)
		w.mu.Unlock()
		return nil, false, context.Cause(ctx)
	}
	w.mu.Unlock()
	// It was served at the same moment.
	if m, ok := <-q.got; ok && m != nil {
		w.giveBack(m, false)
	} else if ok {
		w.uncount()
	}
	return nil, false, context.Cause(ctx)
}

// take removes the youngest idle machine of a key. Requires: w.mu held.
func (w *warm) take(key warmKey) *warmMachine {
	for i, m := range slices.Backward(w.idle) {
		if m.key != key {
			continue
		}
		w.idle = slices.Delete(w.idle, i, i+1)
		select {
		case <-m.caller.Done(): // it died while it was idle
			w.work.Add(1)
			go w.stop(m)
			return w.take(key)
		default:
			return m
		}
	}
	return nil
}

// uncount gives up the place of a machine, to whoever waits longest.
func (w *warm) uncount() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.waiting) > 0 && !w.closed {
		q := w.waiting[0]
		w.waiting = w.waiting[1:]
		q.got <- nil
		return
	}
	w.count--
}

// giveBack ends a loan. A machine that is of no use any more is stopped.
func (w *warm) giveBack(m *warmMachine, broken bool) {
	m.calls++
	w.mu.Lock()
	delete(w.busy, m)
	if broken || w.closed || m.calls >= w.limits.Calls {
		w.work.Add(1)
		w.mu.Unlock()
		go w.stop(m)
		return
	}
	for i, q := range w.waiting {
		if q.key == m.key {
			w.waiting = slices.Delete(w.waiting, i, i+1)
			w.mu.Unlock()
			q.got <- m
			return
		}
	}
	if len(w.waiting) > 0 { // for machines of other kinds: this one makes room
		w.work.Add(1)
		w.mu.Unlock()
		go w.stop(m)
		return
	}
	m.since = time.Now()
	w.idle = append(w.idle, m)
	if !w.sweep {
		w.sweep = w.n.spawn(w.sweepIdle)
	}
	w.mu.Unlock()
}

// sweepIdle stops machines that were idle for long. It ends when there is none.
func (w *warm) sweepIdle() {
	tick := time.NewTicker(max(w.limits.Idle/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-w.n.life.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		n := 0
		for n < len(w.idle) && time.Since(w.idle[n].since) >= w.limits.Idle {
			n++
		}
		old := slices.Clone(w.idle[:n])
		w.idle = slices.Delete(w.idle, 0, n)
		w.work.Add(len(old))
		if len(w.idle) == 0 && len(old) == 0 {
			w.sweep = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		for _, m := range old {
			w.stop(m)
		}
	}
}

// evict stops the machine that is idle longest, and reports whether there was
// one.
func (w *warm) evict() bool {
	w.mu.Lock()
	if len(w.idle) == 0 || w.closed {
		w.mu.Unlock()
		return false
	}
	old := w.idle[0]
	w.idle = w.idle[1:]
	w.work.Add(1)
	w.mu.Unlock()
	w.stop(old)
	return true
}

// start makes a machine, whose place is counted. What it returns beside an
// error is nothing: all is given back.
func (w *warm) start(ctx context.Context, key warmKey, env environment) (_ *warmMachine, err error) {
	n := w.n
	w.mu.Lock()
	for _, d := range env.digests() {
		w.layers[d]++
	}
	w.mu.Unlock()
	m := &warmMachine{key: key, id: n.cfg.Keys.New(n.cfg.Place), digests: env.digests()}
	m.spec = dsec.Spec{
		Kind: dsec.FnCall, Project: key.project,
		Resources: dsec.Resources{CPU: 1, Memory: key.memory + warmOverhead, Disk: warmDisk, Pids: warmPids},
	}.WithDefaults()
	counted := false
	defer func() {
		if err != nil {
			w.forget(m, counted)
		}
	}()
	if n.cfg.Quota != nil {
		if err := n.cfg.Quota.Take(m.id, &m.spec); err != nil {
			return nil, err
		}
		counted = true
	}
	if err := n.room(); err != nil {
		return nil, err
	}
	if err := n.gate.enter(ctx); err != nil {
		return nil, err
	}
	defer n.gate.leave()
	// The machine is not the call's that is the first to need it, but a call
	// that went away needs none.
	ctx, cancel := context.WithTimeoutCause(ctx, n.limits.StartTimeout,
		dsec.Errorf(dsec.Timeout, "the call's machine did not start within %v", n.limits.StartTimeout))
	defer cancel()
	layers, release, err := n.cfg.Roots.Acquire(ctx, env.digests())
	if err != nil {
		return nil, causeOf(ctx, fmt.Errorf("mount environment: %w", err))
	}
	m.release = release
	started, err := n.drivers[dsec.FnCall].Start(ctx, driver.Config{
		ID: m.id, Root: driver.Root{Layers: layers}, Resources: m.spec.Resources, Hostname: "fn", Guest: env.guest,
	})
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	caller, ok := started.(driver.Caller)
	if !ok {
		err := dsec.Errorf(dsec.Unsupported, "machines of kind %s on this node call no functions", dsec.FnCall)
		return nil, errors.Join(err, started.Stop(context.WithoutCancel(ctx)))
	}
	m.caller = caller
	return m, nil
}

// stop ends a machine, whose place goes on, and is counted in w.work.
func (w *warm) stop(m *warmMachine) {
	defer w.work.Done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.n.life), discardTimeout)
	defer cancel()
	if err := m.caller.Stop(ctx); err != nil {
		w.n.events.StopFailed(m.id, err) // the next Open finds it
	}
	w.forget(m, w.n.cfg.Quota != nil)
	w.uncount()
}

// forget gives back what a machine had beside itself.
func (w *warm) forget(m *warmMachine, counted bool) {
	if m.release != nil {
		m.release()
	}
	if counted {
		w.n.cfg.Quota.Give(m.id, &m.spec)
	}
	w.mu.Lock()
	for _, d := range m.digests {
		if w.layers[d]--; w.layers[d] == 0 {
			delete(w.layers, d)
		}
	}
	w.mu.Unlock()
}

// inUse adds the layers of all machines to used.
func (w *warm) inUse(used map[string]int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for d, n := range w.layers {
		used[d] += n
	}
}

// close stops every machine and waits for that. Calls under way fail.
func (w *warm) close() {
	w.mu.Lock()
	w.closed = true
	idle := w.idle
	w.idle = nil
	for _, q := range w.waiting {
		close(q.got)
	}
	w.waiting = nil
	w.work.Add(len(idle))
	for m := range w.busy {
		w.work.Go(func() { m.caller.Stop(context.WithoutCancel(w.n.life)) }) //nolint:errcheck // its call fails, and then it is stopped again
	}
	w.mu.Unlock()
	for _, m := range idle {
		go w.stop(m)
	}
	w.work.Wait()
}

// Machines is how many machines are kept for function calls, busy or idle.
func (n *Node) Machines() int {
	if n.functions == nil {
		return 0
	}
	n.functions.mu.Lock()
	defer n.functions.mu.Unlock()
	return n.functions.count
}

// Package synthetic is a driver whose machines exist in memory only: what tests
// of the edge, the api and whole clusters run on. Its guests understand a few
// scripted programs (see Commands in guest.go) and keep small files; nothing
// in it touches a kernel, so thousands of machines fit in a test and time may
// be faked with testing/synctest.
//
// It does not measure anything: a figure taken with it says what the code above
// the driver costs, never what a sandbox costs.
//
// A Host stands for the computer: its machines live as long as it does. A
// Driver is one edge process's view of it. Detach is that process's kill -9,
// Reboot the computer's power loss, Crash one guest's death, and Fail breaks
// the next operation of a name.
//
// Invariants:
//   - No lock is held while a fault or a delay runs, and only the one that
//     orders them while a subscriber is told of the running commands.
//   - No goroutine exists per machine; callbacks of AfterDone run in the
//     goroutine that ends the machine.
//
// Read next: package driver, then package edge.
package synthetic

import (
	"context"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Operations that Fail can break.
const (
	OpStart    = "start"    // before the machine exists
	OpStarted  = "started"  // when it exists and the guest does not answer yet
	OpAdopt    = "adopt"    // as a whole
	OpStop     = "stop"     // before anything is ended
	OpUsage    = "usage"    //
	OpFreeze   = "freeze"   //
	OpExec     = "exec"     // Start and Run of a command
	OpActivity = "activity" //
	OpPause    = "pause"    // before anything stands still
	OpResume   = "resume"   // before anything goes on
	OpReclaim  = "reclaim"  // of a machine that is paused
	OpSnapshot = "snapshot" // before anything is written
	OpFork     = "fork"     // before any child is there
	OpInput    = "input"    // of keys and pointer
)

// Options shape a Host. The zero value is instant and without a writable layer.
type Options struct {
	Kind      dsec.Kind     // default Container
	StartTime time.Duration // how long a start takes
	StopTime  time.Duration // how long a stop takes
	Upper     string        // folder that every machine gives as its writable layer; none when empty
	Whole     bool          // a paused machine has given all of its memory back, as virtual machines have
	Copies    bool          // machines can be saved and forked, and have a screen; not with Upper
}

// Host is a computer with machines on it. It is safe for concurrent use.
type Host struct {
	opt Options

	mu       sync.Mutex
	machines map[dsec.SandboxID]*machine // guarded by mu, with all below
	faults   map[string][]fault
	counts   map[string]int
	starting int
	maxStart int
}

// fault is what the nth call of an operation from now meets.
type fault struct {
	at  int // value of counts at which it strikes
	run func(context.Context) error
}

// New gives an empty host.
func New(opt Options) *Host {
	if opt.Kind == "" {
		opt.Kind = dsec.Container
	}
	return &Host{
		opt:      opt,
		machines: map[dsec.SandboxID]*machine{},
		faults:   map[string][]fault{},
		counts:   map[string]int{},
	}
}

// Fail makes the nth call of op from now on (1 is the next) return err.
func (h *Host) Fail(op string, nth int, err error) {
	h.Intercept(op, nth, func(context.Context) error { return err })
}

// Intercept runs f in the nth call of op from now on (1 is the next): f may
// block, and its error becomes the call's.
func (h *Host) Intercept(op string, nth int, f func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults[op] = append(h.faults[op], fault{h.counts[op] + nth, f})
}

// Calls says how often op was called.
func (h *Host) Calls(op string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.counts[op]
}

// hit counts a call of op and runs the fault that waits for it, if any.
func (h *Host) hit(ctx context.Context, op string) error {
	h.mu.Lock()
	h.counts[op]++
	var run func(context.Context) error
	for i, f := range h.faults[op] {
		if f.at == h.counts[op] {
			run = f.run
			h.faults[op] = append(h.faults[op][:i:i], h.faults[op][i+1:]...)
			break
		}
	}
	h.mu.Unlock()
	if run == nil {
		return nil
	}
	return run(ctx)
}

// Machines lists what exists, half-started machines included.
func (h *Host) Machines() []dsec.SandboxID {
	h.mu.Lock()
	defer h.mu.Unlock()
	ids := make([]dsec.SandboxID, 0, len(h.machines))
	for id := range h.machines {
		ids = append(ids, id)
	}
	return ids
}

// MostStarting is the highest number of starts that ran at once.
func (h *Host) MostStarting() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.maxStart
}

// Crash ends a machine by itself, with the cause given. It reports whether the
// machine was there.
func (h *Host) Crash(id dsec.SandboxID, cause dsec.Cause, detail string) bool {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	if m == nil {
		return false
	}
	m.end(cause, detail)
	return true
}

// Config gives what a machine was started from.
func (h *Host) Config(id dsec.SandboxID) (driver.Config, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[id]
	if m == nil {
		return driver.Config{}, false
	}
	return m.config, true
}

// SetUsage fixes the figures that a machine reports.
func (h *Host) SetUsage(id dsec.SandboxID, u dsec.Usage) {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	if m != nil {
		m.mu.Lock()
		m.usage = &u
		m.mu.Unlock()
	}
}

// Reboot is the computer losing power: every machine is gone and nobody is
// told, since the edge went with them. Drivers of before must not be used.
func (h *Host) Reboot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.machines {
		m.mu.Lock()
		m.after = nil
		m.subscriber = nil
		m.mu.Unlock()
	}
	clear(h.machines)
}

// Driver gives one edge process's view of the host.
func (h *Host) Driver() *Driver { return &Driver{host: h} }

// Driver is a driver.Driver on a Host.
type Driver struct {
	host *Host

	mu       sync.Mutex
	detached bool
}

var _ driver.Driver = (*Driver)(nil)

// Kind is the kind of Options.
func (d *Driver) Kind() dsec.Kind { return d.host.opt.Kind }

// Detach is the kill -9 of the process that holds d: its machines go on, no
// callback reaches it any more, and what it was starting stays half done.
func (d *Driver) Detach() {
	d.mu.Lock()
	d.detached = true
	d.mu.Unlock()
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	for _, m := range d.host.machines {
		m.mu.Lock()
		m.after = nil
		m.subscriber = nil
		m.mu.Unlock()
	}
}

func (d *Driver) gone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.detached
}

// Start makes a machine after Options.StartTime.
func (d *Driver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	h := d.host
	h.mu.Lock()
	h.starting++
	h.maxStart = max(h.maxStart, h.starting)
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.starting--
		h.mu.Unlock()
	}()

	if err := h.hit(ctx, OpStart); err != nil {
		return nil, err
	}
	begin := time.Now()
	m := newMachine(h, c)
	h.mu.Lock()
	if _, taken := h.machines[c.ID]; taken {
		h.mu.Unlock()
		return nil, dsec.Errorf(dsec.Exists, "machine %s is there already", c.ID)
	}
	h.machines[c.ID] = m
	h.mu.Unlock()

	err := pause(ctx, h.opt.StartTime)
	if err == nil {
		err = h.hit(ctx, OpStarted)
	}
	if err != nil {
		if !d.gone() { // a killed process cleans nothing up
			h.mu.Lock()
			delete(h.machines, c.ID)
			h.mu.Unlock()
		}
		return nil, err
	}
	m.mu.Lock()
	m.ready = true
	m.mu.Unlock()
	m.stages = []driver.Stage{{Name: "synthetic", Took: time.Since(begin)}}
	return m.face(), nil
}

// Adopt returns the machines that were started and removes the half-started.
func (d *Driver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	h := d.host
	if err := h.hit(ctx, OpAdopt); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []driver.Machine
	for id, m := range h.machines {
		m.mu.Lock()
		ready := m.ready
		m.mu.Unlock()
		if !ready {
			delete(h.machines, id)
			continue
		}
		out = append(out, m.face())
	}
	return out, nil
}

// Close does nothing: the driver holds nothing for machines to come.
func (d *Driver) Close() error { return nil }

// pause waits d or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

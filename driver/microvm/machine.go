package microvm

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/wire"
)

// idleConnection is after how long without a call the connection to a guest is
// closed.
const idleConnection = 30 * time.Second

// machine is one sandbox. It implements driver.Machine, and driver.Pauser,
// driver.Snapshotter and driver.Forker in files of their own.
type machine struct {
	*driver.Ending

	driver *Driver
	id     dsec.SandboxID
	slot   *slot
	client *wire.Client
	stages []driver.Stage

	life context.Context // ends when the machine is told to stop, or dies
	end  context.CancelFunc

	moving sync.Mutex // held while the machine is paused, resumed, saved, or cleaned away

	mu       sync.Mutex
	st       state
	stopping bool
	detached bool
	leaving  *qemu.Process // its end is not the machine's
	silent   string        // why a machine that runs is as good as dead
	usage    dsec.Usage    // last figures
}

var _ driver.Machine = (*machine)(nil)

func (d *Driver) newMachine(g *slot, st state) *machine {
	m := &machine{driver: d, id: st.ID, slot: g, st: st, Ending: driver.NewEnding()}
	m.life, m.end = context.WithCancel(context.Background())
	m.client = wire.NewClient(wire.Options{IdleAfter: idleConnection, Standing: g.frames.Standing, Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
		raw, err := g.frames.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return vm.Dial(ctx, raw)
	}})
	return m
}

// register makes m one of the driver's machines, and its end be noticed.
func (d *Driver) register(m *machine) error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		m.client.Close()
		return dsec.Errorf(dsec.Unavailable, "the node is closing")
	}
	d.machines[m.slot.n] = m
	d.mu.Unlock()
	m.follow()
	return nil
}

// follow watches the process that the machine has now.
func (m *machine) follow() {
	p := m.slot.process()
	if p == nil {
		return
	}
	m.slot.onHush(m.hushed)
	go func() { // ends with the process
		<-p.Done()
		m.mu.Lock()
		mine := m.leaving != p && !m.detached
		m.mu.Unlock()
		if mine {
			m.finish(p.Exit().String())
		}
	}()
}

// hushed ends a machine whose agent has closed a port: the agent is gone, and
// nobody will ever answer.
func (m *machine) hushed(why string) {
	m.mu.Lock()
	if m.silent == "" {
		m.silent = why
	}
	m.mu.Unlock()
	go m.kill()
}

func (m *machine) kill() {
	if p := m.slot.process(); p != nil {
		p.Kill()
	}
}

// finish runs once, when the machine has no process any more and will have
// none: nothing of it is left after it.
func (m *machine) finish(detail string) {
	m.end()
	m.moving.Lock()
	defer m.moving.Unlock()
	if m.Over() {
		return
	}
	host, _ := m.slot.group.Usage()
	m.client.Close()
	err := m.slot.destroy()
	m.driver.mu.Lock()
	delete(m.driver.machines, m.slot.n)
	m.driver.mu.Unlock()
	m.mu.Lock()
	m.usage.CPU = max(m.usage.CPU, host.CPU)
	m.usage.Memory, m.usage.Pids, m.usage.Commands = 0, 0, 0
	x := driver.Exit{Cause: dsec.CauseGuestDied, Detail: detail, Usage: m.usage, At: time.Now()}
	if m.silent != "" {
		x.Detail = m.silent
	}
	if m.stopping {
		x.Cause, x.Detail = dsec.CauseUser, ""
	}
	m.mu.Unlock()
	m.Conclude(x, err)
}

func (m *machine) ID() dsec.SandboxID     { return m.id }
func (m *machine) Group() string          { return m.slot.group.Name() }
func (m *machine) Guest() driver.Guest    { return m.client }
func (m *machine) Stages() []driver.Stage { return m.stages }

// usageTimeout is how long a guest may take to say what it uses; then the last
// figures are given.
const usageTimeout = 3 * time.Second

// Usage implements driver.Machine. It is what the guest counts of its workload.
func (m *machine) Usage(ctx context.Context) (dsec.Usage, error) {
	m.mu.Lock()
	last, paused := m.usage, m.st.Paused
	m.mu.Unlock()
	if m.Over() {
		return m.Exit().Usage, nil
	}
	if paused {
		return last, nil
	}
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	u, err := m.slot.ctl.Usage(ctx)
	if err != nil {
		return last, nil //nolint:nilerr // a guest that is busy or stands still
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.usage = u
	return u, nil
}

// Stop implements driver.Machine.
func (m *machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	if m.Over() {
		return m.Failure()
	}
	m.end() // whatever moves gives up
	m.kill()
	go m.finish("") // a paused machine has no process whose end is seen
	select {
	case <-m.Done():
		return m.Failure()
	case <-ctx.Done():
		return dsec.WithOp("", "", context.Cause(ctx))
	}
}

// detach lets go of a machine that goes on without this process.
func (m *machine) detach() {
	m.mu.Lock()
	m.detached = true
	m.mu.Unlock()
	m.end()
	m.moving.Lock() // what moves is over
	defer m.moving.Unlock()
	m.slot.onHush(nil)
	m.client.Close()
	m.slot.ctl.Close() //nolint:errcheck // it is over
	m.slot.control.Close()
	m.slot.frames.Close()
	if p := m.slot.process(); p != nil {
		p.Release()
	}
}

// gone is Conflict when the machine has ended or is about to.
func (m *machine) gone() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopping || m.life.Err() != nil {
		return driver.Ended()
	}
	return nil
}

// judge replaces what failed because the machine has ended.
func (m *machine) judge(err error) error {
	if err == nil {
		return nil
	}
	if gone := m.gone(); gone != nil {
		return gone
	}
	return err
}

// both gives a context that ends with ctx, and when the machine is told to end.
func (m *machine) both(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.life, func() { cancel(driver.Ended()) })
	return ctx, func() { stop(); cancel(nil) }
}

// setPaused writes down whether the machine has a process.
func (m *machine) setPaused(paused bool) error {
	m.mu.Lock()
	st := m.st
	m.mu.Unlock()
	st.Paused = paused
	if err := writeState(m.slot.dir, st); err != nil {
		return err
	}
	m.mu.Lock()
	m.st = st
	m.mu.Unlock()
	return nil
}

// Paused implements driver.Pauser.
func (m *machine) Paused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.st.Paused
}

// state gives a copy of what is written down.
func (m *machine) state() state {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.st
}

var errNoGuest = errors.New("the guest did not come back")

// Process is the number of the machine's process, 0 while it has none: for
// those who look at what it holds.
func (m *machine) Process() int {
	if p := m.slot.process(); p != nil {
		return p.Pid()
	}
	return 0
}

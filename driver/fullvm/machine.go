package fullvm

import (
	"context"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/wire"
)

// idleConnection is after how long without a call the connection to a guest is
// closed.
const idleConnection = 30 * time.Second

// machine is one sandbox. It implements driver.Machine, driver.Screen here, and
// driver.Pauser, driver.Snapshotter and driver.Forker in pause.go.
type machine struct {
	*driver.Ending

	driver *Driver
	id     dsec.SandboxID
	slot   *slot
	client *wire.Client // of dsec-guest
	guest  *guest
	stages []driver.Stage

	life context.Context // ends when the machine is told to stop, or dies
	end  context.CancelFunc

	moving sync.Mutex // held while the machine is paused, resumed, saved, or cleaned away

	mu       sync.Mutex
	st       state
	stopping bool
	detached bool
	leaving  *qemu.Process // its end is not the machine's
	last     dsec.Usage
	inside   dsec.Usage // what the guest said last
	lost     string     // why its process is being ended
}

var (
	_ driver.Machine = (*machine)(nil)
	_ driver.Screen  = (*machine)(nil)
)

func (d *Driver) newMachine(g *slot, st state) *machine {
	m := &machine{driver: d, id: st.ID, slot: g, st: st, Ending: driver.NewEnding()}
	m.life, m.end = context.WithCancel(context.Background())
	m.client = wire.NewClient(wire.Options{IdleAfter: idleConnection, Standing: g.frames.Standing, Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
		// An agent that its system started anew serves nobody before it is told
		// whom.
		if i, err := g.ctl.Ping(ctx); err != nil {
			return nil, err
		} else if !i.Entered {
			if err := g.ctl.Enter(ctx, st.setup()); err != nil && dsec.KindOf(err) != dsec.Conflict {
				return nil, err
			}
		}
		raw, err := g.frames.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return vm.Dial(ctx, raw)
	}})
	m.guest = newGuest(m)
	if st.Agent == DsecGuest {
		g.setVigil(newVigil(d.config.AgentGrace, m.agentLost))
	}
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
	go func() { // ends with the process
		m.slot.look()
		<-p.Done()
		m.mu.Lock()
		mine := m.leaving != p && !m.detached
		m.mu.Unlock()
		if mine {
			m.finish(p.Exit().String())
		}
	}()
}

// finish runs once, when the machine has no process any more and will have
// none: nothing of it is left after it.
func (m *machine) finish(detail string) {
	m.end()
	m.slot.setVigil(nil)
	m.moving.Lock()
	defer m.moving.Unlock()
	if m.Over() {
		return
	}
	usage := m.usage()
	m.mu.Lock()
	if m.lost != "" {
		detail = m.lost
	}
	m.mu.Unlock()
	if host, err := m.slot.group.Usage(); err == nil && host.OOMKills > 0 {
		detail += ": its process needed more memory than the node gives a machine"
	}
	m.client.Close()
	m.guest.close()
	err := m.slot.destroy()
	usage.Memory, usage.Pids, usage.Commands = 0, 0, 0
	x := driver.Exit{Cause: dsec.CauseGuestDied, Detail: detail, Usage: usage, At: time.Now()}
	m.mu.Lock()
	if m.stopping {
		x.Cause, x.Detail = dsec.CauseUser, ""
	}
	m.mu.Unlock()
	m.Conclude(x, err)
}

func (m *machine) ID() dsec.SandboxID     { return m.id }
func (m *machine) Group() string          { return m.slot.group.Name() }
func (m *machine) Guest() driver.Guest    { return m.guest }
func (m *machine) Stages() []driver.Stage { return m.stages }

// usageTimeout is how long a guest may take to say what it uses; then its part
// is as it was.
const usageTimeout = 3 * time.Second

// Usage implements driver.Machine. It is what the host counts of the machine as
// a whole, its emulator included; the disk is what was written. Processes, and
// what was ended for want of memory, are the guest's to count: of commands,
// where dsec-guest runs them.
func (m *machine) Usage(ctx context.Context) (dsec.Usage, error) {
	if m.Over() {
		return m.Exit().Usage, nil
	}
	m.mu.Lock()
	asks := m.st.Agent == DsecGuest && !m.st.Paused
	m.mu.Unlock()
	if asks {
		ctx, cancel := context.WithTimeout(ctx, usageTimeout)
		defer cancel()
		if u, err := m.slot.ctl.Usage(ctx); err == nil {
			m.mu.Lock()
			m.inside = u
			m.mu.Unlock()
		}
	}
	return m.usage(), nil
}

func (m *machine) usage() dsec.Usage {
	u, err := m.slot.group.Usage()
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		return m.last
	}
	var st unix.Stat_t
	if unix.Stat(m.slot.path(diskFile), &st) == nil {
		u.Disk = st.Blocks * 512
	}
	u.Pids, u.OOMKills = m.inside.Pids, m.inside.OOMKills
	m.last = u
	return u
}

// Stop implements driver.Machine: the machine is switched off.
func (m *machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	if m.Over() {
		return m.Failure()
	}
	m.end() // whatever moves gives up
	go func() {
		if p := m.slot.process(); p != nil {
			p.Kill()
		}
		m.finish("") // a paused machine has no process whose end is seen
	}()
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
	m.slot.setVigil(nil)
	m.client.Close()
	m.guest.close()
	m.slot.letGo()
	if p := m.slot.process(); p != nil {
		p.Release()
	}
}

// gone is Conflict when the machine has ended or is about to.
func (m *machine) gone() error {
	if m.life.Err() != nil {
		return driver.Ended()
	}
	return nil
}

// judge replaces what failed because the machine has ended.
func (m *machine) judge(err error) error {
	if err != nil && m.gone() != nil {
		return driver.Ended()
	}
	return err
}

// both gives a context that ends with ctx, and when the machine is told to end.
func (m *machine) both(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.life, func() { cancel(driver.Ended()) })
	return ctx, func() { stop(); cancel(nil) }
}

// Screenshot implements driver.Screen. That of a paused machine waits.
func (m *machine) Screenshot(ctx context.Context) ([]byte, error) {
	ctx, cancel := m.both(ctx)
	defer cancel()
	p, err := m.slot.ready(ctx)
	if err != nil {
		return nil, err
	}
	b, err := p.Screenshot(ctx)
	return b, m.verdict(p, err)
}

// Input implements driver.Screen.
func (m *machine) Input(ctx context.Context, events []dsec.InputEvent) error {
	ctx, cancel := m.both(ctx)
	defer cancel()
	p, err := m.slot.ready(ctx)
	if err != nil {
		return err
	}
	return m.verdict(p, p.Input(ctx, events))
}

// verdict is judge for what was asked of a process, which may be gone before anybody
// has noticed.
func (m *machine) verdict(p *qemu.Process, err error) error {
	if err == nil {
		return nil
	}
	m.mu.Lock()
	leaving := m.leaving == p
	m.mu.Unlock()
	select {
	case <-p.Done():
		if !leaving {
			return driver.Ended()
		}
	default:
	}
	return m.judge(err)
}

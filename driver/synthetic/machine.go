package synthetic

import (
	"context"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// machine is one machine of a Host. It is all that exists of a sandbox, so it
// allocates its maps only when something runs in it.
type machine struct {
	host   *Host
	config driver.Config
	stages []driver.Stage // set before Start returns
	born   time.Time
	done   chan struct{}

	telling sync.Mutex // held while the subscriber is told, so that it is told in order

	mu         sync.Mutex
	ready      bool
	ended      bool
	frozen     bool
	paused     bool
	exit       driver.Exit
	usage      *dsec.Usage
	after      []func()
	subscriber func(driver.Activity)
	activity   driver.Activity
	commands   *commandTable // nil until the first command
	files      *fileTable    // nil until the first file
}

// upperMachine is a machine with a writable layer; a separate type because
// powers are found by assertion.
type upperMachine struct{ *machine }

var (
	_ driver.Machine = (*machine)(nil)
	_ driver.Upper   = upperMachine{}
)

func newMachine(h *Host, c driver.Config) *machine {
	c.Root.Layers = nil // not owned by the machine
	return &machine{host: h, config: c, born: time.Now(), done: make(chan struct{})}
}

// face is m with the powers that its host gives it.
func (m *machine) face() driver.Machine {
	if m.host.opt.Upper != "" {
		return upperMachine{m}
	}
	if m.host.opt.Whole {
		return wholeMachine{m, m}
	}
	if m.host.opt.Copies {
		return copyMachine{m}
	}
	return m
}

func (m *machine) ID() dsec.SandboxID     { return m.config.ID }
func (m *machine) Guest() driver.Guest    { return guest{m} }
func (m *machine) Stages() []driver.Stage { return m.stages }
func (m *machine) Done() <-chan struct{}  { return m.done }

// Usage gives what SetUsage fixed, else the running commands and no more.
func (m *machine) Usage(ctx context.Context) (dsec.Usage, error) {
	if err := m.host.hit(ctx, OpUsage); err != nil {
		return dsec.Usage{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.figures(), nil
}

// figures gives the usage. Requires: m.mu held.
func (m *machine) figures() dsec.Usage {
	var u dsec.Usage
	if m.usage != nil {
		u = *m.usage
	}
	u.Commands = m.activity.Running
	return u
}

// Stop ends the machine after Options.StopTime.
func (m *machine) Stop(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	default:
	}
	if err := m.host.hit(ctx, OpStop); err != nil {
		return err
	}
	if err := pause(ctx, m.host.opt.StopTime); err != nil {
		return err
	}
	m.end(dsec.CauseUser, "")
	return nil
}

// Exit is final once Done is closed.
func (m *machine) Exit() driver.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// AfterDone calls f once the machine is gone, at once if it is. It spares its
// caller a goroutine per machine.
func (m *machine) AfterDone(f func()) {
	m.mu.Lock()
	if !m.ended {
		m.after = append(m.after, f)
		m.mu.Unlock()
		return
	}
	m.mu.Unlock()
	f()
}

// end makes the machine gone, once.
func (m *machine) end(cause dsec.Cause, detail string) {
	m.mu.Lock()
	if m.ended {
		m.mu.Unlock()
		return
	}
	m.ended = true
	m.exit = driver.Exit{Cause: cause, Detail: detail, Usage: m.figures(), At: time.Now()}
	after := m.after
	m.after, m.subscriber = nil, nil
	if m.commands != nil {
		m.commands.interrupt()
	}
	m.mu.Unlock()

	m.host.mu.Lock()
	if m.host.machines[m.config.ID] == m {
		delete(m.host.machines, m.config.ID)
	}
	m.host.mu.Unlock()
	close(m.done)
	for _, f := range after {
		f()
	}
}

// count changes the number of running commands and tells the subscriber.
func (m *machine) count(by int) {
	m.telling.Lock()
	defer m.telling.Unlock()
	m.mu.Lock()
	m.activity.Running += by
	if by < 0 {
		m.activity.Last = time.Now()
	}
	f, a := m.subscriber, m.activity
	m.mu.Unlock()
	if f != nil {
		f(a)
	}
}

// alive is Conflict for a machine that is gone.
func (m *machine) alive() error {
	select {
	case <-m.done:
		return driver.Ended()
	default:
		return nil
	}
}

// Upper gives the folder of Options.
func (m upperMachine) Upper() (string, uint32) { return m.host.opt.Upper, 0 }

// Freeze marks the machine; a second freeze is Conflict.
func (m upperMachine) Freeze(ctx context.Context) (func() error, error) {
	if err := m.host.hit(ctx, OpFreeze); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.frozen {
		return nil, dsec.Errorf(dsec.Conflict, "the machine is frozen")
	}
	m.frozen = true
	return func() error {
		m.mu.Lock()
		m.frozen = false
		m.mu.Unlock()
		return nil
	}, nil
}

// Frozen reports whether a machine is frozen now.
func (h *Host) Frozen(id dsec.SandboxID) bool {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.frozen
}

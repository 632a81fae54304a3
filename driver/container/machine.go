package container

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/wire"
)

// idleConnection is after how long without a call the connection to a guest is
// closed; an idle sandbox costs the node no descriptor and no goroutine then.
const idleConnection = 30 * time.Second

// machine is one running box. It implements driver.Machine, and driver.Upper,
// driver.Pauser and driver.Reclaimer in pause.go.
type machine struct {
	driver *Driver
	id     dsec.SandboxID
	shell  *shell
	client *wire.Client
	stages []driver.Stage
	done   chan struct{}

	freezing sync.Mutex // held while what stands still changes; before mu

	mu       sync.Mutex
	stopping bool
	frozen   bool                    // by Freeze
	paused   bool                    // by Pause
	reclaim  context.CancelCauseFunc // of a Reclaim under way
	after    []func()                // called once done is closed
	end      error                   // of the clean-up
	exit     driver.Exit
}

var (
	_ driver.Machine = (*machine)(nil)
)

func (m *machine) ID() dsec.SandboxID     { return m.id }
func (m *machine) Guest() driver.Guest    { return m.client }
func (m *machine) Stages() []driver.Stage { return m.stages }
func (m *machine) Done() <-chan struct{}  { return m.done }

func (m *machine) Exit() driver.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

func (m *machine) Usage(context.Context) (dsec.Usage, error) {
	select {
	case <-m.done:
		return m.Exit().Usage, nil
	default:
	}
	return m.shell.group.Usage()
}

// Stop implements driver.Machine: the guest, pid 1 of the box's outer pid
// namespace, is killed, and the kernel ends everything below it.
func (m *machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	select {
	case <-m.done:
		return m.endError()
	default:
	}
	m.mu.Lock()
	patience := killPatience
	if m.paused || m.frozen {
		patience = 0
	}
	m.mu.Unlock()
	if err := m.shell.kill(patience, m.done, ctx.Done()); err != nil {
		return err
	}
	select {
	case <-m.done:
		return m.endError()
	default:
		return fmt.Errorf("wait for the end of the box: %w", ctx.Err())
	}
}

func (m *machine) endError() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.end
}

// ended runs once, when the guest's pidfd has become readable: no process of
// the box is left.
func (m *machine) ended() {
	usage, _ := m.shell.group.Usage()
	m.client.Close()
	m.shell.pidfd.Close()
	err := m.driver.clean(m.shell)
	m.driver.mu.Lock()
	delete(m.driver.machines, m.shell.slot)
	m.driver.mu.Unlock()
	m.mu.Lock()
	m.end = err
	m.exit = driver.Exit{Cause: dsec.CauseGuestDied, Detail: "the agent in the sandbox ended", Usage: usage, At: time.Now()}
	if m.stopping {
		m.exit.Cause, m.exit.Detail = dsec.CauseUser, ""
	}
	after := m.after
	close(m.done)
	m.mu.Unlock()
	for _, f := range after {
		f()
	}
}

// AfterDone calls f, in a goroutine of the driver's, once Done is closed: for
// those who watch thousands of machines and would rather not wait in thousands
// of goroutines.
func (m *machine) AfterDone(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.done:
		go f()
	default:
		m.after = append(m.after, f)
	}
}

// detach lets go of a box that goes on without this process.
func (m *machine) detach() {
	m.client.Close()
}

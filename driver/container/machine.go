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
	*driver.Ending

	driver *Driver
	id     dsec.SandboxID
	shell  *shell
	client *wire.Client
	stages []driver.Stage

	freezing sync.Mutex // held while what stands still changes; before mu

	mu       sync.Mutex
	stopping bool
	frozen   bool                    // by Freeze
	paused   bool                    // by Pause
	reclaim  context.CancelCauseFunc // of a Reclaim under way
}

var (
	_ driver.Machine = (*machine)(nil)
)

func (m *machine) ID() dsec.SandboxID     { return m.id }
func (m *machine) Group() string          { return m.shell.group.Name() }
func (m *machine) Guest() driver.Guest    { return m.client }
func (m *machine) Stages() []driver.Stage { return m.stages }

func (m *machine) Usage(context.Context) (dsec.Usage, error) {
	if m.Over() {
		return m.Exit().Usage, nil
	}
	return m.shell.group.Usage()
}

// Stop implements driver.Machine: the guest, pid 1 of the box's outer pid
// namespace, is killed, and the kernel ends everything below it.
func (m *machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	m.stopping = true
	m.mu.Unlock()
	if m.Over() {
		return m.Failure()
	}
	m.mu.Lock()
	patience := killPatience
	if m.paused || m.frozen {
		patience = 0
	}
	m.mu.Unlock()
	if err := m.shell.kill(patience, m.Done(), ctx.Done()); err != nil {
		return err
	}
	select {
	case <-m.Done():
		return m.Failure()
	default:
		return fmt.Errorf("wait for the end of the box: %w", ctx.Err())
	}
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
	x := driver.Exit{Cause: dsec.CauseGuestDied, Detail: "the agent in the sandbox ended", Usage: usage, At: time.Now()}
	m.mu.Lock()
	if m.stopping {
		x.Cause, x.Detail = dsec.CauseUser, ""
	}
	m.mu.Unlock()
	m.Conclude(x, err)
}

// detach lets go of a box that goes on without this process.
func (m *machine) detach() {
	m.client.Close()
}

package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

var (
	_ driver.Upper     = (*machine)(nil)
	_ driver.Pauser    = (*machine)(nil)
	_ driver.Reclaimer = (*machine)(nil)
)

// Upper implements driver.Upper.
func (m *machine) Upper() (string, uint32) {
	return filepath.Join(m.shell.dir, "upper"), base(m.shell.slot)
}

// Freeze implements driver.Upper. A paused machine stands still already, and
// stays so.
func (m *machine) Freeze(ctx context.Context) (func() error, error) {
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if m.still(&m.frozen) {
		return nil, dsec.Errorf(dsec.Conflict, "the sandbox is frozen already")
	}
	if !m.still(&m.paused) {
		if err := m.freeze(ctx); err != nil {
			return nil, err
		}
	}
	m.set(&m.frozen, true)
	return sync.OnceValue(func() error {
		m.freezing.Lock()
		defer m.freezing.Unlock()
		m.set(&m.frozen, false)
		if m.still(&m.paused) {
			return nil
		}
		return m.shell.group.Thaw()
	}), nil
}

// freeze makes the workload stand still, or leaves it as it was.
func (m *machine) freeze(ctx context.Context) error {
	if err := m.shell.group.Freeze(ctx); err != nil {
		return m.gone(errors.Join(err, m.shell.group.Thaw()))
	}
	return nil
}

// gone replaces what failed because the machine has ended.
func (m *machine) gone(err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.done:
	default:
		if !m.stopping {
			return err
		}
	}
	return dsec.Errorf(dsec.Conflict, "the sandbox has ended")
}

// still and set read and write one of the flags under mu.
func (m *machine) still(flag *bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return *flag
}

func (m *machine) set(flag *bool, to bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	*flag = to
}

// Paused implements driver.Pauser. After a crash it is also true of a box that
// was frozen for a commit.
func (m *machine) Paused() bool { return m.still(&m.paused) }

// Pause implements driver.Pauser. A process that dies on the way leaves a box
// that Paused tells of, whose clocks may go on: nobody was told that it is
// paused, so it is resumed.
func (m *machine) Pause(ctx context.Context) error {
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if err := m.gone(nil); err != nil {
		return err
	}
	if m.still(&m.paused) {
		return nil
	}
	held := m.still(&m.frozen)
	if !held {
		if err := m.freeze(ctx); err != nil {
			return err
		}
	}
	err := m.client.StopClocks(ctx)
	if err == nil {
		err = m.shell.group.AllowSwap()
	}
	if err != nil {
		// Clocks that stand are started by the next Resume at the latest, and
		// those of a guest that did not answer go.
		m.client.StartClocks(context.WithoutCancel(ctx)) //nolint:errcheck // the first error says more
		if !held {
			err = errors.Join(err, m.shell.group.Thaw())
		}
		return m.gone(fmt.Errorf("pause: %w", err))
	}
	m.set(&m.paused, true)
	return nil
}

// Resume implements driver.Pauser. Clocks start before the workload does: a
// process that dies in between leaves a frozen box, which is found again.
func (m *machine) Resume(ctx context.Context) error {
	m.mu.Lock()
	if m.reclaim != nil {
		m.reclaim(errResumed)
	}
	m.mu.Unlock()
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if err := m.gone(nil); err != nil {
		return err
	}
	if !m.still(&m.paused) {
		return nil
	}
	g := m.shell.group
	err := m.client.StartClocks(ctx)
	if err == nil {
		err = g.KeepInMemory()
	}
	if err == nil && !m.still(&m.frozen) {
		err = g.Thaw()
	}
	if err != nil {
		return m.gone(fmt.Errorf("resume: %w", err))
	}
	m.set(&m.paused, false)
	m.driver.waking.Go(m.prefault)
	return nil
}

// What is read back for a resumed box before it asks for it: more than a quick
// command touches, and no more time than such a command takes.
const (
	prefaultBytes = 64 << 20
	prefaultTime  = 500 * time.Millisecond
)

func (m *machine) prefault() {
	ctx, cancel := context.WithTimeout(context.Background(), prefaultTime)
	defer cancel()
	m.shell.group.Prefault(ctx, prefaultBytes)
}

// Reclaim implements driver.Reclaimer.
func (m *machine) Reclaim(ctx context.Context, target int64) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m.mu.Lock()
	ready := m.paused && m.reclaim == nil && !m.stopping
	if ready {
		m.reclaim = cancel
	}
	m.mu.Unlock()
	if !ready {
		return 0, nil
	}
	defer func() {
		m.mu.Lock()
		m.reclaim = nil
		m.mu.Unlock()
	}()
	n, err := m.shell.group.Reclaim(ctx, target)
	if errors.Is(err, errResumed) || m.gone(nil) != nil {
		err = nil
	}
	return n, err
}

// errResumed ends a Reclaim.
var errResumed = errors.New("the sandbox is resumed")

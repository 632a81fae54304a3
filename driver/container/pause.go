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
		if err := m.stand(ctx); err != nil {
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
		ctx, cancel := context.WithTimeout(context.Background(), goOnTimeout)
		defer cancel()
		return m.goOn(ctx)
	}), nil
}

// goOnTimeout bounds what nobody else bounds.
const goOnTimeout = 10 * time.Second

// stand makes the workload stand still, or leaves it as it was. The guest is
// told first: a program that it is just starting must not be caught half way,
// and neither must the guest with it.
func (m *machine) stand(ctx context.Context) error {
	err := m.client.StopClocks(ctx)
	if err == nil {
		err = m.shell.group.Freeze(ctx)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), goOnTimeout)
		defer cancel()
		return m.gone(errors.Join(err, m.goOn(undo)))
	}
	return nil
}

// goOn is the inverse of stand, and may be repeated. A process that dies
// between its two steps, or those of stand, leaves a guest that holds commands
// back: Adopt tells every guest that does not stand still to go on.
func (m *machine) goOn(ctx context.Context) error {
	if err := m.shell.group.Thaw(); err != nil {
		return err
	}
	return m.client.StartClocks(ctx)
}

// gone replaces what failed because the machine has ended.
func (m *machine) gone(err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.Done():
	default:
		if !m.stopping {
			return err
		}
	}
	return driver.Ended()
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

// Pause implements driver.Pauser.
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
		if err := m.stand(ctx); err != nil {
			return fmt.Errorf("pause: %w", err)
		}
	}
	if err := m.shell.group.AllowSwap(); err != nil {
		if !held {
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), goOnTimeout)
			defer cancel()
			err = errors.Join(err, m.goOn(undo))
		}
		return m.gone(fmt.Errorf("pause: %w", err))
	}
	m.set(&m.paused, true)
	return nil
}

// Resume implements driver.Pauser.
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
	err := m.shell.group.KeepInMemory()
	if err == nil && !m.still(&m.frozen) {
		err = m.goOn(ctx)
	}
	if err != nil {
		return m.gone(fmt.Errorf("resume: %w", err))
	}
	m.set(&m.paused, false)
	m.driver.waking.Go(m.prefault)
	return nil
}

// wakeAdopted tells the guests of adopted machines that run to go on: the last
// process may have died while it paused or resumed one. A few at a time: there
// may be thousands.
func (d *Driver) wakeAdopted(ms []*machine) {
	next := make(chan *machine, len(ms))
	for _, m := range ms {
		if !m.Paused() {
			next <- m
		}
	}
	close(next)
	for range min(8, len(next)) {
		d.waking.Go(func() {
			for m := range next {
				select {
				case <-d.stop:
					return
				default:
				}
				m.freezing.Lock()
				if !m.still(&m.paused) && !m.still(&m.frozen) {
					ctx, cancel := context.WithTimeout(context.Background(), goOnTimeout)
					m.client.StartClocks(ctx) //nolint:errcheck // a guest that does not answer is no worse for it
					cancel()
				}
				m.freezing.Unlock()
			}
		})
	}
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

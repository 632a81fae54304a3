package synthetic

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

var (
	_ driver.Pauser    = (*machine)(nil)
	_ driver.Reclaimer = (*machine)(nil)
)

// Pause marks the machine. Its scripted programs go on, but none can be
// started: whoever tries has missed that it is paused, and is told so.
func (m *machine) Pause(ctx context.Context) error { return m.setPaused(ctx, OpPause, true) }

// Resume takes the mark away.
func (m *machine) Resume(ctx context.Context) error { return m.setPaused(ctx, OpResume, false) }

func (m *machine) setPaused(ctx context.Context, op string, to bool) error {
	if err := m.alive(); err != nil {
		return err
	}
	if err := m.host.hit(ctx, op); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = to
	return nil
}

// Paused reports the mark.
func (m *machine) Paused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.paused
}

// Reclaim gives back the memory that SetUsage said is used.
func (m *machine) Reclaim(ctx context.Context, target int64) (int64, error) {
	if err := m.host.hit(ctx, OpReclaim); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.paused || m.usage == nil {
		return 0, nil
	}
	u := *m.usage
	n := u.Memory
	if target > 0 {
		n = min(n, target)
	}
	u.Memory -= n
	m.usage = &u
	return n, nil
}

// Paused reports whether a machine is paused now.
func (h *Host) Paused(id dsec.SandboxID) bool {
	h.mu.Lock()
	m := h.machines[id]
	h.mu.Unlock()
	return m != nil && m.Paused()
}

package fullvm

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec/qemu"
)

// vigil waits for an agent that has closed its port in the guest to come back,
// and calls over when it has not within a time of grace.
type vigil struct {
	grace time.Duration
	over  func()

	mu    sync.Mutex
	timer *time.Timer // while the port is closed
}

func newVigil(grace time.Duration, over func()) *vigil { return &vigil{grace: grace, over: over} }

// sees is told whether the port is open.
func (v *vigil) sees(open bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case open && v.timer != nil:
		v.timer.Stop()
		v.timer = nil
	case !open && v.timer == nil:
		v.timer = time.AfterFunc(v.grace, v.over)
	}
}

// setVigil begins a vigil over the slot's agent, or with nil ends it.
func (g *slot) setVigil(v *vigil) {
	g.mu.Lock()
	old := g.vigil
	g.vigil = v
	g.mu.Unlock()
	if old != nil {
		old.sees(true)
	}
}

func (g *slot) watcher() *vigil {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.vigil
}

// agentPort begins the names of the ports' devices, by which QEMU tells of them.
const agentPort = "vport"

// note is told what happens in QEMU: that the agent opened or closed its port.
func (g *slot) note(e qemu.Event) {
	if e.Name != "VSERPORT_CHANGE" {
		return
	}
	var port struct {
		ID   string `json:"id"`
		Open bool   `json:"open"`
	}
	if v := g.watcher(); v != nil && e.Into(&port) == nil && port.ID == fmt.Sprint(agentPort, controlPort) {
		v.sees(port.Open)
	}
}

// lookTimeout bounds a question to QEMU.
const lookTimeout = 10 * time.Second

// look asks whether the agent has its port open, for the changes that were not
// told: a machine that was adopted, or slept.
func (g *slot) look() {
	v := g.watcher()
	if v == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	if a, err := g.hears(ctx); err == nil && a != DsecGuest {
		v.sees(false)
	}
}

// agentLost ends a machine whose agent is gone for good: nobody can tell what
// its sandbox does any more. One that sleeps is looked at when it wakes.
func (m *machine) agentLost() {
	p := m.slot.process()
	if p == nil || m.gone() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	if a, err := m.slot.hears(ctx); err != nil || a == DsecGuest {
		return
	}
	m.mu.Lock()
	if m.leaving == p || m.st.Agent != DsecGuest {
		m.mu.Unlock()
		return
	}
	m.lost = fmt.Sprintf("the agent in the guest ended and was not started anew within %v", m.driver.config.AgentGrace)
	m.mu.Unlock()
	p.Kill()
}

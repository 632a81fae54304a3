package fullvm

import (
	"context"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// guest is whatever answers in a machine. Which agent that is was found out at
// its start; a machine in which none was is looked at again at each call, for
// one may have been installed or come up late.
type guest struct {
	m   *machine
	qga *qga

	mu sync.Mutex
	is Agent
}

var (
	_ driver.Guest = (*guest)(nil)
	_ driver.Inlet = (*guest)(nil)
)

func newGuest(m *machine) *guest {
	return &guest{m: m, qga: newQGA(m), is: m.st.Agent}
}

func (g *guest) close() { g.qga.close() }

// agent says who answers.
func (g *guest) agent(ctx context.Context) Agent {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.is == NoAgent {
		if a, err := g.m.slot.hears(ctx); err == nil {
			g.is = a
		}
	}
	return g.is
}

// lacks is the answer where an agent cannot do something.
func (g *guest) lacks(what string) error {
	if err := g.m.gone(); err != nil {
		return err
	}
	g.mu.Lock()
	is := g.is
	g.mu.Unlock()
	if is == QemuGuest {
		return dsec.Errorf(dsec.Unsupported, "%s: the machine has qemu-guest-agent, which cannot; dsec-guest in it can", what)
	}
	return dsec.Errorf(dsec.Unsupported, "%s: no agent answers in the machine: it has a screen and a keyboard only", what)
}

// Commands implements driver.Guest.
func (g *guest) Commands() dsec.Commands {
	if g.agent(context.Background()) == DsecGuest {
		return g.m.client.Commands()
	}
	return g.qga.commands()
}

// Files implements driver.Guest.
func (g *guest) Files() dsec.Files {
	if g.agent(context.Background()) == DsecGuest {
		return g.m.client.Files()
	}
	return g.qga.files()
}

// Ports implements driver.Guest.
func (g *guest) Ports() dsec.Ports {
	if g.agent(context.Background()) == DsecGuest {
		return g.m.client.Ports()
	}
	return noPorts{g}
}

type noPorts struct{ g *guest }

func (p noPorts) Dial(context.Context, dsec.Call, int) (dsec.PortConn, error) {
	return nil, p.g.lacks("ports")
}

// Activity implements driver.Guest. A machine without an agent does nothing that
// the node could know of.
func (g *guest) Activity(ctx context.Context) (driver.Activity, error) {
	switch g.agent(ctx) {
	case DsecGuest:
		return g.m.client.Activity(ctx)
	case QemuGuest:
		return g.qga.activity(), nil
	}
	return driver.Activity{}, g.m.gone()
}

// Forget implements driver.Guest.
func (g *guest) Forget(ctx context.Context, steps []dsec.Step) error {
	if g.agent(ctx) == DsecGuest {
		return g.m.client.Forget(ctx, steps)
	}
	g.qga.forget(steps)
	return g.m.gone()
}

// Subscribe implements driver.Guest.
func (g *guest) Subscribe(f func(driver.Activity)) {
	if g.agent(context.Background()) == DsecGuest {
		g.m.client.Subscribe(f)
		return
	}
	g.qga.subscribe(f)
}

// Listen implements driver.Inlet.
func (g *guest) Listen(ctx context.Context, port int) error {
	if g.agent(ctx) == DsecGuest {
		return g.m.client.Listen(ctx, port)
	}
	return g.lacks("ports of the workload to the node")
}

// Accept implements driver.Inlet.
func (g *guest) Accept(ctx context.Context, port int) (dsec.PortConn, error) {
	if g.agent(ctx) == DsecGuest {
		return g.m.client.Accept(ctx, port)
	}
	return nil, g.lacks("ports of the workload to the node")
}

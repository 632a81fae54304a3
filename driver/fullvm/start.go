package fullvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
)

// The least memory that firmware and a boot loader work with.
const (
	minMemory = 32 << 20
	minUEFI   = 128 << 20
)

// check looks at what a machine is to be made from.
func check(c driver.Config) (image, error) {
	i, err := open(c.Root.Disk)
	if err != nil {
		return i, err
	}
	least := int64(minMemory)
	if i.UEFI {
		least = minUEFI
	}
	switch {
	case c.Resources.Disk < i.Size:
		return i, dsec.Errorf(dsec.Invalid, "a disk of %d MiB does not hold the image of %d MiB", c.Resources.Disk>>20, i.Size>>20)
	case c.Resources.Memory < least:
		return i, dsec.Errorf(dsec.Invalid, "%d MiB of memory are too little: a sandbox of kind %s has at least %d MiB with this image's firmware, and most systems want more", c.Resources.Memory>>20, dsec.FullVM, least>>20)
	}
	if i.UEFI {
		if _, err := os.Stat(firmwareCode); err != nil {
			return i, dsec.Errorf(dsec.Unsupported, "the image needs UEFI firmware, which the host does not have")
		}
	}
	return i, roomFor(ram(c.Resources) + overhead)
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	i, err := check(c)
	if err != nil {
		return nil, err
	}
	t := driver.NewTimer()
	g, err := d.warm.start(ctx, c, i, t)
	if err != nil {
		return nil, err
	}
	m, err := d.dress(ctx, g, c, t)
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return m, nil
}

// boot makes a machine in a new slot from the image alone, and waits for its
// agent. l may say what its memory is.
func (d *Driver) boot(ctx context.Context, c driver.Config, i image, l launch, t *driver.Timer) (*slot, error) {
	g, err := d.newSlot()
	if err != nil {
		return nil, err
	}
	g.image = i
	err = g.newDisk(ctx, c.Resources.Disk)
	t.Mark("disk")
	if err == nil {
		err = d.at("process")
	}
	var p *qemu.Process
	if err == nil {
		l.resources = c.Resources
		p, err = g.start(ctx, l)
	}
	if err == nil {
		g.setProcess(p)
		t.Mark("machine")
		g.agent, err = d.await(ctx, g)
		t.Mark("boot")
	}
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return g, nil
}

// askEvery is how often QEMU is asked who listens in a guest that boots.
const askEvery = 50 * time.Millisecond

// settle is how long a guest in which one agent listens is given for a better
// one: services start in any order.
const settle = 10 * time.Second

// await waits until an agent answers in a guest that boots. That none does is
// no error. A machine that ends meanwhile is Invalid with its last words: the
// image does not boot.
func (d *Driver) await(ctx context.Context, g *slot) (Agent, error) {
	key, err := g.image.key()
	if err != nil {
		return NoAgent, err
	}
	wait := d.config.AgentWait
	d.mu.Lock()
	if d.silent[key] {
		wait /= 8
	}
	d.mu.Unlock()
	p, begin := g.process(), time.Now()
	best, since := NoAgent, time.Time{}
	for {
		found, err := g.hears(ctx)
		if err != nil {
			select {
			case <-p.Done():
				return NoAgent, dsec.Errorf(dsec.Invalid, "the machine did not boot: %s", p.Exit())
			default:
				return NoAgent, err
			}
		}
		if found != best {
			best, since = found, time.Now()
		}
		switch {
		case best == DsecGuest:
			if _, err := g.ctl.Ping(ctx); err != nil {
				return NoAgent, fmt.Errorf("ask the agent: %w", err)
			}
			return best, nil
		case best == QemuGuest && (time.Since(since) > settle || d.without(DsecGuest)):
			return best, nil
		case best == NoAgent && time.Since(begin) > wait:
			d.mu.Lock()
			d.silent[key] = true
			d.mu.Unlock()
			return NoAgent, nil
		}
		select {
		case <-time.After(askEvery):
		case <-p.Done():
		case <-ctx.Done():
			return NoAgent, dsec.WithOp("", "", context.Cause(ctx))
		}
	}
}

// dress makes a machine that runs the sandbox that c asks for.
func (d *Driver) dress(ctx context.Context, g *slot, c driver.Config, t *driver.Timer) (*machine, error) {
	if err := d.at("guest"); err != nil {
		return nil, err
	}
	if err := g.enter(ctx, c); err != nil {
		return nil, err
	}
	t.Mark("enter")
	st := state{ID: c.ID, Image: g.image, Resources: c.Resources, Agent: g.agent, Guest: c.Guest, Hostname: c.Hostname}
	if err := writeState(g.dir, st); err != nil {
		return nil, err
	}
	m := d.newMachine(g, st)
	m.stages = t.Stages()
	if err := d.at("state"); err != nil {
		m.client.Close()
		return nil, err
	}
	if err := d.register(m); err != nil {
		return nil, err
	}
	return m, nil
}

// enter gives the guest its identity.
func (g *slot) enter(ctx context.Context, c driver.Config) error {
	if g.agent != DsecGuest {
		return nil
	}
	r, err := restored()
	if err != nil {
		return err
	}
	id := make([]byte, 16)
	rand.Read(id) //nolint:errcheck // never fails
	r.Hostname, r.Hosts, r.Machine = c.Hostname, hosts(c.Hostname), hex.EncodeToString(id)
	if _, err := g.ctl.Restored(ctx, r); err != nil {
		return fmt.Errorf("wake the guest: %w", err)
	}
	err = g.ctl.Enter(ctx, state{Hostname: c.Hostname, Guest: c.Guest, Resources: c.Resources}.setup())
	if err != nil && dsec.KindOf(err) != dsec.Conflict { // entered in the machine that was saved
		return fmt.Errorf("enter the guest: %w", err)
	}
	return nil
}

// hosts is what a machine's /etc/hosts holds. It is part of its identity: what
// else was in the file of the machine that it is a copy of is lost.
func hosts(name string) string {
	s := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	if name != "" && name != "localhost" {
		s += "127.0.1.1\t" + name + "\n"
	}
	return s
}

// restored is what a guest that was asleep is told.
func restored() (vm.Restored, error) {
	seed := make([]byte, 2*vm.MinSeed)
	if _, err := rand.Read(seed); err != nil {
		return vm.Restored{}, err
	}
	return vm.Restored{Now: time.Now(), Seed: seed}, nil
}

// load makes the slot's process from a saved state, whose disk is there.
func (g *slot) load(ctx context.Context, l launch, file string, o qemu.SaveOptions) (err error) {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	l.incoming = true
	p, err := g.start(ctx, l)
	if err != nil {
		return err
	}
	// The ports' connections are there before the devices know of them, so that
	// the guest is told of no change.
	err = errors.Join(g.control.Connect(), g.frames.Connect())
	if err == nil {
		err = p.Load(ctx, f, o)
	}
	if err == nil {
		err = p.Cont(ctx)
	}
	if err != nil {
		p.Kill()
		return err
	}
	g.setProcess(p)
	return nil
}

// save stops the slot's machine and writes its state.
func (g *slot) save(ctx context.Context, file string, o qemu.SaveOptions) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer f.Close()
	if err := g.process().Save(ctx, f, o); err != nil {
		return fmt.Errorf("save to %s: %w", filepath.Base(file), err)
	}
	return f.Close()
}

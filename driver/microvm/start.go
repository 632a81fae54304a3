package microvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/vm"
)

// fresh makes a copy of a saved guest in a slot of its own; it stands still.
func (d *Driver) fresh(ctx context.Context, t *template, pmem []flat) (*slot, error) {
	g, err := d.newSlot(t.Shape)
	if err != nil {
		return nil, err
	}
	if err = g.keepPmem(pmem); err == nil {
		err = g.copyOf(ctx, t, paths(pmem))
	}
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return g, nil
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	if err := checkRoot(c.Root); err != nil {
		return nil, err
	}
	s, err := shapeFor(c.Resources, d.config.Variant)
	if err != nil {
		return nil, err
	}
	if err := roomFor(s.RAM + overhead); err != nil {
		return nil, err
	}
	d.pool.use(s)
	d.pool.begin()
	defer d.pool.end()
	t := driver.NewTimer()
	tmpl, err := d.template(ctx, s)
	if err != nil {
		return nil, err
	}
	t.Mark("template")
	m, err := d.start(ctx, c, tmpl, t)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// start is Start without what is only waiting.
func (d *Driver) start(ctx context.Context, c driver.Config, tmpl *template, t *driver.Timer) (*machine, error) {
	g := d.pool.take(tmpl.Shape)
	st := state{ID: c.ID, Shape: tmpl.Shape, Resources: c.Resources, Layers: c.Root.Files, Template: tmpl.ID}
	flat, err := d.flat.choose(c.Root.Files, tmpl.Shape)
	if err != nil {
		return nil, err
	}
	for _, f := range flat {
		st.Pmem = append(st.Pmem, f.name)
	}
	if g == nil {
		if g, err = d.fresh(ctx, tmpl, flat); err != nil {
			return nil, err
		}
	}
	t.Mark("machine")
	m, err := d.dress(ctx, g, c, st, t)
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return m, nil
}

// dress makes a standing copy the sandbox that c asks for.
func (d *Driver) dress(ctx context.Context, g *slot, c driver.Config, st state, t *driver.Timer) (*machine, error) {
	if err := d.at("disks"); err != nil {
		return nil, err
	}
	if err := d.blanks.make(g.path(upperFile), c.Resources.Disk); err != nil {
		return nil, err
	}
	if err := d.blanks.make(g.path(outputFile), outputSize); err != nil {
		return nil, err
	}
	t.Mark("disks")
	if err := g.bind(ctx, st.disks(g)); err != nil {
		return nil, err
	}
	at, err := extents(st.Layers, st.Pmem)
	if err != nil {
		return nil, err
	}
	t.Mark("bind")
	if err := d.at("guest"); err != nil {
		return nil, err
	}
	if err := g.process().Cont(ctx); err != nil {
		return nil, err
	}
	answer, cancel := d.answering(ctx)
	defer cancel()
	answer, stop := g.alive(answer)
	defer stop()
	if _, err := g.ctl.Restored(answer, identity(nil)); err != nil {
		return nil, fmt.Errorf("wake the guest: %w", err)
	}
	t.Mark("wake")
	id := identity(&c)
	if err := g.ctl.Enter(answer, vm.Setup{
		Layers: at, Upper: upperDisk, Output: outputDisk,
		Hostname: c.Hostname, Hosts: id.Hosts, Resolv: resolvFile, Machine: id.Machine,
		Env: c.Guest.Env, Cwd: c.Guest.Cwd, User: c.Guest.User,
		Limits: vm.Limits{Memory: g.shape.workMemory(c.Resources), CPU: c.Resources.CPU, Pids: c.Resources.Pids},
	}); err != nil {
		return nil, fmt.Errorf("enter the environment: %w", err)
	}
	t.Mark("enter")
	if err := d.at("limits"); err != nil {
		return nil, err
	}
	if err := g.limit(c.Resources); err != nil {
		return nil, err
	}
	m := d.newMachine(g, st)
	m.stages = t.Stages()
	if err := writeState(g.dir, st); err != nil {
		return nil, errors.Join(err, m.client.Close())
	}
	if err := d.register(m); err != nil {
		return nil, err
	}
	t.Mark("record")
	m.stages = t.Stages()
	return m, nil
}

// at is where tests make a start fail.
func (d *Driver) at(place string) error {
	if d.fault == nil {
		return nil
	}
	return d.fault(place)
}

// disks are the machine's, in its slot.
func (st state) disks(g *slot) disks {
	var block []driver.LayerFiles
	next := 0
	for _, l := range st.Layers {
		if next < len(st.Pmem) && st.Pmem[next] == pmemName(l) {
			next++
			continue
		}
		block = append(block, l)
	}
	return disks{layers: block, upper: g.path(upperFile), output: g.path(outputFile)}
}

// identity is what makes a copy another machine; without c only what is so of
// every machine that was asleep.
func identity(c *driver.Config) vm.Restored {
	r := vm.Restored{Now: time.Now(), Seed: make([]byte, 64)}
	rand.Read(r.Seed) //nolint:errcheck // never fails
	if c != nil {
		var machine [16]byte
		rand.Read(machine[:]) //nolint:errcheck // as above
		r.Machine = hex.EncodeToString(machine[:])
		r.Hostname, r.Hosts = c.Hostname, hostsFile(c.Hostname)
	}
	return r
}

func hostsFile(hostname string) string {
	return "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n"
}

// resolvFile names no server: a machine has no network. An empty file would make
// resolvers ask loopback and wait.
const resolvFile = "# this sandbox has no network\noptions timeout:1 attempts:1\n"

// maxLayers is how many layers overlayfs takes from its options.
const maxLayers = 480

func checkRoot(r driver.Root) error {
	switch {
	case len(r.Files) == 0 || r.Dir != "" || r.Disk != "" || len(r.Layers) > 0:
		return dsec.Errorf(dsec.Invalid, "a microVM's root is made of layers as files")
	case len(r.Files) > maxLayers:
		return dsec.Errorf(dsec.Invalid, "a microVM's root has at most %d layers", maxLayers)
	}
	for _, l := range r.Files {
		for _, path := range append([]string{l.Meta}, l.Data...) {
			if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
				return dsec.Errorf(dsec.Invalid, "layer %s is not there as files: %v", l.Digest, err)
			}
		}
	}
	return nil
}

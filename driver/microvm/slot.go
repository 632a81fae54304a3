package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
)

// slot is a place for one machine: a folder, control groups, a user, and the
// QEMU process in it, if there is one. It knows no sandbox.
type slot struct {
	driver *Driver
	n      int
	dir    string
	shape  shape
	group  *jail.Group

	control *qemu.Port
	frames  *qemu.Port
	ctl     *vm.Client

	mu       sync.Mutex
	proc     *qemu.Process
	template string       // whose memory the process maps privately; empty if none's
	hushed   func(string) // called when the guest closes a port; nil while it may
}

// MaxSlots bounds the machines of a driver.
const MaxSlots = 1 << 14

// FirstID is the host user of slot 0's process; those of the others follow. It
// lies below the ranges of package container.
const FirstID = 0x6fff_0000

// newSlot takes a free slot and makes its folder and groups.
func (d *Driver) newSlot(s shape) (*slot, error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, dsec.Errorf(dsec.Unavailable, "the node is closing")
	}
	n, ok := d.slots.Take()
	d.mu.Unlock()
	if !ok {
		return nil, dsec.Errorf(dsec.Exhausted, "all %d places for microVMs are in use", MaxSlots)
	}
	g := d.slotAt(n)
	g.shape = s
	err := os.Mkdir(g.dir, 0o711)
	if err == nil {
		g.group, err = d.cgroups.Make(strconv.Itoa(n), 0)
	}
	if err == nil {
		err = g.group.Limit(dsec.Resources{CPU: dsec.MaxCPU, Memory: s.charge(), Pids: processThreads})
	}
	if err != nil {
		return nil, noSpace(errors.Join(err, g.destroy()))
	}
	return g, nil
}

// processThreads is what QEMU may have: processors, workers for disks, its own.
const processThreads = 256

// slotAt gives the slot of a number, without looking at it.
func (d *Driver) slotAt(n int) *slot {
	dir := filepath.Join(d.config.Dir, strconv.Itoa(n))
	g := &slot{driver: d, n: n, dir: dir, control: qemu.NewPort(filepath.Join(dir, control)), frames: qemu.NewPort(filepath.Join(dir, frames))}
	g.ctl = vm.NewClient(g.control.Dial)
	return g
}

func (g *slot) path(name string) string { return filepath.Join(g.dir, name) }

// process is the slot's QEMU; nil if there is none.
func (g *slot) process() *qemu.Process {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.proc
}

// maps gives the template whose memory the slot's process maps; empty if none's.
func (g *slot) maps() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.template
}

// launch says how a process is started.
type launch struct {
	memory   *os.File
	shared   bool
	template string
	pmem     []string // files; the rest of its devices is empty
	boot     *boot    // nil for a machine to be loaded
}

// launch starts a process. One that does not boot waits to be loaded.
func (g *slot) launch(ctx context.Context, l launch) error {
	p, err := g.driver.platform(ctx)
	if err != nil {
		return err
	}
	if n := g.shape.pmems(); len(l.pmem) < n {
		empty, err := g.driver.emptyPmem(g.shape)
		if err != nil {
			return err
		}
		l.pmem = append(slices.Clone(l.pmem), empty[len(l.pmem):]...)
	}
	c := command{shape: g.shape, dir: g.dir, memory: l.memory, shared: l.shared, pmem: l.pmem, boot: l.boot, net: g.driver.config.net}
	args, files, err := c.args(p.accel)
	if err != nil {
		return err
	}
	proc, err := qemu.Start(ctx, qemu.Config{
		Dir: g.dir, Args: args, Accel: p.accel, Files: files, Incoming: l.boot == nil, Group: g.group,
		UID: FirstID + g.n, GID: FirstID + g.n, Event: g.event,
	})
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.proc, g.template = proc, l.template
	g.mu.Unlock()
	return nil
}

// event hears of QEMU's events.
func (g *slot) event(e qemu.Event) {
	if e.Name != "VSERPORT_CHANGE" {
		return
	}
	var d struct {
		ID   string
		Open bool
	}
	if e.Into(&d) != nil || d.Open {
		return
	}
	g.mu.Lock()
	f := g.hushed
	g.mu.Unlock()
	if f != nil {
		f("the agent in the guest closed its port")
	}
}

// onHush sets what is called when the guest closes a port; nil for nothing.
func (g *slot) onHush(f func(string)) {
	g.mu.Lock()
	g.hushed = f
	g.mu.Unlock()
}

// alive gives a context that ends with the process too.
func (g *slot) alive(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if p := g.process(); p != nil {
		go func() {
			select {
			case <-p.Done():
				cancel(dsec.Errorf(dsec.Unavailable, "the machine ended: %s", p.Exit()))
			case <-ctx.Done():
			}
		}()
	}
	return ctx, func() { cancel(nil) }
}

// ping waits until the guest answers.
func (g *slot) ping(ctx context.Context) (vm.Info, error) {
	ctx, cancel := g.alive(ctx)
	defer cancel()
	for {
		i, err := g.ctl.Ping(ctx)
		if err == nil || ctx.Err() != nil || dsec.KindOf(err) != dsec.Unavailable {
			return i, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// copyOf loads the saved guest t into a new process; it stands still.
func (g *slot) copyOf(ctx context.Context, t *template, pmem []string) error {
	if err := g.launch(ctx, launch{memory: t.memory, template: t.ID, pmem: pmem}); err != nil {
		return err
	}
	device, err := reopened(t.device, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer device.Close()
	return g.proc.Load(ctx, device, qemu.SaveOptions{})
}

// saveDevices writes what a standing machine's devices are in. Memory and disks
// are not in it.
func (g *slot) saveDevices(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer f.Close()
	p := g.process()
	name, err := p.AddFile(ctx, f)
	if err != nil {
		return err
	}
	defer p.RemoveFile(ctx, name) //nolint:errcheck // it is one descriptor
	// The call is there for Xen, which saves memory itself, as we do.
	if err := p.Execute(ctx, "xen-save-devices-state", map[string]any{"filename": name, "live": false}, nil); err != nil {
		var st unix.Statfs_t
		if unix.Fstatfs(int(f.Fd()), &st) == nil && st.Bavail*uint64(st.Bsize) < 1<<20 {
			return dsec.Errorf(dsec.Exhausted, "no space is left on the host's disk: %w", err)
		}
		return fmt.Errorf("save devices: %w", err)
	}
	return nil
}

// disks are what a machine's block devices are bound to.
type disks struct {
	layers        []driver.LayerFiles
	upper, output string // paths
}

// bind puts disks under the devices of a machine that has not looked at them,
// or believes to know them already.
func (g *slot) bind(ctx context.Context, d disks) error {
	if len(d.layers) > 0 {
		if err := g.bindRoot(ctx, d.layers); err != nil {
			return err
		}
	}
	for node, path := range map[string]string{upperDisk: d.upper, outputDisk: d.output} {
		if path == "" {
			continue
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		name, err := g.process().AddFile(ctx, f)
		f.Close()
		if err != nil {
			return err
		}
		if err := g.process().Swap(ctx, node, map[string]any{"driver": "file", "filename": name, "discard": "unmap", "locking": "off"}); err != nil {
			return err
		}
	}
	return nil
}

func (g *slot) bindRoot(ctx context.Context, layers []driver.LayerFiles) error {
	p := g.process()
	var extents []qemu.Extent
	for _, l := range layers {
		for _, path := range append([]string{l.Meta}, l.Data...) {
			f, err := os.Open(path)
			if err != nil {
				return fmt.Errorf("open layer %s: %w", l.Digest, err)
			}
			fi, err := f.Stat()
			var name string
			if err == nil {
				name, err = p.AddFile(ctx, f)
			}
			f.Close()
			if err != nil {
				return err
			}
			extents = append(extents, qemu.Extent{File: name, Size: whole(fi.Size())})
		}
	}
	desc, err := qemu.ConcatFile(extents)
	if err != nil {
		return err
	}
	defer desc.Close()
	name, err := p.AddFile(ctx, desc)
	if err != nil {
		return err
	}
	return p.Swap(ctx, rootDisk, map[string]any{
		"driver": "vmdk", "read-only": true,
		"file": map[string]any{"driver": "file", "filename": name, "read-only": true, "locking": "off"},
	})
}

// unbind takes all disks away.
func (g *slot) unbind(ctx context.Context) error {
	for _, node := range []string{rootDisk, upperDisk, outputDisk} {
		child := map[string]any{"driver": "null-co", "size": int64(diskSlot), "read-zeroes": true, "read-only": node == rootDisk}
		if err := g.process().Swap(ctx, node, child); err != nil {
			return err
		}
	}
	return nil
}

// whole rounds up to whole pages.
func whole(n int64) int64 { return (n + page - 1) &^ (page - 1) }

// extents says where the layers lie on the root disk, but for those in
// persistent memory.
func extents(layers []driver.LayerFiles, pmem []string) ([]vm.Extent, error) {
	var out []vm.Extent
	var at int64
	next := 0
	for _, l := range layers {
		size, err := layerSize(l)
		if err != nil {
			return nil, err
		}
		if next < len(pmem) && pmem[next] == pmemName(l) {
			out = append(out, vm.Extent{Disk: fmt.Sprintf("pmem%d", next), DAX: true})
			next++
			continue
		}
		out = append(out, vm.Extent{Disk: rootDisk, Offset: at, Size: size})
		at += size
	}
	if at > diskSlot {
		return nil, dsec.Errorf(dsec.Invalid, "the environment's layers have more than %d TiB", int64(diskSlot)>>40)
	}
	return out, nil
}

func layerSize(l driver.LayerFiles) (int64, error) {
	var size int64
	for _, path := range append([]string{l.Meta}, l.Data...) {
		fi, err := os.Stat(path)
		if err != nil {
			return 0, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
		size += whole(fi.Size())
	}
	return size, nil
}

// kill ends the process, if there is one, and returns when it is gone.
func (g *slot) kill() {
	if p := g.process(); p != nil {
		p.Kill()
	}
}

// destroy ends whatever there is in a slot and frees it.
func (g *slot) destroy() error {
	g.onHush(nil)
	g.ctl.Close() //nolint:errcheck // its socket goes with the process
	g.control.Close()
	g.frames.Close()
	g.kill()
	var errs []error
	if g.group != nil {
		errs = append(errs, g.group.KillAll(), g.group.Remove())
	}
	errs = append(errs, os.RemoveAll(g.dir))
	if err := errors.Join(errs...); err != nil {
		return err // the slot stays taken
	}
	g.driver.mu.Lock()
	g.driver.slots.Free(g.n)
	g.driver.mu.Unlock()
	return nil
}

// limit sets the limits of a machine whose guest is a sandbox.
func (g *slot) limit(r dsec.Resources) error {
	return g.group.Limit(dsec.Resources{CPU: r.CPU, Memory: g.shape.charge(), Pids: processThreads})
}

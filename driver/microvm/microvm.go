// Package microvm runs sandboxes as small virtual machines with a kernel of
// their own, each a private copy of one saved guest.
//
// A guest's boot does not depend on its environment. So a node boots one for
// each size, saves it (a template), and every machine maps the template's
// memory privately, gets its disks late, and is told by package vm what it is.
// What a machine has written is all that it costs, and all that a pause keeps.
//
// The package knows neither images nor what happens inside: the guest is
// cmd/dsec-guest's business, the process package qemu's.
//
// What it owns on the host, below Config.Dir:
//
//	templates/KEY     saved guests, see template.go
//	flat              layers in the form of variant DAX, see dax.go
//	ext4-SIZE         empty writable disks
//	initramfs-SUM     what templates boot from
//	NUMBER            the folder of a slot, which is one machine's
//
// and for each slot control groups of that number below Config.Name, and the
// host user FirstID + number.
//
// Invariants: those of package driver, and:
//   - Nothing in the pool depends on a Spec.
//   - A template is never written to once it is one: its memory is sealed.
//   - A slot's state names a sandbox from its successful start to its end.
//
// Lock order: machine.moving, then machine.mu, then Driver.mu, then slot.mu.
//
// Read next: docs/decisions/backends.md, template.go, then start.go.
package microvm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm/initramfs"
)

// Variant is how the layers of an environment reach the guest.
type Variant string

// The variants.
const (
	Block Variant = "block" // one disk put together from all layers
	DAX   Variant = "dax"   // a persistent memory device each: the page cache of the host is the guest's
)

// Config says where a driver lives. Dir, Guest, Kernel and Name are required.
type Config struct {
	Dir     string // its own folder, on a file system that holds sparse files
	Guest   string // path of the dsec-guest binary
	Kernel  string // path of the guest kernel
	Modules string // folder of its modules; default modules-VERSION beside vmlinuz-VERSION
	Name    string // of its control groups, unique on the host

	Variant Variant // default Block

	// The ready pool of each size in use is filled to High once it falls below
	// Low. 0 means the default, negative none. Variant DAX has no pool: its
	// devices cannot be bound late.
	Low, High int

	// Templates is how many saved guests are kept; default DefaultTemplates.
	Templates int

	// TemplateIdle is after how long without a use the memory of a saved guest is
	// given back, that no machine shares; its files stay, and the next start reads
	// them. Default DefaultTemplateIdle.
	TemplateIdle time.Duration

	// Answer is how long a guest may take to answer at a start; default
	// DefaultAnswer.
	Answer time.Duration

	Log *slog.Logger // default none

	net []string // arguments for a network device: the network's hook
}

// Defaults of a Config.
const (
	DefaultLow    = 1
	DefaultHigh   = 2
	DefaultAnswer = time.Minute
)

const templateDir = "templates"

// Feature says whether the host can run microVMs with this configuration, and
// if not, why.
func Feature(c Config) dsec.FeatureStatus {
	f := dsec.FeatureStatus{Name: "microvm", Cost: "sandboxes of kind microvm are Unsupported"}
	c.defaults()
	if err := possible(c); err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Detail = true, "QEMU and a guest kernel are there"
	return f
}

func possible(c Config) error {
	if _, err := exec.LookPath(qemu.Program); err != nil {
		return fmt.Errorf("%s is not installed", qemu.Program)
	}
	for _, f := range []struct{ path, what string }{
		{c.Kernel, "guest kernel"}, {filepath.Join(c.Modules, initramfs.IndexFile), "modules of the guest kernel"}, {c.Guest, "guest program"},
	} {
		if _, err := os.Stat(f.path); err != nil {
			return fmt.Errorf("no %s: %w", f.what, err)
		}
	}
	return nil
}

func (c *Config) defaults() {
	if c.Variant == "" {
		c.Variant = Block
	}
	if c.Low == 0 {
		c.Low = DefaultLow
	}
	if c.High == 0 {
		c.High = DefaultHigh
	}
	if c.Low < 0 || c.High < 0 || c.Variant == DAX {
		c.Low, c.High = 0, 0
	}
	c.High = max(c.High, c.Low)
	if c.Templates <= 0 {
		c.Templates = DefaultTemplates
	}
	if c.TemplateIdle <= 0 {
		c.TemplateIdle = DefaultTemplateIdle
	}
	if c.Answer == 0 {
		c.Answer = DefaultAnswer
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Modules == "" {
		version, _ := strings.CutPrefix(filepath.Base(c.Kernel), "vmlinuz-")
		c.Modules = filepath.Join(filepath.Dir(c.Kernel), "modules-"+version)
	}
}

// Driver makes microVMs. It implements driver.Driver, driver.Rooted and
// driver.Restorer.
type Driver struct {
	config  Config
	cgroups *jail.Cgroups
	blanks  blanks
	flat    flats

	finding sync.Mutex // held while plat is found out
	plat    *platform

	warmer struct { // what a pool member mounts, made once
		sync.Mutex
		ready bool
	}

	life    context.Context // ends with Close
	end     context.CancelFunc
	working sync.WaitGroup // background work
	pool    pool

	mu        sync.Mutex
	slots     driver.Slots
	machines  map[int]*machine // by slot
	templates map[shape]*template
	making    map[shape]*making
	ticks     int64
	closed    bool

	fault func(place string) error // of tests: fails a start at a named place
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Rooted   = (*Driver)(nil)
	_ driver.Restorer = (*Driver)(nil)
)

// Open opens the driver's folder; it costs next to nothing, and boots nothing.
// It is Unsupported, with the reason, on a host that cannot run microVMs.
// Adopt comes next.
func Open(c Config) (*Driver, error) {
	c.defaults()
	if err := possible(c); err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "microVMs: %w", err)
	}
	if c.Variant != Block && c.Variant != DAX {
		return nil, dsec.Errorf(dsec.Invalid, "microVMs have no variant %q", c.Variant)
	}
	for _, dir := range []string{"", templateDir, flatDir} {
		if err := os.MkdirAll(filepath.Join(c.Dir, dir), 0o711); err != nil {
			return nil, err
		}
	}
	cgroups, err := jail.OpenCgroups(c.Name)
	if err != nil {
		return nil, err
	}
	d := &Driver{
		slots:  driver.Slots{Limit: MaxSlots},
		config: c, cgroups: cgroups, blanks: blanks{dir: c.Dir}, flat: flats{dir: filepath.Join(c.Dir, flatDir)},
		machines: map[int]*machine{}, templates: map[shape]*template{}, making: map[shape]*making{},
	}
	d.life, d.end = context.WithCancel(context.Background())
	d.pool.init(d)
	return d, nil
}

// Kind is dsec.MicroVM.
func (d *Driver) Kind() dsec.Kind { return dsec.MicroVM }

// RootForm is driver.FormFiles.
func (d *Driver) RootForm() driver.RootForm { return driver.FormFiles }

// Prepare boots the saved guest for machines of that size and fills their
// pool, so that the first create need not wait for it.
func (d *Driver) Prepare(ctx context.Context, r dsec.Resources) error {
	s, err := shapeFor(r, d.config.Variant)
	if err != nil {
		return err
	}
	if _, err := d.template(ctx, s); err != nil {
		return err
	}
	d.pool.use(s)
	return d.pool.full(ctx, s)
}

// Adopt implements driver.Driver.
func (d *Driver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	es, err := os.ReadDir(d.config.Dir)
	if err != nil {
		return nil, err
	}
	var out []driver.Machine
	var errs []error
	known := map[string]bool{}
	for _, e := range es {
		if strings.HasPrefix(e.Name(), forkDir) {
			errs = append(errs, os.RemoveAll(filepath.Join(d.config.Dir, e.Name())))
		}
	}
	for _, e := range es {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n < 0 || n >= MaxSlots {
			continue
		}
		d.mu.Lock()
		d.slots.Mark(n)
		d.mu.Unlock()
		m, err := d.adopt(ctx, n)
		if err != nil {
			errs = append(errs, fmt.Errorf("adopt slot %d: %w", n, err))
			known[e.Name()] = true // left alone
		} else if m != nil {
			out = append(out, m)
			known[e.Name()] = true
		}
	}
	groups, err := d.cgroups.Slots()
	errs = append(errs, err)
	for _, s := range groups {
		if !known[s] {
			g := d.cgroups.Group(s)
			errs = append(errs, g.KillAll(), g.Remove())
		}
	}
	errs = append(errs, d.sweepTemplates(), d.flat.sweep())
	d.pool.start()
	return out, errors.Join(errs...)
}

// adopt looks at one slot that an earlier process left.
func (d *Driver) adopt(ctx context.Context, n int) (*machine, error) {
	g := d.slotAt(n)
	g.group = d.cgroups.Group(strconv.Itoa(n))
	proc, err := qemu.Attach(ctx, g.dir, g.event)
	if err != nil {
		return nil, err
	}
	g.proc = proc
	st, err := readState(g.dir)
	if err != nil || st.ID == "" || proc == nil && !st.Paused {
		return nil, g.destroy()
	}
	g.shape = st.Shape
	g.mu.Lock()
	g.template = st.Template
	g.mu.Unlock()
	m := d.newMachine(g, st)
	if st.Paused {
		// A resume that did not come to its end; or a pause that had.
		g.kill()
		g.mu.Lock()
		g.proc = nil
		g.mu.Unlock()
		m.stand()
	} else if err := m.wake(ctx); err != nil {
		return nil, err
	}
	return m, d.register(m)
}

// Close implements driver.Driver: machines without a sandbox end, templates are
// on disk.
func (d *Driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	left := len(d.machines)
	var ms []*machine
	for _, m := range d.machines {
		ms = append(ms, m)
	}
	d.mu.Unlock()
	d.end()
	err := d.pool.close()
	d.working.Wait()
	for _, m := range ms {
		m.detach()
	}
	d.mu.Lock()
	for _, t := range d.templates {
		t.close()
	}
	clear(d.templates)
	d.mu.Unlock()
	if left == 0 {
		if groups, _ := d.cgroups.Slots(); len(groups) == 0 {
			err = errors.Join(err, d.cgroups.Remove())
		}
	}
	return err
}

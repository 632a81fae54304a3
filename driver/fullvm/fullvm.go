// Package fullvm runs sandboxes as whole machines: firmware, a disk image of any
// operating system, a screen, on QEMU's q35.
//
// It knows nothing of what is in an image. How a machine is worked with depends
// on what answers inside, found out while it boots and again whenever it is
// used: the agent dsec-guest gives every operation; qemu-guest-agent gives
// commands without a terminal and whole files; with neither there are the screen
// and the keyboard, and every other call is Unsupported and says so.
//
// What it owns on the host is one folder for each slot, below Config.Dir, and
// while a machine is in it the control groups of that number and the user
// FirstID + number:
//
//	machine       who it is, see state.go
//	disk          what the machine changed of its image: a qcow2 overlay
//	vars          settings of UEFI firmware, where the image needs that
//	memory        the machine while it is paused
//	qemu qmp c w a  package qemu's record, the monitor, and the ports
//
// and the folder warm: machines saved just after their boot, see warm.go.
//
// Invariants: those of package driver. An image is opened for reading only, and
// one that names other files of the host is refused. Order of a machine's end:
// the process is gone, its groups and folder are removed, Done is closed.
//
// Read next: start.go, then packages qemu and vm.
package fullvm

import (
	"context"
	"errors"
	"fmt"
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
)

// FirstID is the host user of slot 0's process; those of the others follow.
const (
	FirstID  = 0x6ffe_0000
	MaxSlots = 1 << 12
)

// Defaults of Config.
const (
	DefaultAgentWait  = 2 * time.Minute
	DefaultAgentGrace = 30 * time.Second
	DefaultWarm       = 2
)

// Agent names what may answer inside a machine.
type Agent string

// The agents, best first.
const (
	NoAgent   Agent = ""
	DsecGuest Agent = "dsec-guest"
	QemuGuest Agent = "qemu-guest-agent"
)

// Config says where a driver lives.
type Config struct {
	Dir  string // its own folder, on a file system that holds sparse files; required
	Name string // of its control groups, unique on the host; required

	// Accel is qemu.KVM or qemu.TCG. Default: KVM where Kernel, any guest's
	// kernel, really boots under it, which is tried once before the first start;
	// TCG without a Kernel.
	Accel  string
	Kernel string

	// AgentWait is how long a start waits for an agent in the guest; then the
	// machine is one with a screen only. The images for which that happened are
	// remembered, and their next start waits AgentWait/8. Default
	// DefaultAgentWait.
	AgentWait time.Duration

	// AgentGrace is how long dsec-guest may be gone from a machine that had it
	// before its sandbox has ended: a service starts anew, and a system may update
	// it. Default DefaultAgentGrace.
	AgentGrace time.Duration

	// Warm is how many images of a size have a machine kept that was saved just
	// after its boot, and is what later starts begin from. Default DefaultWarm,
	// negative none.
	Warm int

	// Without are agents that are not looked for.
	Without []Agent
}

// Driver makes full VMs. It implements driver.Driver, driver.Rooted and
// driver.Restorer.
type Driver struct {
	config  Config
	cgroups *jail.Cgroups
	warm    *warm

	mu       sync.Mutex
	taken    map[int]bool
	machines map[int]*machine // by slot
	silent   map[string]bool  // images in which no agent answered
	looked   bool             // Adopt was called
	accel    string           // once it is known
	closed   bool
	fault    func(place string) error // of tests
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Rooted   = (*Driver)(nil)
	_ driver.Restorer = (*Driver)(nil)
)

// Feature says whether the host can run full VMs, and if not, why.
func Feature() dsec.FeatureStatus {
	f := dsec.FeatureStatus{Name: "fullvm", Cost: "sandboxes of kind fullvm are Unsupported"}
	for _, program := range []string{qemu.Program, imageProgram} {
		if _, err := exec.LookPath(program); err != nil {
			f.Detail = program + " is not installed"
			return f
		}
	}
	f.OK, f.Detail = true, "QEMU is there"
	if _, err := os.Stat(firmwareCode); err != nil {
		f.Detail += ", but no UEFI firmware: images that need it are Unsupported"
	}
	return f
}

// Open opens the driver's folder; it boots nothing. It is Unsupported, with the
// reason, on a host that cannot run full VMs. Adopt comes next.
func Open(c Config) (*Driver, error) {
	if f := Feature(); !f.OK {
		return nil, dsec.Errorf(dsec.Unsupported, "full VMs: %s", f.Detail)
	}
	if c.AgentWait == 0 {
		c.AgentWait = DefaultAgentWait
	}
	if c.AgentGrace == 0 {
		c.AgentGrace = DefaultAgentGrace
	}
	if c.Warm == 0 {
		c.Warm = DefaultWarm
	}
	if err := os.MkdirAll(filepath.Join(c.Dir, warmDir), 0o700); err != nil {
		return nil, err
	}
	cgroups, err := jail.OpenCgroups(c.Name)
	if err != nil {
		return nil, err
	}
	d := &Driver{config: c, cgroups: cgroups, taken: map[int]bool{}, machines: map[int]*machine{}, silent: map[string]bool{}}
	d.warm = newWarm(d)
	return d, nil
}

// Kind is dsec.FullVM.
func (d *Driver) Kind() dsec.Kind { return dsec.FullVM }

// RootForm is driver.FormDisk.
func (d *Driver) RootForm() driver.RootForm { return driver.FormDisk }

// Adopt implements driver.Driver.
func (d *Driver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	d.mu.Lock()
	d.looked = true
	d.mu.Unlock()
	es, err := os.ReadDir(d.config.Dir)
	if err != nil {
		return nil, err
	}
	var out []driver.Machine
	var errs []error
	for _, e := range es {
		if strings.HasPrefix(e.Name(), forkDir) {
			errs = append(errs, os.RemoveAll(filepath.Join(d.config.Dir, e.Name())))
		}
		n, err := strconv.Atoi(e.Name())
		if err != nil || !e.IsDir() {
			continue
		}
		d.mu.Lock()
		d.taken[n] = true
		d.mu.Unlock()
		g := d.slot(n)
		m, err := d.adopt(ctx, g)
		if err != nil || m == nil {
			errs = append(errs, err, g.destroy())
			continue
		}
		out = append(out, m)
	}
	// Groups of slots whose folder is gone already.
	groups, err := d.cgroups.Slots()
	errs = append(errs, err)
	for _, s := range groups {
		if n, err := strconv.Atoi(s); err == nil && !d.isTaken(n) {
			g := d.cgroups.Group(s)
			errs = append(errs, g.KillAll(), g.Remove())
		}
	}
	return out, errors.Join(errs...)
}

func (d *Driver) isTaken(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.taken[n]
}

// adopt gives the machine of a slot's folder; nil if there is none any more.
func (d *Driver) adopt(ctx context.Context, g *slot) (*machine, error) {
	st, err := readState(g.dir)
	if err != nil || st.ID == "" {
		return nil, nil //nolint:nilerr // a start that did not come to its end
	}
	g.image, g.agent = st.Image, st.Agent
	p, err := qemu.Attach(ctx, g.dir, g.note)
	if err != nil {
		return nil, err
	}
	if p == nil && !st.Paused {
		return nil, nil
	}
	if p != nil && st.Paused { // it was being resumed, or had not ended yet
		p.Kill()
		p = nil
	}
	g.setProcess(p)
	if p == nil {
		g.stand()
	}
	m := d.newMachine(g, st)
	if err := d.register(m); err != nil {
		return nil, err
	}
	return m, nil
}

// Close implements driver.Driver.
func (d *Driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	var ms []*machine
	for _, m := range d.machines {
		ms = append(ms, m)
	}
	none := d.looked && len(d.taken) == 0
	d.mu.Unlock()
	for _, m := range ms {
		m.detach()
	}
	d.warm.close()
	if none {
		return d.cgroups.Remove()
	}
	return nil
}

// accelerator says how guests are run.
func (d *Driver) accelerator(ctx context.Context) (string, error) {
	d.mu.Lock()
	accel := d.accel
	d.mu.Unlock()
	if accel != "" {
		return accel, nil
	}
	switch {
	case d.config.Accel != "":
		accel = d.config.Accel
	case d.config.Kernel != "":
		v, err := qemu.Accelerator(ctx, d.config.Kernel, d.config.Dir)
		if err != nil {
			return "", err
		}
		accel = v.Accel
	default:
		accel = qemu.TCG
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.accel = accel
	return accel, nil
}

// at is a place where a test may make a start fail.
func (d *Driver) at(place string) error {
	d.mu.Lock()
	f := d.fault
	d.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(place)
}

// newSlot takes a free slot and makes its folder and groups.
func (d *Driver) newSlot() (*slot, error) {
	d.mu.Lock()
	n := 0
	for d.taken[n] {
		n++
	}
	if n >= MaxSlots || d.closed {
		d.mu.Unlock()
		return nil, dsec.Errorf(dsec.Exhausted, "all %d places for full VMs are in use", MaxSlots)
	}
	d.taken[n] = true
	d.mu.Unlock()
	g := d.slot(n)
	err := os.Mkdir(g.dir, 0o700)
	if err == nil {
		g.group, err = d.cgroups.Make(strconv.Itoa(n), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make place for a machine: %w", err), g.destroy())
	}
	return g, nil
}

func (d *Driver) slot(n int) *slot {
	name := strconv.Itoa(n)
	return newSlot(d, n, filepath.Join(d.config.Dir, name), d.cgroups.Group(name))
}

func (d *Driver) freeSlot(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.taken, n)
	delete(d.machines, n)
}

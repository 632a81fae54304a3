package fullvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
)

// Sockets in a slot's folder, of the ports of these names.
var ports = []struct {
	socket, name string
	agent        Agent
}{
	{"c", vm.ControlPort, DsecGuest},
	{"w", vm.WirePort, DsecGuest},
	{"a", "org.qemu.guest_agent.0", QemuGuest},
}

const (
	controlPort = 0
	wirePort    = 1
	qgaPort     = 2
)

// slot is a place for one machine: a folder, control groups, a user, and the
// QEMU process in it, if there is one. It knows no sandbox.
type slot struct {
	driver *Driver
	n      int
	dir    string
	group  *jail.Group
	image  image

	control *qemu.Port
	frames  *qemu.Port
	ctl     *vm.Client

	mu      sync.Mutex
	proc    *qemu.Process
	agent   Agent
	vigil   *vigil        // over the agent; nil for none
	running chan struct{} // closed while the machine runs; nothing reaches the guest of one that does not
}

func newSlot(d *Driver, n int, dir string, group *jail.Group) *slot {
	g := &slot{driver: d, n: n, dir: dir, group: group, running: make(chan struct{})}
	g.control, g.frames = qemu.NewPort(g.path(ports[controlPort].socket)), qemu.NewPort(g.path(ports[wirePort].socket))
	g.ctl = vm.NewClient(g.control.Dial)
	return g
}

func (g *slot) path(name string) string { return filepath.Join(g.dir, name) }

func (g *slot) process() *qemu.Process {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.proc
}

// setProcess says that the slot's machine runs in p, or with nil that it has no
// process now and is waited for.
func (g *slot) setProcess(p *qemu.Process) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.proc = p
	select {
	case <-g.running:
		if p == nil {
			g.running = make(chan struct{})
		}
	default:
		if p != nil {
			close(g.running)
		}
	}
}

// ready waits until the machine has a process.
func (g *slot) ready(ctx context.Context) (*qemu.Process, error) {
	for {
		g.mu.Lock()
		p, running := g.proc, g.running
		g.mu.Unlock()
		if p != nil {
			return p, nil
		}
		select {
		case <-running:
		case <-ctx.Done():
			return nil, dsec.WithOp("", "", context.Cause(ctx))
		}
	}
}

// dialQGA connects to the port of qemu-guest-agent. QEMU takes one connection at
// a time.
func (g *slot) dialQGA(ctx context.Context) (io.ReadWriteCloser, error) {
	if _, err := g.ready(ctx); err != nil {
		return nil, err
	}
	c, err := jail.DialPath(g.path(ports[qgaPort].socket))
	if err != nil {
		return nil, dsec.Errorf(dsec.Unavailable, "connect to the guest: %w", err)
	}
	return c, nil
}

// stand makes the bytes of the agent's ports come to rest.
func (g *slot) stand() {
	g.control.Suspend()
	g.frames.Suspend()
}

// hears finds out which agent has its port open in the guest.
func (g *slot) hears(ctx context.Context) (Agent, error) {
	p := g.process()
	if p == nil {
		return NoAgent, dsec.Errorf(dsec.Unavailable, "the machine does not run")
	}
	var devs []struct {
		Label string `json:"label"`
		Open  bool   `json:"frontend-open"`
	}
	if err := p.Execute(ctx, "query-chardev", nil, &devs); err != nil {
		return NoAgent, err
	}
	found := NoAgent
	for i, port := range ports {
		for _, d := range devs {
			if d.Label == "port"+strconv.Itoa(i) && d.Open && i != wirePort && found == NoAgent {
				found = port.agent
			}
		}
	}
	return found, nil
}

// launch says how a slot's process is started.
type launch struct {
	resources dsec.Resources
	memory    *os.File // the file under its memory; nil for its own
	shared    bool     // what it writes to memory is in the file
	incoming  bool
}

// codeCache is how much translated code an emulated machine keeps, in MiB: QEMU's
// own default is a gigabyte, which would be part of each machine.
const codeCache = 192

// Firmware, as Debian has it.
const (
	firmwareCode = "/usr/share/OVMF/OVMF_CODE_4M.fd"
	firmwareVars = "/usr/share/OVMF/OVMF_VARS_4M.fd"
)

// cpus is how many processors a guest sees for a share of them.
func cpus(r dsec.Resources) int { return max(1, int(math.Ceil(r.CPU))) }

// ram is the machine's memory.
func ram(r dsec.Resources) int64 { return r.Memory &^ (1<<20 - 1) }

// start starts the slot's process on its disk.
func (g *slot) start(ctx context.Context, l launch) (*qemu.Process, error) {
	r := l.resources
	accel, err := g.driver.accelerator(ctx)
	if err != nil {
		return nil, err
	}
	charge := ram(r) + overhead
	if l.memory != nil {
		// Of memory that all copies share a hole is filled by who writes there first,
		// and charged to it beside its own page.
		charge += ram(r)
	}
	if err := g.group.Limit(dsec.Resources{CPU: r.CPU, Memory: charge, Pids: 256}); err != nil {
		return nil, err
	}
	f := &qemu.Files{}
	size := strconv.FormatInt(ram(r), 10)
	memory := "memory-backend-ram,id=mem,size=" + size
	if l.memory != nil {
		share := "off"
		if l.shared {
			share = "on"
		}
		memory = "memory-backend-file,id=mem,size=" + size + ",share=" + share + ",mem-path=" + f.Path(l.memory)
	}
	machine := "q35,memory-backend=mem,vmport=off,hpet=off"
	args := []string{
		"-m", "size=" + size + "B", "-smp", strconv.Itoa(cpus(r)), "-object", memory,
		"-blockdev", "driver=" + g.image.Format + ",node-name=base,read-only=on,discard=unmap,file.driver=file,file.filename=" + f.SetPath(g.image.Path, os.O_RDONLY),
		"-blockdev", "driver=qcow2,node-name=disk,discard=unmap,detect-zeroes=unmap,backing=base,cache.no-flush=on,file.driver=file,file.discard=unmap,file.filename=" +
			f.SetPath(g.path(diskFile), os.O_RDWR),
		"-device", "virtio-blk-pci,drive=disk,bootindex=0,serial=disk",
		"-serial", "chardev:console",
		"-device", "VGA", "-device", "qemu-xhci", "-device", "usb-tablet",
		"-device", "virtio-rng-pci", "-device", "virtio-balloon-pci,free-page-reporting=on", "-device", "pvpanic",
		"-device", "virtio-serial-pci",
	}
	if g.image.UEFI {
		machine += ",pflash0=code,pflash1=vars"
		args = append(args,
			"-blockdev", "driver=raw,node-name=code,read-only=on,file.driver=file,file.filename="+f.SetPath(firmwareCode, os.O_RDONLY),
			"-blockdev", "driver=raw,node-name=vars,file.driver=file,file.filename="+f.SetPath(g.path(varsFile), os.O_RDWR))
	}
	for i, p := range ports {
		if g.driver.without(p.agent) {
			continue
		}
		id := "port" + strconv.Itoa(i)
		args = append(args, "-chardev", "socket,id="+id+",server=on,wait=off,fd="+f.Listen(g.path(p.socket)),
			"-device", fmt.Sprintf("virtserialport,id=%s,chardev=%s,name=%s,nr=%d", agentPort+strconv.Itoa(i), id, p.name, i+1))
	}
	args = append([]string{"-machine", machine}, args...)
	if accel == qemu.KVM {
		args = append(args, "-cpu", "host")
	} else {
		args = append(args, "-cpu", "max")
		accel += ",thread=multi,tb-size=" + strconv.Itoa(codeCache)
	}
	p, err := qemu.Start(ctx, qemu.Config{
		Dir: g.dir, Args: args, Accel: accel, Files: f, Incoming: l.incoming, Group: g.group, UID: FirstID + g.n, GID: FirstID + g.n,
		Event: g.note,
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (d *Driver) without(a Agent) bool {
	for _, w := range d.config.Without {
		if w == a {
			return true
		}
	}
	return false
}

// imageProgram makes overlays.
const imageProgram = "qemu-img"

// newDisk makes the slot's overlay, and its settings of the firmware.
func (g *slot) newDisk(ctx context.Context, size int64) error {
	out, err := exec.CommandContext(ctx, imageProgram, "create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", g.path(diskFile), strconv.FormatInt(size, 10)).CombinedOutput()
	if err != nil {
		if ctx.Err() != nil {
			return dsec.WithOp("", "", context.Cause(ctx))
		}
		return fmt.Errorf("make disk: %w: %s", err, out)
	}
	if g.image.UEFI {
		return g.newVars(firmwareVars)
	}
	return nil
}

func (g *slot) newVars(from string) error {
	if err := copySparse(g.path(varsFile), from); err != nil {
		return err
	}
	return nil
}

// takeDisk makes the slot's disk a copy of those files in a folder.
func (g *slot) takeDisk(dir string) error {
	if err := copySparse(g.path(diskFile), filepath.Join(dir, diskFile)); err != nil {
		return err
	}
	if g.image.UEFI {
		return g.newVars(filepath.Join(dir, varsFile))
	}
	return nil
}

// giveDisk copies the slot's disk into a folder; the machine stands still and
// its disks are flushed, as after a save.
func (g *slot) giveDisk(dir string) error {
	if err := copySparse(filepath.Join(dir, diskFile), g.path(diskFile)); err != nil {
		return err
	}
	if g.image.UEFI {
		return copySparse(filepath.Join(dir, varsFile), g.path(varsFile))
	}
	return nil
}

// letGo ends the connections to the guest.
func (g *slot) letGo() {
	g.ctl.Close() //nolint:errcheck // it is over
	g.control.Close()
	g.frames.Close()
}

// destroy removes everything of the slot. It may be called twice.
func (g *slot) destroy() error {
	g.letGo()
	if p := g.process(); p != nil {
		p.Kill()
	}
	var errs []error
	if g.group != nil {
		errs = append(errs, g.group.KillAll(), g.group.Remove())
	}
	errs = append(errs, os.RemoveAll(g.dir))
	if err := errors.Join(errs...); err != nil {
		return err // the slot stays taken: what is left of it must not be somebody's
	}
	g.driver.freeSlot(g.n)
	return nil
}

package microvm

import (
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
)

// Sizes of what every machine has, whatever its environment: a saved guest
// knows its devices' sizes, and takes a disk of any smaller size for one with a
// bad end.
const (
	diskSlot   = 16 << 40 // bytes that the guest takes a disk for
	MinRAM     = 128 << 20
	MaxRAM     = 1 << 40
	maxCPUs    = 64
	outputSize = 4 << 30 // of the disk of recorded output, which is sparse

	// PmemSlot is the size of a persistent-memory device, and the largest layer
	// that reaches a guest of variant DAX that way. The guest keeps a 64th of it
	// in bookkeeping, so there is one for each 256 MiB of its memory.
	PmemSlot    = 2 << 30
	pmemPerSlot = 256 << 20
	maxPmem     = 8
)

// Names of devices, block nodes and ports.
const (
	rootDisk   = "root"
	upperDisk  = "upper"
	outputDisk = "output"
	control    = "control"
	frames     = "wire"
)

// shape is what a saved guest has in common with its copies.
type shape struct {
	RAM     int64   `json:"ram"`
	CPUs    int     `json:"cpus"`
	Variant Variant `json:"variant"`
}

func (s shape) String() string {
	return fmt.Sprintf("%d MiB, %d processors, %s", s.RAM>>20, s.CPUs, s.Variant)
}

// shapeFor rounds up to powers of two, so that few guests serve many sizes.
func shapeFor(r dsec.Resources, v Variant) (shape, error) {
	ram := int64(MinRAM)
	for ram < r.Memory {
		ram *= 2
	}
	if ram > MaxRAM {
		return shape{}, dsec.Errorf(dsec.Invalid, "a microVM has at most %d GiB of memory", MaxRAM>>30)
	}
	cpus := 1
	for float64(cpus) < r.CPU {
		cpus *= 2
	}
	if cpus > maxCPUs {
		return shape{}, dsec.Errorf(dsec.Invalid, "a microVM has at most %d processors", maxCPUs)
	}
	return shape{RAM: ram, CPUs: cpus, Variant: v}, nil
}

// pmems is how many persistent-memory devices the machine has.
func (s shape) pmems() int {
	if s.Variant != DAX {
		return 0
	}
	return int(min(max(s.RAM/pmemPerSlot, 1), maxPmem))
}

// reserve is what of a machine's memory the workload cannot have: kernel and
// agent live in it.
func (s shape) reserve() int64 { return 40<<20 + s.RAM/32 }

// workMemory is the workload's memory limit.
func (s shape) workMemory(r dsec.Resources) int64 { return min(r.Memory, s.RAM-s.reserve()) }

// Memory of a QEMU process beside its guest's: translated code, which is
// bounded, and its own.
const (
	codeCache = 64 // MiB
	overhead  = (codeCache + 192) << 20
)

// charge is what a machine's control group may hold. A page that nobody has
// touched before is a hole in its template's memory: the first machine that
// writes it is charged twice, for the hole that the kernel fills and for its own
// copy. Others find it filled.
func (s shape) charge() int64 { return 2*s.RAM + overhead }

// command is how a QEMU is started. The zero value of what is optional leaves
// it out.
type command struct {
	shape  shape
	dir    string   // for the ports' sockets
	memory *os.File // what the guest's memory is made of
	shared bool     // changes to memory go into the file
	pmem   []string // flat layers, for variant DAX
	boot   *boot    // nil for a machine that will be loaded
	net    []string // further arguments, for a network device
}

// boot is what only a machine that boots needs.
type boot struct{ kernel, initramfs string }

// args gives the arguments and the files that go with them.
func (c command) args(accel string) ([]string, *qemu.Files, error) {
	files := &qemu.Files{}
	bus := "device" // of a virtio device's name
	var args []string
	size := strconv.FormatInt(c.shape.RAM>>20, 10) + "M"
	f, err := again(c.memory)
	if err != nil {
		return nil, nil, err
	}
	share := "off"
	if c.shared {
		share = "on"
	}
	mem := "memory-backend-file,id=mem,size=" + size + ",share=" + share + ",mem-path=" + files.Path(f)
	m := size
	switch c.shape.Variant {
	case DAX:
		bus = "pci"
		args = append(args, "-machine", "q35,memory-backend=mem,suppress-vmdesc=on,usb=off,smbus=off,sata=off,vmport=off,i8042=off,hpet=off")
		m += ",slots=" + strconv.Itoa(maxPmem) + ",maxmem=" + strconv.FormatInt((c.shape.RAM+(maxPmem+1)*PmemSlot)>>20, 10) + "M"
	default:
		args = append(args, "-machine", "microvm,memory-backend=mem,suppress-vmdesc=on,rtc=on")
	}
	args = append(args, "-object", mem, "-m", m, "-smp", strconv.Itoa(c.shape.CPUs), "-cpu", cpuModel(accel),
		"-global", "migration.send-configuration=off", "-global", "migration.store-global-state=off",
		"-serial", "chardev:console",
		"-object", "rng-builtin,id=rng", "-device", "virtio-rng-"+bus+",rng=rng",
		"-device", "virtio-serial-"+bus+",id=serial")
	for i, p := range []struct{ id, name string }{{control, vm.ControlPort}, {frames, vm.WirePort}} {
		args = append(args, "-chardev", "socket,server=on,wait=off,id="+p.id+",fd="+files.Listen(c.socket(p.id)),
			"-device", fmt.Sprintf("virtserialport,bus=serial.0,nr=%d,chardev=%s,id=port-%s,name=%s", i+1, p.id, p.id, p.name))
	}
	for _, d := range []string{rootDisk, upperDisk, outputDisk} {
		ro := "off"
		if d == rootDisk {
			ro = "on"
		}
		args = append(args,
			"-blockdev", fmt.Sprintf("driver=null-co,node-name=%s.0,size=%d,read-zeroes=on,read-only=%s", d, int64(diskSlot), ro),
			"-blockdev", fmt.Sprintf("driver=raw,node-name=%s,file=%s.0,read-only=%s,discard=unmap", d, d, ro),
			"-device", fmt.Sprintf("virtio-blk-%s,drive=%s,id=disk-%s,serial=%s,werror=report,rerror=report", bus, d, d, d))
	}
	for i := range c.shape.pmems() {
		args = append(args, "-object", fmt.Sprintf("memory-backend-file,id=pmem%d,size=%d,share=on,readonly=on,mem-path=%s", i, int64(PmemSlot), files.OpenPath(c.pmem[i], os.O_RDONLY)),
			"-device", fmt.Sprintf("virtio-pmem-pci,memdev=pmem%d,id=nv%d", i, i))
	}
	if b := c.boot; b != nil {
		args = append(args, "-kernel", files.OpenPath(b.kernel, os.O_RDONLY), "-initrd", files.OpenPath(b.initramfs, os.O_RDONLY), "-append", KernelLine(accel))
	}
	return append(args, c.net...), files, nil
}

// socket is the path of a port's socket.
func (c command) socket(name string) string { return c.dir + "/" + name }

// cpuModel is the processor that a guest sees.
func cpuModel(accel string) string {
	if strings.HasPrefix(accel, qemu.KVM) {
		return "host"
	}
	// The emulator carries out a repeated instruction one step at a time: where
	// bytes are as good as words (erms) a kernel clears its pages in eight times
	// as many. And each level of page tables is one more look-up.
	return "max,erms=off,la57=off"
}

// tcgLine is for guests that are emulated, where every instruction of the
// kernel's that nobody asked for is felt. What is left out protects a kernel
// from its own users, or accounts for them once more; the machine is the
// workload's alone, and its memory is bounded. Together it halves a command.
const tcgLine = " mitigations=off" + // a processor that is emulated has none of the faults
	" init_on_alloc=0 lsm=landlock audit=0 psi=0 noautogroup cgroup.memory=nokmem,nosocket"

// KernelLine is what the kernel of a machine is told.
func KernelLine(accel string) string {
	line := "console=ttyS0 panic=-1 reboot=t quiet"
	if strings.HasPrefix(accel, qemu.TCG) {
		if khz := hostKHz(); khz > 0 {
			// Saves its measuring. On a busy host the kernel would take late ticks
			// for a counter that runs fast, and every copy count by ticks.
			line += " tsc=reliable tsc_early_khz=" + strconv.Itoa(khz)
		}
		line += tcgLine + " " + vm.YieldWord
	}
	return line
}

// hostKHz is the rate of the host's time stamp counter, as its kernel shows it.
func hostKHz() int {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), "cpu MHz")
	_, rest, _ = strings.Cut(rest, ":")
	rest, _, _ = strings.Cut(rest, "\n")
	mhz, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
	if err != nil || bits.Len(uint(mhz)) > 16 {
		return 0
	}
	return int(mhz * 1000)
}

package main

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/vm"
)

// waker has what wake needs open, from before the workload says what is at a
// path.
type waker struct {
	random *os.File
	source *os.File // nil where the kernel does not say
}

func newWaker() (w waker, err error) {
	if w.random, err = os.OpenFile("/dev/random", os.O_WRONLY, 0); err != nil {
		return w, err
	}
	w.source, _ = os.Open("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	return w, nil
}

// wake brings a machine that was asleep up to date: its clock and its random
// pool, which it shares with every other copy until then.
func (w *waker) wake(r vm.Restored) (vm.Clock, error) {
	var c vm.Clock
	if len(r.Seed) < vm.MinSeed {
		return c, dsec.Errorf(dsec.Invalid, "a seed of %d bytes is too short: it takes %d", len(r.Seed), vm.MinSeed)
	}
	if err := stir(int(w.random.Fd()), r.Seed); err != nil {
		return c, err
	}
	if !r.Now.IsZero() {
		ts := unix.NsecToTimespec(r.Now.UnixNano())
		if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
			return c, dsec.Errorf(dsec.Internal, "set the clock: %w", err)
		}
	}
	source, _ := text(w.source)
	c.Now, c.Source = time.Now().UTC(), strings.TrimSpace(source)
	return c, nil
}

// rndReseedCRNG of linux/random.h makes the kernel's generator take a new key
// from the pool at once; programs whose C library keeps a generator of its own
// see that by its generation.
const rndReseedCRNG = 0x5207

// stir mixes a seed into the kernel's random pool.
func stir(fd int, seed []byte) error {
	// struct rand_pool_info: how many bits to count, the size, and the bytes.
	b := binary.NativeEndian.AppendUint32(nil, uint32(8*len(seed)))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(seed)))
	b = append(b, seed...)
	if err := ioctl(fd, unix.RNDADDENTROPY, unsafe.Pointer(&b[0])); err != nil {
		return dsec.Errorf(dsec.Internal, "stir the random pool: %w", err)
	}
	runtime.KeepAlive(b)
	if err := ioctl(fd, rndReseedCRNG, nil); err != nil {
		return dsec.Errorf(dsec.Internal, "reseed the random pool: %w", err)
	}
	return nil
}

func ioctl(fd int, op uintptr, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), op, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// FIFREEZE and FITHAW of linux/fs.h.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freeze holds back writes to the file system that f is on. That it is frozen
// already is nothing new.
func freeze(f *os.File) error {
	var arg int32
	err := ioctl(int(f.Fd()), fiFreeze, unsafe.Pointer(&arg))
	if errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

func thaw(f *os.File) error {
	var arg int32
	err := ioctl(int(f.Fd()), fiThaw, unsafe.Pointer(&arg))
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// meter reads what a workload uses, from files that were opened while they had
// a path.
type meter struct {
	memory, peak, events, cpu, pids *os.File

	upper *os.File
	empty int64 // bytes that an unused writable layer takes
}

// newMeter opens the files of a cgroup v2 folder.
func newMeter(group string) (m meter, err error) {
	open := func(name string) *os.File {
		f, e := os.Open(filepath.Join(group, name))
		if e != nil && name != "memory.peak" { // Linux 5.19
			err = errors.Join(err, e)
		}
		return f
	}
	m = meter{memory: open("memory.current"), peak: open("memory.peak"), events: open("memory.events"), cpu: open("cpu.stat"), pids: open("pids.current")}
	return m, err
}

// from measures the writable layer at f from now on.
func (m *meter) from(f *os.File) {
	m.upper = f
	m.empty = used(f)
}

func used(f *os.File) int64 {
	var st unix.Statfs_t
	if f == nil || unix.Fstatfs(int(f.Fd()), &st) != nil {
		return 0
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

func (m *meter) read() (dsec.Usage, error) {
	if m.events == nil { // no cgroup v2
		return dsec.Usage{Disk: max(used(m.upper)-m.empty, 0)}, nil
	}
	events, err := text(m.events)
	if err != nil {
		return dsec.Usage{}, err
	}
	number := func(f *os.File) int64 {
		s, _ := text(f)
		n, _ := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
		return n
	}
	cpu, _ := text(m.cpu)
	return dsec.Usage{
		CPU:    time.Duration(jail.Count(cpu, "usage_usec ")) * time.Microsecond,
		Memory: number(m.memory), MemoryPeak: number(m.peak), Pids: int(number(m.pids)),
		OOMKills: int(jail.Count(events, "oom_kill ")),
		Disk:     max(used(m.upper)-m.empty, 0),
	}, nil
}

func text(f *os.File) (string, error) {
	if f == nil {
		return "", nil
	}
	var b [1024]byte
	n, err := unix.Pread(int(f.Fd()), b[:], 0)
	return string(b[:max(n, 0)]), err
}

package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Shell is the guest process before it has a root: namespaces, reaper, devices,
// masked procfs and sysfs are ready, and nothing in it depends on a Spec, so
// shells are made ahead of need.
type Shell struct {
	forge *forge
	own   *os.File // procfs of the shell's own pid namespace
}

// Paths of procfs and sysfs that a workload does not see, and those that it
// sees read-only: the lists that container runtimes share.
var (
	maskedFiles = []string{"/kcore", "/keys", "/latency_stats", "/timer_list", "/timer_stats", "/sched_debug",
		"/kpagecgroup", "/kpagecount", "/kpageflags", "/interrupts"}
	maskedDirs    = []string{"/acpi", "/asound", "/scsi"}
	readOnlyPaths = []string{"/bus", "/fs", "/irq", "/sys", "/sysrq-trigger"}
	maskedSys     = []string{"/firmware", "/devices/virtual/powercap"}
)

// Serve makes the calling process, just forked by a holder, into a shell, and
// returns what f returns, which gets it in a goroutine of its own. The calling
// thread becomes the forge. It is called from main, so that the program's first
// thread is the one: every other would be one more.
func Serve(f func(*Shell) error) error { return serve(prepare, f) }

func serve(prepare func(*forge) (*Shell, error), f func(*Shell) error) error {
	growStack()
	runtime.LockOSThread()
	forge := &forge{work: make(chan func())}
	var err error
	go func() {
		growStack()
		defer close(forge.work)
		var shell *Shell
		if shell, err = prepare(forge); err == nil {
			err = f(shell)
		}
	}()
	for w := range forge.work {
		w()
	}
	return err
}

func prepare(f *forge) (*Shell, error) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("make the guest undumpable: %w", err)
	}
	setName("dsec-guest")
	if err := closeOnExec(); err != nil {
		return nil, err
	}
	if err := loopbackUp(); err != nil {
		return nil, fmt.Errorf("bring loopback up: %w", err)
	}
	if err := mountDev(); err != nil {
		return nil, err
	}
	own, err := mountOwnProc()
	if err != nil {
		return nil, err
	}
	if err := f.do(startReaper); err != nil {
		return nil, err
	}
	if err := mountSys(); err != nil {
		return nil, err
	}
	if err := maskProc(); err != nil {
		return nil, err
	}
	return &Shell{forge: f, own: own}, nil
}

// growStack makes the calling goroutine's stack as large as it will get at once;
// growing it by doubling is a tenth of what a shell costs.
//
//go:noinline
func growStack() {
	var frame [12 << 10]byte
	keepFrame(&frame)
}

//go:noinline
func keepFrame(*[12 << 10]byte) {}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fstype, target, err)
	}
	return nil
}

func bind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s on %s: %w", source, target, err)
	}
	return nil
}

// mountDev makes the box's one tmpfs, which holds /dev, /dev/shm and the files
// for /etc. Three would be nearer to custom, but the kernel gives every memory
// cgroup a place for every 64 superblocks that the host ever had: a superblock
// a box is 80 KiB a box when there are 5,000.
func mountDev() error {
	if err := mount("tmpfs", stageFiles, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755,size=65536k"); err != nil {
		return err
	}
	const dev, shm = stageFiles + "/dev", stageFiles + "/shm"
	for _, d := range []string{dev, shm} {
		if err := unix.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Chmod(shm, 0o1777); err != nil {
		return err
	}
	if err := bind(dev, stageDev); err != nil {
		return err
	}
	if err := unix.Mount("", stageDev, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOSUID|unix.MS_STRICTATIME, ""); err != nil {
		return fmt.Errorf("allow programs in /dev: %w", err)
	}
	for _, n := range deviceNodes {
		to := stageDev + "/" + n
		fd, err := unix.Open(to, unix.O_CREAT|unix.O_CLOEXEC|unix.O_WRONLY, 0o666)
		if err != nil {
			return err
		}
		unix.Close(fd)
		if err := bind("/dev/"+n, to); err != nil {
			return err
		}
	}
	for _, d := range []string{"/pts", "/shm", "/mqueue"} {
		if err := unix.Mkdir(stageDev+d, 0o755); err != nil {
			return err
		}
	}
	if err := mount("devpts", stageDev+"/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"); err != nil {
		return err
	}
	if err := bind(shm, stageDev+"/shm"); err != nil {
		return err
	}
	if err := mount("mqueue", stageDev+"/mqueue", "mqueue", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	return linkDev()
}

func linkDev() error {
	for _, l := range [][2]string{{"pts/ptmx", "/ptmx"}, {"/proc/self/fd", "/fd"}, {"/proc/self/fd/0", "/stdin"},
		{"/proc/self/fd/1", "/stdout"}, {"/proc/self/fd/2", "/stderr"}, {"/proc/kcore", "/core"}} {
		if err := unix.Symlink(l[0], stageDev+l[1]); err != nil {
			return err
		}
	}
	return nil
}

// mountOwnProc opens a procfs of the shell's own pid namespace, in which the
// workload's processes are seen with both their numbers, and unmounts it: only
// the descriptor reaches it.
func mountOwnProc() (*os.File, error) {
	if err := mount("proc", stageOwn, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return nil, err
	}
	f, err := os.Open(stageOwn)
	if err != nil {
		return nil, err
	}
	if err := unix.Unmount(stageOwn, unix.MNT_DETACH); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func mountSys() error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_RDONLY
	if err := mount("sysfs", stageSys, "sysfs", flags, ""); err != nil {
		return err
	}
	for _, p := range maskedSys {
		if err := bind(stageMask, stageSys+p); err != nil && !missing(err) {
			return err
		}
	}
	return nil
}

func maskProc() error {
	if err := openNetwork(); err != nil {
		return err
	}
	for _, p := range maskedFiles {
		if err := bind("/dev/null", stageProc+p); err != nil && !missing(err) {
			return err
		}
	}
	for _, p := range maskedDirs {
		if err := bind(stageMask, stageProc+p); err != nil && !missing(err) {
			return err
		}
	}
	const ro = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, p := range readOnlyPaths {
		p = stageProc + p
		if err := bind(p, p); err != nil {
			if missing(err) {
				continue
			}
			return err
		}
		if err := unix.Mount("", p, "", ro, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", p, err)
		}
	}
	return nil
}

// openNetwork lets any user ping and bind low ports, as is usual for containers.
func openNetwork() error {
	for _, s := range [][2]string{{"ping_group_range", "0 " + strconv.Itoa(IDRange-1)}, {"ip_unprivileged_port_start", "0"}} {
		if err := os.WriteFile(stageProc+"/sys/net/ipv4/"+s[0], []byte(s[1]), 0); err != nil && !missing(err) {
			return fmt.Errorf("set %s: %w", s[0], err)
		}
	}
	return nil
}

func missing(err error) bool {
	return os.IsNotExist(err) || isErrno(err, unix.ENOENT) || isErrno(err, unix.ENOTDIR)
}

// loopbackUp sets the flag UP on the namespace's only interface.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// forge is the locked thread that forks the workload's processes. Work is done
// by it one piece at a time.
type forge struct {
	work chan func()
}

// do runs w on the forge's thread and waits for it.
func (f *forge) do(w func() error) error {
	done := make(chan error, 1)
	f.work <- func() { done <- w() }
	return <-done
}

func isErrno(err error, e syscall.Errno) bool { return errors.Is(err, e) }

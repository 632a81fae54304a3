package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// A machine that is there for one box alone needs no walls around it: the box
// keeps the workload apart from the agent, so that neither a fork bomb nor a
// killed tree reaches that, and nothing more. Root in it is root of the machine:
// no user namespace, no filter, all capabilities, everything in /proc and /sys.

// SoloGroups are a lone box's places in the machine's cgroup v2 hierarchy.
type SoloGroups struct {
	root string
}

// MakeSoloGroups makes the groups of a lone box and its agent in the hierarchy
// mounted at root.
func MakeSoloGroups(root string) (SoloGroups, error) {
	g := SoloGroups{root}
	if err := soloControllers(root); err != nil {
		return g, fmt.Errorf("enable controllers of %s: %w", root, err)
	}
	for _, d := range []string{g.agent(), g.Work()} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return g, err
		}
	}
	// What the agent needs stays in memory however short that is.
	if err := writeFile(filepath.Join(g.agent(), "memory.min"), strconv.Itoa(agentMemory)); err != nil {
		return g, fmt.Errorf("keep memory for the agent: %w", err)
	}
	return g, nil
}

const agentMemory = 24 << 20

// soloControllers lets the groups below dir have limits. A kernel may lack io.
func soloControllers(dir string) error {
	writeFile(filepath.Join(dir, "cgroup.subtree_control"), "+io") //nolint:errcheck // as the comment says
	return enableControllers(dir)
}

func (g SoloGroups) agent() string { return filepath.Join(g.root, "agent") }

// Work is the folder of the workload's group. The agent is born in it and
// leaves it in DressSolo.
func (g SoloGroups) Work() string { return filepath.Join(g.root, "work") }

// Remove removes the groups, in which no process may be.
func (g SoloGroups) Remove() error {
	commands, err := os.ReadDir(g.Work())
	if err != nil {
		return err
	}
	for _, c := range commands {
		if c.IsDir() {
			err = errors.Join(err, os.Remove(filepath.Join(g.Work(), c.Name())))
		}
	}
	return errors.Join(err, os.Remove(g.Work()), os.Remove(g.agent()))
}

// ServeSolo makes the calling process into a shell as Serve does, on a machine
// of its own: it has mount, pid, ipc and uts namespaces and g.Work() as its
// cgroup, and its root is writable and holds /dev, /proc and /sys.
func ServeSolo(f func(*Shell) error) error { return serve(prepareSolo, f) }

func prepareSolo(f *forge) (*Shell, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("make the guest undumpable: %w", err)
	}
	setName("dsec-guest")
	if err := closeOnExec(); err != nil {
		return nil, err
	}
	for _, d := range []string{programs, stage, stageRoot, stageDev, stageProc, stageOwn, stageSys, stageFiles, stageMask} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	if err := os.WriteFile(NullProgram, []byte(null), 0o555); err != nil { //nolint:gosec // a program
		return nil, err
	}
	if err := os.Chmod(NullProgram, 0o555); err != nil {
		return nil, err
	}
	if err := loopbackUp(); err != nil {
		return nil, fmt.Errorf("bring loopback up: %w", err)
	}
	if err := mountSoloDev(); err != nil {
		return nil, err
	}
	own, err := mountOwnProc()
	if err != nil {
		return nil, err
	}
	if err := f.do(func() error {
		if err := unix.Prctl(unix.PR_SET_TIMERSLACK, workloadSlack, 0, 0, 0); err != nil {
			return fmt.Errorf("set timer slack: %w", err)
		}
		if err := startReaper(); err != nil {
			return err
		}
		a, err := unix.SchedGetAttr(0, 0)
		yields = err == nil && a.Policy == unix.SCHED_BATCH
		return nil
	}); err != nil {
		return nil, err
	}
	if err := openNetwork(); err != nil {
		return nil, err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := mount("sysfs", stageSys, "sysfs", flags, ""); err != nil {
		return nil, err
	}
	return &Shell{forge: f, own: own}, nil
}

// Yield makes the calling thread, and what comes of it, interrupt nobody when it
// wakes up. The commands of a lone box are as they would be without.
func Yield() error {
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Policy: unix.SCHED_BATCH}, 0); err != nil {
		return fmt.Errorf("set scheduling policy: %w", err)
	}
	return nil
}

// yields is whether the forge does that.
var yields bool

// soloDevices are the nodes in the /dev of a lone box, beside those that every
// box has. What a kernel lacks says so when it is opened.
var soloDevices = []struct {
	name         string
	mode         uint32
	major, minor uint32
}{
	{"null", unix.S_IFCHR | 0o666, 1, 3}, {"zero", unix.S_IFCHR | 0o666, 1, 5}, {"full", unix.S_IFCHR | 0o666, 1, 7},
	{"random", unix.S_IFCHR | 0o666, 1, 8}, {"urandom", unix.S_IFCHR | 0o666, 1, 9}, {"tty", unix.S_IFCHR | 0o666, 5, 0},
	{"kmsg", unix.S_IFCHR | 0o644, 1, 11},
	{"fuse", unix.S_IFCHR | 0o666, 10, 229}, {"cuse", unix.S_IFCHR | 0o600, 10, 203}, {"net/tun", unix.S_IFCHR | 0o666, 10, 200},
	{"loop-control", unix.S_IFCHR | 0o660, 10, 237}, {"mapper/control", unix.S_IFCHR | 0o600, 10, 236},
	{"kvm", unix.S_IFCHR | 0o660, 10, 232}, {"vsock", unix.S_IFCHR | 0o666, 10, 127},
	{"loop0", unix.S_IFBLK | 0o660, 7, 0}, {"loop1", unix.S_IFBLK | 0o660, 7, 1}, {"loop2", unix.S_IFBLK | 0o660, 7, 2},
	{"loop3", unix.S_IFBLK | 0o660, 7, 3}, {"loop4", unix.S_IFBLK | 0o660, 7, 4}, {"loop5", unix.S_IFBLK | 0o660, 7, 5},
	{"loop6", unix.S_IFBLK | 0o660, 7, 6}, {"loop7", unix.S_IFBLK | 0o660, 7, 7},
}

// mountSoloDev makes /dev with nodes of its own: those of the machine's disks
// and ports are not in it.
func mountSoloDev() error {
	if err := mount("tmpfs", stageFiles, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755,size=1m"); err != nil {
		return err
	}
	if err := mount("tmpfs", stageDev, "tmpfs", unix.MS_NOSUID|unix.MS_STRICTATIME, "mode=755,size=64m"); err != nil {
		return err
	}
	for _, d := range []string{"/pts", "/shm", "/mqueue", "/net", "/mapper"} {
		if err := unix.Mkdir(stageDev+d, 0o755); err != nil {
			return err
		}
	}
	for _, d := range soloDevices {
		path := stageDev + "/" + d.name
		if err := unix.Mknod(path, d.mode, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make /dev/%s: %w", d.name, err)
		}
		if err := unix.Chmod(path, d.mode&0o777); err != nil {
			return err
		}
	}
	if err := mount("devpts", stageDev+"/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"); err != nil {
		return err
	}
	if err := mount("tmpfs", stageDev+"/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	if err := mount("mqueue", stageDev+"/mqueue", "mqueue", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil && !isErrno(err, unix.ENODEV) {
		return err
	}
	return linkDev()
}

// DressSolo gives a shell of ServeSolo its box. The agent leaves the workload's
// group, which is the root of the hierarchy that the workload sees.
func (sh *Shell) DressSolo(g SoloGroups) (*Box, error) {
	err := sh.forge.do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("unshare cgroup namespace: %w", err)
		}
		if err := mount("cgroup2", stageSys+"/fs/cgroup", "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return err
		}
		unix.KeyctlJoinSessionKeyring("") //nolint:errcheck // absent in kernels without keys
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Commands have groups below, so nobody may stay: neither the agent nor the
	// reaper that it forked.
	for _, pid := range []int{0, reaperPid} {
		if err := writeFile(filepath.Join(g.agent(), "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return nil, fmt.Errorf("join the agent's cgroup: %w", err)
		}
	}
	return sh.soloBox(g)
}

// soloBox makes the box of groups that nobody is in.
func (sh *Shell) soloBox(g SoloGroups) (b *Box, err error) {
	if err := soloControllers(g.Work()); err != nil {
		return nil, fmt.Errorf("enable controllers: %w", err)
	}
	b = &Box{forge: sh.forge, own: sh.own}
	if b.cgroup.Commands, err = os.Open(g.Work()); err != nil {
		return nil, err
	}
	if b.cgroup.OOM, err = os.Open(filepath.Join(g.Work(), "memory.events")); err != nil {
		return nil, err
	}
	return b, nil
}

// WaitReaper returns when the box's pid 1 has ended, and with it everything in
// the box: root of a lone box can do that, by reboot(2).
func (sh *Shell) WaitReaper() error {
	fd, err := unix.PidfdOpen(reaperPid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 && err == nil
	})
}

// SoloRoot is where the root of a lone box is mounted before EnterSolo.
const SoloRoot = stageRoot

// SoloFiles is a folder out of the workload's sight. EnterSolo leaves in it the
// files that it puts over those of the root: hosts, hostname, resolv.conf,
// machine-id and boot_id. It has no path afterwards, so who wants to change
// them opens it before.
const SoloFiles = stageFiles

// Identity is what tells a machine from its copies.
type Identity struct {
	Machine string // content of /etc/machine-id
	Boot    string // content of /proc/sys/kernel/random/boot_id
}

// EnterSolo makes the file system mounted at SoloRoot the shell's root; s needs
// no Root.
func (sh *Shell) EnterSolo(s *Setup, id Identity) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for _, f := range [][2]string{{"machine-id", id.Machine}, {"boot_id", id.Boot}} {
		if err := os.WriteFile(SoloFiles+"/"+f[0], []byte(f[1]+"\n"), 0o444); err != nil { //nolint:gosec // all may read it
			return err
		}
		fd, err := unix.OpenTree(unix.AT_FDCWD, SoloFiles+"/"+f[0], unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("clone %s: %w", f[0], err)
		}
		fds = append(fds, fd)
	}
	if err := sh.enter(s); err != nil {
		return err
	}
	if err := coverEtc("machine-id", fds[0]); err != nil {
		return err
	}
	const boot = "/proc/sys/kernel/random/boot_id"
	if err := unix.MoveMount(fds[1], "", unix.AT_FDCWD, boot, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("cover boot_id: %w", err)
	}
	return nil
}

// coverEtc puts a mount over a file of /etc, which is made if it is missing. As
// with etcFiles, an image's symlink is left alone.
func coverEtc(name string, fd int) error {
	etc, err := unix.Open("/etc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil //nolint:nilerr // an image without /etc gets none
	}
	defer unix.Close(etc)
	to, err := inside(etc, name, unix.O_PATH)
	if errors.Is(err, unix.ENOENT) {
		to, err = inside(etc, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY)
	}
	if err != nil {
		return nil //nolint:nilerr // left alone
	}
	defer unix.Close(to)
	var st unix.Stat_t
	if err := unix.Fstat(to, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return err
	}
	if err := unix.MoveMount(fd, "", to, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("cover /etc/%s: %w", name, err)
	}
	return nil
}

// OwnGroups makes the groups of a lone box below the cgroup v2 group that the
// calling process is in, which it must be alone in and allowed to manage, as a
// service that systemd delegates its group to is. It moves the process to the
// agent's. It is Unsupported on a system without cgroup v2.
func OwnGroups() (SoloGroups, error) {
	mounts, err := cgroupMounts("/proc/self/mountinfo")
	if err != nil {
		return SoloGroups{}, err
	}
	top := mounts[""]
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return SoloGroups{}, err
	}
	_, path, ok := strings.Cut("\n"+string(own), "\n0::")
	path, _, _ = strings.Cut(path, "\n")
	if top == "" || !ok || !hasControllers(top) {
		return SoloGroups{}, dsec.Errorf(dsec.Unsupported, "the system has no cgroup v2 with controllers")
	}
	// A process that was restarted is in the agent's group of its predecessor at
	// times.
	g := SoloGroups{strings.TrimSuffix(filepath.Join(top, path), "/agent")}
	if err := os.Mkdir(g.agent(), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return g, err
	}
	if err := writeFile(filepath.Join(g.agent(), "cgroup.procs"), "0"); err != nil {
		return g, fmt.Errorf("join the agent's cgroup: %w", err)
	}
	if err := soloControllers(g.root); err != nil {
		return g, fmt.Errorf("enable controllers: %w", err)
	}
	return MakeSoloGroups(g.root)
}

// ServeLoose calls f with a box that has no walls at all: its processes live in
// the namespaces and the root of the caller, each with a group of its own below
// g. The calling thread becomes the forge; it is called from main.
func ServeLoose(g SoloGroups, f func(*Box) error) error {
	return serve(func(fo *forge) (*Shell, error) {
		own, err := os.Open("/proc")
		return &Shell{forge: fo, own: own}, err
	}, func(sh *Shell) error {
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return fmt.Errorf("make the guest undumpable: %w", err)
		}
		if err := closeOnExec(); err != nil {
			return err
		}
		b, err := sh.soloBox(g)
		if err != nil {
			return err
		}
		return f(b)
	})
}

package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Cell is a room in a box for one command: fresh mount, pid, net and ipc
// namespaces, a root that is the box's layers under an empty writable one, and
// control groups of its own. Nothing in it is left when it is closed, and no
// process in it sees the box, its guest or another cell.
//
// A goroutine of its own with a thread of its own makes it. That thread is the
// only task outside that is in the namespaces; what it forks is born in them.
// What runs in a cell has no capability, and no program gives it any.
type Cell struct {
	box    *Box
	slot   int
	group  cellGroup
	forge  *forge   // nil once the thread has ended
	pidfd  *os.File // of pid 1
	reaper int
	root   int    // O_PATH of its root
	spaces [4]int // namespaces: mount, net, ipc, pid

	closed sync.Once
	err    error
}

// cellSystem is what the cells of a box share, made once.
type cellSystem struct {
	*Cells
	masked   []string // files of procfs to hide, that this kernel has
	hidden   []string // folders likewise
	readOnly []string
	etc      []string // files of /etc that are the sandbox's

	mu    sync.Mutex
	slots [MaxCells]bool
}

// Where the guest keeps what cells share, in the box's own /dev, which no
// command of a box with cells sees.
const (
	cellStage  = "/dev/.cells"
	cellLayer  = cellStage + "/l" // and a number
	cellDev    = cellStage + "/dev"
	cellBuilds = cellStage + "/builds"
	cellEmpty  = cellStage + "/empty"
	cellFiles  = cellStage + "/files" // where a cell's own tmpfs is, in its mount namespace
	cellRoot   = cellStage + "/root"

	buildsSize = "512m"
)

// reapers are the memory of the pid 1 of cells, which share the guest's.
var (
	reapers      [MaxCells]reaperWork
	reaperStacks [MaxCells][1024]byte
)

// UseCells prepares the box for OpenCell. It is called once, after Enter.
func (b *Box) UseCells(c *Cells) error {
	s := &cellSystem{Cells: c}
	for _, d := range []string{cellStage} {
		if err := unix.Mkdir(d, 0o700); err != nil {
			return fmt.Errorf("make %s: %w", d, err)
		}
	}
	if err := mount("cells", cellStage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=700,size="+buildsSize); err != nil {
		return err
	}
	for _, d := range []string{cellDev, cellBuilds, cellEmpty, cellFiles, cellRoot} {
		if err := unix.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	for i, l := range c.Lowers {
		at := cellLayer + strconv.Itoa(i)
		if err := unix.Mkdir(at, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(int(l.Fd()), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach layer %d: %w", i, err)
		}
		l.Close()
	}
	if err := s.makeDev(); err != nil {
		return err
	}
	have := func(list []string) (out []string) {
		for _, p := range list {
			if _, err := os.Lstat("/proc" + p); err == nil {
				out = append(out, p)
			}
		}
		return out
	}
	s.masked, s.hidden, s.readOnly = have(maskedFiles), have(maskedDirs), have(readOnlyPaths)
	for _, f := range []string{"hosts", "hostname", "resolv.conf"} {
		var st unix.Stat_t
		if unix.Lstat("/etc/"+f, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			s.etc = append(s.etc, f)
		}
	}
	b.cells = s
	return nil
}

// HasCells reports whether OpenCell can be used.
func (b *Box) HasCells() bool { return b.cells != nil }

// makeDev makes the part of /dev that cells share: a read-only mount of device
// nodes and links, with empty places for what is each cell's own.
func (s *cellSystem) makeDev() error {
	if err := bind(cellDev, cellDev); err != nil { // a mount of its own, to be cloned with those below
		return err
	}
	for _, n := range deviceNodes {
		if err := os.WriteFile(cellDev+"/"+n, nil, 0o666); err != nil {
			return err
		}
		if err := bind("/dev/"+n, cellDev+"/"+n); err != nil {
			return err
		}
	}
	for _, d := range []string{"/pts", "/shm", "/mqueue"} {
		if err := unix.Mkdir(cellDev+d, 0o755); err != nil {
			return err
		}
	}
	for _, l := range [][2]string{{"pts/ptmx", "/ptmx"}, {"/proc/self/fd", "/fd"}, {"/proc/self/fd/0", "/stdin"},
		{"/proc/self/fd/1", "/stdout"}, {"/proc/self/fd/2", "/stderr"}} {
		if err := unix.Symlink(l[0], cellDev+l[1]); err != nil {
			return err
		}
	}
	return unix.Mount("", cellDev, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NOEXEC, "")
}

// CellConfig says what a cell is to be.
type CellConfig struct {
	Limits  CellLimits
	Build   string // name of a folder of builds, see Builds, that is put on BuildAt
	BuildAt string
	RW      bool // the build is being made
}

// Builds is the folder whose folders cells can be given.
func (b *Box) Builds() string { return cellBuilds }

// OpenCell makes a cell. EAGAIN means that the box has as many as it can have.
func (b *Box) OpenCell(c CellConfig) (*Cell, error) {
	s := b.cells
	if s == nil {
		return nil, errors.New("this box has no cells")
	}
	cell := &Cell{box: b, slot: -1, root: -1, spaces: [4]int{-1, -1, -1, -1}}
	s.mu.Lock()
	for i, taken := range s.slots {
		if !taken {
			s.slots[i], cell.slot = true, i
			break
		}
	}
	s.mu.Unlock()
	if cell.slot < 0 {
		return nil, fmt.Errorf("make cell: %w", unix.EAGAIN)
	}
	var err error
	if cell.group, err = s.newGroup(cell.slot, c.Limits); err != nil {
		s.free(cell.slot)
		return nil, err
	}
	cell.forge = &forge{work: make(chan func())}
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		for w := range cell.forge.work {
			w()
		}
	}()
	if err := cell.forge.do(func() error { return cell.make(c) }); err != nil {
		return nil, errors.Join(err, cell.Close())
	}
	return cell, nil
}

func (s *cellSystem) free(slot int) {
	s.mu.Lock()
	s.slots[slot] = false
	s.mu.Unlock()
}

// make runs on the cell's thread.
func (c *Cell) make(cfg CellConfig) error {
	s := c.box.cells
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWPID); err != nil {
		return fmt.Errorf("unshare namespaces: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	size := "mode=755"
	if m := cfg.Limits.Memory; m > 0 {
		size += ",size=" + strconv.FormatInt(m/2, 10)
	}
	if err := mount("cell", cellFiles, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, size); err != nil {
		return err
	}
	for _, d := range []string{"/upper", "/work", "/shm"} {
		if err := unix.Mkdir(cellFiles+d, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Chmod(cellFiles+"/shm", 0o1777); err != nil {
		return err
	}
	var lowers strings.Builder
	for i := len(s.Lowers) - 1; i >= 0; i-- { // the topmost first
		if lowers.Len() > 0 {
			lowers.WriteByte(':')
		}
		lowers.WriteString(cellLayer + strconv.Itoa(i))
	}
	options := "userxattr,lowerdir=" + lowers.String() + ",upperdir=" + cellFiles + "/upper,workdir=" + cellFiles + "/work"
	if err := mount("cell", cellRoot, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return err
	}
	root, err := unix.Open(cellRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	c.root = root
	if err := c.startReaper(); err != nil {
		return err
	}
	if err := c.furnish(cfg); err != nil {
		return err
	}
	if err := unix.Mount(cellRoot, "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("cover the cell's old root: %w", err)
	}
	if err := unix.Fchdir(root); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	for i, n := range []string{"mnt", "net", "ipc", "pid_for_children"} {
		c.spaces[i], err = unix.Openat(int(c.box.own.Fd()), "thread-self/ns/"+n, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open namespace %s: %w", n, err)
		}
	}
	return nil
}

// startReaper starts pid 1 of the cell, which mounts its procfs over the box's.
func (c *Cell) startReaper() error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	defer unix.Close(p[0])
	r := &reapers[c.slot]
	*r = reaperWork{chld: 1 << (uint(unix.SIGCHLD) - 1), result: int32(p[1])}
	copy(r.name[:], "init")
	copy(r.fs[:], "proc")
	copy(r.path[:], "/proc")
	pidfd := int32(-1)
	args := cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_PIDFD,
		pidfd:      uint64(uintptr(unsafe.Pointer(&pidfd))),
		exitSignal: uint64(unix.SIGCHLD),
		stack:      uint64(uintptr(unsafe.Pointer(&reaperStacks[c.slot]))),
		stackSize:  uint64(len(reaperStacks[c.slot])),
	}
	var errno uintptr
	err := signalsBlocked(func() { c.reaper, errno = cloneReaper(&args, unsafe.Sizeof(args), r) })
	runtime.KeepAlive(&pidfd)
	unix.Close(p[1])
	if err == nil && errno != 0 {
		err = syscall.Errno(errno)
	}
	if err != nil {
		c.reaper = 0
		return fmt.Errorf("clone pid 1 of the cell: %w", err)
	}
	unix.SetNonblock(int(pidfd), true) //nolint:errcheck // a pidfd can always be
	c.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	var b [4]byte
	if n, err := unix.Read(p[0], b[:]); err != nil || n != len(b) {
		return fmt.Errorf("pid 1 of the cell ended at once (%d bytes, %v)", n, err)
	}
	if e := *(*int32)(unsafe.Pointer(&b)); e != 0 {
		return fmt.Errorf("mount proc of the cell: %w", syscall.Errno(e))
	}
	return nil
}

// furnish masks the cell's procfs and moves it and the other parts into its
// root.
func (c *Cell) furnish(cfg CellConfig) error {
	s := c.box.cells
	for _, p := range s.masked {
		if err := bind("/dev/null", "/proc"+p); err != nil {
			return err
		}
	}
	for _, p := range s.hidden {
		if err := bind(cellEmpty, "/proc"+p); err != nil {
			return err
		}
	}
	const ro = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, p := range s.readOnly {
		p = "/proc" + p
		if err := bind(p, p); err != nil {
			return err
		}
		if err := unix.Mount("", p, "", ro, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", p, err)
		}
	}
	if err := moveInto(c.root, "/proc", "proc"); err != nil {
		return err
	}
	if err := c.cloneInto("/sys", "sys", unix.MOUNT_ATTR_RDONLY, true); err != nil {
		return err
	}
	if err := c.cloneInto(cellDev, "dev", 0, true); err != nil {
		return err
	}
	dev := cellRoot + "/dev"
	if err := mount("devpts", dev+"/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"); err != nil {
		return err
	}
	if err := bind(cellFiles+"/shm", dev+"/shm"); err != nil {
		return err
	}
	if err := mount("mqueue", dev+"/mqueue", "mqueue", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	for _, f := range s.etc {
		if err := c.cloneInto("/etc/"+f, "etc/"+f, unix.MOUNT_ATTR_RDONLY, false); err != nil {
			return err
		}
	}
	if cfg.Build == "" {
		return nil
	}
	var attr uint64 = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	if !cfg.RW {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	return c.cloneInto(cellBuilds+"/"+cfg.Build, strings.TrimPrefix(cfg.BuildAt, "/"), attr, true)
}

// cloneInto puts a copy of a mount, or of a folder of one, into the cell's root.
func (c *Cell) cloneInto(from, name string, attr uint64, folder bool) error {
	flags := uint64(unix.O_PATH)
	if folder {
		flags |= unix.O_DIRECTORY
	}
	to, err := inside(c.root, name, flags)
	if errors.Is(err, unix.ENOENT) {
		if folder {
			err = unix.Mkdirat(c.root, name, 0o755)
		} else {
			var fd int
			if fd, err = inside(c.root, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY); err == nil {
				unix.Close(fd)
			}
		}
		if err != nil {
			return fmt.Errorf("make /%s: %w", name, err)
		}
		to, err = inside(c.root, name, flags)
	}
	if err != nil {
		return fmt.Errorf("the cell's /%s: %w", name, err)
	}
	defer unix.Close(to)
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("clone %s: %w", from, err)
	}
	defer unix.Close(fd)
	if attr != 0 {
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: attr}); err != nil {
			return fmt.Errorf("protect %s: %w", name, err)
		}
	}
	if err := unix.MoveMount(fd, "", to, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach %s: %w", name, err)
	}
	return nil
}

// Root is the cell's root folder, as a descriptor that names it and reads
// nothing. It is the cell's.
func (c *Cell) Root() int { return c.root }

// Start runs p in the cell as a leader of its own. It is called once: the
// thread that forks gives up for it all that could fork another.
func (c *Cell) Start(p Process) (*CellProcess, error) {
	r := &CellProcess{}
	err := c.forge.do(func() (err error) {
		var joins []int
		if !c.group.v2 { // there a thread takes the whole process along, so the fork goes into the group
			if joins, err = c.group.joins(); err != nil {
				return err
			}
		}
		defer func() { closeAll(joins) }()
		if c.box.cells.CPU != nil {
			joins = append(joins, -1)
			if joins[len(joins)-1], err = dupUp(int(c.box.cells.CPU.Fd())); err != nil {
				return err
			}
			tasks, err := unix.Openat(int(c.box.cgroup.Commands.Fd()), "tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			joins = append(joins, tasks)
		}
		for _, fd := range joins {
			if _, err := unix.Write(fd, []byte("0")); err != nil {
				return fmt.Errorf("join cell group: %w", err)
			}
		}
		if !c.group.v2 { // on v2 it could not leave the thread's own group for the cell's
			if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil { // its groups are the root of what it sees
				return fmt.Errorf("unshare cgroup namespace: %w", err)
			}
		}
		filter := c.box.cells.Filter
		if c.group.v2 && len(filter) > 0 {
			filter = c.box.key.admit(filter)
		}
		if err := c.box.cells.confine(filter, unix.CAP_SETUID, unix.CAP_SETGID); err != nil {
			return err
		}
		if err := dropAllBounding(); err != nil {
			return err
		}
		if c.group.v2 {
			return r.forkInto(p, c.group.dirs[0], c.box.key)
		}
		return r.fork(p, nil)
	})
	runtime.KeepAlive(p)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// confine gives the calling thread a filter, no_new_privs and the capabilities
// caps.
func (s *cellSystem) confine(filter []byte, caps ...int) error {
	unix.Prctl(unix.PR_SET_TIMERSLACK, workloadSlack, 0, 0, 0) //nolint:errcheck // for speed only
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid new privileges: %w", err)
	}
	if len(filter) > 0 {
		if err := installFilter(filter); err != nil {
			return err
		}
	}
	keep := uint64(0)
	for _, c := range caps {
		keep |= 1 << c
	}
	for c := 0; c < 64; c++ {
		if keep&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			if err == unix.EINVAL { // the last one that this kernel knows was c-1
				break
			}
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	setpcap := uint64(0)
	if len(caps) == 2 { // whoever starts without any drops the rest of the bounding set yet
		setpcap = 1 << unix.CAP_SETPCAP
	}
	return setCapabilities(keep | setpcap)
}

func dropAllBounding() error {
	for _, c := range []uintptr{unix.CAP_SETUID, unix.CAP_SETGID} {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("empty the bounding set: %w", err)
		}
	}
	return setCapabilities(1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID)
}

func setCapabilities(mask uint64) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(mask), Permitted: uint32(mask)},
		{Effective: uint32(mask >> 32), Permitted: uint32(mask >> 32)},
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	return nil
}

// Warm is what a warm process, see Box.StartWarm, needs to put a fork of itself
// into the cell: namespaces to enter (the last, that of pids, before it forks)
// and files to write "0" to. The files are the caller's to close.
func (c *Cell) Warm() (spaces []int, joins []int, err error) {
	if joins, err = c.group.joins(); err != nil {
		return nil, nil, err
	}
	return c.spaces[:], joins, nil
}

// Usage reads what the cell has used so far.
func (c *Cell) Usage() CellUsage { return c.group.usage() }

// Kill ends every process of the cell, whatever they do, and returns at once.
func (c *Cell) Kill() error {
	if c.pidfd == nil {
		return nil
	}
	err := unix.PidfdSendSignal(int(c.pidfd.Fd()), unix.SIGKILL, nil, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Close ends the cell and returns when nothing of it is left. Its leader must
// have been waited for. It may be called twice.
func (c *Cell) Close() error {
	c.closed.Do(func() {
		if c.forge != nil {
			close(c.forge.work) // the thread, and with it its hold on the namespaces
		}
		if c.pidfd != nil {
			c.err = c.Kill()
			if _, err := reap(c.pidfd, c.reaper); err != nil {
				c.err = errors.Join(c.err, err)
			}
			c.pidfd.Close()
		}
		closeAll(c.spaces[:])
		if c.root >= 0 {
			unix.Close(c.root)
		}
		c.err = errors.Join(c.err, c.group.remove())
		if c.err == nil { // else the slot's memory may be in use yet
			c.box.cells.free(c.slot)
		}
	})
	return c.err
}

// CellProcess is the leader of a cell, or a warm process.
type CellProcess struct {
	pid   int
	pidfd *os.File
}

func (r *CellProcess) fork(p Process, more []uintptr) error {
	pidfd := -1
	sys := &syscall.SysProcAttr{
		Setsid:     true,
		Credential: &syscall.Credential{Uid: p.UID, Gid: p.GID, Groups: p.Groups},
		PidFD:      &pidfd,
	}
	if p.TTY {
		sys.Setctty, sys.Ctty = true, 0
	}
	pid, err := syscall.ForkExec(p.Path, p.Argv, &syscall.ProcAttr{
		Dir: p.Dir, Env: p.Env, Sys: sys,
		Files: append([]uintptr{p.Stdin.Fd(), p.Stdout.Fd(), p.Stderr.Fd()}, more...),
	})
	if err != nil {
		return err
	}
	return r.found(pid, pidfd)
}

// forkInto forks into a group of v2.
func (r *CellProcess) forkInto(p Process, group int, k forkKey) error {
	c, err := forkInto(p, group, k)
	if err != nil {
		return err
	}
	return r.found(c.pid, c.pidfd)
}

// found is told what was forked; pidfd is negative where there is none yet.
func (r *CellProcess) found(pid, pidfd int) (err error) {
	r.pid = pid
	if pidfd < 0 {
		if pidfd, err = unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK); err != nil {
			unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // our own child
			unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
			return err
		}
	}
	unix.SetNonblock(pidfd, true) //nolint:errcheck // a pidfd can always be
	r.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	return nil
}

// Pid is the leader's number as the guest counts.
func (r *CellProcess) Pid() int { return r.pid }

// Wait returns once the leader has ended, and reaps it. It is called once, and
// parks without holding a thread.
func (r *CellProcess) Wait() (Exit, error) {
	defer r.pidfd.Close()
	return reap(r.pidfd, r.pid)
}

// Kill ends the leader alone. It must not have been waited for.
func (r *CellProcess) Kill() error { return unix.Kill(r.pid, unix.SIGKILL) }

// Signal sends s to the leader's process group, as Running.Signal does.
func (r *CellProcess) Signal(s syscall.Signal) error { return unix.Kill(-r.pid, s) }

// reap waits for a child in the poller and collects it.
func reap(pidfd *os.File, pid int) (Exit, error) {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return Exit{}, err
	}
	var ws unix.WaitStatus
	var ru unix.Rusage
	var werr error
	err = raw.Read(func(uintptr) bool {
		for {
			n, err := unix.Wait4(pid, &ws, unix.WNOHANG|unix.WALL, &ru)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			werr = err
			return err != nil || n == pid
		}
	})
	if err = errors.Join(err, werr); err != nil {
		return Exit{}, fmt.Errorf("wait for process %d: %w", pid, err)
	}
	e := Exit{CPU: time.Duration(ru.Utime.Nano() + ru.Stime.Nano()), MaxRSS: ru.Maxrss << 10}
	if ws.Signaled() {
		e.Signal = ws.Signal()
	} else {
		e.Code = ws.ExitStatus()
	}
	return e, nil
}

// StartWarm runs p, a program of the image that forks itself into cells when
// its descriptor 3, control, says so. It sits in the guest's own pid namespace,
// so that cells lie below it, and keeps of its capabilities those that entering
// a cell takes. No call's code ever runs in it.
func (b *Box) StartWarm(p Process, control *os.File) (*CellProcess, error) {
	r := &CellProcess{}
	f := &forge{work: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for w := range f.work {
			w()
		}
	}()
	defer close(f.work)
	err := f.do(func() error {
		s := b.cells
		if s.CPU != nil {
			for _, dir := range []*os.File{s.Memory, s.CPUAcct, s.Pids, b.cgroup.Commands} {
				if err := joinIn(int(dir.Fd())); err != nil {
					return err
				}
			}
			if err := joinTasks(s.CPU); err != nil {
				return err
			}
		}
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("unshare cgroup namespace: %w", err)
		}
		if err := s.confine(s.Filter, unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SETUID, unix.CAP_SETGID); err != nil {
			return err
		}
		return r.fork(p, []uintptr{control.Fd()})
	})
	runtime.KeepAlive(p)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func joinIn(dir int) error {
	fd, err := unix.Openat(dir, "tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("0")); err != nil {
		return fmt.Errorf("join group of the box: %w", err)
	}
	return nil
}

package jail

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// group holds one command and all its descendants: what its timeout kills.
//
// On v2, where making and removing one costs more than the command's process, a
// group that is found empty again is the next command's. What a command has
// written into its own group's files, which takes root, stays.
type group struct {
	box    *Box
	n      uint64
	dir    int  // its cgroup folder
	events int  // v2: its cgroup.events
	used   bool // by a command before
}

// maxSpare is how many empty groups a box keeps.
const maxSpare = 4

func (g group) name() string { return "c" + strconv.FormatUint(g.n, 10) }

// takeGroup gives an empty group, a new one if need be.
func (b *Box) takeGroup() (group, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.spare); n > 0 {
		g := b.spare[n-1]
		b.spare = b.spare[:n-1]
		return g, nil
	}
	return b.newGroup()
}

func (b *Box) newGroup() (group, error) {
	g := group{box: b, n: b.serial.Add(1), events: -1}
	at := int(b.cgroup.Commands.Fd())
	if err := unix.Mkdirat(at, g.name(), 0o755); err != nil {
		return g, err
	}
	dir, err := unix.Openat(at, g.name(), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Unlinkat(at, g.name(), unix.AT_REMOVEDIR) //nolint:errcheck // just made, empty
		return g, err
	}
	g.dir = dir
	if b.cgroup.v2() {
		g.events, _ = unix.Openat(dir, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0) // without it the group is not used again
	}
	return g, nil
}

// empty reports whether nothing is in a group, nor below it, and it is not
// frozen.
func (g group) empty() bool {
	var b [64]byte
	n, err := unix.Pread(g.events, b[:], 0)
	if err != nil || string(b[:n]) != "populated 0\nfrozen 0\n" {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(g.dir, &st) == nil && st.Nlink == 2
}

// fork starts p in g. On v1 the calling thread, the forge, is in g meanwhile.
func (g group) fork(p Process) (c forked, err error) {
	if g.box.cgroup.v2() {
		return forkInto(p, g.dir, g.box.key)
	}
	fd, err := unix.Openat(g.dir, "tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return c, err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("0")); err != nil {
		return c, fmt.Errorf("join command group: %w", err)
	}
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
		Files: []uintptr{p.Stdin.Fd(), p.Stdout.Fd(), p.Stderr.Fd()},
	})
	if e := joinTasks(g.box.cgroup.Leave); e != nil && err == nil {
		unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // our own child
		unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
		err = e
	}
	return forked{pid: pid, pidfd: pidfd}, err
}

// remove deletes the group and reports whether it could: it must be empty.
func (g group) remove() bool {
	unix.Close(g.dir)
	if g.events >= 0 {
		unix.Close(g.events)
	}
	err := unix.Unlinkat(int(g.box.cgroup.Commands.Fd()), g.name(), unix.AT_REMOVEDIR)
	return err == nil || errors.Is(err, unix.ENOENT)
}

func (g group) write(file, text string) error {
	fd, err := unix.Openat(g.dir, file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

// kill ends every process of the group. A process with SIGKILL pending cannot
// fork, so a few passes empty a group of any honest size. A tree that forks
// faster than it is listed is frozen while it is; that comes last, since the
// processes of a guest that dies in between stand still until the host thaws
// them, see Group.Thaw.
func (g group) kill() error {
	if g.box.cgroup.v2() {
		if err := g.write("cgroup.kill", "1"); !errors.Is(err, unix.ENOENT) {
			return err
		} // a kernel before 5.14
	}
	const passes = 16
	deadline := time.Now().Add(killTimeout)
	pause := 100 * time.Microsecond
	for n := 0; ; n++ {
		if n >= passes {
			g.freeze("FROZEN", "1")
		}
		pids, err := g.pids()
		for _, p := range pids {
			unix.Kill(p, unix.SIGKILL) //nolint:errcheck // gone is as good
		}
		if n >= passes {
			g.freeze("THAWED", "0")
		}
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kill command group %s: %d processes are left", g.name(), len(pids))
		}
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// killTimeout is how long a killed process may take to die: it may be writing
// out gigabytes or sit in an uninterruptible call.
const killTimeout = 10 * time.Second

func (g group) freeze(v1, v2 string) {
	if g.box.cgroup.v2() {
		g.write("cgroup.freeze", v2) //nolint:errcheck // best effort: the loop of kill looks again
		return
	}
	g.write("freezer.state", v1) //nolint:errcheck
}

// pids lists the group as the guest counts. Zombies of the leader, which the
// guest has not waited for yet, are not listed by the kernel.
func (g group) pids() ([]int, error) {
	fd, err := unix.Openat(g.dir, "cgroup.procs", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "cgroup.procs")
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, s := range strings.Fields(string(b)) {
		if p, err := strconv.Atoi(s); err == nil && p > 0 {
			out = append(out, p)
		}
	}
	return out, nil
}

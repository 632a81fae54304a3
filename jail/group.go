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
type group struct {
	box *Box
	n   uint64
	dir int // its cgroup folder
}

func (g group) name() string { return "c" + strconv.FormatUint(g.n, 10) }

func (b *Box) newGroup() (group, error) {
	g := group{box: b, n: b.serial.Add(1)}
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
	return g, nil
}

// enter makes the next fork of the calling thread, the forge, be born in g;
// leave undoes what the thread itself did.
func (g group) enter(sys *syscall.SysProcAttr) (leave func() error, err error) {
	if g.box.cgroup.v2() {
		sys.UseCgroupFD, sys.CgroupFD = true, g.dir
		return func() error { return nil }, nil
	}
	fd, err := unix.Openat(g.dir, "tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte("0")); err != nil {
		return nil, fmt.Errorf("join command group: %w", err)
	}
	return func() error { return joinTasks(g.box.cgroup.Leave) }, nil
}

// remove deletes the group and reports whether it could: it must be empty.
func (g group) remove() bool {
	unix.Close(g.dir)
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

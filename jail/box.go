package jail

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Box starts and ends the workload's processes. It is safe for concurrent use;
// forks happen one after the other.
type Box struct {
	forge  *forge
	own    *os.File // procfs of the guest's pid namespace
	cgroup Join
	key    forkKey
	serial atomic.Uint64
	cells  *cellSystem // nil unless UseCells was called

	mu    sync.Mutex
	stale []string // command groups that still hold survivors of a finished command
	spare []group  // empty command groups

	counted bool  // kills is set
	kills   int64 // memory kills that were counted last
}

// Process is one program to start. The files become 0, 1 and 2; nothing else is
// inherited.
type Process struct {
	Path   string
	Argv   []string
	Env    []string
	Dir    string
	UID    uint32
	GID    uint32
	Groups []uint32
	Stdin  *os.File
	Stdout *os.File
	Stderr *os.File
	TTY    bool // Stdin becomes the controlling terminal
}

// Running is a started process with all its descendants.
type Running struct {
	box   *Box
	group group
	pid   int // in the guest's namespace
	inner int // in the box
	pidfd *os.File
	oom   int64 // kills counted when it began
	hit   atomic.Bool
}

// Exit is how a process ended.
type Exit struct {
	Code   int            // valid when Signal is 0
	Signal syscall.Signal // that ended it
	CPU    time.Duration  // user and system, with waited-for children
	MaxRSS int64          // bytes
}

// Start runs p as the leader of a session and process group of its own. An
// error carries the kernel's errno; nothing of p is left then.
func (b *Box) Start(p Process) (*Running, error) {
	for {
		g, err := b.takeGroup()
		if err != nil {
			return nil, fmt.Errorf("make command group: %w", err)
		}
		r := &Running{box: b, group: g, oom: b.oomBefore()}
		err = b.forge.do(func() error { return r.fork(p) })
		runtime.KeepAlive(p)
		if err == nil {
			return r, nil
		}
		g.remove()
		if !g.used {
			return nil, err
		} // an earlier command may have spoilt the group
	}
}

// fork runs on the forge.
func (r *Running) fork(p Process) error {
	c, err := r.group.fork(p)
	if err != nil {
		return err
	}
	r.pid, r.inner = c.pid, c.inner
	if c.pidfd < 0 {
		if c.pidfd, err = unix.PidfdOpen(c.pid, unix.PIDFD_NONBLOCK); err != nil {
			unix.Kill(c.pid, unix.SIGKILL) //nolint:errcheck
			unix.Wait4(c.pid, nil, 0, nil) //nolint:errcheck
			return err
		}
	}
	unix.SetNonblock(c.pidfd, true) //nolint:errcheck // a pidfd can always be
	r.pidfd = os.NewFile(uintptr(c.pidfd), "pidfd")
	return nil
}

// Pid is the leader's number as the sandbox sees it, 0 if it is gone already.
func (r *Running) Pid() int {
	if r.inner == 0 {
		r.inner = r.box.innerPid(r.pid)
	}
	return r.inner
}

// Wait returns once the leader has ended, and reaps it. It is called once, and
// parks without holding a thread.
func (r *Running) Wait() (Exit, error) {
	e, err := reap(r.pidfd, r.pid)
	r.pidfd.Close()
	r.hit.Store(e.Signal == unix.SIGKILL && r.box.oomKills() > r.oom)
	return e, err
}

// Kill ends the leader and all its descendants, whatever they do.
func (r *Running) Kill() error { return r.group.kill() }

// Signal sends s to the leader's process group. The leader must not have been
// waited for: until then its number is its own.
func (r *Running) Signal(s syscall.Signal) error { return unix.Kill(-r.pid, s) }

// OOMKilled reports whether the kernel ended the leader at the sandbox's memory
// limit. Valid after Wait.
func (r *Running) OOMKilled() bool { return r.hit.Load() }

// Release gives back the command's group. Descendants that still run keep
// running until the box ends.
func (r *Running) Release() {
	b := r.box
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.spare) < maxSpare && r.group.events >= 0 && r.group.empty() {
		r.group.used = true
		b.spare = append(b.spare, r.group)
	} else if !r.group.remove() {
		b.stale = append(b.stale, r.group.name())
	}
	// Groups of earlier commands may have emptied since; look at a few.
	keep := b.stale[:0]
	for i, n := range b.stale {
		if i >= 8 || unix.Unlinkat(int(b.cgroup.Commands.Fd()), n, unix.AT_REMOVEDIR) == unix.EBUSY {
			keep = append(keep, n)
		}
	}
	b.stale = keep
}

// oomBefore is oomKills for a command that begins. On v2 the kernel tells,
// some milliseconds late, whether the file has changed, which is much less work
// than to write it out.
func (b *Box) oomBefore() int64 {
	if !b.cgroup.v2() {
		return b.oomKills()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p := []unix.PollFd{{Fd: int32(b.cgroup.OOM.Fd()), Events: unix.POLLPRI}}
	if n, err := unix.Poll(p, 0); n != 0 || err != nil || !b.counted {
		b.kills, b.counted = b.oomKills(), true
	}
	return b.kills
}

// oomKills reads the sandbox's count of processes killed for want of memory.
func (b *Box) oomKills() int64 {
	var buf [512]byte
	n, _ := unix.Pread(int(b.cgroup.OOM.Fd()), buf[:], 0)
	return Count(string(buf[:max(n, 0)]), "oom_kill ")
}

// Count gives the figure behind key, which ends with a space, in a control
// group's file of one figure a line; 0 if it has no such line.
func Count(text, key string) int64 {
	_, rest, ok := strings.Cut("\n"+text, "\n"+key)
	if !ok {
		return 0
	}
	v, _, _ := strings.Cut(rest, "\n")
	n, _ := strconv.ParseInt(v, 10, 64)
	return n
}

// innerPid finds what the box calls the process that the guest calls pid: the
// last number of its NSpid line.
func (b *Box) innerPid(pid int) int {
	fd, err := unix.Openat(int(b.own.Fd()), strconv.Itoa(pid)+"/status", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	var buf [2048]byte
	n, _ := unix.Read(fd, buf[:])
	_, rest, ok := strings.Cut(string(buf[:max(n, 0)]), "\nNSpid:")
	if !ok {
		return 0
	}
	line, _, _ := strings.Cut(rest, "\n")
	f := strings.Fields(line)
	if len(f) == 0 {
		return 0
	}
	inner, _ := strconv.Atoi(f[len(f)-1])
	return inner
}

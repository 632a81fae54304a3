package jail

import (
	"errors"
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
	serial atomic.Uint64

	mu    sync.Mutex
	stale []string // command groups that still hold survivors of a finished command
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
	g, err := b.newGroup()
	if err != nil {
		return nil, fmt.Errorf("make command group: %w", err)
	}
	r := &Running{box: b, group: g, oom: b.oomKills()}
	err = b.forge.do(func() error { return r.fork(p) })
	runtime.KeepAlive(p)
	if err != nil {
		g.remove()
		return nil, err
	}
	return r, nil
}

// fork runs on the forge.
func (r *Running) fork(p Process) error {
	pidfd := -1
	sys := &syscall.SysProcAttr{
		Setsid:     true,
		Credential: &syscall.Credential{Uid: p.UID, Gid: p.GID, Groups: p.Groups},
		PidFD:      &pidfd,
	}
	if p.TTY {
		sys.Setctty, sys.Ctty = true, 0
	}
	leave, err := r.group.enter(sys)
	if err != nil {
		return err
	}
	pid, err := syscall.ForkExec(p.Path, p.Argv, &syscall.ProcAttr{
		Dir: p.Dir, Env: p.Env, Sys: sys,
		Files: []uintptr{p.Stdin.Fd(), p.Stdout.Fd(), p.Stderr.Fd()},
	})
	if e := leave(); e != nil && err == nil {
		unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // our own child
		unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
		err = e
	}
	if err != nil {
		return err
	}
	r.pid = pid
	if pidfd < 0 {
		if pidfd, err = unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK); err != nil {
			unix.Kill(pid, unix.SIGKILL) //nolint:errcheck
			unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
			return err
		}
	}
	unix.SetNonblock(pidfd, true) //nolint:errcheck // a pidfd can always be
	r.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
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
	raw, err := r.pidfd.SyscallConn()
	if err != nil {
		return Exit{}, err
	}
	var ws unix.WaitStatus
	var ru unix.Rusage
	var werr error
	err = raw.Read(func(uintptr) bool {
		for {
			pid, err := unix.Wait4(r.pid, &ws, unix.WNOHANG, &ru)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			werr = err
			return err != nil || pid == r.pid
		}
	})
	r.pidfd.Close()
	if err = errors.Join(err, werr); err != nil {
		return Exit{}, fmt.Errorf("wait for process %d: %w", r.pid, err)
	}
	e := Exit{CPU: time.Duration(ru.Utime.Nano() + ru.Stime.Nano()), MaxRSS: ru.Maxrss << 10}
	if ws.Signaled() {
		e.Signal = ws.Signal()
		r.hit.Store(e.Signal == unix.SIGKILL && r.box.oomKills() > r.oom)
	} else {
		e.Code = ws.ExitStatus()
	}
	return e, nil
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
	if !r.group.remove() {
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

// oomKills reads the sandbox's count of processes killed for want of memory.
func (b *Box) oomKills() int64 {
	var buf [512]byte
	n, _ := unix.Pread(int(b.cgroup.OOM.Fd()), buf[:], 0)
	return parseCount(string(buf[:max(n, 0)]), "oom_kill ")
}

func parseCount(text, key string) int64 {
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

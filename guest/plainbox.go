package guest

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// PlainBox starts processes without a cgroup of their own: what a virtual
// machine's guest can do anywhere, and what tests use. Each command leads a
// session. Kill finds the tree by parentage, so a process that left the
// session and whose parent has ended escapes it, and OOMKilled is always
// false.
type PlainBox struct{}

// Start implements Box.
func (PlainBox) Start(p Process) (Running, error) {
	r := &plainRunning{fd: -1}
	attr := &syscall.ProcAttr{
		Dir:   p.Dir,
		Env:   p.Env,
		Files: []uintptr{p.Stdin.Fd(), p.Stdout.Fd(), p.Stderr.Fd()},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Setctty:    p.TTY,
			PidFD:      &r.fd,
			Credential: &syscall.Credential{Uid: p.UID, Gid: p.GID, Groups: p.Groups},
		},
	}
	if attr.Env == nil {
		attr.Env = []string{}
	}
	pid, err := syscall.ForkExec(p.Path, p.Argv, attr)
	if err != nil {
		return nil, &os.PathError{Op: "exec", Path: p.Path, Err: err}
	}
	r.pid = pid
	if r.fd >= 0 {
		// The poller waits for it, so that an idle command costs no thread.
		unix.SetNonblock(r.fd, true) //nolint:errcheck // then Wait blocks a thread
		r.pidfd = os.NewFile(uintptr(r.fd), "pidfd")
	}
	return r, nil
}

type plainRunning struct {
	pid   int
	fd    int
	pidfd *os.File // nil where the kernel has none

	mu     sync.Mutex
	reaped bool // the pid may belong to another process by now
}

func (r *plainRunning) Pid() int { return r.pid }

func (r *plainRunning) Wait() (Exit, error) {
	var ws unix.WaitStatus
	var ru unix.Rusage
	var err error
	done := false
	reap := func(flags int) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		var pid int
		for {
			if pid, err = unix.Wait4(r.pid, &ws, flags, &ru); !errors.Is(err, unix.EINTR) {
				break
			}
		}
		done = pid == r.pid || err != nil
		r.reaped = done
		return done
	}
	if r.pidfd != nil {
		if c, cerr := r.pidfd.SyscallConn(); cerr == nil {
			c.Read(func(uintptr) bool { return reap(unix.WNOHANG) }) //nolint:errcheck // the loop below waits then
		}
	}
	for !done { // without pidfd; blocks a thread but not the lock
		var si unix.Siginfo
		if err := unix.Waitid(unix.P_PID, r.pid, &si, unix.WEXITED|unix.WNOWAIT, nil); err != nil && !errors.Is(err, unix.EINTR) {
			return Exit{}, os.NewSyscallError("waitid", err)
		}
		reap(unix.WNOHANG)
	}
	if err != nil {
		return Exit{}, os.NewSyscallError("wait4", err)
	}
	x := Exit{
		CPU:    time.Duration(ru.Utime.Nano() + ru.Stime.Nano()),
		MaxRSS: ru.Maxrss << 10,
	}
	if ws.Signaled() {
		x.Signal = ws.Signal()
	} else {
		x.Code = ws.ExitStatus()
	}
	return x, nil
}

// Signal is sent under the lock that Wait reaps under, so the pid is still the
// leader's.
func (r *plainRunning) Signal(sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reaped {
		return os.ErrProcessDone
	}
	return unix.Kill(-r.pid, sig)
}

// Kill stops what it finds before it kills, until it finds nothing new, so that
// no child is born unseen.
func (r *plainRunning) Kill() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reaped {
		return os.ErrProcessDone
	}
	unix.Kill(-r.pid, unix.SIGSTOP) //nolint:errcheck // it may be empty
	unix.Kill(r.pid, unix.SIGSTOP)  //nolint:errcheck
	stopped := map[int]bool{r.pid: true}
	for grew := true; grew; {
		grew = false
		for pid, parent := range parents(r.pid) {
			if stopped[parent] && !stopped[pid] {
				unix.Kill(pid, unix.SIGSTOP) //nolint:errcheck // it may have ended
				stopped[pid], grew = true, true
			}
		}
	}
	for pid := range stopped {
		unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // as above
	}
	if err := unix.Kill(-r.pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

func (r *plainRunning) OOMKilled() bool { return false }

func (r *plainRunning) Release() {
	if r.pidfd != nil {
		r.pidfd.Close()
	}
}

// parents gives the parent of every process; of those in the session of
// leader it gives the leader, so that orphans in it count as its children.
func parents(leader int) map[int]int {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	out := make(map[int]int)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		// The name in parentheses may hold anything.
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if len(f) < 4 || pid == leader {
			continue
		}
		out[pid], _ = strconv.Atoi(f[1])
		if f[3] == strconv.Itoa(leader) {
			out[pid] = leader
		}
	}
	return out
}

package qemu

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// wait collects the process when it ends, or, where somebody else is its
// parent, sees that it has. A pidfd is polled like a socket, so this parks a
// goroutine and no thread.
func (p *Process) wait() {
	var status syscall.WaitStatus
	known := false
	file := pollable(p.pidfd)
	if c, err := file.SyscallConn(); err == nil {
		c.Read(func(fd uintptr) bool { //nolint:errcheck // ended is all that there is to learn
			for {
				n, err := syscall.Wait4(p.pid, &status, syscall.WNOHANG, nil)
				switch {
				case err == syscall.EINTR:
					continue
				case err != nil: // not our child: it can only be polled
					n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
					return n == 1
				}
				known = n == p.pid
				return known
			}
		})
	}
	file.Close()
	p.ended(status, known)
}

// pollable gives a further descriptor of a pidfd, for the poller alone, so that
// p.pidfd stays good for signals.
func pollable(f *os.File) *os.File {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return f
	}
	unix.SetNonblock(fd, true) //nolint:errcheck // it blocks a thread then
	return os.NewFile(uintptr(fd), "pidfd")
}

// lookPath finds a program, and says that the host lacks it.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", dsec.Errorf(dsec.Unsupported, "%s is not installed", name)
	}
	return path, nil
}

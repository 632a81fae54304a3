package container

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// watch calls a function when a process ends: one goroutine and one epoll
// descriptor for all pidfds.
type watch struct {
	epoll int
	wake  int // eventfd
	done  chan struct{}

	mu    sync.Mutex
	calls map[int32]func()
}

func newWatch() (*watch, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	ev, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ev, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(ev)})
	}
	if err != nil {
		unix.Close(ep)
		return nil, err
	}
	w := &watch{epoll: ep, wake: ev, done: make(chan struct{}), calls: map[int32]func(){}}
	go w.run()
	return w, nil
}

// add arranges for f to be called, in a goroutine of its own, once the process
// has ended. f may close the file.
func (w *watch) add(pidfd *os.File, f func()) error {
	fd := int(pidfd.Fd())
	w.mu.Lock()
	w.calls[int32(fd)] = f
	w.mu.Unlock()
	err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(fd)})
	if err != nil {
		w.mu.Lock()
		delete(w.calls, int32(fd))
		w.mu.Unlock()
		return fmt.Errorf("watch process: %w", err)
	}
	return nil
}

func (w *watch) run() {
	defer close(w.done)
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(w.epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		for _, e := range events[:max(n, 0)] {
			if int(e.Fd) == w.wake {
				return
			}
			w.mu.Lock()
			f := w.calls[e.Fd]
			delete(w.calls, e.Fd)
			w.mu.Unlock()
			if f != nil {
				unix.EpollCtl(w.epoll, unix.EPOLL_CTL_DEL, int(e.Fd), nil) //nolint:errcheck // closing removes it too
				go f()
			}
		}
	}
}

// close stops watching; calls under way go on.
func (w *watch) close() {
	unix.Write(w.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) //nolint:errcheck // an eventfd takes it
	<-w.done
	unix.Close(w.epoll)
	unix.Close(w.wake)
}

// waitPidfd waits for a process to end.
func waitPidfd(pidfd *os.File, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		left := max(time.Until(deadline), 0)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}, int(left.Milliseconds()))
		switch {
		case n > 0:
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return err
		case left == 0:
			return fmt.Errorf("process did not end within %v", timeout)
		}
	}
}

// waitGone waits for a process that was told to end.
func waitGone(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // gone
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	return waitPidfd(f, endTimeout)
}

package jail

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// holdVersion names the exchanges between host, holder and shell. It changes
// with any of them.
const holdVersion = "1"

// Files of the holder process, in order.
const (
	holdListenFD = 3 // listening SOCK_SEQPACKET socket
	holdGuestFD  = 4 // the guest binary
)

// ServeHold is the main function of the holder. It expects the descriptors
// that StartHolder gives it, serves one host process after the other, and
// returns when it is told to or cannot go on.
func ServeHold() error {
	runtime.LockOSThread() // the mount namespace made here is this thread's
	setName("dsec-hold")
	unix.Umask(0)
	if err := closeOnExec(); err != nil {
		return err
	}
	h := &hold{requests: make(chan holdRequest)}
	var err error
	if h.listen, err = moveUp(holdListenFD); err != nil {
		return err
	}
	if err := holdRoot(holdGuestFD); err != nil {
		return err
	}
	h.spawner = newSpawner()
	go h.reap()
	go h.accept()
	for r := range h.requests {
		switch r.m.fields[0] {
		case "exit":
			reply(r.conn, "", nil)
			return nil
		case "hello":
			reply(r.conn, holdVersion+" "+strconv.Itoa(os.Getpid()), nil)
		default:
			h.spawn(r)
		}
		close(r.done)
	}
	return nil
}

type holdRequest struct {
	conn int
	m    *message
	done chan struct{}
}

// closeOnExec makes sure that nothing but 0, 1 and 2 passes an exec, whatever
// the program was started with.
func closeOnExec() error {
	if err := unix.CloseRange(3, 1<<32-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close descriptors on exec: %w", err)
	}
	return nil
}

// setName is what ps shows instead of the descriptor that was executed.
func setName(name string) {
	b := append([]byte(name), 0)
	unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&b[0])), 0, 0, 0) //nolint:errcheck // for people only
}

// moveUp gives an inherited descriptor a number out of the way of those that a
// fork gives to a shell's files, and closes it on exec.
func moveUp(fd int) (int, error) {
	n, err := dupUp(fd)
	if err != nil {
		return -1, err
	}
	return n, unix.Close(fd)
}

func dupUp(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 64)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
	}
	return n, nil
}

type hold struct {
	listen   int // listening socket
	spawner  *spawner
	requests chan holdRequest
	mu       sync.Mutex // held from fork to reply, so that reap cannot overtake
}

// accept serves hosts, any number at once: during a restart the old and the
// new one overlap.
func (h *hold) accept() {
	for {
		fd, _, err := unix.Accept4(h.listen, unix.SOCK_CLOEXEC)
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
				continue
			}
			os.Exit(1)
		}
		go h.serve(fd)
	}
}

func (h *hold) serve(fd int) {
	defer unix.Close(fd)
	for {
		m, err := receive(fd)
		if err != nil {
			return
		}
		if len(m.fields) == 0 {
			m.close()
			return
		}
		done := make(chan struct{})
		h.requests <- holdRequest{conn: fd, m: m, done: done}
		<-done // the answer is sent; the descriptor may be reused from here on
	}
}

func reply(conn int, text string, files []*os.File) {
	m := message{fields: []string{text}, files: files}
	m.send(conn) //nolint:errcheck // a host that went away asks again when it is back
}

// spawn forks one shell. Fields: "spawn", its priority. Files: its listening socket, a socket on which the
// host is told the pid and answers once it has written the id maps, and on
// cgroup v2 the cgroup it is born in.
func (h *hold) spawn(r holdRequest) {
	defer r.m.close()
	if len(r.m.fields) != 2 || len(r.m.files) < 2 || len(r.m.files) > 3 {
		reply(r.conn, "error "+errMessage.Error(), nil)
		return
	}
	cgroup := -1
	if len(r.m.files) == 3 {
		cgroup = int(r.m.files[2].Fd())
	}
	listener, err := dupUp(int(r.m.files[0].Fd()))
	if err != nil {
		reply(r.conn, "error "+err.Error(), nil)
		return
	}
	defer unix.Close(listener)
	h.mu.Lock()
	pid, f, err := h.spawner.fork(listener, int(r.m.files[1].Fd()), cgroup, Priority(r.m.fields[1]))
	h.mu.Unlock()
	if err != nil {
		reply(r.conn, "error "+err.Error(), nil)
		return
	}
	reply(r.conn, strconv.Itoa(pid), []*os.File{f})
	f.Close()
}

// reap collects shells that ended. Hosts learn of the end from the pidfd.
func (h *hold) reap() {
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, unix.SIGCHLD)
	for range chld {
		h.mu.Lock()
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
		h.mu.Unlock()
	}
}

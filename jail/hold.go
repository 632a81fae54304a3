package jail

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
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

// Holder is the host's connection to a holder process. It is safe for
// concurrent use; requests are served one after the other.
type Holder struct {
	mu   sync.Mutex
	conn int // SOCK_SEQPACKET
	pid  int
	old  bool
}

// HolderConfig says where a holder lives.
type HolderConfig struct {
	Socket string   // path of its listening socket
	Guest  string   // path of the guest binary
	Log    *os.File // its standard error, and that of the guests; default none
	Join   func(pid int) error
	// Join is called with the pid of a new holder before it forks anything, so
	// that all shells are born in the guests' cgroup; nil means nothing.
}

// OpenHolder connects to the holder at c.Socket, and starts one if none
// answers there.
func OpenHolder(c HolderConfig) (*Holder, error) {
	if h, err := connectHolder(c.Socket); err == nil {
		if !h.old {
			return h, nil
		}
		// Of an earlier build. Its shells are their own by now; what it forks
		// would not understand us.
		if err := errors.Join(h.Exit(), h.Close()); err != nil {
			return nil, fmt.Errorf("end old holder: %w", err)
		}
	}
	if err := startHolder(c); err != nil {
		return nil, fmt.Errorf("start holder: %w", err)
	}
	return connectHolder(c.Socket)
}

func connectHolder(socket string) (*Holder, error) {
	conn, err := dialSeqpacket(socket)
	if err != nil {
		return nil, fmt.Errorf("connect to holder: %w", err)
	}
	h := &Holder{conn: conn}
	// Its own word, since the socket was made by the process that started it.
	r, err := h.call(&message{fields: []string{"hello"}})
	version, pid := "", ""
	if err == nil {
		version, pid, _ = strings.Cut(r.fields[0], " ")
		h.pid, err = strconv.Atoi(pid)
	}
	if err != nil {
		unix.Close(conn)
		return nil, fmt.Errorf("connect to holder: %w", err)
	}
	h.old = version != holdVersion
	return h, nil
}

func startHolder(c HolderConfig) error {
	os.Remove(c.Socket)
	l, err := ListenPath(c.Socket, unix.SOCK_SEQPACKET)
	if err != nil {
		return err
	}
	defer l.Close()
	guest, err := os.Open(c.Guest)
	if err != nil {
		return fmt.Errorf("open guest binary: %w", err)
	}
	defer guest.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	log := null
	if c.Log != nil {
		log = c.Log
	}
	pid, err := syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(int(guest.Fd())), []string{"dsec-guest", "hold"}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=2"},
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd(), l.Fd(), guest.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	// While this process lives it is the holder's parent and collects it.
	go unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
	if c.Join != nil {
		if err := c.Join(pid); err != nil {
			unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // just started; its number is not reused yet
			return err
		}
	}
	return nil
}

// Priority is how urgent a shell is.
type Priority string

// The priorities of a shell.
const (
	Urgent Priority = "urgent" // a create waits for it
	Spare  Priority = "spare"  // made ahead: it and what it starts yield to all else until Hasten
)

// Hasten gives a spare shell the priority of others. Its process group is the
// shell alone, so this is one call for all its threads.
func Hasten(pid int) error {
	if err := unix.Setpriority(unix.PRIO_PGRP, pid, 0); err != nil {
		return fmt.Errorf("set priority of shell: %w", err)
	}
	return nil
}

// SpawnConfig says what a shell is to be.
type SpawnConfig struct {
	Base     uint32   // first host id of its range
	Listener *os.File // socket on which it takes an outfit and a root
	Cgroup   *os.File // that it is born in; nil on v1
	Priority Priority
}

// Spawn makes a shell. It returns the shell's pid and pidfd; the caller closes
// the file.
func (h *Holder) Spawn(c SpawnConfig) (int, *os.File, error) {
	pid, pidfd, err := h.spawn(c)
	if err != nil {
		return 0, nil, fmt.Errorf("spawn shell: %w", err)
	}
	return pid, pidfd, nil
}

func (h *Holder) spawn(c SpawnConfig) (int, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "sync"), os.NewFile(uintptr(pair[1]), "sync")
	defer ours.Close()
	m := message{fields: []string{"spawn", string(c.Priority)}, files: []*os.File{c.Listener, theirs}}
	if c.Cgroup != nil {
		m.files = append(m.files, c.Cgroup)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn < 0 {
		theirs.Close()
		return 0, nil, os.ErrClosed
	}
	err = m.send(h.conn)
	theirs.Close()
	if err != nil {
		return 0, nil, err
	}
	// The child waits for its maps and the holder for the child. An error here
	// closes our end, and both go on.
	mapErr := letGo(ours, c.Base)
	if mapErr != nil {
		ours.Close()
	}
	r, err := h.answer()
	if err != nil {
		return 0, nil, errors.Join(mapErr, err)
	}
	pid, err := strconv.Atoi(r.fields[0])
	if err != nil || len(r.files) != 1 {
		r.close()
		return 0, nil, errors.Join(mapErr, errors.New(r.fields[0]))
	}
	return pid, r.files[0], nil
}

// letGo reads the child's pid from the sync socket, writes its maps and lets it
// go on.
func letGo(sync *os.File, base uint32) error {
	var tid [4]byte
	if _, err := unix.Read(int(sync.Fd()), tid[:]); err != nil {
		return err
	}
	pid := int(binary.NativeEndian.Uint32(tid[:]))
	if pid == 0 { // the holder could not fork; its answer says why
		return nil
	}
	if err := writeIDMaps(pid, base); err != nil {
		return err
	}
	_, err := unix.Write(int(sync.Fd()), []byte{1})
	return err
}

// Pid is the holder's process.
func (h *Holder) Pid() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pid
}

// Exit ends the holder. Shells go on.
func (h *Holder) Exit() error {
	_, err := h.call(&message{fields: []string{"exit"}})
	return err
}

// Close ends the connection; the holder goes on.
func (h *Holder) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn < 0 {
		return nil
	}
	err := unix.Close(h.conn)
	h.conn = -1
	return err
}

func (h *Holder) call(m *message) (*message, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn < 0 {
		return nil, os.ErrClosed
	}
	if err := m.send(h.conn); err != nil {
		return nil, err
	}
	return h.answer()
}

// Requires: h.mu held.
func (h *Holder) answer() (*message, error) {
	r, err := receive(h.conn)
	if err != nil {
		return nil, err
	}
	if len(r.fields) != 1 {
		r.close()
		return nil, errMessage
	}
	return r, nil
}

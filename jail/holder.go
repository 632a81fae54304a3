package jail

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Holder is the host's connection to a holder process. It is safe for
// concurrent use; requests are served one after the other.
type Holder struct {
	config HolderConfig

	mu     sync.Mutex
	conn   int // SOCK_SEQPACKET; negative while there is none
	pid    int
	closed bool
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
// answers there. Should it die, the next Spawn starts another.
func OpenHolder(c HolderConfig) (*Holder, error) {
	h := &Holder{config: c, conn: -1}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.open(); err != nil {
		return nil, err
	}
	return h, nil
}

// open connects, and starts a holder if there is none of this build.
// Requires: h.mu held.
func (h *Holder) open() error {
	version, err := h.connect()
	if err == nil && version == holdVersion {
		return nil
	}
	if err == nil {
		// Of an earlier build. Its shells are their own by now; what it forks
		// would not understand us.
		if _, err := h.call(&message{fields: []string{"exit"}}); err != nil {
			return fmt.Errorf("end old holder: %w", err)
		}
		h.drop()
	}
	if err := startHolder(h.config); err != nil {
		return fmt.Errorf("start holder: %w", err)
	}
	_, err = h.connect()
	return err
}

// connect makes the connection, and learns the holder's version and pid: its own
// word, since the socket was made by the process that started it.
// Requires: h.mu held.
func (h *Holder) connect() (version string, err error) {
	if h.conn, err = dialSeqpacket(h.config.Socket); err != nil {
		return "", fmt.Errorf("connect to holder: %w", err)
	}
	r, err := h.call(&message{fields: []string{"hello"}})
	if err == nil {
		var pid string
		version, pid, _ = strings.Cut(r.fields[0], " ")
		h.pid, err = strconv.Atoi(pid)
	}
	if err != nil {
		h.drop()
		return "", fmt.Errorf("connect to holder: %w", err)
	}
	return version, nil
}

// drop ends the connection.
// Requires: h.mu held.
func (h *Holder) drop() {
	if h.conn >= 0 {
		unix.Close(h.conn)
		h.conn = -1
	}
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
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return 0, nil, os.ErrClosed
	}
	pid, pidfd, err := h.spawn(c)
	if errors.Is(err, errHolderGone) {
		h.drop()
		if err = h.open(); err == nil {
			pid, pidfd, err = h.spawn(c)
		}
	}
	if err != nil {
		return 0, nil, fmt.Errorf("spawn shell: %w", err)
	}
	return pid, pidfd, nil
}

// Requires: h.mu held.
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
	err = h.send(&m)
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
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := h.call(&message{fields: []string{"exit"}})
	if errors.Is(err, errHolderGone) {
		return nil
	}
	return err
}

// Close ends the connection; the holder goes on.
func (h *Holder) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.drop()
	return nil
}

// errHolderGone means the connection does not work; what was asked for did not
// happen, or is ended with the slot it was for.
var errHolderGone = errors.New("the holder is gone")

// Requires: h.mu held.
func (h *Holder) call(m *message) (*message, error) {
	if err := h.send(m); err != nil {
		return nil, err
	}
	return h.answer()
}

// Requires: h.mu held.
func (h *Holder) send(m *message) error {
	if h.conn < 0 {
		return errHolderGone
	}
	if err := m.send(h.conn); err != nil {
		return fmt.Errorf("%w: %w", errHolderGone, err)
	}
	return nil
}

// Requires: h.mu held.
func (h *Holder) answer() (*message, error) {
	r, err := receive(h.conn)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errHolderGone, err)
	}
	if len(r.fields) != 1 {
		r.close()
		return nil, errMessage
	}
	return r, nil
}

// Package hold keeps open files for processes that may die. A holder is a process of its own
// that knows names and descriptors and nothing else: another process puts a descriptor there
// under a name, is killed, and its successor gets the same open file back. A mount that is
// attached nowhere and a connection to the kernel's FUSE live as long as somebody holds them.
//
// It does not know what it holds, and decides nothing: a holder with logic would have to be
// upgraded, and what it holds cannot outlive it.
//
// Invariants:
//   - There is one holder in a folder at most: it has the lock there, from before it answers
//     until it is gone.
//   - Only processes of the holder's own user are served.
//   - Put, Get, List, Drop and End are all there ever is. A holder of another version than
//     the client's is refused, never replaced: ending it would end what it holds.
//
// Read next: client.go for the other end, docs/decisions/images.md for who holds what.
package hold

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Words of the protocol. A connection is of type SOCK_SEQPACKET, one request or answer a
// packet. The holder begins with the greeting and its pid.
const (
	greeting = "dsec-hold 1"

	opPut  = "put"  // name, one descriptor
	opGet  = "get"  // name; the answer has the descriptor
	opList = "list" // the names that follow a name, in order, as many as fit
	opDrop = "drop" // name
	opEnd  = "end"

	sayOK   = "ok"
	sayNone = "none" // nothing has this name
	sayFull = "full"
	sayBad  = "bad" // no request of this version
)

// Bounds.
const (
	maxPacket = 16 << 10
	maxName   = 200
	maxHeld   = 32 << 10
	maxList   = maxPacket / (maxName + 1)
)

// Names in the folder.
const (
	socketName = "hold.sock"
	lockName   = "hold.lock"
)

// checkName says whether a name can be sent: printable, without spaces.
func checkName(name string) error {
	bad := strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' })
	if name == "" || len(name) > maxName || bad {
		return fmt.Errorf("hold: name %.40q is malformed", name)
	}
	return nil
}

// holder is the process's state.
type holder struct {
	mu    sync.Mutex
	held  map[string]*os.File
	ended chan struct{}
	end   func()
}

// Serve is the whole of a holder process that Open started. It returns when it is told to end.
func Serve() error {
	// Open gave the listener and the lock, which stays open as long as the process.
	l, err := net.FileListener(os.NewFile(listenerFD, socketName))
	if err != nil {
		return fmt.Errorf("serve as holder: %w", err)
	}
	unix.CloseOnExec(lockFD)
	settle()
	h := &holder{held: map[string]*os.File{}, ended: make(chan struct{})}
	h.end = sync.OnceFunc(func() { close(h.ended) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				if errors.Is(err, net.ErrClosed) {
					return
				}
				continue // out of descriptors: somebody drops some
			}
			go h.serve(c.(*net.UnixConn))
		}
	}()
	<-h.ended
	return l.Close()
}

// settle makes the process small and hard to kill by accident. What does not work is
// not needed.
func settle() {
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0) //nolint:errcheck
	os.WriteFile("/proc/self/comm", []byte("dsec-hold"), 0)     //nolint:errcheck
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim) //nolint:errcheck
	}
	debug.SetGCPercent(20)
	debug.FreeOSMemory()
}

func (h *holder) serve(c *net.UnixConn) {
	defer c.Close()
	if !mine(c) {
		return
	}
	if err := send(c, greeting+" "+strconv.Itoa(os.Getpid()), nil); err != nil {
		return
	}
	for {
		text, file, err := receive(c)
		if err != nil {
			return
		}
		answer, out := h.answer(text, file)
		if err := send(c, answer, out); err != nil {
			return
		}
		if text == opEnd {
			h.end()
		}
	}
}

// mine reports whether the other end is of this process's user.
func mine(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		ok = err == nil && int(cred.Uid) == os.Geteuid()
	})
	return err == nil && ok
}

// answer does what is asked. A file that is not taken is closed.
func (h *holder) answer(text string, file *os.File) (string, *os.File) {
	op, name, _ := strings.Cut(text, " ")
	if file != nil && op != opPut {
		file.Close()
		return sayBad, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch op {
	case opPut:
		if file == nil || checkName(name) != nil {
			shut(file)
			return sayBad, nil
		}
		old, ok := h.held[name]
		if !ok && len(h.held) >= maxHeld {
			shut(file)
			return sayFull, nil
		}
		h.held[name] = file
		shut(old)
	case opGet:
		f, ok := h.held[name]
		if !ok {
			return sayNone, nil
		}
		return sayOK, f
	case opList:
		names := slices.Sorted(maps.Keys(h.held))
		at, found := slices.BinarySearch(names, name)
		if found {
			at++
		}
		names = names[at:]
		return strings.Join(append([]string{sayOK}, names[:min(len(names), maxList)]...), " "), nil
	case opDrop:
		f, ok := h.held[name]
		if !ok {
			return sayNone, nil
		}
		delete(h.held, name)
		shut(f)
	case opEnd:
	default:
		return sayBad, nil
	}
	return sayOK, nil
}

// shut closes a file beside: the last descriptor of a mount may take its time.
func shut(f *os.File) {
	if f != nil {
		go f.Close()
	}
}

// send writes one packet. The file stays the caller's.
func send(c *net.UnixConn, text string, file *os.File) error {
	var oob []byte
	if file != nil {
		oob = unix.UnixRights(int(file.Fd()))
	}
	_, _, err := c.WriteMsgUnix([]byte(text), oob, nil)
	return err
}

// receive reads one packet with at most one file, which is the caller's and closes on exec.
func receive(c *net.UnixConn) (string, *os.File, error) {
	buf := make([]byte, maxPacket+1)
	oob := make([]byte, unix.CmsgSpace(4*8))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return "", nil, err
	}
	files, err := rights(oob[:oobn])
	if err == nil && (n == 0 || n > maxPacket || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || len(files) > 1) {
		err = errors.New("hold: malformed packet")
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return "", nil, err
	}
	if len(files) == 1 {
		return string(buf[:n]), files[0], nil
	}
	return string(buf[:n]), nil, nil
}

func rights(oob []byte) (files []*os.File, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // credentials or the like, which nobody asked for
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "held"))
		}
	}
	return files, nil
}

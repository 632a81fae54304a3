package guest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/wire"
)

// warm is a program of the image that has loaded all it needs and forks itself
// into cells. It runs no call's code: only its forks do, in cells.
//
// On its descriptor 3, a stream, it first says "ready\n". Then come requests,
// one at a time: four bytes of length (little-endian), and that many of fields,
// each with four bytes of length before it:
//
//	"uid gid group ..."   of the call
//	folder                to work in
//	number of arguments   in decimal; so many fields, then variables NAME=value
//
// With the first byte come descriptors: namespaces (pid, mount, net, ipc), the
// streams 0, 1 and 2, and files to which the fork writes "0" to be in its
// cell's groups. It answers "ok STATUS\n" with the wait status of the fork, or
// "error TEXT\n" when it could not fork.
type warm struct {
	mu   sync.Mutex // one call at a time
	conn *os.File
	in   *bufio.Reader
	dead bool
}

// Limits of a warm program.
const (
	warmTimeout = 60 * time.Second // to load what it is to have
	warmSays    = 16 << 10         // of what it prints before it is ready
)

func (a *Agent) findWarm(name string) *warm {
	a.cells.mu.Lock()
	defer a.cells.mu.Unlock()
	return a.cells.warm[name]
}

// Warm implements wire.CellHandler.
func (a *Agent) Warm(ctx context.Context, w wire.Warm) error {
	box, err := a.cellBox()
	if err != nil {
		return err
	}
	if len(w.Argv) == 0 || w.Name == "" {
		return dsec.Errorf(dsec.Invalid, "a warm program has a name and arguments")
	}
	if a.findWarm(w.Name) != nil {
		return nil
	}
	root := identity{home: "/", groups: []uint32{0}}
	p := Process{Argv: w.Argv, Env: environ(a.opt.Env, w.Env, root.home, false), Dir: "/", Groups: root.groups}
	if p.Path, err = findProgram(w.Argv[0], getenv(p.Env, "PATH"), "/", root); err != nil {
		return dsec.Errorf(dsec.Unsupported, "the environment has no program %s", clip(w.Argv[0]))
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return short(err)
	}
	unix.SetNonblock(pair[0], true) //nolint:errcheck // a socket can always be
	ours, theirs := os.NewFile(uintptr(pair[0]), "warm"), os.NewFile(uintptr(pair[1]), "warm")
	errs, said, err := pipe(0)
	if err != nil {
		ours.Close()
		theirs.Close()
		return short(err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err == nil {
		p.Stdin, p.Stdout, p.Stderr = null, null, said
		var proc *jail.CellProcess
		if proc, err = startWarm(box, p, theirs); err == nil {
			go proc.Wait() //nolint:errcheck // its end shows in conn
		}
		null.Close()
	}
	theirs.Close()
	said.Close()
	if err != nil {
		ours.Close()
		errs.Close()
		return short(err)
	}
	n := &warm{conn: ours, in: bufio.NewReaderSize(ours, 512)}
	text := make(chan string, 1)
	go func() { // ends with the program, or when it closes its stream
		b, _ := io.ReadAll(io.LimitReader(errs, warmSays))
		text <- string(b)
		io.Copy(io.Discard, errs) //nolint:errcheck // so that it never blocks
		errs.Close()
	}()
	stop := context.AfterFunc(ctx, func() { ours.SetReadDeadline(time.Now()) }) //nolint:errcheck // only a socket
	defer stop()
	ours.SetReadDeadline(time.Now().Add(warmTimeout)) //nolint:errcheck // as above
	line, err := n.in.ReadString('\n')
	if err != nil || line != "ready\n" {
		ours.Close() // it ends when it finds its stream closed
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return dsec.Errorf(dsec.Invalid, "the warm program was not ready within %v", warmTimeout)
		}
		detail := strings.TrimSpace(<-text)
		if i := strings.LastIndexByte(detail, '\n'); i >= 0 {
			detail = detail[i+1:]
		}
		return dsec.Errorf(dsec.Invalid, "the warm program ended: %s", clip(detail))
	}
	ours.SetReadDeadline(time.Time{}) //nolint:errcheck // as above
	a.cells.mu.Lock()
	defer a.cells.mu.Unlock()
	if a.cells.warm == nil {
		a.cells.warm = map[string]*warm{}
	}
	if a.cells.warm[w.Name] != nil { // two at once; one is enough
		ours.Close()
		return nil
	}
	a.cells.warm[w.Name] = n
	return nil
}

func startWarm(box *jail.Box, p Process, control *os.File) (*jail.CellProcess, error) {
	return box.StartWarm(jail.Process{
		Path: p.Path, Argv: p.Argv, Env: p.Env, Dir: p.Dir, UID: p.UID, GID: p.GID, Groups: p.Groups,
		Stdin: p.Stdin, Stdout: p.Stdout, Stderr: p.Stderr,
	}, control)
}

// fork has the program fork itself into the cell as p says, and gives what
// waits for the fork.
func (w *warm) fork(cell *jail.Cell, p Process) (func() (jail.Exit, error), error) {
	w.mu.Lock()
	if w.dead {
		w.mu.Unlock()
		return nil, dsec.Errorf(dsec.NotFound, "the warm program has ended")
	}
	spaces, joins, err := cell.Warm()
	if err != nil {
		w.mu.Unlock()
		return nil, err
	}
	defer func() {
		for _, fd := range joins {
			unix.Close(fd)
		}
	}()
	ids := strconv.Itoa(int(p.UID)) + " " + strconv.Itoa(int(p.GID))
	for _, g := range p.Groups {
		ids += " " + strconv.Itoa(int(g))
	}
	fields := append([]string{ids, p.Dir, strconv.Itoa(len(p.Argv))}, p.Argv...)
	fields = append(fields, p.Env...)
	b := make([]byte, 4, 1024)
	for _, f := range fields {
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(f))), f...)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
	fds := append([]int{spaces[3], spaces[0], spaces[1], spaces[2], int(p.Stdin.Fd()), int(p.Stdout.Fd()), int(p.Stderr.Fd())}, joins...)
	if err := w.send(b, unix.UnixRights(fds...)); err != nil {
		w.end()
		w.mu.Unlock()
		return nil, fmt.Errorf("ask the warm program: %w", err)
	}
	return w.wait, nil
}

// send writes b, the descriptors with its first byte.
func (w *warm) send(b, oob []byte) error {
	raw, err := w.conn.SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		n, serr = unix.SendmsgN(int(fd), b, oob, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(serr, unix.EAGAIN)
	})
	if err = errors.Join(err, serr); err == nil && n < len(b) {
		_, err = w.conn.Write(b[n:])
	}
	return err
}

// wait is called once after fork, and gives w free.
func (w *warm) wait() (jail.Exit, error) {
	defer w.mu.Unlock()
	line, err := w.in.ReadString('\n')
	if err != nil {
		w.end()
		return jail.Exit{}, dsec.Errorf(dsec.Unavailable, "the warm program ended under a call")
	}
	word, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	status, err := strconv.ParseUint(rest, 10, 32)
	if word != "ok" || err != nil {
		return jail.Exit{}, dsec.Errorf(dsec.Exhausted, "the warm program could not fork: %s", clip(rest))
	}
	ws := syscall.WaitStatus(status)
	if ws.Signaled() {
		return jail.Exit{Signal: ws.Signal()}, nil
	}
	return jail.Exit{Code: ws.ExitStatus()}, nil
}

// end lets go of a program that does not answer. Requires: w.mu held.
func (w *warm) end() {
	w.dead = true
	w.conn.Close()
}

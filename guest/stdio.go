package guest

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// stdio is both ends of a new command's streams.
type stdio struct {
	child [3]*os.File
	out   [2]*os.File // our ends of stdout and stderr
	in    *os.File    // our end of stdin; nil for none
	tty   *os.File    // master; also out[0] and in
	feed  bool        // the input is known from the start and is closed after it
}

// openStdio makes pipes or a terminal. fed tells that Run brought input along.
func openStdio(c dsec.Command, fed bool, id identity) (s *stdio, err error) {
	s = &stdio{feed: fed}
	defer func() {
		if err != nil {
			s.closeChild()
			s.closeOurs()
		}
	}()
	if c.TTY != nil {
		master, slave, err := openTerminal(*c.TTY, id)
		if err != nil {
			return s, err
		}
		s.child = [3]*os.File{slave, slave, slave}
		s.tty, s.out[0], s.in = master, master, master
		return s, nil
	}
	if c.Stdin == dsec.StdinPipe || fed {
		s.in, s.child[0], err = pipe(1)
	} else {
		s.child[0], err = openNull()
		if errors.Is(err, unix.ENOENT) { // an image may have no /dev
			s.in, s.child[0], err = pipe(1)
			if err == nil {
				s.in.Close()
				s.in = nil
			}
		}
	}
	for i := 0; i < 2 && err == nil; i++ {
		s.out[i], s.child[1+i], err = pipe(0)
	}
	return s, err
}

// openNull opens the null device without asking the poller about it.
func openNull() (*os.File, error) {
	fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
	}
	return os.NewFile(uintptr(fd), os.DevNull), nil
}

func (s *stdio) closeChild() {
	for i, f := range s.child {
		if f != nil && (i == 0 || f != s.child[0]) {
			f.Close()
		}
	}
}

func (s *stdio) closeOurs() {
	for _, f := range s.out {
		if f != nil {
			f.Close()
		}
	}
	if s.in != nil && s.in != s.tty {
		s.in.Close()
	}
}

// pipe gives the end of a pipe that is ours (0 to read, 1 to write), watched by
// the poller, and the child's, which blocks as programs expect.
func pipe(ours int) (our, child *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	unix.SetNonblock(p[ours], true) //nolint:errcheck // cannot fail on a pipe
	return os.NewFile(uintptr(p[ours]), "pipe"), os.NewFile(uintptr(p[1-ours]), "pipe"), nil
}

// openTerminal makes a terminal of the sandbox's devpts, owned by the user.
func openTerminal(size dsec.WinSize, id identity) (master, slave *os.File, err error) {
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	s := -1
	if err = unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err == nil {
		// By the master's own descriptor: the name may lead elsewhere.
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(m), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if s = int(r); errno != 0 {
			err = errno
		}
	}
	if err != nil {
		unix.Close(m)
		return nil, nil, os.NewSyscallError("open terminal", err)
	}
	setSize(m, size)
	unix.Fchown(s, int(id.uid), -1) //nolint:errcheck // programs that open it by name go without
	return os.NewFile(uintptr(m), "terminal"), os.NewFile(uintptr(s), "terminal"), nil
}

func setSize(fd int, size dsec.WinSize) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
}

// pump moves what a command writes to its record. While there is nothing to
// read it holds no buffer and no thread.
type pump struct {
	c      *command
	stream int
	f      *os.File
	conn   syscall.RawConn
	done   chan struct{} // closed when nothing more will be read

	mu   sync.Mutex // held from reading bytes to recording them
	over bool       // the command has ended: drop what comes
}

const pumpBuffer = 32 << 10

var pumpBuffers = sync.Pool{New: func() any { return new([pumpBuffer]byte) }}

func newPump(c *command, stream int, f *os.File) *pump {
	conn, err := f.SyscallConn()
	if err != nil {
		panic(err) // only a nil or closed file has none
	}
	return &pump{c: c, stream: stream, f: f, conn: conn, done: make(chan struct{})}
}

func (p *pump) run() {
	if p.c.tty == nil {
		defer p.f.Close()
		defer close(p.done)
		p.read() //nolint:errcheck // closed, at the command's end
		return
	}
	// A terminal that no process has open reads as ended, but that is not ours
	// to act on: closing it would hang up a leader that has closed its files
	// and is about to exit, and a program may open the terminal again.
	hung := sync.OnceFunc(func() { close(p.done) })
	for p.read() == nil && !p.ended() {
		hung()
		time.Sleep(ttyQuiet)
	}
	hung()
}

// read records until there is nothing more to come. It fails once the file is
// closed.
func (p *pump) read() error {
	return p.conn.Read(func(fd uintptr) bool {
		buf := pumpBuffers.Get().(*[pumpBuffer]byte)
		defer pumpBuffers.Put(buf)
		for {
			if n, more := p.step(int(fd), buf[:]); n <= 0 {
				return !more
			}
		}
	})
}

func (p *pump) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over
}

// step reads once and records it. more is false at the end.
func (p *pump) step(fd int, buf []byte) (n int, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, err := unix.Read(fd, buf)
	switch {
	case errors.Is(err, unix.EINTR):
		return 1, true
	case errors.Is(err, unix.EAGAIN):
		return 0, true
	case err != nil || n == 0: // EIO is the end of a terminal
		return 0, false
	}
	if !p.over {
		p.c.out.append(p.stream, buf[:n])
		p.c.spokeNow()
	}
	return n, true
}

// How long the end of a terminal may keep us. Its output passes through a
// kernel thread, so an empty buffer does not mean that nothing is under way.
const (
	ttyQuiet = 10 * time.Millisecond
	ttyLimit = 250 * time.Millisecond
)

// drain records what the ended leader wrote and drops what comes later. The
// pipe tells how much is in it at this moment, so children that go on writing
// cannot hold it up.
func (p *pump) drain(tty bool) {
	if tty {
		limit := time.NewTimer(ttyLimit)
		defer limit.Stop()
		for quiet, seen := false, int64(-1); !quiet; {
			out, _ := p.c.out.stats()
			quiet, seen = out.Total == seen, out.Total
			select {
			case <-p.done:
				quiet = true
			case <-limit.C:
				quiet = true
			case <-time.After(ttyQuiet):
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn.Control(func(fd uintptr) { //nolint:errcheck // closed: all was read
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		if err != nil {
			return
		}
		buf := pumpBuffers.Get().(*[pumpBuffer]byte)
		defer pumpBuffers.Put(buf)
		for left > 0 {
			n, err := unix.Read(int(fd), buf[:min(left, len(buf))])
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || n <= 0 {
				return
			}
			p.c.out.append(p.stream, buf[:n])
			left -= n
		}
	})
	p.over = true
}

// input is a command's standard input. One writer at a time holds sem.
type input struct {
	f   *os.File
	tty bool
	sem chan struct{}

	// Guarded by sem.
	off    int64
	closed bool

	ended sync.Once
}

// end is called when the command has ended, and stops a writer that waits.
func (in *input) end() {
	in.ended.Do(func() {
		if !in.tty { // the terminal is closed with the command
			in.f.Close()
		}
	})
}

// eot is what closes the input of a terminal.
const eot = 4

// write implements dsec.Commands.Write.
func (in *input) write(ctx context.Context, w dsec.StdinWrite) (int64, error) {
	select {
	case in.sem <- struct{}{}:
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	defer func() { <-in.sem }()
	switch {
	case w.Offset < 0 || w.Offset > in.off:
		return in.off, dsec.Errorf(dsec.Invalid, "input offset %d is not between 0 and %d, what was written so far", w.Offset, in.off)
	case w.Offset+int64(len(w.Data)) <= in.off && (in.closed || !w.Close):
		return in.off, nil // a repetition
	case in.closed:
		return in.off, dsec.Errorf(dsec.Conflict, "the command's input is closed")
	}
	p := w.Data[min(in.off-w.Offset, int64(len(w.Data))):]
	if len(p) > 0 {
		stop := context.AfterFunc(ctx, func() { in.f.SetWriteDeadline(time.Unix(1, 0)) }) //nolint:errcheck // pipes and terminals have deadlines
		n, err := in.f.Write(p)
		if !stop() {
			in.f.SetWriteDeadline(time.Time{}) //nolint:errcheck // as above
		}
		in.off += int64(n)
		switch {
		case err == nil:
		case ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded):
			return in.off, context.Cause(ctx)
		case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO):
			return in.off, dsec.Errorf(dsec.Conflict, "the command has ended")
		case errors.Is(err, unix.EPIPE):
			return in.off, dsec.Errorf(dsec.Conflict, "the command has closed its input")
		default:
			return in.off, dsec.Errorf(dsec.Internal, "write the command's input: %w", err)
		}
	}
	if w.Close {
		in.closed = true
		if in.tty {
			in.f.Write([]byte{eot}) //nolint:errcheck // an ended command needs none
		} else {
			in.end()
		}
	}
	return in.off, nil
}

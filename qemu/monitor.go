package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// MaxMessage is the longest message that a monitor takes. The longest that is
// ever asked for, the state of all block devices, is some tens of kilobytes.
const MaxMessage = 1 << 20

// ErrClosed is in the error of every call on a monitor whose connection ended.
var ErrClosed = errors.New("the monitor's connection is closed")

// Event is something that QEMU tells unasked.
type Event struct {
	Name string
	Data json.RawMessage
	Time time.Time
}

// Into decodes the event's data.
func (e Event) Into(v any) error {
	if len(e.Data) == 0 {
		return nil
	}
	return json.Unmarshal(e.Data, v)
}

// CommandError is QEMU's refusal of a command.
type CommandError struct {
	Command string
	Class   string // GenericError, CommandNotFound, DeviceNotFound, ...
	Text    string
}

// Error gives command and QEMU's words.
func (e *CommandError) Error() string { return e.Command + ": " + e.Text }

// message is one line from QEMU: greeting, answer or event.
type message struct {
	QMP       json.RawMessage `json:"QMP"`
	ID        uint64          `json:"id"`
	Return    json.RawMessage `json:"return"`
	Error     *refusal        `json:"error"`
	Event     string          `json:"event"`
	Data      json.RawMessage `json:"data"`
	Timestamp stamp           `json:"timestamp"`
}

type refusal struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

type stamp struct {
	Seconds      int64 `json:"seconds"`
	Microseconds int64 `json:"microseconds"`
}

// decode reads one line.
func decode(line []byte) (message, error) {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return m, fmt.Errorf("read message of the monitor: %w", err)
	}
	if m.QMP == nil && m.Return == nil && m.Error == nil && m.Event == "" {
		return m, errors.New("read message of the monitor: neither answer nor event")
	}
	return m, nil
}

// Monitor speaks QMP, QEMU's machine protocol, over one connection. It is safe
// for concurrent use: QEMU answers in order, so commands queue up.
type Monitor struct {
	conn  *os.File
	event func(Event)

	write sync.Mutex // held while a command is sent

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan message
	err     error // once closed

	closed chan struct{}
}

// NewMonitor takes the connection over and agrees with QEMU on it.
func NewMonitor(ctx context.Context, conn *os.File, event func(Event)) (*Monitor, error) {
	m := &Monitor{conn: conn, event: event, waiting: map[uint64]chan message{}, closed: make(chan struct{})}
	greeting := make(chan struct{})
	go m.read(greeting)
	select {
	case <-greeting:
	case <-m.closed:
		return nil, m.failure()
	case <-ctx.Done():
		m.Close()
		return nil, fmt.Errorf("wait for the monitor: %w", ctx.Err())
	}
	if err := m.Execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Close ends the connection; QEMU runs on.
func (m *Monitor) Close() {
	m.fail(ErrClosed)
	<-m.closed
}

// Closed is closed when the connection has ended.
func (m *Monitor) Closed() <-chan struct{} { return m.closed }

// drain waits until all that QEMU said before its end is read.
func (m *Monitor) drain() {
	select {
	case <-m.closed:
	case <-time.After(time.Second): // a child of QEMU would hold the socket, and it has none
	}
}

func (m *Monitor) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// fail makes every call return err, once.
func (m *Monitor) fail(err error) {
	m.mu.Lock()
	if m.err == nil {
		m.err = err
	}
	m.mu.Unlock()
	m.conn.Close()
}

// read hands out what comes until the connection ends.
func (m *Monitor) read(greeting chan<- struct{}) {
	defer close(m.closed)
	r := bufio.NewReaderSize(m.conn, 4096)
	for {
		line, err := readLine(r)
		var msg message
		if err == nil {
			msg, err = decode(line)
		}
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, os.ErrClosed) {
				err = ErrClosed
			}
			m.fail(fmt.Errorf("%w: %w", ErrClosed, err))
			return
		}
		switch {
		case msg.QMP != nil:
			if greeting != nil {
				close(greeting)
				greeting = nil
			}
		case msg.Event != "":
			if m.event != nil {
				m.event(Event{Name: msg.Event, Data: msg.Data, Time: time.Unix(msg.Timestamp.Seconds, msg.Timestamp.Microseconds*1000)})
			}
		default:
			m.mu.Lock()
			c := m.waiting[msg.ID]
			delete(m.waiting, msg.ID)
			m.mu.Unlock()
			if c != nil {
				c <- msg // has room
			}
		}
	}
}

// readLine reads up to and without a newline, at most MaxMessage bytes.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > MaxMessage:
			return nil, fmt.Errorf("a message of the monitor is longer than %d bytes", MaxMessage)
		case errors.Is(err, bufio.ErrBufferFull):
		case err != nil:
			return nil, err
		default:
			return line[:len(line)-1], nil
		}
	}
}

// Execute runs one command and decodes its answer into result, if that is not
// nil. A refusal is a *CommandError. The command may have been carried out when
// ctx ends first.
func (m *Monitor) Execute(ctx context.Context, command string, args, result any) error {
	return m.execute(ctx, command, args, result, nil)
}

// execute sends a file along, where one is given.
func (m *Monitor) execute(ctx context.Context, command string, args, result any, file *os.File) error {
	c := make(chan message, 1)
	m.mu.Lock()
	if m.err != nil {
		defer m.mu.Unlock()
		return fmt.Errorf("%s: %w", command, m.err)
	}
	m.next++
	id := m.next
	m.waiting[id] = c
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		delete(m.waiting, id)
		m.mu.Unlock()
	}()
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	if err := m.send(append(b, '\n'), file); err != nil {
		return fmt.Errorf("%s: %w: %w", command, ErrClosed, err)
	}
	var msg message
	select {
	case msg = <-c:
	case <-m.closed:
		select {
		case msg = <-c: // the last thing that it said
		default:
			return fmt.Errorf("%s: %w", command, m.failure())
		}
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", command, ctx.Err())
	}
	if msg.Error != nil {
		return &CommandError{Command: command, Class: msg.Error.Class, Text: msg.Error.Desc}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(msg.Return, result); err != nil {
		return dsec.Errorf(dsec.Internal, "read the answer to %s: %w", command, err)
	}
	return nil
}

// send writes one command. QEMU that is stuck for sendTimeout is as good as
// gone.
func (m *Monitor) send(b []byte, file *os.File) error {
	m.write.Lock()
	defer m.write.Unlock()
	if err := m.conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	if file == nil {
		_, err := m.conn.Write(b)
		return err
	}
	c, err := m.conn.SyscallConn()
	if err != nil {
		return err
	}
	rights := unix.UnixRights(int(file.Fd()))
	sent := 0
	werr := c.Write(func(fd uintptr) bool {
		sent, err = unix.SendmsgN(int(fd), b, rights, nil, unix.MSG_NOSIGNAL)
		return err != unix.EAGAIN
	})
	if err == nil {
		err = werr
	}
	if err == nil && sent < len(b) {
		_, err = m.conn.Write(b[sent:])
	}
	return err
}

const sendTimeout = 30 * time.Second

// passFile gives QEMU a file under a name for its migration commands.
func (p *Process) passFile(ctx context.Context, name string, file *os.File) error {
	m := p.Monitor()
	if m == nil {
		return dsec.Errorf(dsec.Unavailable, "QEMU's monitor is not connected")
	}
	return p.gone(m.execute(ctx, "getfd", map[string]any{"fdname": name}, nil, file))
}

// AddFile gives QEMU a file in a set of its own, see Files.Set, and returns the
// path that names it. The set vanishes with the last use of the file.
func (p *Process) AddFile(ctx context.Context, file *os.File) (path string, err error) {
	m := p.Monitor()
	if m == nil {
		return "", dsec.Errorf(dsec.Unavailable, "QEMU's monitor is not connected")
	}
	var r struct {
		Set int `json:"fdset-id"`
	}
	if err := m.execute(ctx, "add-fd", nil, &r, file); err != nil {
		return "", p.gone(err)
	}
	return fmt.Sprintf("/dev/fdset/%d", r.Set), nil
}

// RemoveFile drops a set that AddFile made and whose user is done with it.
func (p *Process) RemoveFile(ctx context.Context, path string) error {
	var set int
	if _, err := fmt.Sscanf(path, "/dev/fdset/%d", &set); err != nil {
		return err
	}
	return p.Execute(ctx, "remove-fd", map[string]any{"fdset-id": set}, nil)
}

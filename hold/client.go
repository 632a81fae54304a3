package hold

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/jail"
)

// Errors of a client.
var (
	ErrNone = errors.New("the holder has nothing of this name")
	ErrGone = errors.New("the holder is gone")
	ErrFull = errors.New("the holder is full")
)

// Descriptors that a holder begins with.
const (
	listenerFD = 3
	lockFD     = 4
)

// callLimit bounds an exchange: a holder answers in microseconds.
const callLimit = 10 * time.Second

// Config says where a holder is, and how to start one.
type Config struct {
	Dir     string   // folder of its socket and lock; it must be there
	Command []string // a program that calls Serve, and its arguments
	Log     *os.File // its standard error; default none
}

// Client is a connection to a holder. It is safe for concurrent use.
type Client struct {
	dir   string
	pid   int
	watch *net.UnixConn // carries nothing: it ends with the holder
	gone  chan struct{} // closed when the holder is dead, or Close was called
	once  sync.Once

	mu   sync.Mutex // held through an exchange
	conn *net.UnixConn
}

// Open connects to the holder in a folder, and starts one if there is none.
func Open(c Config) (*Client, error) {
	lock, err := os.OpenFile(filepath.Join(c.Dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open holder: %w", err)
	}
	defer lock.Close()
	// One that is just ending has the lock and does not answer any more.
	for until := time.Now().Add(callLimit); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			if err := start(c, lock); err != nil {
				return nil, fmt.Errorf("start holder: %w", err)
			}
			return Dial(c.Dir)
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock holder: %w", err)
		}
		h, err := Dial(c.Dir)
		if err == nil || !errors.Is(err, ErrGone) || time.Now().After(until) {
			return h, err
		}
	}
}

// Dial connects to the holder in a folder. Without one it is ErrGone.
func Dial(dir string) (*Client, error) {
	c := &Client{dir: dir, gone: make(chan struct{})}
	var err error
	if c.conn, c.pid, err = dial(dir); err != nil {
		return nil, err
	}
	if c.watch, _, err = dial(dir); err != nil {
		c.conn.Close()
		return nil, err
	}
	c.watch.SetDeadline(time.Time{}) //nolint:errcheck // sockets have deadlines
	go func() {
		c.watch.Read(make([]byte, 1)) //nolint:errcheck // it only ever ends
		c.lost()
	}()
	return c, nil
}

func dial(dir string) (conn *net.UnixConn, pid int, err error) {
	err = jail.ViaFolder(filepath.Join(dir, socketName), func(short string) (err error) {
		conn, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: short})
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrGone, err)
	}
	conn.SetDeadline(time.Now().Add(callLimit)) //nolint:errcheck // sockets have deadlines
	text, file, err := receive(conn)
	if file != nil {
		file.Close()
	}
	if err != nil {
		conn.Close()
		return nil, 0, fmt.Errorf("%w: %w", ErrGone, err)
	}
	number, ok := strings.CutPrefix(text, greeting+" ")
	if pid, err = strconv.Atoi(number); !ok || err != nil {
		conn.Close()
		return nil, 0, fmt.Errorf("holder says %.40q where %q was expected: it is of another version of dsec, whose down ends it", text, greeting)
	}
	return conn, pid, nil
}

// start runs a holder with a listener and the lock.
func start(c Config, lock *os.File) error {
	l, err := listen(c.Dir)
	if err != nil {
		return err
	}
	defer l.Close()
	cmd := exec.Command(c.Command[0], c.Command[1:]...)
	cmd.Dir = "/"
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.ExtraFiles = []*os.File{l, lock} // listenerFD, lockFD
	if c.Log != nil {
		cmd.Stderr = c.Log
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	go cmd.Wait() //nolint:errcheck // collected by its parent while that lives
	return nil
}

// listen makes the socket. Requires: the lock is held.
func listen(dir string) (*os.File, error) {
	path := filepath.Join(dir, socketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return jail.ListenPath(path, unix.SOCK_SEQPACKET)
}

// Put gives the holder a descriptor; what had the name before is closed there. The file
// stays the caller's as well.
func (c *Client) Put(name string, file *os.File) error {
	_, _, err := c.call(opPut, name, file)
	return err
}

// Get gives the file of a name, or ErrNone. The caller closes it.
func (c *Client) Get(name string) (*os.File, error) {
	_, f, err := c.call(opGet, name, nil)
	if err == nil && f == nil {
		err = errors.New("hold: an answer without a file")
	}
	return f, err
}

// Drop closes what has a name, or is ErrNone.
func (c *Client) Drop(name string) error {
	_, _, err := c.call(opDrop, name, nil)
	return err
}

// List gives all names with a prefix, in order.
func (c *Client) List(prefix string) ([]string, error) {
	var out []string
	for last := ""; ; {
		names, _, err := c.call(opList, last, nil)
		if err != nil || len(names) == 0 {
			return out, err
		}
		for _, n := range names {
			if strings.HasPrefix(n, prefix) {
				out = append(out, n)
			}
		}
		last = names[len(names)-1]
	}
}

// End ends the holder, and all it holds. It returns when it is gone.
func (c *Client) End() error {
	if _, _, err := c.call(opEnd, "", nil); err != nil && !errors.Is(err, ErrGone) {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(c.dir, lockName), os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("end holder: %w", err)
	}
	defer lock.Close()
	for until := time.Now().Add(callLimit); ; time.Sleep(time.Millisecond) {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(until) {
			return fmt.Errorf("end holder: %w", err)
		}
	}
}

// Pid is the holder's process.
func (c *Client) Pid() int { return c.pid }

// Gone is closed when the connection is of no more use.
func (c *Client) Gone() <-chan struct{} { return c.gone }

// Close ends the connection; the holder goes on.
func (c *Client) Close() error {
	c.lost()
	return nil
}

func (c *Client) lost() {
	c.once.Do(func() {
		close(c.gone)
		c.conn.Close()
		c.watch.Close()
	})
}

func (c *Client) call(op, name string, file *os.File) (words []string, got *os.File, err error) {
	text := op
	if name != "" {
		if err := checkName(name); err != nil {
			return nil, nil, err
		}
		text += " " + name
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn.SetDeadline(time.Now().Add(callLimit)) //nolint:errcheck // sockets have deadlines
	err = send(c.conn, text, file)
	var answer string
	if err == nil {
		answer, got, err = receive(c.conn)
	}
	if err != nil {
		c.lost()
		return nil, nil, fmt.Errorf("%s: %w: %w", text, ErrGone, err)
	}
	words = strings.Fields(answer)
	switch answer, _, _ := strings.Cut(answer, " "); answer {
	case sayOK:
		return words[1:], got, nil
	case sayNone:
		return nil, nil, fmt.Errorf("%s: %w", text, ErrNone)
	case sayFull:
		return nil, nil, fmt.Errorf("%s: %w", text, ErrFull)
	default:
		return nil, nil, fmt.Errorf("%s: the holder answers %.40q", text, answer)
	}
}

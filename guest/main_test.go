package guest_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/guest"
	"github.com/dsec-go/dsec/wire"
	"golang.org/x/sys/unix"
)

// TestMain finds goroutines, descriptors and children that tests leave.
func TestMain(m *testing.M) {
	// What the test itself inherited is not for the commands.
	unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)
	before := leftovers()
	code := m.Run()
	// The fuzzer has goroutines of its own.
	if code == 0 && flag.Lookup("test.fuzz").Value.String() == "" {
		if err := settled(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// counts is what must be the same before and after.
type counts struct{ goroutines, fds, children int }

func leftovers() counts {
	var c counts
	c.goroutines = runtime.NumGoroutine()
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		for _, fd := range fds {
			// The runtime's own poller and the descriptor of ReadDir come and go.
			l, _ := os.Readlink("/proc/self/fd/" + fd.Name())
			if l != "" && !strings.HasPrefix(l, "anon_inode:[event") {
				c.fds++
			}
		}
	}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	c.children = len(strings.Fields(string(b)))
	return c
}

// settled waits until no more is there than before.
func settled(before counts) error {
	var now counts
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); runtime.Gosched() {
		now = leftovers()
		if now.goroutines <= before.goroutines && now.fds <= before.fds && now.children <= before.children {
			return nil
		}
	}
	var stacks bytes.Buffer
	b := make([]byte, 1<<20)
	stacks.Write(b[:runtime.Stack(b, true)])
	return fmt.Errorf("left behind: %+v before, %+v now\n%s", before, now, &stacks)
}

// box is a guest and a host's client of it, joined by a socket.
type box struct {
	testing.TB
	*wire.Client
	agent *guest.Agent
	path  string // of the socket
	dir   string // for files
}

func newBox(t testing.TB, opts ...func(*guest.Options)) *box {
	t.Helper()
	dir := t.TempDir()
	out, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	opt := guest.Options{Box: guest.PlainBox{}, Output: out}
	for _, f := range opts {
		f(&opt)
	}
	b := &box{TB: t, agent: guest.New(opt), path: filepath.Join(dir, "s"), dir: filepath.Join(dir, "files")}
	if err := os.Mkdir(b.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	os.Chmod(b.dir, 0o777)
	for d := dir; len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		os.Chmod(d, 0o755) // other users must get in
	}
	l, err := net.Listen("unix", b.path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- b.agent.Serve(l) }()
	b.Client = b.client()
	t.Cleanup(func() {
		b.Client.Close()
		l.Close()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		b.agent.Close()
		out.Close()
	})
	return b
}

// client makes another client of the same guest.
func (b *box) client() *wire.Client {
	return wire.NewClient(wire.Options{Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", b.path)
	}})
}

var nobody = dsec.Call{}

func step(n uint64) dsec.Call { return dsec.Call{Step: dsec.Step{Session: "s", Number: n}} }

func sh(line string) dsec.Command { return dsec.Command{Shell: line} }

func (b *box) run(c dsec.Command, stdin string) dsec.Result {
	b.Helper()
	r, err := b.Commands().Run(b.Context(), nobody, c, []byte(stdin))
	if err != nil {
		b.Fatalf("run %+v: %v", c, err)
	}
	return r
}

func (b *box) start(c dsec.Command) dsec.CommandStatus {
	b.Helper()
	st, err := b.Commands().Start(b.Context(), nobody, c)
	if err != nil {
		b.Fatalf("start %+v: %v", c, err)
	}
	return st
}

func (b *box) wait(id dsec.CommandID) dsec.CommandStatus {
	b.Helper()
	st, err := b.Commands().Wait(b.Context(), nobody, id)
	if err != nil {
		b.Fatalf("wait: %v", err)
	}
	return st
}

func (b *box) write(id dsec.CommandID, off int64, data string, end bool) int64 {
	b.Helper()
	n, err := b.Commands().Write(b.Context(), nobody, id, dsec.StdinWrite{Offset: off, Data: []byte(data), Close: end})
	if err != nil {
		b.Fatalf("write: %v", err)
	}
	return n
}

// attached is all that an Attach gave.
type attached struct {
	out, err string
	order    string // streams of the events
	gap      int64
	status   *dsec.CommandStatus
	next     int64
}

func (b *box) attach(id dsec.CommandID, off int64) attached {
	b.Helper()
	var a attached
	a.next = off
	for o, err := range b.Commands().Attach(b.Context(), nobody, id, off) {
		if err != nil {
			b.Fatalf("attach: %v", err)
		}
		if a.status != nil {
			b.Fatalf("event after the status")
		}
		if o.Offset != a.next+o.Gap {
			b.Fatalf("offset %d after %d with gap %d", o.Offset, a.next, o.Gap)
		}
		a.gap += o.Gap
		a.next = o.Offset + int64(len(o.Data))
		switch o.Stream {
		case dsec.Stdout:
			a.out += string(o.Data)
			a.order += "o"
		case dsec.Stderr:
			a.err += string(o.Data)
			a.order += "e"
		}
		a.status = o.Status
	}
	if a.status == nil {
		b.Fatal("attach ended without a status")
	}
	return a
}

func wantKind(t testing.TB, err error, want dsec.ErrorKind, parts ...string) {
	t.Helper()
	if err == nil || dsec.KindOf(err) != want {
		t.Fatalf("error %v is %v, want %v", err, dsec.KindOf(err), want)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Fatalf("error %q does not say %q", err, p)
		}
	}
}

// alive reports whether a process whose command line contains mark runs.
func alive(mark string) bool {
	pids, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range pids {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(mark)) {
			return true
		}
	}
	return false
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

func mountTmpfs(dir, opt string) error { return unix.Mount("tmpfs", dir, "tmpfs", 0, opt) }
func unmount(dir string)               { unix.Unmount(dir, unix.MNT_DETACH) }

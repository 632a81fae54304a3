package main

import (
	"context"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/dsec-go/dsec"
)

// create makes a sandbox on a fake server.
func create(t *testing.T, f *fake) string {
	t.Helper()
	sb, err := fakeSandboxes{f}.Create(context.Background(), dsec.Spec{Environment: dsec.Environment{Base: "debian"}}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return string(sb.ID)
}

func TestExecIsByteExact(t *testing.T) {
	f := newFake()
	s := newSession(f)
	if code := <-s.start("exec", create(t, f), "binary"); code != 0 {
		t.Fatalf("status %d: %s", code, s.err)
	}
	got := s.out.String()
	if len(got) != 2048 {
		t.Fatalf("%d bytes arrived, want 2048", len(got))
	}
	for i := range 1024 {
		if got[2*i] != byte(i) || got[2*i+1] != byte(i>>8) {
			t.Fatalf("bytes %d: %q", 2*i, got[2*i:2*i+2])
		}
	}
}

func TestExecPassesCtrlCToTheCommand(t *testing.T) {
	f := newFake()
	s := newSession(f)
	code := s.start("exec", create(t, f), "hang")
	s.out.await(t, "ready\n")
	s.signals <- os.Interrupt
	if got := <-code; got != 130 {
		t.Errorf("status %d, want 130", got)
	}
}

func TestExecKillsAtTheSecondCtrlC(t *testing.T) {
	f := newFake()
	s := newSession(f)
	code := s.start("exec", create(t, f), "stubborn")
	s.out.await(t, "ready\n")
	s.signals <- syscall.SIGTERM
	s.out.await(t, "TERM\n")
	s.signals <- os.Interrupt
	if got := <-code; got != 137 {
		t.Errorf("status %d, want 137", got)
	}
}

func TestExecLeavesAtTheThirdCtrlC(t *testing.T) {
	f := newFake()
	s := newSession(f)
	id := create(t, f)
	code := s.start("exec", id, "deaf")
	s.out.await(t, "ready\n")
	for range 3 {
		s.signals <- os.Interrupt
	}
	if got := <-code; got != 130 {
		t.Errorf("status %d, want 130", got)
	}
	if want := "dsec: command c1 goes on; see: dsec wait " + id + " c1\n"; s.err.String() != want {
		t.Errorf("stderr %q, want %q", s.err, want)
	}
}

func TestRunStopsItsSandboxAtCtrlC(t *testing.T) {
	f := newFake()
	s := newSession(f)
	code := s.start("run", "debian", "--", "hang")
	s.out.await(t, "ready\n")
	s.signals <- os.Interrupt
	if got := <-code; got != 130 {
		t.Errorf("status %d, want 130: %s", got, s.err)
	}
	left, err := fakeSandboxes{f}.List(context.Background(), dsec.Filter{})
	if err != nil || len(left) != 0 {
		t.Errorf("%d sandboxes are left, %v", len(left), err)
	}
}

// closedPipe is an output whose reader has gone.
type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.EPIPE}
}

func TestClosedPipeEndsTheCommand(t *testing.T) {
	for program, want := range map[string]string{"hang": "PIPE", "stubborn": "KILL"} {
		f := newFake()
		s := newSession(f)
		s.Stdout = closedPipe{}
		id := create(t, f)
		if got := <-s.start("exec", id, program); got != 141 {
			t.Errorf("%s: status %d, want 141", program, got)
		}
		list, err := fakeCommands{f}.List(t.Context(), dsec.Call{Sandbox: dsec.SandboxID(id)})
		if err != nil || len(list) != 1 || list[0].Signal != want || s.err.String() != "" {
			t.Errorf("%s: %+v, %v, %q; want it ended by %s", program, list, err, s.err, want)
		}
	}
	// A run takes its sandbox along.
	f := newFake()
	s := newSession(f)
	s.Stdout = closedPipe{}
	if got := <-s.start("run", "debian", "hang"); got != 141 {
		t.Errorf("run: status %d, want 141", got)
	}
	if left, err := (fakeSandboxes{f}).List(t.Context(), dsec.Filter{}); err != nil || len(left) != 0 {
		t.Errorf("run: %d sandboxes are left, %v", len(left), err)
	}
}

func TestExecTerminal(t *testing.T) {
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	if err := pty.Setsize(slave, &pty.Winsize{Rows: 33, Cols: 77}); err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	f := newFake()
	s := newSession(f)
	s.Stdin = slave
	code := s.start("exec", "-it", create(t, f), "rawcat")
	s.out.await(t, "{33 77}")
	// A raw terminal hands Ctrl-C on as a byte and waits for no newline.
	if _, err := master.Write([]byte("a\x03b\x04")); err != nil {
		t.Fatal(err)
	}
	if got := <-code; got != 0 {
		t.Errorf("status %d: %s", got, s.err)
	}
	if got := s.out.String(); !strings.Contains(got, "a\x03b\x04") {
		t.Errorf("the command read %q", got)
	}
	after, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if *before != *after {
		t.Errorf("the terminal was not restored")
	}
}

func TestPorts(t *testing.T) {
	f := newFake()
	s := newSession(f)
	code := s.start("ports", create(t, f), "0:7", "0:8")
	s.out.await(t, "-> 8\n")
	open, closed, _ := strings.Cut(s.out.String(), "\n")
	for range 2 {
		c, err := net.Dial("tcp", strings.TrimSuffix(open, " -> 7"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		// The answer comes only after the half-close went through.
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(c); err != nil || string(b) != "back: hello" {
			t.Fatalf("got %q, %v", b, err)
		}
	}
	c, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimSpace(closed), " -> 8"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, _ := io.ReadAll(c); len(b) != 0 {
		t.Errorf("a dead port sent %q", b)
	}
	s.err.await(t, "nothing listens on port 8")
	s.signals <- os.Interrupt
	if got := <-code; got != 0 {
		t.Errorf("status %d", got)
	}
}

func TestPortsEndWithTheirSandbox(t *testing.T) {
	f := newFake()
	s := newSession(f)
	id := create(t, f)
	code := s.start("ports", id, "0:7")
	s.out.await(t, "-> 7\n")
	open, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimSpace(s.out.String()), " -> 7"))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if _, err := (fakeSandboxes{f}).Stop(t.Context(), dsec.SandboxID(id)); err != nil {
		t.Fatal(err)
	}
	want := "dsec: sandbox " + id + " has ended: stopped (user)\n"
	if got := <-code; got != 1 || s.err.String() != want {
		t.Errorf("status %d, %q, want %q", got, s.err, want)
	}
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection is still open")
	}
	// One that has ended before is not waited for.
	s = newSession(f)
	if got := <-s.start("ports", id, "0:7"); got != 1 || s.err.String() != want || s.out.String() != "" {
		t.Errorf("status %d, %q, want %q", got, s.err, want)
	}
}

package fncall_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// TestSandbox uses a machine as an ordinary sandbox: every command is in a cell
// of its own, and what would keep something is refused.
func TestSandbox(t *testing.T) {
	r := newRig(t)
	ctx, g := t.Context(), r.m.Guest()
	run := func(c dsec.Command, stdin string) dsec.Result {
		t.Helper()
		res, err := g.Commands().Run(ctx, dsec.Call{}, c, []byte(stdin))
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	res := run(dsec.Command{Shell: "cat; echo x > /tmp/x; echo y > /etc/y; cat /tmp/x; (sleep 1000 &) ; ls /proc | grep -c '^[0-9]'", Env: map[string]string{"A": "b"}}, "in\n")
	if !strings.HasPrefix(string(res.Out), "in\nx\n") || res.Code != 0 || res.Pid != 2 {
		t.Errorf("the first command: %q, %q, code %d, pid %d", res.Out, res.Err, res.Code, res.Pid)
	}
	res = run(dsec.Command{Shell: "ls /tmp /etc/y; ps ax 2>/dev/null; grep -l sleep /proc/[0-9]*/comm; id -u; grep CapEff /proc/self/status; exit 5", User: "nobody"}, "")
	if want := "/tmp:\n65534\nCapEff:\t0000000000000000\n"; string(res.Out) != want || res.Code != 5 {
		t.Errorf("the next command prints %q, code %d; want %q", res.Out, res.Code, want)
	}
	if res = run(dsec.Command{Argv: []string{"/nothing"}}, ""); res.Outcome != dsec.NotStarted || res.Code != 127 {
		t.Errorf("a program that is not there: %s %d", res.Outcome, res.Code)
	}
	if res = run(dsec.Command{Shell: "setsid sleep 1000 & sleep 1000", Timeout: 200 * time.Millisecond}, ""); res.Outcome != dsec.TimedOut {
		t.Errorf("a command beyond its time: %s", res.Outcome)
	}
	st, err := g.Commands().Start(ctx, dsec.Call{Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{Argv: []string{"sh", "-c", "read x; echo got $x; kill -SEGV $$"}, Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Commands().Write(ctx, dsec.Call{}, st.ID, dsec.StdinWrite{Data: []byte("it\n"), Close: true}); err != nil {
		t.Fatal(err)
	}
	end, err := g.Commands().Wait(ctx, dsec.Call{}, st.ID)
	if err != nil || end.Outcome != dsec.Signaled || end.Signal != "SEGV" {
		t.Errorf("a signalled command: %v, %s %s", err, end.Outcome, end.Signal)
	}
	again, err := g.Commands().Start(ctx, dsec.Call{Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{Argv: []string{"sh", "-c", "read x; echo got $x; kill -SEGV $$"}, Stdin: dsec.StdinPipe})
	if err != nil || !again.Replayed || again.ID != st.ID {
		t.Errorf("a repeated step: %v, replayed %v", err, again.Replayed)
	}
	size := dsec.WinSize{Rows: 10, Cols: 20}
	if res = run(dsec.Command{Shell: "stty size; test -t 1 && echo terminal", TTY: &size}, ""); string(res.Out) != "10 20\r\nterminal\r\n" {
		t.Errorf("a terminal: %q", res.Out)
	}

	for what, err := range map[string]error{
		"write": second(g.Files().Write(ctx, dsec.Call{}, dsec.FileOp{Path: "/tmp/x"}, dsec.WriteOptions{}, bytes.NewReader(nil))),
		"read":  second(g.Files().Read(ctx, dsec.Call{}, dsec.FileOp{Path: "/etc/passwd"}, dsec.ReadRange{})),
		"mkdir": g.Files().Mkdir(ctx, dsec.Call{}, dsec.FileOp{Path: "/tmp/d"}, 0o755),
		"dial":  second(g.Ports().Dial(ctx, dsec.Call{}, 80)),
	} {
		if dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "fncall") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for name, has := range map[string]bool{
		"pause": has[driver.Pauser](r.m), "commit": has[driver.Upper](r.m), "snapshot": has[driver.Snapshotter](r.m), "fork": has[driver.Forker](r.m),
	} {
		if has {
			t.Errorf("a machine of this kind shows the power to %s", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func has[T any](m driver.Machine) bool {
	_, ok := m.(T)
	return ok
}

// TestAdopt finds a machine after the node's process was another: calls go on.
func TestAdopt(t *testing.T) {
	r := newRig(t)
	r.want(python("print(1)"), dsec.FunctionOK, "1\n")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// The driver of a second process sees the guest as it is: warm already.
	again := r.driver.Wrap(r.m)
	res, err := again.Call(ctx, python("print(2)"), nil)
	if err != nil || string(res.Out) != "2\n" {
		t.Errorf("call of an adopted machine: %v, %q", err, res.Out)
	}
}

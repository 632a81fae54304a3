// Package drivertest is the list of behaviours that every driver passes. A
// driver's test makes an Env and calls Run.
//
// It checks what package driver promises: a failed start leaves nothing, a
// machine outlives its edge, limits hold, an end is an end. What a kind cannot
// do is declared by the driver's test in its Env, not found out here.
//
// Read next: package driver.
package drivertest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Env is a driver under test.
type Env struct {
	// Open opens the driver, again after a Close or after Crash.
	Open func(t *testing.T) driver.Driver

	// Crash lets go of an open driver as if its process had been killed.
	Crash func(t *testing.T, d driver.Driver)

	// Residue lists what is on the host on the driver's behalf: processes,
	// mounts, cgroups, files, descriptors. Two equal lists are a clean end.
	Residue func(t *testing.T) []string

	// Root gives a root that holds busybox, see Root.
	Root func(t *testing.T) driver.Root
}

var keys dsec.IDKey

// Resources of a machine that a test does not care about.
var Resources = dsec.Resources{CPU: 2, Memory: 256 << 20, Disk: 1 << 30, Pids: 256}

// Config is a plain configuration of a machine.
func (e Env) Config(t *testing.T) driver.Config {
	return driver.Config{ID: keys.New(dsec.Place{Node: 1, Epoch: 1}), Root: e.Root(t), Resources: Resources, Hostname: "box"}
}

// Run runs the list.
func Run(t *testing.T, e Env) {
	for _, c := range []struct {
		name string
		f    func(*testing.T, Env)
	}{
		{"commands", testCommands},
		{"files", testFiles},
		{"ports", testPorts},
		{"terminal", testTerminal},
		{"timeout kills the tree", testTimeout},
		{"limits", testLimits},
		{"fork bomb", testForkBomb},
		{"hostile workload", testHostile},
		{"confined", testConfined},
		{"no shell", testNoShell},
		{"stop", testStop},
		{"stop is quick whatever runs", testStopQuick},
		{"ends by itself", testDies},
		{"failed start", testFailedStart},
		{"adopt", testAdopt},
		{"adopt after kill", testAdoptDead},
		{"freeze", testFreeze},
		{"pause", testPause},
		{"pause with work in hand", testPauseInHand},
		{"pause again and again", testPauseAgain},
		{"stop while paused", testPauseStop},
		{"adopt while paused", testPauseAdopt},
		{"pause and freeze", testPauseFrozen},
		{"reclaim", testReclaim},
		{"many", testMany},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := e.Residue(t)
			t.Run("run", func(t *testing.T) { c.f(t, e) }) // its cleanups come before the look
			var after []string
			for range 100 { // the kernel tears namespaces down a moment later
				if after = e.Residue(t); strings.Join(after, "\n") == strings.Join(before, "\n") {
					return
				}
				<-time.After(50 * time.Millisecond)
			}
			t.Errorf("left behind:\n%s", diff(before, after))
		})
	}
}

func diff(before, after []string) string {
	old := map[string]int{}
	for _, s := range before {
		old[s]++
	}
	var b strings.Builder
	for _, s := range after {
		if old[s]--; old[s] < 0 {
			fmt.Fprintln(&b, "+", s)
		}
	}
	for s, n := range old {
		if n > 0 {
			fmt.Fprintln(&b, "-", s)
		}
	}
	return b.String()
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

// start opens the driver and starts one machine, both ended with the test. The
// cleanup runs before the residue is looked at, since it is called explicitly.
func with(t *testing.T, e Env, f func(t *testing.T, m driver.Machine)) {
	t.Helper()
	d := e.Open(t)
	defer func() {
		if err := d.Close(); err != nil {
			t.Error("close:", err)
		}
	}()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal("adopt:", err)
	}
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal("start:", err)
	}
	defer stop(t, m)
	f(t, m)
}

func stop(t *testing.T, m driver.Machine) {
	t.Helper()
	if err := m.Stop(ctx(t)); err != nil {
		t.Error("stop:", err)
	}
}

func sh(t *testing.T, m driver.Machine, line string) dsec.Result {
	t.Helper()
	r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/bin/sh", "-c", line}, Timeout: 30 * time.Second}, nil)
	if err != nil {
		t.Fatalf("run %q: %v", line, err)
	}
	return r
}

func testCommands(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		for _, c := range []struct {
			name string
			c    dsec.Command
			code int
			out  string
		}{
			{"true", dsec.Command{Argv: []string{"true"}}, 0, ""},
			{"status", dsec.Command{Argv: []string{"sh", "-c", "exit 7"}}, 7, ""},
			{"shell form", dsec.Command{Shell: "echo $((1+1)); cd /tmp && pwd"}, 0, "2\n/tmp\n"},
			{"cwd", dsec.Command{Argv: []string{"pwd"}, Cwd: "/home/alice"}, 0, "/home/alice\n"},
			{"env", dsec.Command{Argv: []string{"sh", "-c", "echo $A"}, Env: map[string]string{"A": "b c"}}, 0, "b c\n"},
			{"user", dsec.Command{Argv: []string{"sh", "-c", "id -u; id -g; id -G; echo $HOME"}, User: "alice"}, 0, "1000\n1000\n1000 2000\n/home/alice\n"},
			{"uid", dsec.Command{Argv: []string{"sh", "-c", "id -u; id -g"}, User: "4321:77"}, 0, "4321\n77\n"},
			{"missing", dsec.Command{Argv: []string{"no-such-program"}}, 127, ""},
			{"not executable", dsec.Command{Argv: []string{"/etc/passwd"}}, 126, ""},
			{"signal", dsec.Command{Argv: []string{"sh", "-c", "kill -TERM $$"}}, 143, ""},
			{"hostname", dsec.Command{Argv: []string{"hostname"}}, 0, "box\n"},
			{"no host processes", dsec.Command{Argv: []string{"sh", "-c", "ls /proc | grep -c '^[0-9]'"}}, 0, "4\n"},
		} {
			t.Run(c.name, func(t *testing.T) {
				r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, c.c, nil)
				if err != nil {
					t.Fatal(err)
				}
				if r.Code != c.code || string(r.Out) != c.out {
					t.Errorf("code %d, output %q, errors %q (%s); want %d, %q", r.Code, r.Out, r.Err, r.Detail, c.code, c.out)
				}
			})
		}
		for _, c := range []dsec.Command{
			{Argv: []string{"true"}, User: "nobody-here"},
			{Argv: []string{"true"}, Cwd: "/no/such"},
			{Argv: []string{"true"}, Cwd: "/etc/passwd"},
			{},
		} {
			_, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, c, nil)
			if dsec.KindOf(err) != dsec.Invalid {
				t.Errorf("%+v: error %v, want invalid", c, err)
			}
		}
		r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe}, bytes.Repeat([]byte("0123456789abcdef"), 20_000))
		if err != nil || len(r.Out) != 320_000 {
			t.Errorf("cat of 320,000 bytes gives %d (%v)", len(r.Out), err)
		}
	})
}

func testFiles(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		f := m.Guest().Files()
		data := bytes.Repeat([]byte("x\x00y\n"), 300_000)
		info, err := f.Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/home/alice/a", User: "alice"}, dsec.WriteOptions{}, bytes.NewReader(data))
		if err != nil || info.UID != 1000 || info.Size != int64(len(data)) {
			t.Fatalf("write: %+v, %v", info, err)
		}
		r, err := f.Read(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/home/alice/a"}, dsec.ReadRange{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		r.Close()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("read %d bytes (%v), want %d", len(got), err, len(data))
		}
		if _, err := f.Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/etc/denied", User: "alice"}, dsec.WriteOptions{}, strings.NewReader("")); dsec.KindOf(err) != dsec.Denied {
			t.Errorf("alice writes to /etc: %v", err)
		}
		if out := sh(t, m, "wc -c < /home/alice/a; stat -c %U /home/alice/a"); string(out.Out) != "1200000\nalice\n" {
			t.Errorf("the workload sees %q", out.Out)
		}
		// The agent needs nothing of the image.
		if r := sh(t, m, "rm -rf /bin /etc"); r.Outcome != dsec.Exited {
			t.Errorf("rm: %+v", r.CommandStatus)
		}
		if _, err := f.Stat(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/home/alice/a"}); err != nil {
			t.Errorf("stat after /bin is gone: %v", err)
		}
	})
}

func testPorts(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		cmds := m.Guest().Commands()
		st, err := cmds.Start(ctx(t), dsec.Call{}, dsec.Command{Shell: "echo ready; exec nc -l -p 8080 -e cat"})
		if err != nil {
			t.Fatal(err)
		}
		for o, err := range cmds.Attach(ctx(t), dsec.Call{}, st.ID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			if len(o.Data) > 0 {
				break
			}
		}
		var c dsec.PortConn
		for range 100 {
			if c, err = m.Guest().Ports().Dial(ctx(t), dsec.Call{}, 8080); err == nil {
				break
			}
			<-time.After(10 * time.Millisecond)
		}
		if err != nil {
			t.Fatal("dial:", err)
		}
		defer c.Close()
		go func() {
			c.Write(bytes.Repeat([]byte("ping"), 50_000))
			c.CloseWrite()
		}()
		if got, err := io.ReadAll(c); err != nil || len(got) != 200_000 {
			t.Errorf("echo gives %d bytes (%v)", len(got), err)
		}
		if _, err := m.Guest().Ports().Dial(ctx(t), dsec.Call{}, 9); dsec.KindOf(err) != dsec.Unavailable {
			t.Errorf("dial of a closed port: %v", err)
		}
		// Nothing but loopback is reachable, from either side.
		if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
			defer l.Close()
			port := l.Addr().(*net.TCPAddr).Port
			if r := sh(t, m, fmt.Sprintf("nc -w 1 127.0.0.1 %d </dev/null", port)); r.Code == 0 {
				t.Error("the workload reached a port of the host")
			}
		}
		if r := sh(t, m, "ls /sys/class/net"); string(r.Out) != "lo\n" {
			t.Errorf("interfaces %q", r.Out)
		}
	})
}

func testTerminal(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		cmds := m.Guest().Commands()
		st, err := cmds.Start(ctx(t), dsec.Call{}, dsec.Command{
			Shell: "stty size; read x; stty size; tty", TTY: &dsec.WinSize{Rows: 33, Cols: 77}, Stdin: dsec.StdinPipe,
		})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		for o, err := range cmds.Attach(ctx(t), dsec.Call{}, st.ID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			out.Write(o.Data)
			if o.Status == nil && out.String() == "33 77\r\n" {
				if err := cmds.Resize(ctx(t), dsec.Call{}, st.ID, dsec.WinSize{Rows: 10, Cols: 20}); err != nil {
					t.Fatal(err)
				}
				if _, err := cmds.Write(ctx(t), dsec.Call{}, st.ID, dsec.StdinWrite{Data: []byte("go\n")}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := out.String(); got != "33 77\r\ngo\r\n10 20\r\n/dev/pts/0\r\n" {
			t.Errorf("terminal shows %q", got)
		}
	})
}

func testTimeout(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{
			Shell: "trap '' TERM HUP INT; echo begun; setsid sleep 1001 & (setsid sleep 1002 &); sleep 1003", Timeout: 500 * time.Millisecond,
		}, nil)
		if err != nil || r.Outcome != dsec.TimedOut || r.Code != 124 || string(r.Out) != "begun\n" {
			t.Errorf("outcome %s, code %d, output %q, error %v", r.Outcome, r.Code, r.Out, err)
		}
		if r := sh(t, m, "pgrep sleep"); r.Code == 0 {
			t.Errorf("processes are left: %q", r.Out)
		}
		if r := sh(t, m, "i=0; while [ $i -lt 500 ]; do /bin/true & i=$((i+1)); done; wait; cat /proc/[0-9]*/stat | grep -c ' Z '"); string(r.Out) != "0\n" {
			t.Errorf("zombies: %q", r.Out)
		}
	})
}

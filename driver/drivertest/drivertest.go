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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Env is a driver under test. Fields without a stated default are required.
type Env struct {
	// Open opens the driver, again after a Close or after Crash.
	Open func(t *testing.T) driver.Driver

	// Crash lets go of an open driver as if its process had been killed.
	Crash func(t *testing.T, d driver.Driver)

	// Residue lists what is on the host on the driver's behalf: processes,
	// mounts, cgroups, files, descriptors. Two equal lists are a clean end.
	Residue func(t *testing.T) []string

	// Root gives a root that holds what BusyboxTar has: Root or RootFiles in the
	// form that the driver wants, or a disk image.
	Root func(t *testing.T) driver.Root

	// Kill ends the machine's main process as a fault would: guest, or virtual
	// machine. Default: its KillGuest method.
	Kill func(t *testing.T, m driver.Machine)

	// Prepare runs in every machine that was started, where Root cannot hold all
	// that the tests need.
	Prepare func(t *testing.T, m driver.Machine)

	// Faults are places in a start: each arms the next Start to fail there.
	Faults map[string]func(t *testing.T, d driver.Driver)

	// Resources of machines that a test does not care about; default Resources.
	Resources dsec.Resources

	// Slow is how many times slower than a container it is; default 1. From 2 on
	// tests of many machines or rounds use fewer.
	Slow int

	// GuestStands says that the guest of a paused machine stands still too: calls
	// wait until it is resumed.
	GuestStands bool

	// Powerless says that commands have no capability, root's neither: what needs
	// one is refused them.
	Powerless bool

	// HostFigures says that usage is what the host counts of a whole machine, whose
	// memory is more than its sandbox's.
	HostFigures bool

	// Thrashes says that a guest may take minutes before it ends what needs more
	// memory than it may have: the list tries the other limits.
	Thrashes bool

	// Lacks declares what the kind does otherwise: the name of a behaviour, and
	// why. What it says is not there is not tested, but it must not be there.
	Lacks map[string]string

	// But declares a behaviour that is there with an exception: its name, and what
	// is otherwise. Only the parts that partial names can be excepted.
	But map[string]string

	// Table is the JSON file that the results are compared with, or with -update
	// written to, see table.go; default none.
	Table string
}

var keys dsec.IDKey

// Resources of a machine that a test does not care about.
var Resources = dsec.Resources{CPU: 2, Memory: 256 << 20, Disk: 1 << 30, Pids: 256}

// Config is a plain configuration of a machine.
func (e Env) Config(t *testing.T) driver.Config {
	r := e.Resources
	if r == (dsec.Resources{}) {
		r = Resources
	}
	return driver.Config{ID: keys.New(dsec.Place{Node: 1, Epoch: 1}), Root: e.Root(t), Resources: r, Hostname: "box"}
}

// few gives n, or less where the driver is slow.
func (e Env) few(n, slow int) int {
	if e.Slow > 1 {
		return slow
	}
	return n
}

// behaviour is one line of the list, and of the table in docs/backends.md.
type behaviour struct {
	name  string
	needs power // without which it is to be declared in Env.Lacks
	f     func(*testing.T, Env)
}

// behaviours is the list.
var behaviours = []behaviour{
	{"commands", "", testCommands},
	{"files", "", testFiles},
	{"ports", "", testPorts},
	{"terminal", "", testTerminal},
	{"timeout kills the tree", "", testTimeout},
	{"limits", "", testLimits},
	{"out of memory", "", testOutOfMemory},
	{"disk full", "", testDiskFull},
	{"fork bomb", "", testForkBomb},
	{"hostile workload", "", testHostile},
	{"confined", "", testConfined},
	{"no shell", "", testNoShell},
	{"stop", "", testStop},
	{"stop is quick whatever runs", "", testStopQuick},
	{"ends by itself", "", testDies},
	{"failed start", "", testFailedStart},
	{"start fails half-way", "", testHalfStart},
	{"adopt", "", testAdopt},
	{"adopt after kill", "", testAdoptDead},
	{"freeze", upper, testFreeze},
	{"pause", pauser, testPause},
	{"pause with work in hand", pauser, testPauseInHand},
	{"pause again and again", pauser, testPauseAgain},
	{"ten rounds of pause", pauser, testPauseRounds},
	{"stop while paused", pauser, testPauseStop},
	{"adopt while paused", pauser, testPauseAdopt},
	{"pause and freeze", upper, testPauseFrozen},
	{"reclaim", reclaimer, testReclaim},
	{"snapshot", snapshotter, testSnapshot},
	{"snapshot while paused", snapshotter, testSnapshotPaused},
	{"corrupt snapshot", snapshotter, testSnapshotCorrupt},
	{"snapshot of another version", snapshotter, testSnapshotVersion},
	{"fork", forker, testFork},
	{"screen", screen, testScreen},
	{"many", "", testMany},
}

// partial are the behaviours of which a part can be declared in Env.But.
var partial = []string{"terminal", "limits", "out of memory", "disk full"}

// Run runs the list.
func Run(t *testing.T, e Env) {
	has := findPowers(t, e)
	for name := range e.Lacks {
		if !slices.ContainsFunc(behaviours, func(b behaviour) bool { return b.name == name }) {
			t.Errorf("Env.Lacks names %q, which is not on the list", name)
		}
	}
	for name := range e.But {
		if !slices.Contains(partial, name) || e.Lacks[name] != "" {
			t.Errorf("Env.But names %q, which has no part to except, or is lacking as a whole", name)
		}
	}
	results := make([]Result, 0, len(behaviours))
	whole := true
	for _, b := range behaviours {
		reason, lacks := e.Lacks[b.name]
		switch able := b.needs == "" || has[b.needs]; {
		case lacks && able && b.needs != "":
			t.Errorf("%s: declared as lacking (%s), but machines have the power %s", b.name, reason, b.needs)
		case !lacks && !able:
			t.Errorf("%s: machines have no power %s, and Env.Lacks does not say so", b.name, b.needs)
			continue
		}
		if lacks {
			results = append(results, Result{Behaviour: b.name, Lacks: reason})
			continue
		}
		ran := false
		t.Run(b.name, func(t *testing.T) {
			ran = true
			before := e.Residue(t)
			t.Run("run", func(t *testing.T) { b.f(t, e) }) // its cleanups come before the look
			var after []string
			for range 100 { // the kernel tears namespaces down a moment later
				if after = e.Residue(t); strings.Join(after, "\n") == strings.Join(before, "\n") {
					return
				}
				<-time.After(50 * time.Millisecond)
			}
			t.Errorf("left behind:\n%s", diff(before, after))
		})
		whole = whole && ran
		results = append(results, Result{Behaviour: b.name, But: e.But[b.name]})
	}
	if whole && e.Table != "" && !t.Failed() {
		keepResults(t, e.Table, results)
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

// patience bounds what would otherwise hang; emulated machines are slow.
const patience = 3 * time.Minute

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), patience)
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
	if e.Prepare != nil {
		e.Prepare(t, m)
	}
	f(t, m)
}

// kill ends m's main process.
func (e Env) kill(t *testing.T, m driver.Machine) {
	t.Helper()
	if e.Kill != nil {
		e.Kill(t, m)
		return
	}
	k, ok := m.(interface{ KillGuest() error })
	if !ok {
		t.Fatal("Env.Kill is not set, and the machine has no KillGuest")
	}
	if err := k.KillGuest(); err != nil {
		t.Fatal(err)
	}
}

func stop(t *testing.T, m driver.Machine) {
	t.Helper()
	if err := m.Stop(ctx(t)); err != nil {
		t.Error("stop:", err)
	}
}

func sh(t *testing.T, m driver.Machine, line string) dsec.Result {
	t.Helper()
	r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/bin/sh", "-c", line}, Timeout: 2 * time.Minute}, nil)
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
		got, named := strings.CutSuffix(out.String(), "/dev/pts/0\r\n")
		if !named && e.But["terminal"] != "" { // the terminal works, but has no name
			got, named = strings.CutSuffix(got, "not a tty\r\n")
		}
		if got != "33 77\r\ngo\r\n10 20\r\n" || !named {
			t.Errorf("terminal shows %q", out.String())
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
		line := fmt.Sprintf("i=0; while [ $i -lt %d ]; do /bin/true & i=$((i+1)); done; wait; cat /proc/[0-9]*/stat | grep -c ' Z '", e.few(500, 100))
		if r := sh(t, m, line); string(r.Out) != "0\n" {
			t.Errorf("zombies: %q", r.Out)
		}
	})
}

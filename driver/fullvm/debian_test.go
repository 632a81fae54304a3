package fullvm_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/driver/fullvm"
)

// debian is the image that "make vm" makes.
const debian = "../../bin/vm/debian.img"

// bootWait is how long Debian may take to boot, emulated on a busy host.
const bootWait = 5 * time.Minute

// agentGrace is how long an agent may be gone: an emulated system takes a while to
// start one anew.
const agentGrace = 20 * time.Second

// shared is the folder of the driver in all tests of Debian: it boots once for
// them all, and every test's machines begin where that one was saved.
//
// DSEC_TEST_FULLVM names one that is kept, for who runs the tests again and again.
var shared string

func TestMain(m *testing.M) {
	if shared = os.Getenv("DSEC_TEST_FULLVM"); shared != "" {
		os.Exit(m.Run())
	}
	var err error
	if shared, err = os.MkdirTemp("", "fullvm"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(shared)
	os.Exit(code)
}

// debianConfig is that of the shared driver.
func debianConfig(t *testing.T) fullvm.Config {
	t.Helper()
	if _, err := os.Stat(debian); err != nil {
		t.Fatalf("%v: make vm makes it", err)
	}
	return fullvm.Config{Dir: shared, Name: fmt.Sprintf("fullvm-debian-%d", os.Getpid()), AgentWait: bootWait, AgentGrace: agentGrace}
}

// start starts a machine that ends with the test.
func start(t *testing.T, d driver.Driver, c driver.Config) driver.Machine {
	t.Helper()
	m, err := d.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// sh runs a line and gives what it prints.
func sh(t *testing.T, m driver.Machine, line string) string {
	t.Helper()
	r, err := m.Guest().Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Shell: line}, nil)
	if err != nil {
		select {
		case <-m.Done():
			t.Fatalf("%s: %v; the machine has ended: %+v", line, err, m.Exit())
		default:
			t.Fatalf("%s: %v", line, err)
		}
	}
	if r.Code != 0 {
		t.Fatalf("%s: status %d\n%s%s", line, r.Code, r.Out, r.Err)
	}
	return strings.TrimSpace(string(r.Out))
}

func TestDebian(t *testing.T) {
	d := open(t, debianConfig(t))
	m := start(t, d, config(t, debian))
	if a := fullvm.KeptAgent(m); a != fullvm.DsecGuest {
		t.Fatalf("the agent is %q", a)
	}
	if name := sh(t, m, "hostname"); name != "box" {
		t.Errorf("its name is %q", name)
	}

	// A second one is another, though both began at the same saved machine.
	c := config(t, debian)
	c.Hostname = "other"
	other := start(t, d, c)
	if stages := other.Stages(); slices.ContainsFunc(stages, func(s driver.Stage) bool { return s.Name == "boot" }) {
		t.Errorf("the second machine booted: %v", stages)
	}
	const who = "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid"
	a, b := strings.Split(sh(t, m, who), "\n"), strings.Split(sh(t, other, who), "\n")
	for i := range a {
		if i < len(b) && a[i] == b[i] {
			t.Errorf("both machines have %q", a[i])
		}
	}
	sh(t, m, "echo mine > /etc/mine")
	if got := sh(t, other, "ls /etc/mine 2>&1 || true"); !strings.Contains(got, "No such file") {
		t.Errorf("a file of one machine is in the other: %s", got)
	}
	if date := sh(t, other, "date +%s"); !near(t, date) {
		t.Errorf("its clock is at %s", date)
	}

	if source := sh(t, other, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"); source != "tsc" && source != "kvm-clock" {
		t.Errorf("its clock ticks by %s", source)
	}

	t.Run("agent anew", func(t *testing.T) {
		commands := other.Guest().Commands()
		commands.Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "pkill -KILL -x dsec-guest"}, nil) //nolint:errcheck // it may not answer
		for end := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
			r, err := commands.Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"hostname"}}, nil)
			if err == nil && string(r.Out) == "other\n" {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the agent does not come back: %q, %v", r.Out, err)
			}
		}
	})
	t.Run("agent gone", func(t *testing.T) {
		m := start(t, d, config(t, debian))
		commands := m.Guest().Commands()
		commands.Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "systemctl mask --runtime --now dsec-guest.service"}, nil) //nolint:errcheck // it may not answer
		if e := ended(t, m); e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, "agent") {
			t.Errorf("it ended with %+v", e)
		}
	})
	t.Run("kernel module", func(t *testing.T) {
		if got := sh(t, m, "modprobe dummy numdummies=3 && ip -o link show type dummy | wc -l && rmmod dummy && lsmod | grep -c '^dummy' || true"); got != "3\n0" {
			t.Errorf("a kernel module: %q", got)
		}
	})
	t.Run("docker", func(t *testing.T) { testDocker(t, m) })
	t.Run("panic", func(t *testing.T) {
		_, err := other.Guest().Commands().Start(t.Context(), dsec.Call{}, dsec.Command{Shell: "echo 1 > /proc/sys/kernel/sysrq; sleep 0.2; echo c > /proc/sysrq-trigger"})
		if err != nil {
			t.Fatal(err)
		}
		e := ended(t, other)
		if e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, "panic") {
			t.Errorf("it ended with %+v", e)
		}
	})
	t.Run("power off", func(t *testing.T) {
		m := start(t, d, config(t, debian))
		if _, err := m.Guest().Commands().Start(t.Context(), dsec.Call{}, dsec.Command{Shell: "systemctl poweroff --force --force"}); err != nil {
			t.Fatal(err)
		}
		if e := ended(t, m); e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, "powered off") {
			t.Errorf("it ended with %+v", e)
		}
		if _, err := m.Guest().Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"true"}}, nil); dsec.KindOf(err) != dsec.Conflict {
			t.Errorf("a command after the end: %v", err)
		}
	})
	t.Run("killed", func(t *testing.T) {
		if err := syscall.Kill(fullvm.Pid(m), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := ended(t, m); e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, "killed") {
			t.Errorf("it ended with %+v", e)
		}
	})
}

// near reports whether a clock's seconds are the host's, but for what emulated
// commands take.
func near(t *testing.T, seconds string) bool {
	t.Helper()
	var n int64
	if _, err := fmt.Sscan(seconds, &n); err != nil {
		t.Fatal(err)
	}
	d := time.Since(time.Unix(n, 0))
	return d > -2*time.Second && d < 60*time.Second
}

func ended(t *testing.T, m driver.Machine) driver.Exit {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(60 * time.Second):
		t.Fatal("the machine does not end")
	}
	return m.Exit()
}

// testDocker runs a container in the machine, from an image made of its own
// static shell: there is no registry, nor a network.
func testDocker(t *testing.T, m driver.Machine) {
	sh(t, m, "systemctl start docker")
	sh(t, m, "mkdir -p /tmp/image/bin && cp /bin/busybox /tmp/image/bin/sh && tar -C /tmp/image -c . | docker import - tiny")
	if got := sh(t, m, `docker run --rm --network none tiny /bin/sh -c 'echo $$ in a container'`); got != "1 in a container" {
		t.Errorf("docker run: %q", got)
	}
}

func TestQemuGuestAgent(t *testing.T) {
	c := debianConfig(t)
	c.Without = []fullvm.Agent{fullvm.DsecGuest}
	d := open(t, c)
	m := start(t, d, config(t, debian))
	if a := fullvm.KeptAgent(m); a != fullvm.QemuGuest {
		t.Fatalf("the agent is %q", a)
	}
	commands, files := m.Guest().Commands(), m.Guest().Files()
	r, err := commands.Run(t.Context(), dsec.Call{Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{
		Shell: "cat; echo $A; pwd; echo bad >&2; exit 3", Env: map[string]string{"A": "b c"}, Cwd: "/tmp",
	}, []byte("in\n"))
	if err != nil || string(r.Out) != "in\nb c\n/tmp\n" || string(r.Err) != "bad\n" || r.Outcome != dsec.Exited || r.Code != 3 {
		t.Errorf("a command: %q, %q, %s %d, %v", r.Out, r.Err, r.Outcome, r.Code, err)
	}
	again, err := commands.Run(t.Context(), dsec.Call{Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{Shell: "exit 4"}, nil)
	if err != nil || again.ID != r.ID {
		t.Errorf("the same step ran again: %v, %v", again.ID, err)
	}
	r, err = commands.Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"sleep", "1000"}, Timeout: time.Second}, nil)
	if err != nil || r.Outcome != dsec.TimedOut || r.Code != 124 {
		t.Errorf("a command with a timeout: %s %d, %v", r.Outcome, r.Code, err)
	}
	r, err = commands.Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"no-such-program"}}, nil)
	if err != nil || r.Outcome != dsec.NotStarted || r.Code != 127 {
		t.Errorf("no program: %s %d, %v", r.Outcome, r.Code, err)
	}
	for o, err := range commands.Attach(t.Context(), dsec.Call{}, again.ID, 3) {
		if err != nil || o.Status == nil && o.Offset < 3 || o.Status != nil && o.Status.Code != 3 {
			t.Errorf("attached: %+v, %v", o, err)
		}
	}
	if _, err := commands.Start(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"sh"}, TTY: &dsec.WinSize{Rows: 24, Cols: 80}}); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("a terminal: %v", err)
	}
	content := strings.Repeat("some text, and more\n", 100_000)
	if _, err := files.Write(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/root/file"}, dsec.WriteOptions{}, strings.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	rc, err := files.Read(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/root/file"}, dsec.ReadRange{Offset: 5, Length: 1_500_000})
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	var b strings.Builder
	if _, err := io.Copy(&b, rc); err != nil || b.String() != content[5:1_500_005] {
		t.Errorf("read back %d bytes, %v", b.Len(), err)
	}
	if _, err := files.Read(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/none"}, dsec.ReadRange{}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("no file: %v", err)
	}
	if _, err := files.Stat(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/none"}); dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "qemu-guest-agent") {
		t.Errorf("what the agent cannot: %v", err)
	}

	// A new process of the node finds the agent again.
	d.Crash()
	again2, err := fullvm.Open(func() fullvm.Config { c := c; c.Accel = accel; return c }())
	if err != nil {
		t.Fatal(err)
	}
	defer again2.Close() //nolint:errcheck // never fails
	ms, err := again2.Adopt(t.Context())
	if err != nil || len(ms) != 1 {
		t.Fatalf("adopted %v, %v", ms, err)
	}
	if got := sh(t, ms[0], "cat /root/file | wc -l"); got != "100000" {
		t.Errorf("after the adoption: %q", got)
	}
	if err := ms[0].Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// lacks are the behaviours that a machine of this kind has otherwise, and why.
var lacks = map[string]string{
	"confined":         "the workload is root of a whole machine: what confines it is that machine",
	"freeze":           "the root is a disk image of the guest's: the node walks no folder of it",
	"pause and freeze": "the root is a disk image of the guest's: the node walks no folder of it",
	"reclaim":          "a paused machine has no process whose memory could come back: it all did",
	"no shell":         "the image is the sandbox's root, and this one has a shell",
	"hostile workload": "root of a machine can end its agent and its system: the screen is left then",
}

// but are the exceptions.
var but = map[string]string{
	"disk full": "what is printed while the disk is full may be lost: the agent's records lie on that disk",
}

// prepare adds what the list wants and Debian has not: a program, and a user who
// is in a group. It runs no commands, which the list would count.
func prepare(t *testing.T, m driver.Machine) {
	t.Helper()
	files := m.Guest().Files()
	if err := files.Symlink(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/usr/local/bin/nc"}, "/bin/busybox"); err != nil {
		t.Fatal(err)
	}
	for path, lines := range map[string]string{
		"/etc/passwd": "alice:x:1000:1000::/home/alice:/bin/sh\n", "/etc/group": "alice:x:1000:\nteam:x:2000:alice\n",
	} {
		if _, err := files.Write(t.Context(), dsec.Call{}, dsec.FileOp{Path: path}, dsec.WriteOptions{Append: true}, strings.NewReader(lines)); err != nil {
			t.Fatal(err)
		}
	}
	home := dsec.FileOp{Path: "/home/alice"}
	if err := files.Mkdir(t.Context(), dsec.Call{}, home, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := files.Chown(t.Context(), dsec.Call{}, home, "1000:1000"); err != nil {
		t.Fatal(err)
	}
}

func TestDriver(t *testing.T) {
	c := debianConfig(t)
	c.Accel = accel
	t.Cleanup(func() { removeGroups(c.Name) })
	drivertest.Run(t, drivertest.Env{
		Open: func(t *testing.T) driver.Driver {
			d, err := fullvm.Open(c)
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Crash:     func(_ *testing.T, d driver.Driver) { d.(*fullvm.Driver).Crash() },
		Residue:   func(t *testing.T) []string { return residue(t, c) },
		Root:      func(*testing.T) driver.Root { return driver.Root{Disk: debian} },
		Kill:      func(t *testing.T, m driver.Machine) { syscall.Kill(fullvm.Pid(m), syscall.SIGKILL) }, //nolint:errcheck // seen by the test
		Resources: dsec.Resources{CPU: resources.CPU, Memory: resources.Memory, Disk: resources.Disk, Pids: 256},
		Slow:      20,
		Prepare:   prepare,
		Faults: map[string]func(*testing.T, driver.Driver){
			"process": func(_ *testing.T, d driver.Driver) { d.(*fullvm.Driver).FailAt("process") },
			"guest":   func(_ *testing.T, d driver.Driver) { d.(*fullvm.Driver).FailAt("guest") },
			"state":   func(_ *testing.T, d driver.Driver) { d.(*fullvm.Driver).FailAt("state") },
		},
		GuestStands: true,
		HostFigures: true,
		Thrashes:    true,
		Lacks:       lacks,
		But:         but,
		Table:       "../../docs/backends/fullvm.json",
	})
}

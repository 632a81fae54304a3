package microvm_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/driver/microvm"
)

// What the tests of the package share: a guest program, and a folder in which
// guests that were booted once stay saved.
var (
	guestBinary string
	shared      string
	kernel      = filepath.Join("..", "..", "bin", "vm", "vmlinuz-6.12")
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "dsec-microvm")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := 1
	guestBinary, shared = filepath.Join(dir, "dsec-guest"), filepath.Join(dir, "shared")
	if keep := os.Getenv("DSEC_TEST_MICROVM"); keep != "" { // a folder whose saved guests serve many runs
		shared = keep
	}
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", guestBinary, "github.com/dsec-go/dsec/cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = os.Stderr
	if kernel, err = filepath.Abs(kernel); err == nil {
		if err = build.Run(); err == nil {
			code = m.Run()
		}
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

func name() string { return "dsec-test-vm-" + strconv.Itoa(os.Getpid()) }

// config is one without a pool, in the shared folder.
func config() microvm.Config {
	return microvm.Config{Dir: shared, Guest: guestBinary, Kernel: kernel, Name: name(), Low: -1, High: -1, Answer: 2 * time.Minute}
}

// open opens a driver that ends with the test.
func open(t testing.TB, c microvm.Config) *microvm.Driver {
	t.Helper()
	d, err := microvm.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error("close:", err)
		}
	})
	if _, err := d.Adopt(context.Background()); err != nil {
		t.Fatal("adopt:", err)
	}
	return d
}

var keys dsec.IDKey

// resources are small: processors of an emulated machine are the host's.
var resources = dsec.Resources{CPU: 1, Memory: 256 << 20, Disk: 256 << 20, Pids: 256}

func start(t testing.TB, d driver.Driver, layers ...driver.LayerFiles) driver.Machine {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Files: layers}, Resources: resources, Hostname: "box"})
	if err != nil {
		t.Fatal("start:", err)
	}
	t.Cleanup(func() {
		if err := m.Stop(context.Background()); err != nil {
			t.Error("stop:", err)
		}
	})
	return m
}

func sh(t testing.TB, m driver.Machine, line string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := m.Guest().Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{"/bin/sh", "-c", line}}, nil)
	if err != nil || r.Code != 0 {
		t.Fatalf("%s: %v, %+v, %s", line, err, r.CommandStatus, r.Err)
	}
	return string(r.Out)
}

// residue lists what of the drivers is on the host.
func residue(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range procs {
		if b, _ := os.ReadFile(p); strings.Contains(string(b), "/"+name()) {
			out = append(out, "process "+p)
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + name() + "*", "/sys/fs/cgroup/" + name() + "*"} {
		groups, _ := filepath.Glob(pattern)
		out = append(out, groups...)
	}
	es, _ := os.ReadDir(dir)
	for _, e := range es {
		if _, err := strconv.Atoi(e.Name()); err == nil || strings.HasPrefix(e.Name(), "fork-") {
			out = append(out, "folder "+e.Name())
		}
	}
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		to, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && !strings.Contains(to, "anon_inode") { // of the runtime's, and of ended processes that it has not collected
			out = append(out, "descriptor "+strings.TrimRight(to, "0123456789]"))
		}
	}
	slices.Sort(out)
	return out
}

func TestStart(t *testing.T) {
	d := open(t, config())
	m := start(t, d, drivertest.RootFiles(t))
	for _, s := range m.Stages() {
		t.Log(s.Name, s.Took)
	}
	begin := time.Now()
	if got := sh(t, m, "hostname; cat /etc/hostname; id -u"); got != "box\nbox\n0\n" {
		t.Errorf("it says %q", got)
	}
	t.Log("first command", time.Since(begin))
	begin = time.Now()
	sh(t, m, "true")
	t.Log("second command", time.Since(begin))
	u, err := m.Usage(t.Context())
	t.Logf("%+v %v", u, err)
}

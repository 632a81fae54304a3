package container_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/drivertest"
)

var guestBinary string

// TestMain builds the guest, or takes the one that DSEC_TEST_GUEST names: in a
// worker VM there is no compiler.
func TestMain(m *testing.M) {
	if guestBinary = os.Getenv("DSEC_TEST_GUEST"); guestBinary != "" {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "dsec-guest")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	guestBinary = filepath.Join(dir, "dsec-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", guestBinary, "github.com/dsec-go/dsec/cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = os.Stderr
	code := 1
	if err := build.Run(); err == nil {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

func TestDriver(t *testing.T) {
	dir := t.TempDir()
	name := "dsec-test-" + strconv.Itoa(os.Getpid())
	layer := drivertest.Root(t)
	e := drivertest.Env{
		Open: func(t *testing.T) driver.Driver {
			t.Helper()
			d, err := container.Open(container.Config{Dir: filepath.Join(dir, "m"), Guest: guestBinary, Name: name, Pool: 2, Log: os.Stderr})
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Crash:   func(t *testing.T, d driver.Driver) { d.(*container.Driver).Crash() },
		Root:    func(*testing.T) driver.Root { return driver.Root{Layers: []*os.File{layer}} },
		Residue: func(t *testing.T) []string { return residue(t, dir, name) },
		Lacks: map[string]string{
			"disk full": "the node measures the writable layer of a container and ends one that is over its limit",
			"screen":    "a container has no display",
		},
		Faults: faults,
		Table:  "../../docs/backends/container.json",
	}
	if os.Getenv("DSEC_TEST_GUEST") != "" {
		e.Slow, e.Table = 15, "" // in a virtual machine, which may be emulated, and without the source
	}
	drivertest.Run(t, e)
}

// faults are the stages of a start behind which it can be made to fail.
var faults = map[string]func(*testing.T, driver.Driver){
	"limits": breakAt("limits"), "root": breakAt("root"), "guest": breakAt("guest"),
}

func breakAt(stage string) func(*testing.T, driver.Driver) {
	return func(_ *testing.T, d driver.Driver) { d.(*container.Driver).Break(stage) }
}

// residue lists processes in the driver's control groups, the groups, mounts,
// files and this process's descriptors.
func residue(t *testing.T, dir, name string) []string {
	t.Helper()
	var out []string
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range procs {
		if b, _ := os.ReadFile(p); strings.Contains(string(b), "/"+name) {
			out = append(out, "process "+p)
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + name + "*", "/sys/fs/cgroup/" + name + "*"} {
		groups, _ := filepath.Glob(pattern)
		out = append(out, groups...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	out = append(out, "mounts "+strconv.Itoa(strings.Count(string(mounts), "\n")))
	filepath.WalkDir(filepath.Join(dir, "m"), func(p string, e os.DirEntry, err error) error {
		if err == nil {
			out = append(out, "file "+p)
		}
		return nil
	})
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		to, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err != nil || strings.Contains(to, "eventpoll") && fd.Name() < "6" {
			continue
		}
		out = append(out, "descriptor "+strings.TrimRight(to, "0123456789]"))
	}
	slices.Sort(out)
	// The driver's own folders stay.
	return slices.DeleteFunc(out, func(s string) bool {
		return s == "file "+filepath.Join(dir, "m") || s == "file "+filepath.Join(dir, "m", "trash")
	})
}

// TestHolderDies ends the holder under a running sandbox: the sandbox goes on,
// and the next create starts another holder.
func TestHolderDies(t *testing.T) {
	dir := t.TempDir()
	name := "dsec-test-" + strconv.Itoa(os.Getpid())
	layer := drivertest.Root(t)
	before := residue(t, dir, name)
	d, err := container.Open(container.Config{Dir: filepath.Join(dir, "m"), Guest: guestBinary, Name: name, Pool: -1, Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := d.Adopt(ctx); err != nil {
		t.Fatal(err)
	}
	var keys dsec.IDKey
	start := func() driver.Machine {
		t.Helper()
		m, err := d.Start(ctx, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Layers: []*os.File{layer}}, Resources: drivertest.Resources, Hostname: "h"})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	a := start()
	if err := d.KillHolder(); err != nil {
		t.Fatal(err)
	}
	b := start()
	for _, m := range []driver.Machine{a, b} {
		r, err := m.Guest().Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{"hostname"}}, nil)
		if err != nil || string(r.Out) != "h\n" {
			t.Errorf("%q, %v", r.Out, err)
		}
		if err := m.Stop(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if after := residue(t, dir, name); !slices.Equal(before, after) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
}

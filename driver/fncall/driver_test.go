package fncall_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/driver/fncall"
)

// What the list asks of a sandbox that this kind has otherwise, and why.
const (
	noFiles   = "each command has files of its own, in memory, gone with it"
	noPorts   = "each command has a loopback of its own, gone with it"
	uncounted = "kills for want of memory are in the outcomes of commands; where the host has control groups v1 they are not in the figures of usage"
	noState   = "between commands there is nothing to keep, and what a command does is over in moments"
)

var lacks = map[string]string{
	"files": noFiles, "disk full": noFiles, "ports": noPorts, "screen": "commands have no display",
	"freeze": noFiles, "pause and freeze": noFiles,
	"pause": noState, "pause with work in hand": noState, "pause again and again": noState, "ten rounds of pause": noState,
	"stop while paused": noState, "adopt while paused": noState, "reclaim": noState,
	"snapshot": noState, "snapshot while paused": noState, "corrupt snapshot": noState, "snapshot of another version": noState, "fork": noState,
}

// but are the exceptions: a terminal is the machine's, outside of the cell's
// /dev/pts, and control groups of the older kind count what they killed in the
// cell's own, which ends with it.
var but = map[string]string{
	"terminal":      "a terminal has no name in /dev/pts",
	"limits":        uncounted,
	"out of memory": uncounted,
}

// TestDriver runs the list that every driver passes: each of its commands is in
// a cell.
func TestDriver(t *testing.T) {
	dir := t.TempDir()
	name := "dsec-test-" + pid() + "-list"
	layer := drivertest.Root(t)
	inner := func(t *testing.T) driver.Driver {
		t.Helper()
		d, err := container.Open(container.Config{Dir: filepath.Join(dir, "m"), Guest: guestBinary, Name: name, Pool: -1, Log: os.Stderr})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	e := drivertest.Env{
		Open: func(t *testing.T) driver.Driver {
			t.Helper()
			d := &faulty{Driver: inner(t)}
			return &opened{Driver: fncall.New(d), inner: d}
		},
		// The driver below has a crash of its own in its tests; this one keeps
		// nothing that a crash could lose.
		Crash:   func(t *testing.T, d driver.Driver) { d.Close() }, //nolint:errcheck // it is gone
		Root:    func(*testing.T) driver.Root { return driver.Root{Layers: []*os.File{layer}} },
		Residue: func(t *testing.T) []string { return residue(t, dir, name) },
		Kill:    func(t *testing.T, _ driver.Machine) { killGuests(t, name) },
		Lacks:   lacks,
		But:     but,
		Faults: map[string]func(*testing.T, driver.Driver){
			"no cells":  func(_ *testing.T, d driver.Driver) { d.(*opened).inner.fault = "no cells" },
			"no answer": func(_ *testing.T, d driver.Driver) { d.(*opened).inner.fault = "no answer" },
		},
		Powerless: true,
		Table:     "../../docs/backends/fncall.json",
	}
	if os.Getenv("DSEC_TEST_GUEST") != "" {
		e.Slow, e.Table = 15, "" // in a virtual machine, which may be emulated, and without the source
	}
	drivertest.Run(t, e)
}

// opened is a driver with what is below it.
type opened struct {
	*fncall.Driver
	inner *faulty
}

// faulty is a driver whose next machine is of no use for calls.
type faulty struct {
	driver.Driver
	fault string
}

func (d *faulty) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	m, err := d.Driver.Start(ctx, c)
	if fault := d.fault; fault != "" && err == nil {
		d.fault = ""
		return faultyMachine{m, fault}, nil
	}
	return m, err
}

type faultyMachine struct {
	driver.Machine
	fault string
}

func (m faultyMachine) Guest() driver.Guest {
	if m.fault == "no cells" {
		return struct{ driver.Guest }{m.Machine.Guest()}
	}
	return silent{m.Machine.Guest().(cellGuest)}
}

type cellGuest interface {
	driver.Guest
	driver.Celler
}

type silent struct{ cellGuest }

func (silent) Activity(context.Context) (driver.Activity, error) {
	return driver.Activity{}, dsec.Errorf(dsec.Unavailable, "the guest does not answer")
}

// killGuests ends the guests of a driver's machines, and returns when they are
// gone.
func killGuests(t *testing.T, name string) {
	t.Helper()
	var killed []int
	for _, p := range processes(name) {
		n, err := strconv.Atoi(p)
		exe, _ := os.ReadFile("/proc/" + p + "/comm")
		if err != nil || strings.TrimSpace(string(exe)) != "dsec-guest" {
			continue
		}
		if syscall.Kill(n, syscall.SIGKILL) == nil {
			killed = append(killed, n)
		}
	}
	if len(killed) == 0 {
		t.Fatal("there is no guest")
	}
	for _, n := range killed {
		for end := time.Now().Add(30 * time.Second); syscall.Kill(n, 0) == nil; <-time.After(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("guest %d does not go", n)
			}
		}
	}
}

// processes are those in the control groups of a driver.
func processes(name string) []string {
	var out []string
	list, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range list {
		if b, _ := os.ReadFile(p); strings.Contains(string(b), "/"+name) {
			out = append(out, filepath.Base(filepath.Dir(p)))
		}
	}
	return out
}

// residue lists what is on the host on the driver's behalf.
func residue(t *testing.T, dir, name string) []string {
	t.Helper()
	var out []string
	for _, p := range processes(name) {
		out = append(out, "process "+p)
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
	files, _ := filepath.Glob(filepath.Join(dir, "m", "*"))
	trash, _ := filepath.Glob(filepath.Join(dir, "m", "trash", "*"))
	out = append(append(out, files...), trash...)
	return slices.DeleteFunc(out, func(s string) bool { return s == filepath.Join(dir, "m", "trash") })
}

package microvm_test

import (
	"errors"
	"testing"

	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/driver/microvm"
)

func TestDriver(t *testing.T) {
	// The saved guest is booted before the list's clocks run.
	d := open(t, config())
	if err := d.Prepare(t.Context(), resources); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	layer := drivertest.RootFiles(t)
	breakAt := func(place string) func(*testing.T, driver.Driver) {
		return func(_ *testing.T, d driver.Driver) { d.(*microvm.Driver).BreakAt(place, errors.New("armed")) }
	}
	drivertest.Run(t, drivertest.Env{
		Open: func(t *testing.T) driver.Driver {
			t.Helper()
			d, err := microvm.Open(config())
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Crash:       func(t *testing.T, d driver.Driver) { d.(*microvm.Driver).Crash() },
		Root:        func(*testing.T) driver.Root { return driver.Root{Files: []driver.LayerFiles{layer}} },
		Residue:     func(t *testing.T) []string { return residue(t, shared) },
		Resources:   resources,
		Slow:        15,
		GuestStands: true,
		Faults: map[string]func(*testing.T, driver.Driver){
			"disks": breakAt("disks"), "guest": breakAt("guest"), "limits": breakAt("limits"),
		},
		Lacks: map[string]string{
			"confined":         "the workload is root of a kernel of its own, and may mount, trace and load modules in it",
			"freeze":           "the writable layer of a microVM is a disk, not a folder of the host",
			"pause and freeze": "the writable layer of a microVM is a disk, not a folder of the host",
			"reclaim":          "a paused microVM has no process: it has given back all of its memory",
			"screen":           "a microVM has no display",
		},
		Table: "../../docs/backends/microvm.json",
	})
}

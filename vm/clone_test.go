package vm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/vm"
)

// private gives how much memory of a machine's process is its own, in MiB.
func (v *instance) private() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\nPrivate_Dirty:")
	n := 0
	fmt.Sscan(rest, &n) //nolint:errcheck // 0 shows
	return n >> 10
}

// migration waits until the machine's state has come or gone.
func (v *instance) migration() {
	v.t.Helper()
	for end := time.Now().Add(guestWait); ; time.Sleep(5 * time.Millisecond) {
		switch s := v.qmp("query-migrate", nil)["status"]; {
		case s == "completed":
			return
		case s == "failed" || time.Now().After(end):
			v.t.Fatalf("migration: %v", s)
		}
	}
}

// TestClones makes two sandboxes of one saved machine: what they show, and what
// they have drawn from their random pools, is their own.
func TestClones(t *testing.T) {
	blank, _ := disks(t, tarOf(t, "blank", "nothing"))
	dir := t.TempDir()
	ram, saved := filepath.Join(dir, "ram"), filepath.Join(dir, "saved")
	ignore := map[string]any{"capabilities": []any{map[string]any{"capability": "x-ignore-shared", "state": true}}}

	v := boot(t, config{disks: blank, ram: ram + ",share=on"})
	v.ready()
	if err := v.control.Warm(v.ctx(), vm.Setup{}); err != nil {
		t.Fatal(err)
	}
	v.qmp("stop", nil)
	v.qmp("migrate-set-capabilities", ignore)
	v.qmp("migrate", map[string]any{"uri": "exec:cat >" + saved})
	v.migration()
	v.cmd.Process.Kill() //nolint:errcheck // its own
	<-v.dead

	seen := map[string]string{}
	for i, name := range []string{"one", "two"} {
		ds, setup := disks(t, drivertest.BusyboxTar(t), tarOf(t, "name", name))
		setup.Hostname, setup.Machine = name, ""
		c := boot(t, config{disks: ds, ram: ram + ",share=off", args: []string{"-incoming", "defer"}})
		for {
			if _, err := os.Stat(filepath.Join(c.dir, "qmp")); err == nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		c.qmp("migrate-set-capabilities", ignore)
		c.qmp("migrate-incoming", map[string]any{"uri": "exec:cat " + saved})
		c.migration()
		began := time.Now()
		c.qmp("cont", nil)
		now := time.Now().Add(time.Duration(i) * time.Hour)
		k, err := c.control.Restored(c.ctx(), vm.Restored{Now: now, Seed: seed()})
		if off := k.Now.Sub(now); err != nil || off < 0 || off > 10*time.Second {
			t.Errorf("the clock is %v off, %v", off, err)
		}
		idle := c.private()
		if err := c.control.Enter(c.ctx(), setup); err != nil {
			t.Fatal(err)
		}
		c.want("cat /name /etc/hostname", name+name)
		t.Logf("first answer after %v; private memory idle %d MiB, %d after a command", time.Since(began), idle, c.private())
		for _, what := range []string{"head -c 16 /dev/urandom | md5sum", "cat /proc/sys/kernel/random/boot_id", "cat /etc/machine-id", "cat /proc/sys/kernel/random/uuid"} {
			out := string(c.run(what).Out)
			if out == "" || seen[what] == out {
				t.Errorf("%s gives %q in both", what, out)
			}
			seen[what] = out
		}
	}
}

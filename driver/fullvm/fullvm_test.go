package fullvm_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/fullvm"
)

var (
	serial atomic.Int64
	ids    dsec.IDKey
)

// open opens a driver of its own, which is closed and checked for what it left
// at the test's end.
func open(t *testing.T, c fullvm.Config) *fullvm.Driver {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	if c.Name == "" {
		c.Name = fmt.Sprintf("fullvm-test-%d-%d", os.Getpid(), serial.Add(1))
	}
	c.Accel = accel
	d, err := fullvm.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Adopt(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Close() //nolint:errcheck // never fails
		if left := residue(t, c); len(left) > 0 {
			t.Errorf("left on the host: %v", left)
		}
		removeGroups(c.Name)
	})
	return d
}

// accel is what the tests' machines run by: hosts whose device opens do not
// always run guests.
const accel = "tcg"

// residue lists what machines have left: slots' folders, groups, processes.
func residue(t *testing.T, c fullvm.Config) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{
		filepath.Join(c.Dir, "[0-9f]*"), filepath.Join(c.Dir, "warm", "*.part"),
		"/sys/fs/cgroup/" + c.Name + "/[0-9]*", "/sys/fs/cgroup/*/" + c.Name + "/[0-9]*",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), c.Name+"/") {
			out = append(out, p)
		}
	}
	return out
}

func removeGroups(name string) {
	for _, pattern := range []string{"/sys/fs/cgroup/" + name, "/sys/fs/cgroup/*/" + name} {
		found, _ := filepath.Glob(pattern)
		for _, dir := range found {
			filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error { //nolint:errcheck // best effort
				if err == nil && e.IsDir() && p != dir {
					os.Remove(p)
				}
				return nil
			})
			os.Remove(dir)
		}
	}
}

// resources are those of a machine that runs Debian.
var resources = dsec.Resources{CPU: 2, Memory: 512 << 20, Disk: 3 << 30, Pids: 4096}

func config(t *testing.T, disk string) driver.Config {
	t.Helper()
	return driver.Config{ID: ids.New(dsec.Place{Node: 1, Epoch: 1}), Root: driver.Root{Disk: disk}, Resources: resources, Hostname: "box"}
}

func TestWhatIsNoDiskImageIsInvalid(t *testing.T) {
	d := open(t, fullvm.Config{})
	dir := t.TempDir()
	file := func(name string, b []byte, size int64) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, b, 0o600), os.Truncate(path, size)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	boot := make([]byte, 512)
	boot[510], boot[511] = 0x55, 0xaa
	base := file("base.raw", boot, 1<<20)
	qemuImg := func(name string, args ...string) string {
		path := filepath.Join(dir, name)
		if out, err := exec.Command("qemu-img", append(append([]string{"create", "-q", "-f", "qcow2"}, args...), path, "1M")...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return path
	}
	for name, c := range map[string]struct{ path, want string }{
		"nothing":       {"", "needs a disk image"},
		"missing":       {filepath.Join(dir, "none"), "no such file"},
		"a folder":      {dir, "is no file"},
		"text":          {file("text", []byte("hello"), 1<<20), "no boot sector"},
		"odd size":      {file("odd", boot, 1<<20+1), "whole sectors"},
		"empty":         {file("empty", nil, 0), "no boot sector"},
		"backing file":  {qemuImg("backed", "-b", base, "-F", "raw"), "backing file"},
		"external data": {qemuImg("external", "-o", "data_file="+filepath.Join(dir, "data")), "another file"},
		"empty qcow2":   {qemuImg("blank"), "no boot sector"},
		"cut qcow2":     {file("cut", []byte("QFI\xfb\x00\x00\x00\x03"), 16), "cut off"},
	} {
		_, err := d.Start(t.Context(), config(t, c.path))
		if dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c := config(t, base)
	c.Resources.Disk = 1 << 19
	if _, err := d.Start(t.Context(), c); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("an image larger than its disk: %v", err)
	}
	system := append([]byte(nil), boot...)
	clear(system[:440])
	system[446+4] = 0xef // what UEFI firmware boots
	for path, least := range map[string]string{base: "at least 32 MiB", file("uefi", system, 1<<20): "at least 128 MiB"} {
		c = config(t, path)
		c.Resources.Memory = 16 << 20
		if _, err := d.Start(t.Context(), c); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), least) {
			t.Errorf("16 MiB for %s: %v, want %q", path, err, least)
		}
	}
	c = config(t, base)
	c.Resources.Memory = 1 << 45
	if _, err := d.Start(t.Context(), c); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("more memory than the host has: %v", err)
	}

	// Compressed images begin with what has to be unpacked to be looked at.
	packed := filepath.Join(dir, "packed")
	if out, err := exec.Command("qemu-img", "convert", "-c", "-O", "qcow2", rescue, packed).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if size, err := probe(t, packed); err != nil || size < 1<<20 {
		t.Errorf("a compressed image: %d, %v", size, err)
	}
}

func TestAStartThatFailsLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	d := open(t, fullvm.Config{Dir: dir, Name: fmt.Sprintf("fullvm-fail-%d", os.Getpid()), AgentWait: time.Millisecond})
	for _, place := range []string{"process", "guest", "state"} {
		d.FailAt(place)
		c := config(t, rescue)
		c.Resources.Memory = 64 << 20
		if _, err := d.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "injected") {
			t.Errorf("a fault at %s: %v", place, err)
		}
		if left := residue(t, fullvm.Config{Dir: dir, Name: fmt.Sprintf("fullvm-fail-%d", os.Getpid())}); len(left) > 0 {
			t.Errorf("a fault at %s left %v", place, left)
		}
	}
}

func probe(t *testing.T, path string) (int64, error) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return fullvm.Probe(f)
}

func FuzzProbe(f *testing.F) {
	header := make([]byte, 1024)
	copy(header, "QFI\xfb\x00\x00\x00\x03")
	header[23], header[31] = 16, 1
	f.Add(header)
	boot := make([]byte, 1024)
	boot[510], boot[511] = 0x55, 0xaa
	copy(boot[512:], "EFI PART")
	f.Add(boot)
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if size, err := probe(t, path); err == nil && size <= 0 {
			t.Error("an image of no size was taken")
		}
	})
}

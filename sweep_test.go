package dsec_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestSweep leaves what a killed test run leaves, beside what one that runs has,
// and sees the sweep of "make test" tell them apart.
func TestSweep(t *testing.T) {
	const root = "/sys/fs/cgroup"
	hierarchy := root
	if _, err := os.Stat(root + "/cgroup.procs"); err != nil {
		hierarchy = root + "/memory"
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	group := func(name string) (dir string, member *exec.Cmd) {
		t.Helper()
		dir = filepath.Join(hierarchy, name)
		if err := os.MkdirAll(dir+"/m", 0o755); err != nil {
			t.Skipf("feature control groups: %v", err)
		}
		t.Cleanup(func() { os.Remove(dir + "/m"); os.Remove(dir) })
		member = exec.Command("sleep", "1000")
		if err := member.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { member.Process.Kill(); member.Wait() }) //nolint:errcheck // gone is as good
		if err := os.WriteFile(dir+"/m/cgroup.procs", []byte(strconv.Itoa(member.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
		return dir, member
	}
	left, orphan := group("dsec-test-" + strconv.Itoa(dead.Process.Pid) + "-sweep")
	kept, child := group("dsec-test-" + strconv.Itoa(os.Getpid()) + "-sweep")

	tmp := t.TempDir()
	hour := time.Now().Add(-2 * time.Hour)
	node := func(top string, made time.Time) string {
		t.Helper()
		data := filepath.Join(tmp, top, "001", "data")
		if err := os.MkdirAll(data, 0o755); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(data, "instance")
		if err := os.WriteFile(file, []byte("0123456789abcdef"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, made, made); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(tmp, top)
	}
	old, young, others := node("TestOld1", hour), node("TestYoung1", time.Now()), node("mine", hour)

	c := exec.Command(".ci/sweep")
	c.Env = append(os.Environ(), "TMPDIR="+tmp)
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), left) {
		t.Errorf("sweep: %v\n%s", err, out)
	}
	for path, want := range map[string]bool{left: false, old: false, kept: true, young: true, others: true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", path, err == nil, want)
		}
	}
	if err := orphan.Wait(); err == nil || orphan.ProcessState.Exited() {
		t.Errorf("the process of the dead run ended with %v", err)
	}
	if err := child.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process of the run that is alive: %v", err)
	}
}

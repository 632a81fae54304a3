package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestSnapshotOnAnotherNode saves a sandbox on one node and goes on from it on
// another, which shares the folder of snapshots and has the image itself.
func TestSnapshotOnAnotherNode(t *testing.T) {
	shared := filepath.Join(t.TempDir(), "snapshots")
	a, b := unstarted(t), fresh(t)
	for _, n := range []*node{a, b} {
		n.flags = []string{"--snapshots", shared}
		must(t, n.start())
		n.importBusybox(t)
	}
	sb := strings.TrimSpace(a.dsec(t, "create", "--image", busybox, "-e", "WHO=me"))
	a.dsec(t, "exec", sb, "sh", "-c", "echo kept > /kept; rm /bin/yes; ln /kept /twin")
	id := strings.TrimSpace(a.dsec(t, "snapshot", sb))
	if list := a.dsec(t, "snapshot", "ls"); !strings.Contains(list, id) || !strings.Contains(list, sb) {
		t.Errorf("listed:\n%s", list)
	}
	a.dsec(t, "stop", sb)

	// The layers below stay although no name and no sandbox has them any more.
	a.dsec(t, "image", "rm", busybox)
	a.kill()
	old := time.Now().Add(-24 * time.Hour)
	must(t, filepath.WalkDir(filepath.Join(a.data, "blobs"), func(p string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			err = os.Chtimes(p, old, old)
		}
		return err
	}))
	must(t, a.start())
	a.dsec(t, "image", "gc")
	for _, n := range []*node{a, b} {
		c := strings.TrimSpace(n.dsec(t, "create", "--from", id))
		if out := n.dsec(t, "exec", c, "sh", "-c", `cat /twin; echo $WHO; ls /bin/yes 2>/dev/null || echo gone; [ /kept -ef /twin ] && echo one`); out != "kept\nme\ngone\none" {
			t.Errorf("the copy says %q", out)
		}
		if out := n.dsec(t, "log", c); !strings.Contains(out, "a copy of "+sb) {
			t.Errorf("the log of the copy does not name its origin:\n%s", out)
		}
		kids := strings.Fields(n.dsec(t, "fork", c, "-n", "2", "--key", "k"))
		if again := strings.Fields(n.dsec(t, "fork", c, "-n", "2", "--key", "k")); len(kids) != 2 || again[0] != kids[0] {
			t.Errorf("forks %v, then %v", kids, again)
		}
		for _, k := range append(kids, c) {
			if out := n.dsec(t, "exec", k, "cat", "/kept"); out != "kept" {
				t.Errorf("sandbox %s has %q", k, out)
			}
			n.dsec(t, "stop", k)
		}
	}
	b.dsec(t, "snapshot", "rm", id)
	if r := a.run(nil, "create", "--from", id); r.fault() == nil {
		t.Error("a snapshot that was removed elsewhere was used")
	}
	var left []string
	filepath.WalkDir(shared, func(p string, e os.DirEntry, _ error) error { //nolint:errcheck // an absent folder is an empty one
		if e != nil && e.Type().IsRegular() && e.Name() != "format" { // of the store itself
			left = append(left, p)
		}
		return nil
	})
	if len(left) > 0 {
		t.Errorf("left in the store: %v", left)
	}
}

// TestMicroVM takes a sandbox of another kind the whole way.
func TestMicroVM(t *testing.T) {
	n := unstarted(t)
	kernels, err := filepath.Abs("../bin/vm")
	must(t, err)
	if _, err := os.Stat(filepath.Join(kernels, "vmlinuz-6.12")); err != nil {
		t.Skip("feature microvm: no guest kernel; make kernel")
	}
	must(t, os.Symlink(kernels, filepath.Join(n.dir, "vm")))
	must(t, n.start())
	n.importBusybox(t)
	sb := strings.TrimSpace(n.dsec(t, "create", "--kind", "microvm", "--image", busybox, "--memory", "256M", "--cpu", "1"))
	if out := n.dsec(t, "exec", sb, "sh", "-c", "echo kept > /kept; uname -r"); !strings.HasPrefix(out, "6.12") {
		t.Errorf("its kernel is %q", out)
	}
	n.dsec(t, "pause", sb)
	if out := n.dsec(t, "exec", sb, "cat", "/kept"); out != "kept" { // it wakes
		t.Errorf("after a pause it has %q", out)
	}
	id := strings.TrimSpace(n.dsec(t, "snapshot", sb))
	c := strings.TrimSpace(n.dsec(t, "create", "--from", id))
	if out := n.dsec(t, "exec", c, "sh", "-c", "cat /kept; echo own > /own; cat /own"); out != "kept\nown" {
		t.Errorf("the copy has %q", out)
	}
	for _, k := range strings.Fields(n.dsec(t, "fork", sb, "-n", "2")) {
		if out := n.dsec(t, "exec", k, "sh", "-c", "cat /kept; ls /own 2>/dev/null || echo private"); out != "kept\nprivate" {
			t.Errorf("a child has %q", out)
		}
	}
	got, err := n.Sandboxes.Get(t.Context(), dsec.SandboxID(c))
	if err != nil || got.Spec.Kind != dsec.MicroVM || got.Spec.Resources.Memory != 256<<20 {
		t.Errorf("the copy is %+v, %v", got.Spec, err)
	}
}

package e2e_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// used adds up what files are below a folder.
func used(t *testing.T, dir string) (sum int64) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	}))
	return sum
}

// TestFullDisk fills the disk under imports and then under creates. Each ends
// in a kind, nothing half done stays, and all is well once there is room.
func TestFullDisk(t *testing.T) {
	n := unstarted(t)
	blobs, boxes := filepath.Join(n.data, "blobs"), filepath.Join(n.data, "container")
	must(t, n.start())
	n.dsec(t, "down", "--data", n.data)
	<-n.exited
	tmpfs(t, blobs, "16m")
	tmpfs(t, boxes, "256k")
	t.Cleanup(func() { // before the file systems go
		if err := n.end(); err != nil {
			t.Error(err)
		}
	})
	must(t, n.start())
	n.importBusybox(t)
	sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
	must(t, err)

	file := filepath.Join(t.TempDir(), "large")
	f, err := os.Create(file)
	must(t, err)
	_, err = io.Copy(f, noise(32<<20))
	must(t, err)
	must(t, f.Close())
	root := t.TempDir()
	must(t, os.Rename(file, filepath.Join(root, "large")))
	before := used(t, blobs)
	r := n.run(nil, "image", "import", root, "--name", "large")
	if r.code != 1 || !strings.Contains(r.err, "space") && !strings.Contains(r.err, "full") {
		t.Errorf("import on a full disk: %d %q", r.code, r.err)
	}
	_, err = n.Images.Inspect(ctx(t), "large")
	wantKind(t, "what was not imported", err, dsec.NotFound)
	if now := used(t, blobs); now > before {
		t.Errorf("the store grew from %d to %d bytes", before, now)
	}

	// The room for boxes is full: a file takes what is left.
	hog := filepath.Join(boxes, "hog")
	must(t, os.WriteFile(hog, nil, 0o600))
	for { // the driver makes and deletes meanwhile
		h, err := os.OpenFile(hog, os.O_WRONLY|os.O_APPEND, 0)
		must(t, err)
		_, err = h.Write(make([]byte, 4096))
		h.Close()
		if err != nil {
			break
		}
	}
	refused := 0
	for range 12 { // some boxes may be ready already
		x, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
		if err == nil {
			defer n.stop(t, x.ID)
			continue
		}
		refused++
		wantKind(t, "create on a full disk", err, dsec.Exhausted)
	}
	if refused == 0 {
		t.Error("no create was refused")
	}
	if r := n.sh(t, sb.ID, "echo alive"); string(r.Out) != "alive\n" {
		t.Errorf("a sandbox says %q, %+v", r.Out, r.CommandStatus)
	}
	must(t, os.Remove(hog))
	x, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
	must(t, err)
	n.stop(t, x.ID)
	n.stop(t, sb.ID)
}

// pin keeps a file in memory until the test ends.
func pin(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	st, err := f.Stat()
	must(t, err)
	b, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	must(t, unix.Mlock(b))
	t.Cleanup(func() { unix.Munmap(b) }) //nolint:errcheck // the process ends soon
}

// TestBrokenDisk makes every use of the blobs' disk an I/O error. Imports, and
// creates from what was not read before, fail; all else goes on.
func TestBrokenDisk(t *testing.T) {
	n := unstarted(t)
	must(t, n.start())
	n.dsec(t, "down", "--data", n.data)
	<-n.exited
	d := newDisk(t, 256<<20)
	blobs := filepath.Join(n.data, "blobs")
	must(t, os.RemoveAll(blobs))
	must(t, os.Symlink(d.dir, blobs))
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Error(err)
		}
	})
	must(t, n.start())
	n.importBusybox(t)
	n.dsec(t, "image", "import", t.TempDir(), "--name", "unread", "--as", "workspace")
	sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
	must(t, err)
	for _, pid := range n.guests() {
		if entered(pid) {
			pin(t, fmt.Sprintf("/proc/%d/root/bin/busybox", pid)) // the host may take back what is only cached
		}
	}
	must(t, d.spoil())

	r := n.run(nil, "image", "import", t.TempDir(), "--name", "lost")
	if r.code != 1 || !strings.HasPrefix(r.err, "dsec: ") {
		t.Errorf("import: %d %q", r.code, r.err)
	}
	_, err = n.Images.Inspect(ctx(t), "lost")
	wantKind(t, "what was not imported", err, dsec.NotFound)
	spec := plain()
	spec.Environment.Workspace = "unread"
	_, err = n.Sandboxes.Create(ctx(t), spec, dsec.CreateOptions{})
	if err == nil {
		t.Error("a sandbox was made of what cannot be read")
	}
	if l, err := n.Sandboxes.List(ctx(t), dsec.Filter{}); err != nil || len(l) != 1 {
		t.Errorf("%d sandboxes, %v", len(l), err)
	}
	if r := n.sh(t, sb.ID, "echo alive"); string(r.Out) != "alive\n" {
		t.Errorf("a sandbox says %q, %+v", r.Out, r.CommandStatus)
	}
	if status, body := n.get(t, "/healthz"); status != 200 {
		t.Errorf("health: %d %s", status, body)
	}
	n.stop(t, sb.ID)
}

package erofs_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	goerofs "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// TestMain fails the run if the tests leave a descriptor, and so a mount: all
// they make are detached, in no table, and live as long as their descriptor.
func TestMain(m *testing.M) {
	before := resources()
	code := m.Run()
	if after := resources(); code == 0 && after != before {
		fmt.Fprintf(os.Stderr, "before: %s\nafter: %s\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func resources() string {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err.Error()
	}
	n := 0
	for _, fd := range fds {
		// The runtime opens its poller and the test binary its log lazily.
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && !strings.HasPrefix(to, "anon_inode:[event") {
			n++
		}
	}
	return fmt.Sprintf("%d descriptors", n)
}

func TestKernelReadsFolder(t *testing.T) {
	root := awkward(t)
	tree, data := fromDir(t, root, erofs.DirOptions{})
	l := save(t, tree, data)
	want := describe(t, root, nil)
	if len(want) < 5230 {
		t.Fatalf("the folder has only %d names", len(want))
	}
	fsck(t, l)
	same(t, "devices", describe(t, mountErofs(t, l.meta, l.blobs...), nil), want)
	same(t, "flat", describe(t, mountErofs(t, flat(t, l)), nil), want)

	var st unix.Stat_t
	must(t, unix.Stat(mountErofs(t, l.meta, l.blobs...)+"/dir", &st))
	if st.Nlink != 3 {
		t.Errorf("folder has %d links, want 3", st.Nlink)
	}
	blob := data[l.image.Devices[0].Tag]
	if max := 9 << 20; len(blob) > max {
		t.Errorf("blob of %d bytes: holes or equal files were stored", len(blob))
	}
	t.Logf("metadata %d bytes, blob %d bytes, %d inodes", len(l.image.Meta), len(blob), l.image.Inodes)
}

func TestOtherReader(t *testing.T) {
	root := awkward(t)
	tree, data := fromDir(t, root, erofs.DirOptions{})
	l := save(t, tree, data)
	meta, err := os.Open(l.meta)
	must(t, err)
	defer meta.Close()
	blob, err := os.Open(l.blobs[0])
	must(t, err)
	defer blob.Close()
	img, err := goerofs.Open(meta, goerofs.WithExtraDevices(blob))
	must(t, err)
	seen := 0
	must(t, fs.WalkDir(img, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("%q: %w", p, err)
		}
		seen++
		info, err := d.Info()
		if err != nil {
			return err
		}
		want, err := os.Lstat(filepath.Join(root, p))
		if err != nil {
			return err
		}
		// The reader leaves set-id and sticky bits where Go does not look.
		if info.Mode().Perm() != want.Mode().Perm() || info.Mode().Type() != want.Mode().Type() || !info.ModTime().Equal(want.ModTime()) {
			t.Errorf("%.40q: %v %v, want %v %v", p, info.Mode(), info.ModTime(), want.Mode(), want.ModTime())
		}
		if info.Mode().IsRegular() {
			if info.Size() != want.Size() {
				t.Errorf("%.40q: %d bytes, want %d", p, info.Size(), want.Size())
			}
			if info.Size() < 1<<25 {
				got, err := fs.ReadFile(img, p)
				if err != nil {
					return err
				}
				w, err := os.ReadFile(filepath.Join(root, p))
				if err != nil {
					return err
				}
				if !bytes.Equal(got, w) {
					t.Errorf("%.40q: other contents", p)
				}
			}
		}
		return nil
	}))
	if want := len(describe(t, root, nil)); seen != want {
		t.Errorf("saw %d names, want %d", seen, want)
	}
}

func TestTarOfFolder(t *testing.T) {
	root := awkward(t)
	// GNU tar cannot pack sockets, nor links of anything but files.
	must(t, os.Remove(filepath.Join(root, "dir/fifo")))
	socket := func(_ string, mode uint32) bool { return mode&unix.S_IFMT == unix.S_IFSOCK }
	cmd := exec.Command("tar", "-C", root, "--format=pax", "--xattrs", "--xattrs-include=*", "--acls",
		"--sparse", "--numeric-owner", "-c", ".")
	var out bytes.Buffer
	cmd.Stdout = &out
	must(t, cmd.Run())
	tree, data := fromTar(t, &out, erofs.TarOptions{})
	l := save(t, tree, data)
	fsck(t, l)
	want := describe(t, root, socket)
	for p, line := range want {
		// tar writes ACLs as text, which is not taken.
		want[p] = withoutACL(line)
	}
	got := describe(t, mountErofs(t, l.meta, l.blobs...), socket)
	for p, line := range got {
		got[p] = withoutACL(line)
	}
	same(t, "tar", got, want)
}

func withoutACL(line string) string {
	var keep []string
	for _, f := range strings.Split(line, " ") {
		if !strings.HasPrefix(f, "system.posix_acl") {
			keep = append(keep, f)
		}
	}
	return strings.Join(keep, " ")
}

func TestSameBytes(t *testing.T) {
	root := awkward(t)
	tree1, data1 := fromDir(t, root, erofs.DirOptions{})
	tree2, data2 := fromDir(t, root, erofs.DirOptions{})
	im1, err := tree1.Encode()
	must(t, err)
	im2, err := tree2.Encode()
	must(t, err)
	if !bytes.Equal(im1.Meta, im2.Meta) {
		t.Error("two encodings of one folder differ")
	}
	for tag := range data1 {
		if _, ok := data2[tag]; !ok {
			t.Error("two blobs of one folder differ")
		}
	}
	back, err := erofs.Decode(im1.Meta)
	must(t, err)
	im3, err := back.Encode()
	must(t, err)
	if !bytes.Equal(im1.Meta, im3.Meta) {
		t.Error("decoding and encoding changes the image")
	}
}

func TestManyDevices(t *testing.T) {
	const n = 60
	var trees []*erofs.Tree
	all := map[string][]byte{}
	for i := range n {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("file", i)), pattern(fmt.Sprint(i), 10000+i), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "last"), []byte(fmt.Sprint(i)), 0o644))
		tree, data := fromDir(t, dir, erofs.DirOptions{})
		for tag, b := range data {
			all[tag] = b
		}
		// Go through the encoded form, as a merge of stored layers does.
		im, err := tree.Encode()
		must(t, err)
		tree, err = erofs.Decode(im.Meta)
		must(t, err)
		trees = append(trees, tree)
	}
	merged, err := erofs.Merge(trees...)
	must(t, err)
	l := save(t, merged, all)
	if len(l.blobs) != n {
		t.Fatalf("%d devices, want %d", len(l.blobs), n)
	}
	fsck(t, l)
	for _, root := range []string{mountErofs(t, l.meta, l.blobs...), mountErofs(t, flat(t, l))} {
		for i := range n {
			got, err := os.ReadFile(fmt.Sprintf("%s/file%d", root, i))
			must(t, err)
			if !bytes.Equal(got, pattern(fmt.Sprint(i), 10000+i)) {
				t.Errorf("file%d has other contents", i)
			}
		}
		if got, _ := os.ReadFile(root + "/last"); string(got) != fmt.Sprint(n-1) {
			t.Errorf("last is from layer %q", got)
		}
	}
}

func TestEmptyTree(t *testing.T) {
	l := save(t, erofs.New(), nil)
	fsck(t, l)
	es, err := os.ReadDir(mountErofs(t, l.meta) + "/")
	if err != nil || len(es) != 0 || len(l.blobs) != 0 {
		t.Errorf("%v, %v, %d blobs", es, err, len(l.blobs))
	}
}

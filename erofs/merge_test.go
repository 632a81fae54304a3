package erofs_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// A step changes a folder that is mounted as an overlay.
type step func(t *testing.T, root string)

func put(name, contents string) step {
	return func(t *testing.T, root string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, name), []byte(contents), 0o644))
	}
}

func remove(name string) step {
	return func(t *testing.T, root string) {
		t.Helper()
		must(t, os.RemoveAll(filepath.Join(root, name)))
	}
}

func rename(from, to string) step {
	return func(t *testing.T, root string) {
		t.Helper()
		must(t, os.Rename(filepath.Join(root, from), filepath.Join(root, to)))
	}
}

func chmod(name string, mode os.FileMode) step {
	return func(t *testing.T, root string) {
		t.Helper()
		must(t, os.Chmod(filepath.Join(root, name), mode))
	}
}

func link(from, to string) step {
	return func(t *testing.T, root string) {
		t.Helper()
		must(t, os.Link(filepath.Join(root, from), filepath.Join(root, to)))
	}
}

// commit mounts lowers (uppermost first) with a fresh upper, runs steps in it
// and returns the upper as a layer.
func commit(t *testing.T, options, lowers []string, steps ...step) (*erofs.Tree, map[string][]byte) {
	t.Helper()
	dir := t.TempDir()
	upper := filepath.Join(dir, "upper")
	work := filepath.Join(dir, "work")
	must(t, os.Mkdir(upper, 0o755))
	must(t, os.Mkdir(work, 0o755))
	t.Run("write", func(t *testing.T) { // so that the mount ends before the walk
		root := mount(t, "overlay", func(fs int) error {
			for _, l := range lowers {
				f, err := unix.Open(l, unix.O_PATH|unix.O_CLOEXEC, 0)
				if err != nil {
					return err
				}
				err = unix.FsconfigSetFd(fs, "lowerdir+", f)
				unix.Close(f)
				if err != nil {
					return err
				}
			}
			if err := unix.FsconfigSetString(fs, "upperdir", upper); err != nil {
				return err
			}
			for _, o := range options {
				k, v, _ := strings.Cut(o, "=")
				if err := unix.FsconfigSetString(fs, k, v); err != nil {
					return err
				}
			}
			return unix.FsconfigSetString(fs, "workdir", work)
		})
		for _, s := range steps {
			s(t, root)
		}
	})
	return fromDir(t, upper, erofs.DirOptions{Source: erofs.Upper})
}

var sessions = []struct {
	name          string
	first, second []step
}{
	{"delete and recreate", []step{remove("d"), put("d/new", "n"), remove("f")},
		[]step{put("f", "again"), remove("d/new"), put("d/x/y", "z")}},
	{"folder over file", []step{remove("f"), put("f/inside", "1")}, []step{put("f/more", "2")}},
	{"file over folder", []step{remove("d"), put("d", "file")}, []step{remove("d"), put("d/a", "folder again")}},
	{"append and chmod", []step{put("d/a", "changed"), chmod("d", 0o700)}, []step{chmod("d/b", 0o600), chmod("d/deep", 0o711)}},
	{"links", []step{link("d/a", "linked"), link("linked", "again")}, []step{put("linked", "both"), remove("d/a")}},
	{"rename file", []step{rename("d/a", "moved")}, []step{rename("moved", "d/a2"), rename("d/b", "d/a")}},
	{"delete under deleted", []step{remove("d/deep/er")}, []step{remove("d/deep"), put("d/deep/er/new", "x")}},
	{"nothing then delete", nil, []step{remove("d"), remove("l")}},
}

// baseLayer is what the sessions start from.
func baseLayer(t *testing.T) (*erofs.Tree, map[string][]byte) {
	t.Helper()
	dir := t.TempDir()
	for _, s := range []step{
		put("f", "file"), put("d/a", strings.Repeat("a", 9000)), put("d/b", "b"),
		put("d/deep/er/one", "1"), put("d/deep/er/two", "2"), put("e/keep", "k"),
	} {
		s(t, dir)
	}
	must(t, os.Symlink("d", filepath.Join(dir, "l")))
	return fromDir(t, dir, erofs.DirOptions{})
}

// withoutNlink drops the link counts, which in an overlay count names of lower
// layers that are hidden.
func withoutNlink(files map[string]string) map[string]string {
	for p, line := range files {
		before, after, _ := strings.Cut(line, " nlink=")
		_, after, _ = strings.Cut(after, " ")
		files[p] = before + " " + after
	}
	return files
}

// TestMergeIsOverlay holds Merge and Fold against the kernel's own idea.
func TestMergeIsOverlay(t *testing.T) {
	for _, s := range sessions {
		t.Run(s.name, func(t *testing.T) {
			base, all := baseLayer(t)
			b := save(t, base, all)
			bm := mountErofs(t, b.meta, b.blobs...)
			one, data1 := commit(t, nil, []string{bm}, s.first...)
			maps.Copy(all, data1)
			l1 := save(t, one, all)
			fsck(t, l1)
			m1 := mountErofs(t, l1.meta, l1.blobs...)
			two, data2 := commit(t, nil, []string{m1, bm}, s.second...)
			maps.Copy(all, data2)
			l2 := save(t, two, all)
			want := withoutNlink(describe(t, mountOverlay(t, mountErofs(t, l2.meta, l2.blobs...), m1, bm), nil))

			merged, err := erofs.Merge(base, one, two)
			must(t, err)
			lm := save(t, merged, all)
			fsck(t, lm)
			same(t, "merge", withoutNlink(describe(t, mountErofs(t, lm.meta, lm.blobs...), nil)), want)

			folded, err := erofs.Fold(one, two)
			must(t, err)
			lf := save(t, folded, all)
			same(t, "fold", withoutNlink(describe(t, mountOverlay(t, mountErofs(t, lf.meta, lf.blobs...), bm), nil)), want)

			for p, n := range merged.Walk() {
				if n.IsWhiteout() || n.IsOpaque() {
					t.Errorf("%q is a mark of overlay in a merged tree", p)
				}
			}
		})
	}
}

// TestMergeRedirects merges what an overlay with redirects and metacopy wrote.
func TestMergeRedirects(t *testing.T) {
	base, all := baseLayer(t)
	b := save(t, base, all)
	bm := mountErofs(t, b.meta, b.blobs...)
	options := []string{"redirect_dir=on", "metacopy=on"}
	upper, data := commit(t, options, []string{bm},
		rename("d", "e/moved"), put("e/moved/deep/er/three", "3"), rename("e/moved/deep", "e/moved/flat"),
		chmod("f", 0o600), rename("f", "g"), chmod("e/moved/a", 0o640))
	maps.Copy(all, data)
	if n := upper.Lookup("g"); n == nil || n.Xattrs[erofs.XattrRedirect] == "" {
		t.Fatal("the kernel wrote no redirect, so this test tests nothing")
	}
	u := save(t, upper, all)
	um := mountErofs(t, u.meta, u.blobs...)
	want := describe(t, mount(t, "overlay", func(fs int) error {
		for _, o := range options {
			k, v, _ := strings.Cut(o, "=")
			if err := unix.FsconfigSetString(fs, k, v); err != nil {
				return err
			}
		}
		for _, l := range []string{um, bm} {
			f, err := unix.Open(l, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.FsconfigSetFd(fs, "lowerdir+", f)
			unix.Close(f)
			if err != nil {
				return err
			}
		}
		return nil
	}), nil)
	merged, err := erofs.Merge(base, upper)
	must(t, err)
	m := save(t, merged, all)
	same(t, "merge", describe(t, mountErofs(t, m.meta, m.blobs...), nil), want)

	if _, err := erofs.Fold(erofs.New(), upper); !errors.Is(err, erofs.ErrUnsupported) {
		t.Errorf("fold of a redirected folder: %v, want ErrUnsupported", err)
	}
}

// An entry is a line of a tar in a test.
type entry struct {
	name, body, link string
	kind             byte
	mode             int64
	pax              map[string]string
}

func tarOf(t testing.TB, entries ...entry) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				e.kind = tar.TypeDir
			}
		}
		if e.mode == 0 {
			e.mode = 0o755
		}
		must(t, w.WriteHeader(&tar.Header{
			Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Size: int64(len(e.body)),
			ModTime: time.Unix(1000, 0), PAXRecords: e.pax, Format: tar.FormatPAX,
		}))
		_, err := w.Write([]byte(e.body))
		must(t, err)
	}
	must(t, w.Close())
	return &out
}

// list shows a tree in a line, for comparing.
func list(tree *erofs.Tree) string {
	var parts []string
	for p, n := range tree.Walk() {
		if p == "" {
			continue
		}
		switch {
		case n.IsWhiteout():
			p += "!"
		case n.IsOpaque():
			p += "/!"
		case n.IsDir():
			p += "/"
		case n.IsSymlink():
			p += "->" + n.Target
		default:
			p += fmt.Sprint("=", n.Size)
		}
		parts = append(parts, p)
	}
	return strings.Join(parts, " ")
}

func TestTarMeaning(t *testing.T) {
	long := strings.Repeat("l", 255)
	for _, c := range []struct {
		name    string
		entries []entry
		want    string
	}{
		{"parents are made", []entry{{name: "a/b/c", body: "x"}}, "a/ a/b/ a/b/c=1"},
		{"absolute and dotted", []entry{{name: "/a/./b//c", body: "x"}, {name: "./d/"}}, "a/ a/b/ a/b/c=1 d/"},
		{"last wins", []entry{{name: "a", body: "1"}, {name: "a", body: "22"}}, "a=2"},
		{"folder twice", []entry{{name: "a/"}, {name: "a/b", body: "1"}, {name: "a/", mode: 0o700}}, "a/ a/b=1"},
		{"file over folder", []entry{{name: "a/b", body: "1"}, {name: "a", body: "1"}}, "a=1"},
		{"folder over file", []entry{{name: "a", body: "1"}, {name: "a/b", body: "1"}}, "a/ a/b=1"},
		{"whiteout", []entry{{name: "a/.wh.b"}}, "a/ a/b!"},
		{"whiteout then file", []entry{{name: ".wh.b"}, {name: "b", body: "x"}}, "b=1"},
		{"file then whiteout", []entry{{name: "b", body: "x"}, {name: ".wh.b"}}, "b=1"},
		{"whiteout then folder", []entry{{name: ".wh.b"}, {name: "b/c", body: "x"}}, "b/! b/c=1"},
		{"opaque first", []entry{{name: "a/.wh..wh..opq"}, {name: "a/"}, {name: "a/b", body: "1"}}, "a/! a/b=1"},
		{"opaque last", []entry{{name: "a/"}, {name: "a/b", body: "1"}, {name: "a/.wh..wh..opq"}}, "a/! a/b=1"},
		{"opaque attribute", []entry{{name: "a/", pax: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}}}, "a/!"},
		{"whiteout in opaque", []entry{{name: "a/.wh.b"}, {name: "a/.wh..wh..opq"}, {name: "a/c/.wh.d"}}, "a/! a/c/"},
		{"aufs leftovers", []entry{{name: ".wh..wh.plnk/1.2", body: "1"}, {name: ".wh..wh.aufs", body: "1"}}, ""},
		{"long name", []entry{{name: long, body: "1"}}, long + "=1"},
		{"through a symlink", []entry{{name: "usr/lib/"}, {name: "lib", kind: tar.TypeSymlink, link: "usr/lib"}, {name: "lib/x", body: "1"}},
			"lib->usr/lib usr/ usr/lib/ usr/lib/x=1"},
		{"symlink to outside stays inside", []entry{{name: "e", kind: tar.TypeSymlink, link: "../../../etc"}, {name: "e/passwd", body: "1"}},
			"e->../../../etc etc/ etc/passwd=1"},
		{"hard link", []entry{{name: "a", body: "1"}, {name: "b", kind: tar.TypeLink, link: "/a"}}, "a=1 b=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree, _ := fromTar(t, tarOf(t, c.entries...), erofs.TarOptions{})
			if got := list(tree); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestTarBelow reads a layer that leans on the one below it.
func TestTarBelow(t *testing.T) {
	base, all := fromTar(t, tarOf(t,
		entry{name: "usr/lib/", mode: 0o711}, entry{name: "usr/lib/a", body: "old"},
		entry{name: "lib", kind: tar.TypeSymlink, link: "/usr/lib"}), erofs.TarOptions{})
	upper, data := fromTar(t, tarOf(t,
		entry{name: "lib/b", body: "new"}, entry{name: "hard", kind: tar.TypeLink, link: "usr/lib/a"},
		entry{name: "lib/.wh.gone"}), erofs.TarOptions{Below: base})
	maps.Copy(all, data)
	merged, err := erofs.Merge(base, upper)
	must(t, err)
	if got, want := list(merged), "hard=3 lib->/usr/lib usr/ usr/lib/ usr/lib/a=3 usr/lib/b=3"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if merged.Lookup("hard") != merged.Lookup("usr/lib/a") {
		t.Error("the hard link is a copy")
	}
	// A folder the upper layer only implies keeps what the lower says of it.
	if got := merged.Lookup("usr/lib").Mode & 0o777; got != 0o711 {
		t.Errorf("mode %#o, want 0711", got)
	}
}

package erofs_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

func readTar(r io.Reader, w io.Writer, opts erofs.TarOptions, bo erofs.BlobOptions) error {
	b := erofs.NewBlob(w, bo)
	if _, err := erofs.FromTar(context.Background(), r, b, opts); err != nil {
		return err
	}
	_, _, err := b.Finish()
	return err
}

func TestTarRefused(t *testing.T) {
	deep := strings.Repeat("d/", 5000) + "x"
	for _, c := range []struct {
		name  string
		entry entry
		want  error
	}{
		{"dot dot", entry{name: "a/../../b"}, erofs.ErrInvalid},
		{"long name", entry{name: strings.Repeat("x", 256)}, erofs.ErrInvalid},
		{"deep", entry{name: deep}, erofs.ErrInvalid},
		{"dangling link", entry{name: "a", kind: tar.TypeLink, link: "nowhere"}, erofs.ErrInvalid},
		{"link outside", entry{name: "a", kind: tar.TypeLink, link: "../a"}, erofs.ErrInvalid},
		{"link to root", entry{name: "a", kind: tar.TypeLink, link: "/"}, erofs.ErrInvalid},
		{"file as root", entry{name: ".", kind: tar.TypeSymlink, link: "a"}, erofs.ErrInvalid},
		{"long symlink", entry{name: "a", kind: tar.TypeSymlink, link: strings.Repeat("y", 4096)}, erofs.ErrInvalid},
		{"whiteout of dot dot", entry{name: ".wh..."}, erofs.ErrInvalid},
		{"huge attribute", entry{name: "a", pax: map[string]string{"SCHILY.xattr.user.a": strings.Repeat("z", 65536)}}, erofs.ErrTooBig},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := readTar(tarOf(t, c.entry), io.Discard, erofs.TarOptions{}, erofs.BlobOptions{})
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
	loop := tarOf(t, entry{name: "a", kind: tar.TypeSymlink, link: "b"}, entry{name: "b", kind: tar.TypeSymlink, link: "a"}, entry{name: "a/x"})
	if err := readTar(loop, io.Discard, erofs.TarOptions{}, erofs.BlobOptions{}); !errors.Is(err, erofs.ErrInvalid) {
		t.Errorf("symlink loop: %v", err)
	}
}

func TestLimits(t *testing.T) {
	files := []entry{{name: "a", body: string(pattern("a", 10000))}, {name: "b", body: string(pattern("b", 10000))}}
	for name, c := range map[string]struct {
		tar  erofs.TarOptions
		blob erofs.BlobOptions
	}{
		"entries":    {tar: budget(1, 20000, 100)},
		"file bytes": {tar: budget(2, 19999, 100)},
		"names":      {tar: budget(2, 20000, 1)},
		"blob bytes": {blob: erofs.BlobOptions{Limit: 12288}},
	} {
		if err := readTar(tarOf(t, files...), io.Discard, c.tar, c.blob); !errors.Is(err, erofs.ErrTooBig) {
			t.Errorf("%s: %v, want ErrTooBig", name, err)
		}
	}
	ok := budget(2, 20000, 2)
	if err := readTar(tarOf(t, files...), io.Discard, ok, erofs.BlobOptions{Limit: 24576}); err != nil {
		t.Errorf("at the limits: %v", err)
	}
}

func budget(entries, bytes, meta int64) erofs.TarOptions {
	return erofs.TarOptions{Budget: &erofs.Budget{Entries: entries, Bytes: bytes, Meta: meta}}
}

// A few bytes can ask for a lot of memory in other ways than by many entries.
func TestBudgetCountsWhatIsMade(t *testing.T) {
	var deep []entry
	for i := range 10 {
		deep = append(deep, entry{name: fmt.Sprint(i) + strings.Repeat("/d", 1000) + "/x"})
	}
	for name, c := range map[string]struct {
		entries []entry
		budget  erofs.TarOptions
	}{
		"folders on the way": {deep, budget(9000, 0, 1<<30)},
		"attributes": {[]entry{{name: "a", pax: map[string]string{"SCHILY.xattr.user.a": strings.Repeat("z", 60000)}},
			{name: "b", pax: map[string]string{"SCHILY.xattr.user.a": strings.Repeat("z", 60000)}}}, budget(100, 0, 100000)},
		"targets": {[]entry{{name: "a", kind: tar.TypeSymlink, link: strings.Repeat("y", 4000)},
			{name: "b", kind: tar.TypeSymlink, link: strings.Repeat("y", 4000)}}, budget(100, 0, 7000)},
		"whiteouts": {[]entry{{name: ".wh.a"}, {name: ".wh.b"}, {name: ".wh.c"}}, budget(2, 0, 1<<20)},
		"links":     {[]entry{{name: "a", body: "1"}, {name: "b", kind: tar.TypeLink, link: "a"}, {name: "c", kind: tar.TypeLink, link: "a"}}, budget(2, 100, 1<<20)},
	} {
		if err := readTar(tarOf(t, c.entries...), io.Discard, c.budget, erofs.BlobOptions{}); !errors.Is(err, erofs.ErrTooBig) {
			t.Errorf("%s: %v, want ErrTooBig", name, err)
		}
	}
}

func TestTarTruncated(t *testing.T) {
	whole := tarOf(t, entry{name: "a", body: strings.Repeat("a", 3000)}).Bytes()
	for _, n := range []int{100, 513, 1024, 2000} {
		err := readTar(bytes.NewReader(whole[:n]), io.Discard, erofs.TarOptions{}, erofs.BlobOptions{})
		if !errors.Is(err, erofs.ErrCorrupt) {
			t.Errorf("%d of %d bytes: %v, want ErrCorrupt", n, len(whole), err)
		}
	}
	// Between two entries only the mark at the end tells.
	marked := erofs.TarOptions{Marked: true}
	for n, want := range map[int]error{len(whole): nil, 512 + 3072 + 1024: nil, 512 + 3072 + 512: erofs.ErrCorrupt, 512 + 3072: erofs.ErrCorrupt} {
		if err := readTar(bytes.NewReader(whole[:n]), io.Discard, marked, erofs.BlobOptions{}); !errors.Is(err, want) {
			t.Errorf("%d of %d bytes: %v, want %v", n, len(whole), err, want)
		}
		if err := readTar(bytes.NewReader(whole[:n]), io.Discard, erofs.TarOptions{}, erofs.BlobOptions{}); err != nil {
			t.Errorf("%d of %d bytes: %v, the mark was not asked for", n, len(whole), err)
		}
	}
	if err := readTar(bytes.NewReader(bytes.Repeat([]byte("junk"), 500)), io.Discard, erofs.TarOptions{}, erofs.BlobOptions{}); !errors.Is(err, erofs.ErrCorrupt) {
		t.Errorf("junk: %v, want ErrCorrupt", err)
	}
}

type failing struct{ after int }

var errDisk = errors.New("disk full")

func (f *failing) Write(p []byte) (int, error) {
	if f.after -= len(p); f.after < 0 {
		return 0, errDisk
	}
	return len(p), nil
}

func TestWriterFails(t *testing.T) {
	in := tarOf(t, entry{name: "a", body: string(pattern("x", 3<<20))})
	for _, after := range []int{0, 300 << 10, 3 << 20} {
		err := readTar(bytes.NewReader(in.Bytes()), &failing{after - 1}, erofs.TarOptions{}, erofs.BlobOptions{})
		if !errors.Is(err, errDisk) {
			t.Errorf("failing after %d bytes: %v", after, err)
		}
	}
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errDisk)
	_, err := erofs.FromTar(ctx, tarOf(t, entry{name: "a"}), erofs.NewBlob(io.Discard, erofs.BlobOptions{}), erofs.TarOptions{})
	if !errors.Is(err, errDisk) {
		t.Errorf("got %v, want the cause", err)
	}
}

func TestEqualContentsOnce(t *testing.T) {
	body := string(pattern("same", 3<<20+5))
	tree, data := fromTar(t, tarOf(t, entry{name: "a", body: body}, entry{name: "b", body: body}, entry{name: "c", body: body[:1<<20]}), erofs.TarOptions{})
	l := save(t, tree, data)
	for _, b := range data {
		if want := 3<<20 + erofs.BlockSize; len(b) != want {
			t.Errorf("blob of %d bytes, want %d", len(b), want)
		}
	}
	root := mountErofs(t, l.meta, l.blobs...)
	for name, want := range map[string]string{"a": body, "b": body, "c": body[:1<<20]} {
		if got, err := os.ReadFile(root + "/" + name); err != nil || string(got) != want {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

func TestOlderBlob(t *testing.T) {
	old, data := fromTar(t, tarOf(t, entry{name: "a", body: string(pattern("old", 2<<20))}), erofs.TarOptions{})
	known := map[erofs.Sum]erofs.Extent{}
	for _, x := range old.Lookup("a").Extents {
		for _, b := range data {
			for off := 0; off < len(b); off += 1 << 20 {
				known[sha(b[off:off+1<<20])] = erofs.Extent{Device: x.Device, Start: uint32(off / erofs.BlockSize)}
			}
		}
	}
	body := string(pattern("old", 2<<20)) + "and more"
	tree, fresh := build(t, erofs.BlobOptions{Lookup: func(s erofs.Sum, size int) (*erofs.Device, uint32, bool) {
		x, ok := known[s]
		return x.Device, x.Start, ok && size == 1<<20
	}}, func(b *erofs.Blob) (*erofs.Tree, error) {
		return erofs.FromTar(t.Context(), tarOf(t, entry{name: "a", body: body}), b, erofs.TarOptions{})
	})
	for tag, b := range fresh {
		if len(b) != erofs.BlockSize {
			t.Errorf("new blob of %d bytes, want one block", len(b))
		}
		data[tag] = b
	}
	l := save(t, tree, data)
	if len(l.blobs) != 2 {
		t.Fatalf("%d devices, want 2", len(l.blobs))
	}
	if got, err := os.ReadFile(mountErofs(t, l.meta, l.blobs...) + "/a"); err != nil || string(got) != body {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestShiftedUpper reads a folder as a user namespace's overlay leaves it.
func TestShiftedUpper(t *testing.T) {
	const base = 200000
	dir := t.TempDir()
	p := filepath.Join(dir, "f")
	must(t, os.WriteFile(p, []byte("x"), 0o600))
	must(t, os.Lchown(p, base+1000, base))
	must(t, os.WriteFile(filepath.Join(dir, "foreign"), nil, 0o600))
	must(t, os.Lchown(filepath.Join(dir, "foreign"), base+65536, base-1))
	must(t, os.Lchown(dir, base, base))
	capability := []byte{1, 0, 0, 3, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0x0d, 3, 0}
	must(t, unix.Setxattr(p, "security.capability", capability, 0))
	acl := []byte{2, 0, 0, 0,
		1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0x41, 0x0d, 3, 0,
		4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 6, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255}
	must(t, unix.Setxattr(p, "system.posix_acl_access", acl, 0))
	for _, x := range []string{"opaque", "origin", "impure", "nlink", "uuid"} {
		must(t, unix.Setxattr(dir, "trusted.overlay."+x, []byte("y"), 0))
	}
	tree, _ := fromDir(t, dir, erofs.DirOptions{IDs: erofs.IDRange{Base: base, Count: 65536}, Source: erofs.Upper})
	f := tree.Lookup("f")
	if f.UID != 1000 || f.GID != 0 {
		t.Errorf("owner %d:%d, want 1000:0", f.UID, f.GID)
	}
	if n := tree.Lookup("foreign"); n.UID != erofs.Nobody || n.GID != erofs.Nobody {
		t.Errorf("foreign owner %d:%d", n.UID, n.GID)
	}
	if got, want := f.Xattrs["security.capability"], string(capability[:3])+"\x02"+string(capability[4:20]); got != want {
		t.Errorf("capability %x, want %x", got, want)
	}
	if got := f.Xattrs["system.posix_acl_access"]; got[16:20] != "\x01\x00\x00\x00" {
		t.Errorf("ACL names user %x, want 1", got[16:20])
	}
	if x := tree.Root().Xattrs; len(x) != 1 || x["trusted.overlay.opaque"] != "y" {
		t.Errorf("root has attributes %v, want the opaque mark alone", x)
	}
}

func TestFolderStaysOnItsFileSystem(t *testing.T) {
	f, err := os.Open("/")
	must(t, err)
	defer f.Close()
	root := mount(t, "tmpfs", func(int) error { return nil })
	must(t, os.WriteFile(root+"/here", nil, 0o600))
	// The folder itself may be a mount.
	tree, _ := fromDir(t, root, erofs.DirOptions{})
	if tree.Lookup("here") == nil {
		t.Error("the root's own file is missing")
	}
	b := erofs.NewBlob(io.Discard, erofs.BlobOptions{})
	file, err := os.Open(root + "/here")
	must(t, err)
	defer file.Close()
	if _, err := erofs.FromDir(t.Context(), file, b, erofs.DirOptions{}); !errors.Is(err, erofs.ErrInvalid) {
		t.Errorf("folder that is a file: %v", err)
	}
}

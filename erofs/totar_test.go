package erofs_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// tarBytes writes a tree as a tar.
func tarBytes(t *testing.T, tree *erofs.Tree, data map[string][]byte) []byte {
	t.Helper()
	readers := map[string]io.ReaderAt{}
	for tag, b := range data {
		readers[tag] = bytes.NewReader(b)
	}
	var out bytes.Buffer
	must(t, tree.WriteTar(t.Context(), &out, readers))
	return out.Bytes()
}

func TestWriteTarIsInverse(t *testing.T) {
	root := awkward(t)
	must(t, os.Remove(filepath.Join(root, "huge"))) // its holes would be written
	tree, data := fromDir(t, root, erofs.DirOptions{})
	b := tarBytes(t, tree, data)
	if !bytes.Equal(b, tarBytes(t, tree, data)) {
		t.Error("two tars of one tree differ")
	}
	again, all := fromTar(t, bytes.NewReader(b), erofs.TarOptions{})
	l := save(t, again, all)
	fsck(t, l)
	socket := func(_ string, mode uint32) bool { return mode&unix.S_IFMT == unix.S_IFSOCK }
	same(t, "tar", describe(t, mountErofs(t, l.meta, l.blobs...), nil), describe(t, root, socket))
}

// TestWriteTarKeepsMeaning writes what overlays made, and reads it back over the
// same base.
func TestWriteTarKeepsMeaning(t *testing.T) {
	for _, s := range sessions {
		t.Run(s.name, func(t *testing.T) {
			base, all := baseLayer(t)
			b := save(t, base, all)
			upper, data := commit(t, nil, []string{mountErofs(t, b.meta, b.blobs...)}, append(s.first, s.second...)...)
			maps.Copy(all, data)
			again, data := fromTar(t, bytes.NewReader(tarBytes(t, upper, all)), erofs.TarOptions{Below: base})
			maps.Copy(all, data)
			want, err := erofs.Merge(base, upper)
			must(t, err)
			got, err := erofs.Merge(base, again)
			must(t, err)
			w, g := save(t, want, all), save(t, got, all)
			same(t, "tar", describe(t, mountErofs(t, g.meta, g.blobs...), nil), describe(t, mountErofs(t, w.meta, w.blobs...), nil))
		})
	}
}

func TestExplicit(t *testing.T) {
	base, all := baseLayer(t)
	b := save(t, base, all)
	upper, data := commit(t, []string{"redirect_dir=on", "metacopy=on"}, []string{mountErofs(t, b.meta, b.blobs...)},
		rename("d", "e/moved"), put("e/moved/deep/er/three", "3"), rename("e/moved/deep", "e/moved/flat"),
		chmod("f", 0o600), rename("f", "g"), chmod("e/moved/a", 0o640), chmod("e/keep", 0o611), put("e/other", "o"))
	maps.Copy(all, data)
	if upper.Lookup("g").Xattrs[erofs.XattrRedirect] == "" {
		t.Fatal("the kernel wrote no redirect, so this test tests nothing")
	}
	if err := upper.WriteTar(t.Context(), io.Discard, nil); !errors.Is(err, erofs.ErrUnsupported) {
		t.Errorf("tar of redirects: %v", err)
	}
	plain, err := erofs.Explicit(base, upper)
	must(t, err)
	for p, n := range plain.Walk() {
		if n.Xattrs[erofs.XattrRedirect] != "" || n.Xattrs[erofs.XattrMetacopy] != "" {
			t.Errorf("%q is still a redirect", p)
		}
	}
	again, data := fromTar(t, bytes.NewReader(tarBytes(t, plain, all)), erofs.TarOptions{Below: base})
	maps.Copy(all, data)
	want, err := erofs.Merge(base, upper)
	must(t, err)
	got, err := erofs.Merge(base, again)
	must(t, err)
	w, g := save(t, want, all), save(t, got, all)
	same(t, "explicit", describe(t, mountErofs(t, g.meta, g.blobs...), nil), describe(t, mountErofs(t, w.meta, w.blobs...), nil))

	if same, err := erofs.Explicit(erofs.New(), base); err != nil || same != base {
		t.Errorf("a layer without redirects was changed: %v", err)
	}
}

func TestWriteTarFails(t *testing.T) {
	tree, data := fromTar(t, tarOf(t, entry{name: "a", body: "contents"}), erofs.TarOptions{})
	must(t, tree.Add("sub/.wh.file", &erofs.Inode{Mode: unix.S_IFREG}))
	if err := tree.WriteTar(t.Context(), io.Discard, map[string]io.ReaderAt{}); !errors.Is(err, erofs.ErrCorrupt) {
		t.Errorf("without data: %v", err)
	}
	readers := map[string]io.ReaderAt{}
	for tag := range data {
		readers[tag] = bytes.NewReader(nil)
	}
	if err := tree.WriteTar(t.Context(), io.Discard, readers); !errors.Is(err, erofs.ErrCorrupt) {
		t.Errorf("with short data: %v", err)
	}
	for tag, b := range data {
		readers[tag] = bytes.NewReader(b)
	}
	// A file of that name would be read as something else.
	if err := tree.WriteTar(t.Context(), io.Discard, readers); !errors.Is(err, erofs.ErrUnsupported) {
		t.Errorf("name of a whiteout: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tree.WriteTar(ctx, io.Discard, readers); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

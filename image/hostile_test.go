package image_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// sparseTar is a tar of one file that says it has size bytes, all of them a hole,
// as GNU tar writes it.
func sparseTar(t testing.TB, size int64) []byte {
	t.Helper()
	body := []byte(fmt.Sprintf("1\n%d\n0\n", size))
	body = append(body, make([]byte, 512-len(body))...)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	record := func(k, v string) string {
		n := len(k) + len(v) + 3
		for len(fmt.Sprint(n))+len(k)+len(v)+3 != n {
			n = len(fmt.Sprint(n)) + len(k) + len(v) + 3
		}
		return fmt.Sprintf("%d %s=%s\n", n, k, v)
	}
	pax := record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") +
		record("GNU.sparse.name", "huge") + record("GNU.sparse.realsize", fmt.Sprint(size))
	must(t, w.WriteHeader(&tar.Header{Name: "GNUSparseFile.0/huge", Typeflag: tar.TypeReg, Size: int64(len(body)), Mode: 0o644}))
	_, err := w.Write(body)
	must(t, err)
	must(t, w.Close())
	// The library's writer makes no such records, so the extended header is put
	// before by hand.
	head := make([]byte, 512)
	copy(head, "PaxHeaders.0/huge")
	copy(head[100:], "0000644\x00")
	copy(head[108:], "0000000\x000000000\x00")
	copy(head[124:], fmt.Sprintf("%011o\x00%011o\x00", len(pax), 0))
	head[156] = 'x'
	copy(head[257:], "ustar\x0000")
	copy(head[148:], "        ")
	sum := 0
	for _, c := range head {
		sum += int(c)
	}
	copy(head[148:], fmt.Sprintf("%06o\x00 ", sum))
	b := append(head, pax...)
	b = append(b, make([]byte, (512-len(b)%512)%512)...)
	return append(b, out.Bytes()...)
}

// Nothing that anybody can upload leaves a trace or takes more than it may.
func TestHostileInput(t *testing.T) {
	bomb := gz(t, tarOf(t, entry{name: "zeros", body: make([]byte, 64<<20)}))
	rich := func(n int) map[string]string {
		return map[string]string{"SCHILY.xattr.user.a": strings.Repeat("x", n)}
	}
	var entries, deep []entry
	for i := range 300 {
		entries = append(entries, entry{name: fmt.Sprint("f", i)})
		deep = append(deep, entry{name: fmt.Sprint(i) + strings.Repeat("/d", 100) + "/x"})
	}
	truncated := func(b []byte) []byte { return b[:len(b)*2/3] }
	layers := make([][]byte, 501)
	for i := range layers {
		layers[i] = tarOf(t, entry{name: "f", body: []byte(fmt.Sprint(i))})
	}
	three := three(t, host)
	small := image.Options{MaxInput: 1 << 20, MaxEntries: 250}
	for name, c := range map[string]struct {
		input []byte
		opts  image.Options
		want  dsec.ErrorKind
	}{
		"dot dot":                    {tarOf(t, entry{name: "../../etc/passwd", body: []byte("x")}), image.Options{}, dsec.Invalid},
		"dot dot inside":             {tarOf(t, entry{name: "a/b/../../../x", body: []byte("x")}), image.Options{}, dsec.Invalid},
		"hard link outside":          {tarOf(t, entry{name: "a", kind: tar.TypeLink, link: "../../etc/passwd"}), image.Options{}, dsec.Invalid},
		"hard link to an image's":    {tarOf(t, entry{name: "a", kind: tar.TypeLink, link: "/etc/passwd"}), image.Options{}, dsec.Invalid},
		"links in a circle":          {tarOf(t, entry{name: "a", kind: tar.TypeSymlink, link: "b"}, entry{name: "b", kind: tar.TypeSymlink, link: "a"}, entry{name: "a/x"}), image.Options{}, dsec.Invalid},
		"long name":                  {tarOf(t, entry{name: strings.Repeat("n", 256)}), image.Options{}, dsec.Invalid},
		"long target":                {tarOf(t, entry{name: "a", kind: tar.TypeSymlink, link: strings.Repeat("t", 5000)}), image.Options{}, dsec.Invalid},
		"deep path":                  {tarOf(t, entry{name: strings.Repeat("d/", 4097) + "x"}), image.Options{}, dsec.Invalid},
		"root as a file":             {tarOf(t, entry{name: ".", body: []byte("x")}), image.Options{}, dsec.Invalid},
		"many entries":               {tarOf(t, entries...), small, dsec.Invalid},
		"many folders":               {tarOf(t, deep[:10]...), small, dsec.Invalid},
		"large attribute":            {tarOf(t, entry{name: "a", pax: rich(70000)}), image.Options{}, dsec.Invalid},
		"bomb":                       {bomb, small, dsec.Invalid},
		"bomb of zstd":               {zst(t, tarOf(t, entry{name: "zeros", body: make([]byte, 64<<20)})), small, dsec.Invalid},
		"bomb in an image":           {packed(t, host, []compress{gz}, tarOf(t, entry{name: "zeros", body: make([]byte, 64<<20)})).layoutTar(t), small, dsec.Invalid},
		"bomb as an archive":         {gz(t, tarOf(t, entry{name: "oci-layout", body: make([]byte, 64<<20)})), small, dsec.Invalid},
		"size of a sparse file":      {sparseTar(t, 1<<40), image.Options{}, dsec.Invalid},
		"size beyond all":            {sparseTar(t, 1<<62), image.Options{}, dsec.Invalid},
		"many layers":                {packed(t, host, []compress{plain}, layers...).layoutTar(t), image.Options{}, dsec.Unsupported},
		"gzip cut off":               {truncated(gz(t, tarOf(t, system()...))), image.Options{}, dsec.Invalid},
		"zstd cut off":               {truncated(zst(t, tarOf(t, system()...))), image.Options{}, dsec.Invalid},
		"tar cut off":                {truncated(tarOf(t, system()...)), image.Options{}, dsec.Invalid},
		"layout cut off":             {truncated(three.layoutTar(t)), image.Options{}, dsec.Invalid},
		"gzip of nothing":            {gz(t, nil), image.Options{}, dsec.Invalid},
		"gzip of noise":              {gz(t, pattern("noise", 5000)), image.Options{}, dsec.Invalid},
		"garbage behind gzip":        {append(gz(t, tarOf(t, system()...)), "garbage"...), image.Options{}, dsec.Invalid},
		"archive with long names":    {tarOf(t, entry{name: "oci-layout", body: []byte("{}")}, entry{name: strings.Repeat("n", 600)}), image.Options{}, dsec.Invalid},
		"archive whose links circle": {tarOf(t, entry{name: "oci-layout", body: []byte("{}")}, entry{name: "index.json", kind: tar.TypeSymlink, link: "index.json"}), image.Options{}, dsec.Invalid},
		"archive linked outside":     {tarOf(t, entry{name: "oci-layout", body: []byte("{}")}, entry{name: "index.json", kind: tar.TypeSymlink, link: "../../../etc/passwd"}), image.Options{}, dsec.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			dir, temp := t.TempDir(), t.TempDir()
			store, err := blob.OpenFolder(dir)
			must(t, err)
			lib := image.New(store, image.LibraryOptions{Temp: temp, Index: t.TempDir(), Pack: image.Zstd})
			defer lib.Close()
			if _, err := lib.Upload(t.Context(), bytes.NewReader(c.input), c.opts); dsec.KindOf(err) != c.want {
				t.Errorf("got %v, want %v", err, c.want)
			} else if len(err.Error()) > 2000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			empty(t, store, dir, temp)
		})
	}
}

// empty fails if anything is left of an import.
func empty(t *testing.T, store *blob.Folder, dir, temp string) {
	t.Helper()
	if b := blobs(t, store); len(b) != 0 {
		t.Errorf("%d blobs are left", len(b))
	}
	for _, d := range []string{dir + "/staging", temp} {
		if es, err := os.ReadDir(d); err != nil || len(es) != 0 {
			t.Errorf("%d files are left in %s, %v", len(es), d, err)
		}
	}
}

// What is strange and yet means something is kept, within the image.
func TestStrangeInputStaysInside(t *testing.T) {
	lib, _ := newLibrary(t)
	l := upload(t, lib, tarOf(t,
		entry{name: "/abs/file", body: []byte("1")},
		entry{name: "etc", kind: tar.TypeSymlink, link: "/abs"},
		entry{name: "etc/through", body: []byte("2")},
		entry{name: "out", kind: tar.TypeSymlink, link: "../../../../tmp"},
		entry{name: "out/evil", body: []byte("3")},
		entry{name: "one", kind: tar.TypeSymlink, link: "two"},
		entry{name: "two", kind: tar.TypeSymlink, link: "/../../deep"},
		entry{name: "one/x", body: []byte("4")},
		entry{name: "dangling", kind: tar.TypeSymlink, link: "/etc/../../../proc/self/root"},
		entry{name: "twice", body: []byte("first")}, entry{name: "twice", body: []byte("second")},
		entry{name: "dir/a", body: []byte("5")}, entry{name: "dir", body: []byte("a file instead")}, entry{name: "dir/b", body: []byte("6")},
		entry{name: "mem", kind: tar.TypeChar, major: 1, minor: 1, mode: 0o666},
		entry{name: strings.Repeat("n", 255), body: []byte("7")},
		entry{name: "self", kind: tar.TypeSymlink, link: "self"},
	), dsec.Base)
	root := mounted(t, lib, l)
	for path, want := range map[string]string{
		"abs/file": "1", "abs/through": "2", "tmp/evil": "3", "deep/x": "4", "twice": "second", "dir/b": "6", strings.Repeat("n", 255): "7",
	} {
		if b, err := os.ReadFile(filepath.Join(root, path)); err != nil || string(b) != want {
			t.Errorf("%.20s is %q, %v", path, b, err)
		}
	}
	for path, want := range map[string]string{"etc": "/abs", "out": "../../../../tmp", "dangling": "/etc/../../../proc/self/root"} {
		if got, err := os.Readlink(filepath.Join(root, path)); err != nil || got != want {
			t.Errorf("link %s leads to %q, %v", path, got, err)
		}
	}
	if _, err := os.Lstat("/tmp/evil"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file came out: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(root, "dir/a")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a later entry replaced is there: %v", err)
	}
	var st unix.Stat_t
	must(t, unix.Lstat(filepath.Join(root, "mem"), &st))
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 1) {
		t.Errorf("device has mode %o, number %d", st.Mode, st.Rdev)
	}
}

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
)

func TestPackKeepsWhatAnImageNeeds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("feature root: devices and owners cannot be made")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(at("d"), 0o750))
	must(os.WriteFile(at("d/file"), []byte("data"), 0o644))
	must(os.Chown(at("d/file"), 12, 34))
	must(os.Chmod(at("d/file"), 0o644|os.ModeSetuid))
	must(os.Link(at("d/file"), at("hard")))
	must(os.Symlink("d/file", at("soft")))
	must(unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(unix.Mkfifo(at("pipe"), 0o600))
	must(unix.Setxattr(at("d/file"), "user.note", []byte("a\x00b"), 0))
	stamp := time.Unix(1_600_000_000, 123456789)
	must(os.Chtimes(at("d/file"), stamp, stamp))

	var first, second bytes.Buffer
	must(pack(&first, dir, packOptions{}))
	must(pack(&second, dir, packOptions{}))
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same tree gave two archives")
	}
	var got []string
	for r := tar.NewReader(&first); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		must(err)
		got = append(got, fmt.Sprintf("%c %s %o %s", h.Typeflag, h.Name, h.Mode, h.Linkname))
		switch h.Name {
		case "d/file":
			if h.Uid != 12 || h.Gid != 34 || !h.ModTime.Equal(stamp) || h.PAXRecords[xattrPrefix+"user.note"] != "a\x00b" {
				t.Errorf("d/file: %+v", h)
			}
		case "null":
			if h.Devmajor != 1 || h.Devminor != 3 {
				t.Errorf("null is device %d:%d", h.Devmajor, h.Devminor)
			}
		}
	}
	mode := func(name string) uint32 {
		var st unix.Stat_t
		must(unix.Lstat(at(name), &st))
		return st.Mode & 0o7777
	}
	want := []string{
		fmt.Sprintf("5 ./ %o ", mode(".")),
		"5 d/ 750 ", "0 d/file 4644 ", "1 hard 4644 d/file",
		fmt.Sprintf("3 null %o ", mode("null")), fmt.Sprintf("6 pipe %o ", mode("pipe")), "2 soft 777 d/file",
	}
	if !slices.Equal(got, want) {
		t.Errorf("members\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestPackedFolderEndsEarly(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	r := packFolder(dir, packOptions{})
	if _, err := io.ReadFull(r, make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := io.ReadAll(packFolder(filepath.Join(dir, "nothing"), packOptions{})); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing folder: %v", err)
	}
}

func TestUnpackStaysInItsFolder(t *testing.T) {
	for name, members := range map[string][]tar.Header{
		"dots":             {{Name: "../evil", Typeflag: tar.TypeReg}},
		"absolute":         {{Name: "/evil", Typeflag: tar.TypeReg}},
		"through symlink":  {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "l/evil", Typeflag: tar.TypeReg}},
		"absolute symlink": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "OUTSIDE"}, {Name: "l/evil", Typeflag: tar.TypeReg}},
		"hard link":        {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../secret"}},
	} {
		t.Run(name, func(t *testing.T) {
			outside := t.TempDir()
			dir := filepath.Join(outside, "in")
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(outside, "secret"), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, h := range members {
				h.Linkname = strings.Replace(h.Linkname, "OUTSIDE", outside, 1)
				h.Mode = 0o600
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			if err := unpack(root, &b, func(string) {}); err == nil {
				t.Error("the archive was unpacked")
			}
			if list, _ := os.ReadDir(outside); len(list) != 2 {
				t.Errorf("outside holds %v", list)
			}
		})
	}
}

func TestUnpackReplacesLinks(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(t.TempDir(), "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("old"), 0o600), os.Symlink(victim, filepath.Join(dir, "f"))); err != nil {
		t.Fatal(err)
	}
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "f"), []byte("new"), 0o640); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	r := packFolder(src, packOptions{Anonymous: true})
	if err := errors.Join(unpack(root, r, func(string) {}), r.Close()); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(victim); string(b) != "old" {
		t.Errorf("the link's target holds %q", b)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "f")); string(b) != "new" {
		t.Errorf("the file holds %q, %v", b, err)
	}
}

func TestUnpackTellsWhatItLeavesOut(t *testing.T) {
	src, dir := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(src, name) }
	l, err := net.Listen("unix", at("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(unix.Mkfifo(at("pipe"), 0o600), os.Link(at("pipe"), at("twin")), os.WriteFile(at("f"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var in, out leftOut
	r := packFolder(src, packOptions{Anonymous: true, Skip: in.add})
	if err := errors.Join(unpack(root, r, out.add), r.Close()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(in.names, []string{"socket"}) || !slices.Equal(out.names, []string{"pipe", "twin"}) {
		t.Errorf("left out %v of the folder, %v of the archive", in.names, out.names)
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 || list[0].Name() != "f" {
		t.Errorf("the copy holds %v", list)
	}
}

func TestCopySparse(t *testing.T) {
	const block = holeSize
	data := make([]byte, 40*block+100)
	copy(data[3*block+7:], "in the middle of a block")
	copy(data[20*block-1:], "across two")
	for name, want := range map[string][]byte{"holes": data, "one hole": make([]byte, 5*block), "short": []byte("x\x00"), "empty": {}} {
		f, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := copySparse(f, iotest.HalfReader(bytes.NewReader(want))); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes differ from %d, %v", name, len(got), len(want), err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		if limit := int64(5 * block); st.Blocks*512 > limit {
			t.Errorf("%s: takes %d bytes of disk, more than %d", name, st.Blocks*512, limit)
		}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := copySparse(f, iotest.DataErrReader(iotest.TimeoutReader(bytes.NewReader(data)))); !errors.Is(err, iotest.ErrTimeout) {
		t.Errorf("a broken stream gave %v", err)
	}
}

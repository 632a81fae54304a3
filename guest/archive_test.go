package guest_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

func tarOf(t testing.TB, members ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range members {
		body := h.Name
		if h.Typeflag == tar.TypeReg || h.Typeflag == 0 {
			h.Size = int64(len(body))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			io.WriteString(w, body)
		}
	}
	w.Close()
	return &b
}

func TestPackUnpack(t *testing.T) {
	b := newBox(t)
	src := b.dir + "/src"
	mod := time.Unix(1_600_000_000, 123_000_000)
	long := strings.Repeat("n", 255)
	os.MkdirAll(src+"/d/empty", 0o755)
	os.Chmod(src+"/d/empty", 0o2750)
	os.WriteFile(src+"/d/f", []byte("content"), 0o640)
	os.Chown(src+"/d/f", 11, 22)
	os.Chmod(src+"/d/f", 0o4755)
	os.Link(src+"/d/f", src+"/hard")
	os.Symlink("/etc/../nowhere", src+"/sym")
	os.WriteFile(src+"/"+long, nil, 0o600)
	os.WriteFile(src+"/odd\n\xff name", []byte("odd"), 0o600)
	unix.Mkfifo(src+"/fifo", 0o622)
	unix.Setxattr(src+"/hard", "user.x", []byte("a\x00b"), 0)
	sparse, _ := os.Create(src + "/sparse")
	sparse.WriteAt([]byte("middle"), 5<<20)
	sparse.Truncate(50 << 20)
	sparse.Close()
	os.Chtimes(src+"/d/f", mod, mod)
	os.Chtimes(src+"/d/empty", mod, mod)
	os.Chtimes(src+"/sparse", mod, mod)
	hasXattr := func(p string) bool {
		v := make([]byte, 10)
		n, err := unix.Getxattr(p, "user.x", v)
		return err == nil && string(v[:n]) == "a\x00b"
	}
	wantXattr := hasXattr(src + "/hard")

	r, err := b.Files().Pack(b.Context(), nobody, b.op("src"))
	if err != nil {
		t.Fatal(err)
	}
	archive, err := io.ReadAll(r)
	r.Close()
	if err != nil {
		t.Fatal(err)
	}
	if len(archive) > 1<<20 {
		t.Errorf("holes were packed: %d bytes", len(archive))
	}
	if err := b.Files().Unpack(b.Context(), nobody, b.op("new/dst"), bytes.NewReader(archive)); err != nil {
		t.Fatal(err)
	}
	dst := b.dir + "/new/dst"
	stat := func(p string) (st unix.Stat_t) {
		if err := unix.Lstat(p, &st); err != nil {
			t.Errorf("stat: %v", err)
		}
		return st
	}
	for _, n := range []string{"d", "d/empty", "d/f", "hard", "sym", long, "odd\n\xff name", "fifo", "sparse"} {
		x, y := stat(src+"/"+n), stat(dst+"/"+n)
		if x.Mode != y.Mode || x.Uid != y.Uid || x.Gid != y.Gid || x.Nlink != y.Nlink || x.Size != y.Size && x.Mode&unix.S_IFMT == unix.S_IFREG {
			t.Errorf("%q: %+v\nbecame %+v", n, x, y)
		}
		if dx := x.Mtim.Nano() - y.Mtim.Nano(); dx != 0 {
			t.Errorf("%q: time off by %d", n, dx)
		}
	}
	if stat(dst+"/d/f").Ino != stat(dst+"/hard").Ino {
		t.Error("hard link lost")
	}
	if wantXattr && !hasXattr(dst+"/hard") {
		t.Error("attribute lost")
	}
	if st := stat(dst + "/sparse"); st.Blocks > 64 {
		t.Errorf("hole lost: %d blocks", st.Blocks)
	}
	p, _ := os.ReadFile(dst + "/sparse")
	if len(p) != 50<<20 || string(p[5<<20:5<<20+6]) != "middle" || len(bytes.Trim(p, "\x00")) != 6 {
		t.Error("sparse file differs")
	}
	if l, _ := os.Readlink(dst + "/sym"); l != "/etc/../nowhere" {
		t.Errorf("link to %q", l)
	}
	// GNU tar reads it too.
	os.WriteFile(b.dir+"/a.tar", archive, 0o644)
	res := b.run(dsec.Command{Shell: "mkdir gnu && tar -xf a.tar -C gnu && cmp src/sparse gnu/sparse && cmp src/d/f gnu/hard", Cwd: b.dir}, "")
	if res.Code != 0 {
		t.Errorf("tar: %s", res.Err)
	}
	// A single file, and an early end.
	r, err = b.Files().Pack(b.Context(), nobody, b.op("src/d/f"))
	if err != nil {
		t.Fatal(err)
	}
	if h, err := tar.NewReader(r).Next(); err != nil || h.Name != "f" {
		t.Errorf("%+v %v", h, err)
	}
	r.Close()
	_, err = b.Files().Pack(b.Context(), nobody, b.op("none"))
	wantKind(t, err, dsec.NotFound)
}

func TestHostileArchives(t *testing.T) {
	b := newBox(t)
	os.WriteFile(b.dir+"/victim", []byte("safe"), 0o644)
	os.MkdirAll(b.dir+"/outside", 0o755)
	reg := func(name string) tar.Header { return tar.Header{Name: name} }
	sym := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	for _, c := range []struct {
		name    string
		members []tar.Header
		inside  string // where the content must be, below the folder
		kind    dsec.ErrorKind
		fails   bool
	}{
		{"dots", []tar.Header{reg("../victim")}, "victim", 0, false},
		{"deep dots", []tar.Header{reg("a/../../../victim")}, "victim", 0, false},
		{"absolute", []tar.Header{reg(b.dir + "/victim")}, strings.TrimPrefix(b.dir, "/") + "/victim", 0, false},
		{"through a symlink", []tar.Header{sym("s", "../outside"), reg("s/f")}, "outside/f", dsec.NotFound, true},
		{"through an absolute symlink", []tar.Header{sym("s", b.dir), reg("s/victim")}, "", dsec.NotFound, true},
		{"over a symlink", []tar.Header{sym("s", "../victim"), reg("s")}, "s", 0, false},
		{"hard link outside", []tar.Header{{Name: "h", Linkname: "../victim", Typeflag: tar.TypeLink}}, "", dsec.NotFound, true},
		{"hard link through a symlink", []tar.Header{sym("s", ".."), {Name: "h", Linkname: "s/victim", Typeflag: tar.TypeLink}}, "", dsec.NotFound, true},
		{"device", []tar.Header{{Name: "dev", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, "", dsec.Unsupported, true},
		{"file over folder", []tar.Header{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, reg("d/f"), reg("d")}, "", dsec.Invalid, true},
		{"folder over file", []tar.Header{reg("x"), {Name: "x/", Typeflag: tar.TypeDir, Mode: 0o755}, reg("x/y")}, "x/y", 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			op := b.op("in/" + strings.ReplaceAll(c.name, " ", "_"))
			err := b.Files().Unpack(b.Context(), nobody, op, tarOf(t, c.members...))
			if c.fails {
				wantKind(t, err, c.kind)
			} else if err != nil {
				t.Fatal(err)
			} else if p, err := os.ReadFile(op.Path + "/" + c.inside); err != nil || string(p) != c.members[len(c.members)-1].Name {
				t.Errorf("inside: %q %v", p, err)
			}
			if p, _ := os.ReadFile(b.dir + "/victim"); string(p) != "safe" {
				t.Fatalf("victim is %q", p)
			}
			if m, _ := filepath.Glob(b.dir + "/outside/*"); len(m) > 0 {
				t.Fatalf("outside has %v", m)
			}
		})
	}
	cut := tarOf(t, reg("a"), reg("b")).Bytes()
	for _, bad := range [][]byte{cut[:1200], []byte("not an archive at all, but longer than it needs to be" + strings.Repeat(".", 600))} {
		wantKind(t, b.Files().Unpack(b.Context(), nobody, b.op("bad"), bytes.NewReader(bad)), dsec.Invalid)
	}
	// A folder keeps the symlink in its place, and another user owns what he unpacks.
	os.MkdirAll(b.dir+"/root/usr/lib", 0o777)
	os.Chmod(b.dir+"/root/usr/lib", 0o777)
	os.Symlink("/usr/lib", b.dir+"/root/lib")
	op := b.op("root")
	op.User = "1234"
	err := b.Files().Unpack(b.Context(), nobody, op, tarOf(t, tar.Header{Name: "lib/", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "lib/x", Uid: 0}))
	if err != nil {
		t.Fatal(err)
	}
	if i, err := b.Files().Stat(b.Context(), nobody, b.op("root/usr/lib/x")); err != nil || i.UID != 1234 {
		t.Fatalf("%+v %v", i, err)
	}
}

func TestManyFiles(t *testing.T) {
	b := newBox(t)
	var a bytes.Buffer
	w := tar.NewWriter(&a)
	for i := range 10_000 {
		w.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%d/f%d", i%100, i), Size: 5, Mode: 0o644})
		io.WriteString(w, "12345")
	}
	w.Close()
	if err := b.Files().Unpack(b.Context(), nobody, b.op("many"), &a); err != nil {
		t.Fatal(err)
	}
	n := 0
	for i, err := range b.Files().List(b.Context(), nobody, b.op("many"), 2) {
		if err != nil {
			t.Fatal(err)
		}
		if i.Type == dsec.TypeFile && i.Size == 5 {
			n++
		}
	}
	if n != 10_000 {
		t.Fatalf("%d files", n)
	}
	if err := b.Files().Remove(b.Context(), nobody, b.op("many")); err != nil {
		t.Fatal(err)
	}
}

func TestMoveAcross(t *testing.T) {
	b := newBox(t)
	var st, shm unix.Stat_t
	other, err := os.MkdirTemp("/dev/shm", "dsec")
	if err != nil {
		t.Skip("needs a second file system at /dev/shm")
	}
	defer os.RemoveAll(other)
	unix.Stat(b.dir, &st)
	unix.Stat(other, &shm)
	if st.Dev == shm.Dev {
		t.Skip("needs a second file system at /dev/shm")
	}
	os.MkdirAll(b.dir+"/t/u", 0o750)
	os.WriteFile(b.dir+"/t/u/f", []byte("x"), 0o604)
	os.Symlink("u/f", b.dir+"/t/l")
	for _, to := range []string{other + "/t", other + "/t"} {
		if err := b.Files().Move(b.Context(), nobody, b.op("t"), to); err != nil {
			t.Fatal(err)
		}
		if i, err := os.Stat(to + "/l"); err != nil || i.Mode() != 0o604 {
			t.Fatalf("%v %v", i, err)
		}
		if _, err := os.Lstat(b.dir + "/t"); err == nil {
			t.Fatal("the original is still there")
		}
		if err := b.Files().Move(b.Context(), nobody, dsec.FileOp{Path: to}, b.dir+"/t"); err != nil {
			t.Fatal(err)
		}
	}
	if m, _ := filepath.Glob(other + "/.dsec*"); len(m) > 0 {
		t.Fatalf("left %v", m)
	}
}

package guest_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

func (b *box) op(name string) dsec.FileOp { return dsec.FileOp{Path: b.dir + "/" + name} }

func (b *box) put(op dsec.FileOp, content string, opt dsec.WriteOptions) dsec.FileInfo {
	b.Helper()
	i, err := b.Files().Write(b.Context(), nobody, op, opt, strings.NewReader(content))
	if err != nil {
		b.Fatalf("write %q: %v", op.Path, err)
	}
	return i
}

func (b *box) get(op dsec.FileOp, r dsec.ReadRange) (string, error) {
	f, err := b.Files().Read(b.Context(), nobody, op, r)
	if err != nil {
		return "", err
	}
	defer f.Close()
	p, err := io.ReadAll(f)
	return string(p), err
}

func TestWriteRead(t *testing.T) {
	b := newBox(t)
	for _, n := range []int{0, 1, 18 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 256 << 10, 5<<20 + 3} {
		data := strings.Repeat("0123456789abcde\n", n/16+1)[:n]
		i := b.put(b.op("f"), data, dsec.WriteOptions{})
		if i.Size != int64(n) || i.Mode != 0o644 || i.Type != dsec.TypeFile {
			t.Fatalf("%d: %+v", n, i)
		}
		if got, err := b.get(b.op("f"), dsec.ReadRange{}); err != nil || got != data {
			t.Fatalf("%d came back as %d, %v", n, len(got), err)
		}
	}
	for r, want := range map[dsec.ReadRange]string{
		{Offset: 1}:                  "bcdef",
		{Offset: 1, Length: 2}:       "bc",
		{Offset: 5, Length: 100}:     "f",
		{Offset: 6}:                  "",
		{Offset: 1 << 40}:            "",
		{Offset: 0, Length: 1}:       "a",
		{Offset: 3, Length: 1 << 62}: "def",
	} {
		b.put(b.op("r"), "abcdef", dsec.WriteOptions{})
		if got, err := b.get(b.op("r"), r); err != nil || got != want {
			t.Errorf("%+v: %q %v, want %q", r, got, err, want)
		}
	}
	if got, err := b.get(dsec.FileOp{Path: "/proc/self/status"}, dsec.ReadRange{}); err != nil || !strings.Contains(got, "Name:") {
		t.Errorf("proc: %q %v", got, err)
	}
	at := int64(2)
	b.put(b.op("r"), "XY", dsec.WriteOptions{At: &at})
	b.put(b.op("r"), "Z", dsec.WriteOptions{Append: true})
	if got, _ := b.get(b.op("r"), dsec.ReadRange{}); got != "abXYefZ" {
		t.Errorf("in place: %q", got)
	}
	b.put(b.op("new"), "n", dsec.WriteOptions{Append: true, Mode: 0o751})
	b.put(b.op("a/b/c"), "deep", dsec.WriteOptions{Parents: true, Mode: 0o4755})
	if i, err := b.Files().Stat(b.Context(), nobody, b.op("a/b/c")); err != nil || i.Mode != 0o4755 {
		t.Errorf("%+v %v", i, err)
	}
	if i, err := b.Files().Stat(b.Context(), nobody, b.op("new")); err != nil || i.Mode != 0o751 {
		t.Errorf("%+v %v", i, err)
	}
	// A file replaced keeps its mode and owner, and a symlink stays one.
	os.Chown(b.dir+"/new", 12, 34)
	os.Symlink("new", b.dir+"/link")
	b.put(b.op("link"), "through", dsec.WriteOptions{})
	i, err := b.Files().Stat(b.Context(), nobody, b.op("new"))
	if err != nil || i.Mode != 0o751 || i.UID != 12 || i.GID != 34 || i.Size != 7 {
		t.Errorf("%+v %v", i, err)
	}
	if i, err := b.Files().Stat(b.Context(), nobody, b.op("link")); err != nil || i.Type != dsec.TypeSymlink || i.Target != "new" {
		t.Errorf("%+v %v", i, err)
	}
	if m, _ := filepath.Glob(b.dir + "/.dsec*"); len(m) > 0 {
		t.Errorf("left %v", m)
	}
}

func TestFileErrors(t *testing.T) {
	b := newBox(t)
	unix.Mkfifo(b.dir+"/fifo", 0o644)
	os.Mkdir(b.dir+"/d", 0o755)
	os.WriteFile(b.dir+"/d/f", nil, 0o644)
	os.WriteFile(b.dir+"/secret", []byte("s"), 0o600)
	os.Symlink("loop", b.dir+"/loop")
	ctx, f := b.Context(), b.Files()
	read := func(op dsec.FileOp) error { _, err := b.get(op, dsec.ReadRange{}); return err }
	write := func(op dsec.FileOp, o dsec.WriteOptions) error {
		_, err := f.Write(ctx, nobody, op, o, strings.NewReader("x"))
		return err
	}
	as := func(op dsec.FileOp, user string) dsec.FileOp { op.User = user; return op }
	for _, c := range []struct {
		name string
		err  error
		kind dsec.ErrorKind
	}{
		{"read missing", read(b.op("no")), dsec.NotFound},
		{"read folder", read(b.op("d")), dsec.Invalid},
		{"read fifo", read(b.op("fifo")), dsec.Invalid},
		{"read below a file", read(b.op("d/f/x")), dsec.Invalid},
		{"read denied", read(as(b.op("secret"), "1234")), dsec.Denied},
		{"read loop", read(b.op("loop")), dsec.Invalid},
		{"read empty path", read(dsec.FileOp{}), dsec.Invalid},
		{"read unknown user", read(as(b.op("d/f"), "nouser")), dsec.Invalid},
		{"write folder", write(b.op("d"), dsec.WriteOptions{}), dsec.Invalid},
		{"write fifo", write(b.op("fifo"), dsec.WriteOptions{}), dsec.Invalid},
		{"append fifo", write(b.op("fifo"), dsec.WriteOptions{Append: true}), dsec.Invalid},
		{"write without parent", write(b.op("no/x"), dsec.WriteOptions{}), dsec.NotFound},
		{"write denied", write(as(b.op("secret"), "1234"), dsec.WriteOptions{}), dsec.Denied},
		{"write denied folder", write(as(b.op("d/x"), "1234"), dsec.WriteOptions{}), dsec.Denied},
		{"write bad mode", write(b.op("x"), dsec.WriteOptions{Mode: 0o10000}), dsec.Invalid},
		{"write name too long", write(b.op(strings.Repeat("x", 256)), dsec.WriteOptions{}), dsec.Invalid},
		{"mkdir on a file", f.Mkdir(ctx, nobody, b.op("secret"), 0o755), dsec.Exists},
		{"mkdir below a file", f.Mkdir(ctx, nobody, b.op("secret/x"), 0o755), dsec.Invalid},
		{"move missing", f.Move(ctx, nobody, b.op("no"), b.dir+"/x"), dsec.NotFound},
		{"move over a full folder", f.Move(ctx, nobody, b.op("fifo"), b.dir+"/d"), dsec.Invalid},
		{"remove missing", f.Remove(ctx, nobody, b.op("no")), dsec.NotFound},
		{"remove root", f.Remove(ctx, nobody, dsec.FileOp{Path: "/"}), dsec.Invalid},
		{"remove root 2", f.Remove(ctx, nobody, dsec.FileOp{Path: "//tmp/.."}), dsec.Invalid},
		{"remove dot", f.Remove(ctx, nobody, b.op("d/.")), dsec.Invalid},
		{"remove denied", f.Remove(ctx, nobody, as(b.op("d"), "1234")), dsec.Denied},
		{"chmod missing", f.Chmod(ctx, nobody, b.op("no"), 0o644), dsec.NotFound},
		{"chmod denied", f.Chmod(ctx, nobody, as(b.op("secret"), "1234"), 0o666), dsec.Denied},
		{"chown denied", f.Chown(ctx, nobody, as(b.op("secret"), "1234"), "1234"), dsec.Denied},
		{"chown nobody", f.Chown(ctx, nobody, b.op("secret"), "no-such"), dsec.Invalid},
		{"symlink taken", f.Symlink(ctx, nobody, b.op("d"), "x"), dsec.Exists},
		{"stat", func() error { _, err := f.Stat(ctx, nobody, b.op("no")); return err }(), dsec.NotFound},
	} {
		if c.err == nil || dsec.KindOf(c.err) != c.kind {
			t.Errorf("%s: %v is %v, want %v", c.name, c.err, dsec.KindOf(c.err), c.kind)
		}
	}
	if p, _ := os.ReadFile(b.dir + "/secret"); string(p) != "s" {
		t.Errorf("secret is %q", p)
	}
	// Rights do not stick to threads.
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 100 {
				op := b.op("secret")
				want := dsec.ErrorKind(255)
				if i%2 == 0 {
					op.User, want = "1234", dsec.Denied
				}
				if _, err := b.get(op, dsec.ReadRange{}); (err == nil) != (want == 255) {
					t.Errorf("%d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	wantKind(t, read(b.op("fifo")), dsec.Invalid, b.dir+"/fifo", "not a regular file")
}

func TestFileUser(t *testing.T) {
	b := newBox(t)
	op := b.op("x/y")
	op.User = "1234:77"
	i := b.put(op, "mine", dsec.WriteOptions{Parents: true})
	if i.UID != 1234 || i.GID != 77 {
		t.Fatalf("%+v", i)
	}
	if i, err := b.Files().Stat(b.Context(), nobody, b.op("x")); err != nil || i.UID != 1234 {
		t.Fatalf("%+v %v", i, err)
	}
	if err := b.Files().Chown(b.Context(), nobody, b.op("x/y"), "5:6"); err != nil {
		t.Fatal(err)
	}
	if i, _ := b.Files().Stat(b.Context(), nobody, b.op("x/y")); i.UID != 5 || i.GID != 6 {
		t.Fatalf("%+v", i)
	}
	if err := b.Files().Chown(b.Context(), nobody, b.op("x/y"), ":9"); err != nil {
		t.Fatal(err)
	}
	if i, _ := b.Files().Stat(b.Context(), nobody, b.op("x/y")); i.UID != 5 || i.GID != 9 {
		t.Fatalf("%+v", i)
	}
}

func TestList(t *testing.T) {
	b := newBox(t)
	names := []string{"a", "a/x", "a/y", "b", "new\nline", "sp ace", "\xff\xfe", strings.Repeat("n", 255), "ü"}
	for _, n := range names {
		if n == "a" {
			os.Mkdir(b.dir+"/a", 0o755)
			continue
		}
		b.put(b.op(n), "1", dsec.WriteOptions{})
	}
	for i := range 3000 {
		os.WriteFile(fmt.Sprintf("%s/a/%04d", b.dir, i), nil, 0o644)
	}
	list := func(op dsec.FileOp, depth int) (out []string, err error) {
		for i, err := range b.Files().List(b.Context(), nobody, op, depth) {
			if err != nil {
				return out, err
			}
			out = append(out, strings.TrimPrefix(i.Path, b.dir+"/"))
		}
		return out, nil
	}
	got, err := list(b.op(""), 1)
	want := []string{"a", "b", "new\nline", strings.Repeat("n", 255), "sp ace", "ü", "\xff\xfe"}
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("%q %v", got, err)
	}
	if got, err = list(b.op(""), 2); err != nil || len(got) != 3000+len(names) || got[0] != "a" || got[1] != "a/0000" {
		t.Fatalf("%d %v", len(got), err)
	}
	_, err = list(b.op("b"), 1)
	wantKind(t, err, dsec.Invalid)
	_, err = list(b.op("no"), 1)
	wantKind(t, err, dsec.NotFound)
	_, err = list(b.op(""), 0)
	wantKind(t, err, dsec.Invalid)
	for range b.Files().List(b.Context(), nobody, b.op("a"), 1) {
		break
	}
}

func TestTreeOps(t *testing.T) {
	b := newBox(t)
	ctx, f := b.Context(), b.Files()
	for range 2 {
		if err := f.Mkdir(ctx, nobody, b.op("m/n/o"), 0o1777); err != nil {
			t.Fatal(err)
		}
	}
	if i, _ := f.Stat(ctx, nobody, b.op("m/n/o")); i.Mode != 0o1777 || i.Type != dsec.TypeDir {
		t.Fatalf("%+v", i)
	}
	b.put(b.op("m/n/o/f"), "1", dsec.WriteOptions{})
	os.Symlink(b.dir+"/keep", b.dir+"/m/out")
	os.MkdirAll(b.dir+"/keep/me", 0o755)
	if err := f.Move(ctx, nobody, b.op("m/n"), b.dir+"/m/z"); err != nil {
		t.Fatal(err)
	}
	if err := f.Chmod(ctx, nobody, b.op("m/z/o/f"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 200 { // very deep
		os.MkdirAll(b.dir+"/m/"+strings.Repeat("d/", i), 0o755)
	}
	// Somebody goes on making files while it is removed.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				os.WriteFile(fmt.Sprintf("%s/m/z/%d", b.dir, i%50), nil, 0o644)
			}
		}
	})
	err := f.Remove(ctx, nobody, b.op("m"))
	close(stop)
	wg.Wait()
	if err != nil {
		err = f.Remove(ctx, nobody, b.op("m"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(b.dir + "/keep/me"); err != nil {
		t.Fatal("a symlink was followed")
	}
	if err := f.Remove(ctx, nobody, b.op("keep/")); err != nil {
		t.Fatal(err)
	}
}

// A source that fails leaves the old file.
func TestBrokenWrite(t *testing.T) {
	b := newBox(t)
	b.put(b.op("f"), "old", dsec.WriteOptions{})
	src := io.MultiReader(bytes.NewReader(make([]byte, 300<<10)), brokenReader{})
	if _, err := b.Files().Write(b.Context(), nobody, b.op("f"), dsec.WriteOptions{}, src); err == nil {
		t.Fatal("no error")
	}
	eventually(t, "the unfinished file is gone", func() bool { m, _ := filepath.Glob(b.dir + "/.dsec*"); return len(m) == 0 })
	if got, err := b.get(b.op("f"), dsec.ReadRange{}); err != nil || got != "old" {
		t.Fatalf("%q %v", got, err)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

// Two writers of one path: one of the contents, never a mixture.
func TestTwoWriters(t *testing.T) {
	b := newBox(t)
	var wg sync.WaitGroup
	for _, c := range "ab" {
		wg.Go(func() {
			for range 20 {
				b.put(b.op("f"), strings.Repeat(string(c), 200<<10), dsec.WriteOptions{})
			}
		})
	}
	wg.Go(func() {
		for range 40 {
			got, err := b.get(b.op("f"), dsec.ReadRange{})
			if dsec.KindOf(err) == dsec.NotFound && err != nil {
				continue
			}
			if err != nil || len(got) != 200<<10 || strings.Count(got, got[:1]) != len(got) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		}
	})
	wg.Wait()
}

func TestFileSteps(t *testing.T) {
	b := newBox(t)
	ctx, f := b.Context(), b.Files()
	write := func(n uint64, content string) error {
		_, err := f.Write(ctx, step(n), b.op("f"), dsec.WriteOptions{Append: true}, strings.NewReader(content))
		return err
	}
	big := strings.Repeat("z", 1<<20)
	for range 2 {
		if err := write(1, big); err != nil {
			t.Fatal(err)
		}
		if err := f.Mkdir(ctx, step(2), b.op("d"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := f.Move(ctx, step(3), b.op("d"), b.dir+"/e"); err != nil {
			t.Fatal(err)
		}
	}
	if i, _ := f.Stat(ctx, nobody, b.op("f")); i.Size != 1<<20 {
		t.Fatalf("%+v", i)
	}
	wantKind(t, write(1, big[1:]), dsec.Diverged, "content")
	wantKind(t, f.Mkdir(ctx, step(2), b.op("x"), 0o755), dsec.Diverged, "path")
	wantKind(t, f.Move(ctx, step(3), b.op("d"), "/x"), dsec.Diverged, "destination")
	wantKind(t, f.Remove(ctx, step(4), b.op("no")), dsec.NotFound)
	b.put(b.op("no"), "", dsec.WriteOptions{})
	if err := f.Remove(ctx, step(4), b.op("no")); err != nil { // what failed was not done
		t.Fatal(err)
	}
}

func TestSparseWrite(t *testing.T) {
	b := newBox(t)
	b.put(b.op("s"), strings.Repeat("\x00", 8<<20)+"end"+strings.Repeat("\x00", 1<<20), dsec.WriteOptions{})
	var st unix.Stat_t
	if err := unix.Stat(b.dir+"/s", &st); err != nil || st.Size != 9<<20+3 || st.Blocks > 64 {
		t.Fatalf("size %d, %d blocks, %v", st.Size, st.Blocks, err)
	}
	got, err := b.get(b.op("s"), dsec.ReadRange{})
	if err != nil || len(got) != 9<<20+3 || got[8<<20:8<<20+3] != "end" || strings.Trim(got, "\x00") != "end" {
		t.Fatalf("%d %v", len(got), err)
	}
}

// A full disk is Exhausted, leaves the old file, and no other.
func TestDiskFull(t *testing.T) {
	b := newBox(t)
	mount := b.dir + "/small"
	os.Mkdir(mount, 0o755)
	if err := mountTmpfs(mount, "size=256k"); err != nil {
		t.Skip("needs to mount a tmpfs:", err)
	}
	defer unmount(mount)
	b.put(b.op("small/f"), "old", dsec.WriteOptions{})
	big := strings.Repeat("x", 1<<20)
	_, err := b.Files().Write(b.Context(), nobody, b.op("small/f"), dsec.WriteOptions{}, strings.NewReader(big))
	wantKind(t, err, dsec.Exhausted)
	if got, err := b.get(b.op("small/f"), dsec.ReadRange{}); err != nil || got != "old" {
		t.Fatalf("%q %v", got, err)
	}
	if l, _ := os.ReadDir(mount); len(l) != 1 {
		t.Fatalf("left %v", l)
	}
	// A mount point cannot be replaced, but it can be written.
	os.WriteFile(b.dir+"/hosts", []byte("old and longer"), 0o644)
	os.WriteFile(b.dir+"/src", nil, 0o644)
	if err := unix.Mount(b.dir+"/src", b.dir+"/hosts", "", unix.MS_BIND, ""); err != nil {
		t.Skip("needs to mount:", err)
	}
	defer unmount(b.dir + "/hosts")
	b.put(b.op("hosts"), "new", dsec.WriteOptions{})
	if got, err := b.get(b.op("src"), dsec.ReadRange{}); err != nil || got != "new" {
		t.Fatalf("%q %v", got, err)
	}
	if m, _ := filepath.Glob(b.dir + "/.dsec*"); len(m) > 0 {
		t.Fatalf("left %v", m)
	}
}

package erofs_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// A layerFile is an encoded tree on disk, ready for the kernel.
type layerFile struct {
	image *erofs.Image
	meta  string
	blobs []string
}

// save writes an image beside its blobs; data maps tags to blob contents.
func save(t *testing.T, tree *erofs.Tree, data map[string][]byte) layerFile {
	t.Helper()
	im, err := tree.Encode()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	l := layerFile{image: im, meta: filepath.Join(dir, "meta")}
	write(t, l.meta, im.Meta)
	for i, d := range im.Devices {
		b, ok := data[d.Tag]
		if !ok || len(b) != int(d.Blocks)*erofs.BlockSize {
			t.Fatalf("device %q of %d blocks has %d bytes", d.Tag, d.Blocks, len(b))
		}
		p := filepath.Join(dir, fmt.Sprint("blob", i))
		write(t, p, b)
		l.blobs = append(l.blobs, p)
	}
	return l
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// build runs read with a fresh blob and returns the tree and the blob under
// its digest.
func build(t *testing.T, opts erofs.BlobOptions, read func(*erofs.Blob) (*erofs.Tree, error)) (*erofs.Tree, map[string][]byte) {
	t.Helper()
	var out bytes.Buffer
	b := erofs.NewBlob(&out, opts)
	tree, err := read(b)
	if err != nil {
		t.Fatal(err)
	}
	size, chunks, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if int(size) != out.Len() || size%erofs.BlockSize != 0 {
		t.Fatalf("blob says %d bytes, wrote %d", size, out.Len())
	}
	i := 0
	for c := range slices.Chunk(out.Bytes(), erofs.ChunkSize) {
		if i >= len(chunks) || sha256.Sum256(c) != chunks[i] {
			t.Fatalf("chunk %d has another digest than the table of %d says", i, len(chunks))
		}
		i++
	}
	if i != len(chunks) {
		t.Fatalf("%d chunks in the table, %d in the blob", len(chunks), i)
	}
	sum := sha256.Sum256(out.Bytes())
	tag := hex.EncodeToString(sum[:])
	b.SetTag(tag)
	return tree, map[string][]byte{tag: out.Bytes()}
}

func fromDir(t *testing.T, path string, opts erofs.DirOptions) (*erofs.Tree, map[string][]byte) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return build(t, erofs.BlobOptions{}, func(b *erofs.Blob) (*erofs.Tree, error) {
		return erofs.FromDir(t.Context(), f, b, opts)
	})
}

func fromTar(t *testing.T, r io.Reader, opts erofs.TarOptions) (*erofs.Tree, map[string][]byte) {
	t.Helper()
	return build(t, erofs.BlobOptions{}, func(b *erofs.Blob) (*erofs.Tree, error) {
		return erofs.FromTar(t.Context(), r, b, opts)
	})
}

// mount returns the path of a detached mount, gone when the test ends.
func mount(t *testing.T, kind string, set func(fs int) error) string {
	t.Helper()
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatalf("fsopen %s: %v", kind, err)
	}
	defer unix.Close(fs)
	err = set(fs)
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	var fd int
	if err == nil {
		fd, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	}
	if err != nil {
		var log [4096]byte
		n, _ := unix.Read(fs, log[:])
		t.Fatalf("mount %s: %v: %s", kind, err, log[:max(n, 0)])
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

func mountErofs(t *testing.T, meta string, devices ...string) string {
	t.Helper()
	return mount(t, "erofs", func(fs int) error {
		if err := unix.FsconfigSetString(fs, "source", meta); err != nil {
			return err
		}
		if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
			return err
		}
		for _, d := range devices {
			if err := unix.FsconfigSetString(fs, "device", d); err != nil {
				return err
			}
		}
		return nil
	})
}

// mountOverlay stacks folders, the uppermost first.
func mountOverlay(t *testing.T, lowers ...string) string {
	t.Helper()
	return mount(t, "overlay", func(fs int) error {
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
		return nil
	})
}

// flat lays metadata and blobs end to end.
func flat(t *testing.T, l layerFile) string {
	t.Helper()
	var out []byte
	for i, p := range append([]string{l.meta}, l.blobs...) {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 && len(out) != int(l.image.Devices[i-1].Mapped)*erofs.BlockSize {
			t.Fatalf("device %d is mapped at block %d, not at byte %d", i, l.image.Devices[i-1].Mapped, len(out))
		}
		out = append(out, b...)
	}
	p := filepath.Join(t.TempDir(), "flat")
	write(t, p, out)
	return p
}

func fsck(t *testing.T, l layerFile) {
	t.Helper()
	var args []string
	for _, b := range l.blobs {
		args = append(args, "--device="+b)
	}
	out, err := exec.Command("fsck.erofs", append(args, l.meta)...).CombinedOutput()
	if err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

// describe lists a folder, one line for a file with all that stat, attributes
// and contents say; skip leaves a name out.
func describe(t *testing.T, root string, skip func(path string, mode uint32) bool) map[string]string {
	t.Helper()
	out := map[string]string{}
	inodes := map[uint64]string{}
	var walk func(rel string)
	walk = func(rel string) {
		p := root + "/" + rel
		var st unix.Stat_t
		if err := unix.Fstatat(unix.AT_FDCWD, p, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			t.Fatalf("stat %q: %v", p, err)
		}
		if rel == "" {
			if err := unix.Stat(root, &st); err != nil {
				t.Fatal(err)
			}
		}
		if skip != nil && skip(rel, st.Mode) {
			return
		}
		kind := st.Mode & unix.S_IFMT
		line := fmt.Sprintf("%o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		if kind != unix.S_IFDIR {
			line += fmt.Sprintf(" nlink=%d rdev=%d", st.Nlink, st.Rdev)
			if first, ok := inodes[st.Ino]; ok && st.Nlink > 1 {
				line += " link=" + first
			} else {
				inodes[st.Ino] = rel
			}
		}
		switch kind {
		case unix.S_IFLNK:
			target, err := os.Readlink(p)
			if err != nil {
				t.Fatal(err)
			}
			line += " -> " + target
		case unix.S_IFREG:
			line += fmt.Sprintf(" size=%d sha256=%s", st.Size, hashFile(t, p, st.Size))
		}
		line += xattrs(t, p)
		out[rel] = line
		if kind == unix.S_IFDIR {
			es, err := os.ReadDir(p + "/")
			if err != nil {
				t.Fatal(err)
			}
			line += fmt.Sprint(len(es))
			for _, e := range es {
				walk(strings.TrimPrefix(rel+"/"+e.Name(), "/"))
			}
		}
	}
	walk("")
	return out
}

// hashFile hashes a file; of a huge one only where it has data and its end.
func hashFile(t *testing.T, path string, size int64) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if size <= 1<<30 {
		if n, err := io.Copy(h, f); err != nil || n != size {
			t.Fatalf("read %q: %d of %d bytes, %v", path, n, size, err)
		}
	} else {
		for _, off := range []int64{0, size / 2 &^ 4095, size - 8192} {
			io.Copy(h, io.NewSectionReader(f, off, 1<<20))
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

func xattrs(t *testing.T, path string) string {
	t.Helper()
	buf := make([]byte, 1<<16)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		t.Fatalf("list attributes of %q: %v", path, err)
	}
	var lines []string
	for _, name := range strings.Split(string(buf[:n]), "\x00") {
		if name == "" {
			continue
		}
		v := make([]byte, 1<<16)
		n, err := unix.Lgetxattr(path, name, v)
		if err != nil {
			t.Fatalf("attribute %q of %q: %v", name, path, err)
		}
		lines = append(lines, fmt.Sprintf(" %s=%x", name, sha256.Sum256(v[:n])))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	bad := 0
	for p, w := range want {
		if g, ok := got[p]; g != w {
			if bad++; bad <= 10 {
				t.Errorf("%s: %.80q:\n got %s (%v)\nwant %s", what, p, g, ok, w)
			}
		}
	}
	for p, g := range got {
		if _, ok := want[p]; !ok {
			if bad++; bad <= 10 {
				t.Errorf("%s: %.80q should not be there: %s", what, p, g)
			}
		}
	}
	if bad > 10 {
		t.Errorf("%s: %d differences", what, bad)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pattern returns n bytes that repeat nowhere near a block.
func pattern(seed string, n int) []byte {
	out := make([]byte, 0, n+32)
	sum := sha256.Sum256([]byte(seed))
	for len(out) < n {
		out = append(out, sum[:]...)
		sum = sha256.Sum256(sum[:])
	}
	return out[:n]
}

// awkward makes a folder with one of everything a file system can hold.
func awkward(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	p := func(name string) string { return filepath.Join(root, name) }
	for _, d := range []string{"dir/a/b/c", "empty", "many", "sticky"} {
		must(t, os.MkdirAll(p(d), 0o755))
	}
	must(t, os.Chmod(p("sticky"), 0o1777|os.ModeSticky))
	for i := range 5200 {
		must(t, os.WriteFile(p(fmt.Sprintf("many/entry-%d-%s", i, strings.Repeat("x", i%40))), nil, 0o644))
	}
	// Names: long, odd bytes, and some that sort before "." and "..".
	for _, n := range []string{strings.Repeat("n", 255), strings.Repeat("\xff", 255), "!bang", " ", "-", "\n\t", "...", "..a", "é\xfe"} {
		must(t, os.WriteFile(p(n), []byte(n), 0o640))
	}
	for _, n := range []int{1, 4095, 4096, 4097, 262144, 1<<20 - 1, 1<<20 + 1, 3<<20 + 17} {
		must(t, os.WriteFile(p(fmt.Sprint("file-", n)), pattern(fmt.Sprint(n), n), 0o600))
	}
	must(t, os.WriteFile(p("copy"), pattern("4097", 4097), 0o755))
	must(t, os.WriteFile(p("zeros"), make([]byte, 5<<20+3), 0o644))
	for i, n := range []int{1, 60, 3000, 4031, 4032, 4033, 4095} {
		must(t, os.Symlink(strings.Repeat("s", n), p(fmt.Sprint("symlink", i))))
	}
	must(t, os.Link(p("file-4097"), p("dir/a/link1")))
	must(t, os.Link(p("file-4097"), p("zlink2")))
	must(t, unix.Mkfifo(p("fifo"), 0o620))
	must(t, os.Link(p("fifo"), p("dir/fifo")))
	must(t, unix.Mknod(p("socket"), unix.S_IFSOCK|0o700, 0))
	must(t, unix.Mknod(p("char"), unix.S_IFCHR|0o666, int(unix.Mkdev(4095, 1048575))))
	must(t, unix.Mknod(p("block"), unix.S_IFBLK|0o660, int(unix.Mkdev(8, 300))))
	must(t, os.Chmod(p("copy"), 0o755|os.ModeSetuid|os.ModeSetgid))
	must(t, os.Lchown(p("file-1"), 4294967294, 4000000000))
	must(t, os.Lchown(p("symlink1"), 70000, 65536))
	must(t, os.Lchown(p("empty"), 65535, 1))

	holes, err := os.Create(p("holes"))
	must(t, err)
	for _, off := range []int64{0, 40960, 3<<20 + 4096, 9<<20 + 100} {
		_, err = holes.WriteAt(pattern(fmt.Sprint("hole", off), 5000), off)
		must(t, err)
	}
	must(t, holes.Truncate(12<<20+5))
	must(t, holes.Close())
	huge, err := os.Create(p("huge"))
	must(t, err)
	_, err = huge.WriteAt([]byte("first"), 0)
	must(t, err)
	_, err = huge.WriteAt([]byte("last"), 5<<30)
	must(t, err)
	must(t, huge.Close())

	set := func(name, attr string, v []byte) {
		t.Helper()
		must(t, unix.Lsetxattr(p(name), attr, v, 0))
	}
	set("file-4096", "user.plain", []byte("value"))
	set("file-4096", "user.empty", nil)
	set("file-4096", "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	set("file-4097", "user.three", []byte("abc"))
	set("file-4095", "user.big", pattern("big", 3000))
	set("file-1", "trusted.odd", []byte{0, 1, 0, 255})
	set("dir", "trusted.overlay.opaque", []byte("y"))
	set("many", "user.on-a-folder", []byte("1"))
	set("symlink2", "trusted.on-a-symlink", pattern("link", 700))
	acl := []byte{2, 0, 0, 0,
		1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0xe8, 3, 0, 0,
		4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 6, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255}
	set("file-262144", "system.posix_acl_access", acl)
	set("dir/a", "system.posix_acl_default", acl)
	times := []unix.Timespec{{}, {Sec: 1234567890, Nsec: 987654321}}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("file-4096"), times, 0))
	times[1] = unix.Timespec{Sec: -5, Nsec: 7}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("char"), times, 0))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("symlink0"), times, unix.AT_SYMLINK_NOFOLLOW))
	must(t, os.Chtimes(root, time.Unix(5, 6), time.Unix(7, 8)))
	return root
}

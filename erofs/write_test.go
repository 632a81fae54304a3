package erofs_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// taken reads a folder into an image and its blob.
func taken(t *testing.T, dir string, ids erofs.IDRange) (meta, data []byte) {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var b bytes.Buffer
	blob := erofs.NewBlob(&b, erofs.BlobOptions{})
	tree, err := erofs.FromDir(t.Context(), root, blob, erofs.DirOptions{IDs: ids, Source: erofs.Upper})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := blob.Finish(); err != nil {
		t.Fatal(err)
	}
	blob.SetTag("blob")
	image, err := tree.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return image.Meta, b.Bytes()
}

// fill makes a folder with one of everything, as the upper layer of a sandbox
// whose ids are shifted.
func fill(t *testing.T, dir string, ids erofs.IDRange) {
	t.Helper()
	id := int(ids.Base)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	check(os.Mkdir(in("sub"), 0o700))
	check(os.Chmod(in("sub"), 0o1777))
	check(unix.Setxattr(in("sub"), erofs.XattrOpaque, []byte("y"), 0))
	check(os.WriteFile(in("sub/file"), bytes.Repeat([]byte("0123456789abcde\n"), 100_000), 0o600))
	check(os.Chown(in("sub/file"), id+1000, id+2000))
	check(os.Link(in("sub/file"), in("twin")))
	check(os.WriteFile(in("empty"), nil, 0o644))
	check(os.WriteFile(in("setuid"), []byte("x"), 0o755))
	check(os.Chown(in("setuid"), id, id))
	check(os.Chmod(in("setuid"), os.ModeSetuid|0o755))
	check(os.WriteFile(in("able"), []byte("y"), 0o755))
	capability := append([]byte{1, 0, 0, 3, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, byte(ids.Base), byte(ids.Base>>8), byte(ids.Base>>16), byte(ids.Base>>24))
	check(unix.Setxattr(in("able"), "security.capability", capability, 0))
	holes, err := os.Create(in("holes"))
	check(err)
	check(holes.Truncate(1 << 30))
	_, err = holes.WriteAt([]byte("in the middle"), 500<<20)
	check(err)
	check(holes.Close())
	check(os.Symlink("../nowhere", in("a link")))
	check(os.Lchown(in("a link"), id+5, id+6))
	check(unix.Mknod(in("gone"), unix.S_IFCHR, 0))
	check(unix.Mkfifo(in("pipe"), 0o640))
	check(os.Chtimes(in("sub"), time.Unix(981173045, 5), time.Unix(981173045, 5)))
}

// TestWriteDir reads a folder, writes what was read elsewhere, with other ids,
// and reads that.
func TestWriteDir(t *testing.T) {
	one, two := erofs.IDRange{Base: 0x70000000, Count: 65536}, erofs.IDRange{Base: 0x70050000, Count: 65536}
	from, to := t.TempDir(), t.TempDir()
	fill(t, from, one)
	meta, data := taken(t, from, one)
	tree, err := erofs.Decode(meta)
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	err = tree.WriteDir(t.Context(), root, map[string]io.ReaderAt{"blob": bytes.NewReader(data)}, erofs.WriteOptions{IDs: two})
	if err != nil {
		t.Fatal(err)
	}
	if got, content := taken(t, to, two); !bytes.Equal(got, meta) || !bytes.Equal(content, data) {
		t.Error("what was written is not what was read")
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(to, "sub/file"), &st); err != nil || st.Uid != two.Base+1000 || st.Nlink != 2 {
		t.Errorf("owner %#x, %d names, %v", st.Uid, st.Nlink, err)
	}
	if err := unix.Stat(filepath.Join(to, "holes"), &st); err != nil || st.Blocks*512 > 1<<20 {
		t.Errorf("a file of holes takes %d bytes, %v", st.Blocks*512, err)
	}

	// Contents that are not all there, and a caller who goes away.
	for name, data := range map[string]map[string]io.ReaderAt{
		"no blob": {}, "short": {"blob": bytes.NewReader(data[:len(data)/2])},
	} {
		root, err := os.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		if err := tree.WriteDir(t.Context(), root, data, erofs.WriteOptions{}); !errors.Is(err, erofs.ErrCorrupt) {
			t.Errorf("%s: %v, want corrupt", name, err)
		}
		root.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tree.WriteDir(ctx, root, nil, erofs.WriteOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("under a canceled context: %v", err)
	}
}

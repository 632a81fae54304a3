package e2e_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

// noise gives a stream of n bytes that never repeats, the same for every call.
func noise(n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{1}), n)
}

// TestFileSizes sends files of sizes at which others lose bytes through the
// SDK and the command line, and has the workload and the server count them.
func TestFileSizes(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	dir := t.TempDir()
	for _, size := range []int64{0, 1, 18 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 256<<10 + 1, 1 << 20, 32<<20 + 1} {
		data, err := io.ReadAll(noise(size))
		must(t, err)
		sum := sha256.Sum256(data)
		want := hex.EncodeToString(sum[:])
		info, err := n.Files.Write(ctx(t), on(sb.ID), dsec.FileOp{Path: "/sdk"}, dsec.WriteOptions{}, bytes.NewReader(data))
		if err != nil || info.Size != size {
			t.Fatalf("write of %d gives %d, %v", size, info.Size, err)
		}
		local := filepath.Join(dir, "local")
		must(t, os.WriteFile(local, data, 0o600))
		n.dsec(t, "cp", local, string(sb.ID)+":/cli")
		out := n.sh(t, sb.ID, "sha256sum /sdk /cli")
		if string(out.Out) != want+"  /sdk\n"+want+"  /cli\n" {
			t.Errorf("%d bytes: the workload sees %q, want %s", size, out.Out, want)
		}
		r, err := n.Files.Read(ctx(t), on(sb.ID), dsec.FileOp{Path: "/cli"}, dsec.ReadRange{})
		must(t, err)
		back, err := io.ReadAll(r)
		r.Close()
		n.dsec(t, "cp", string(sb.ID)+":/sdk", filepath.Join(dir, "back"))
		again, rerr := os.ReadFile(filepath.Join(dir, "back"))
		if err != nil || rerr != nil || !bytes.Equal(back, data) || !bytes.Equal(again, data) {
			t.Errorf("%d bytes came back as %d and %d, %v, %v", size, len(back), len(again), err, rerr)
		}
	}
}

// TestLargeTransfer moves more each way than the sandbox has memory; the node
// keeps none of it in memory.
func TestLargeTransfer(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain()) // of less memory than the file has
	const size = 256<<20 + 1
	n.sh(t, sb.ID, "true")
	before := n.anonymous(t)
	info, err := n.Files.Write(ctx(t), on(sb.ID), dsec.FileOp{Path: "/large"}, dsec.WriteOptions{}, noise(size))
	if err != nil || info.Size != size {
		t.Fatalf("write gives %d, %v", info.Size, err)
	}
	during := n.anonymous(t)
	r, err := n.Files.Read(ctx(t), on(sb.ID), dsec.FileOp{Path: "/large"}, dsec.ReadRange{})
	must(t, err)
	defer r.Close()
	want, got := sha256.New(), sha256.New()
	_, err = io.Copy(got, r)
	must(t, err)
	_, err = io.Copy(want, noise(size))
	must(t, err)
	if !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		t.Error("what came back differs")
	}
	for _, now := range []int64{during, n.anonymous(t)} {
		if now > before+32<<20 {
			t.Errorf("the node grew from %d to %d bytes", before, now)
		}
	}
	if u, err := n.Sandboxes.Get(ctx(t), sb.ID); err != nil || u.Usage.OOMKills > 0 {
		t.Errorf("usage %+v, %v", u.Usage, err)
	}
}

// TestFileCallsThroughTheDoor makes every call on files, with names that are
// any bytes, and checks what the workload sees.
func TestFileCallsThroughTheDoor(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	f, call := n.Files, on(sb.ID)
	for i, name := range []string{"plain", "sp ace", "new\nline", "ü€😀", "\xff\xfe", "-n", `"quote'`, strings.Repeat("n", 255)} {
		dir := fmt.Sprintf("/home/alice/%d", i)
		path := dir + "/" + name
		op := dsec.FileOp{Path: path, User: "alice"}
		must(t, f.Mkdir(ctx(t), call, dsec.FileOp{Path: dir, User: "alice"}, 0o750))
		info, err := f.Write(ctx(t), call, op, dsec.WriteOptions{Mode: 0o640}, strings.NewReader("content"))
		if err != nil || info.UID != 1000 || info.Mode != 0o640 || info.Size != 7 {
			t.Errorf("%q: written %+v, %v", name, info, err)
		}
		_, err = f.Write(ctx(t), call, op, dsec.WriteOptions{Append: true}, strings.NewReader(" more"))
		must(t, err)
		r, err := n.Commands.Run(ctx(t), call, dsec.Command{Argv: []string{"cat", path}, User: "alice"}, nil)
		if err != nil || string(r.Out) != "content more" {
			t.Errorf("%q: the workload reads %q %q, %v", name, r.Out, r.Err, err)
		}
		if got, err := f.Stat(ctx(t), call, op); err != nil || got.Path != path || got.Size != 12 || got.Type != dsec.TypeFile {
			t.Errorf("%q: stat %+v, %v", name, got, err)
		}
		rc, err := f.Read(ctx(t), call, op, dsec.ReadRange{Offset: 8, Length: 4})
		must(t, err)
		part, err := io.ReadAll(rc)
		rc.Close()
		if err != nil || string(part) != "more" {
			t.Errorf("%q: a part is %q, %v", name, part, err)
		}
		must(t, f.Chmod(ctx(t), call, op, 0o600))
		must(t, f.Chown(ctx(t), call, dsec.FileOp{Path: path}, "4321:99"))
		moved := dir + "/moved " + name[:min(len(name), 200)]
		must(t, f.Move(ctx(t), call, dsec.FileOp{Path: path}, moved))
		must(t, f.Symlink(ctx(t), call, op, moved))
		if got, err := f.Stat(ctx(t), call, op); err != nil || got.Type != dsec.TypeSymlink || got.Target != moved {
			t.Errorf("%q: link %+v, %v", name, got, err)
		}
		var listed []string
		for info, err := range f.List(ctx(t), call, dsec.FileOp{Path: dir}, 1) {
			must(t, err)
			listed = append(listed, fmt.Sprintf("%s %o %d:%d", info.Path, info.Mode, info.UID, info.GID))
		}
		if want := moved + " 600 4321:99"; len(listed) != 2 || !strings.Contains(strings.Join(listed, "|"), want) {
			t.Errorf("%q: listed %q, want %q and the link", name, listed, want)
		}
		archive, err := f.Pack(ctx(t), call, dsec.FileOp{Path: dir})
		must(t, err)
		packed, err := io.ReadAll(archive)
		archive.Close()
		must(t, err)
		must(t, f.Unpack(ctx(t), call, dsec.FileOp{Path: dir + "/copy"}, bytes.NewReader(packed)))
		if got, err := f.Stat(ctx(t), call, dsec.FileOp{Path: dir + "/copy/" + filepath.Base(moved)}); err != nil || got.Size != 12 || got.UID != 4321 {
			t.Errorf("%q: unpacked %+v, %v", name, got, err)
		}
		// The command line takes such names too, and such variables.
		n.dsec(t, "cp", string(sb.ID)+":"+moved, filepath.Join(t.TempDir(), "back"))
		if r := n.run(nil, "exec", "-e", "A="+name, string(sb.ID), "--", "sh", "-c", `printf %s "$A"`); r.out != name {
			t.Errorf("the variable %q arrives as %q, %v", name, r.out, r.fault())
		}
		must(t, f.Remove(ctx(t), call, dsec.FileOp{Path: dir}))
		_, err = f.Stat(ctx(t), call, dsec.FileOp{Path: dir})
		wantKind(t, "a removed folder", err, dsec.NotFound)
	}
	wantKind(t, "remove /", f.Remove(ctx(t), call, dsec.FileOp{Path: "/"}), dsec.Invalid)
	_, err := f.Write(ctx(t), call, dsec.FileOp{Path: "/etc/x", User: "alice"}, dsec.WriteOptions{}, strings.NewReader(""))
	wantKind(t, "another's folder", err, dsec.Denied)
}

// TestManyFilesAtOnce copies a folder of many files in and out.
func TestManyFilesAtOnce(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	const many = 2_000
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range many {
		name := fmt.Sprintf("d%02d/f%04d", i%100, i)
		must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(name))}))
		_, err := io.WriteString(w, name)
		must(t, err)
	}
	must(t, w.Close())
	must(t, n.Files.Unpack(ctx(t), on(sb.ID), dsec.FileOp{Path: "/many"}, &b))
	if out := n.sh(t, sb.ID, "find /many -type f | wc -l; cat /many/d42/f0042"); string(out.Out) != fmt.Sprintf("%d\nd42/f0042", many) {
		t.Errorf("the workload sees %q", out.Out)
	}
	dir := filepath.Join(t.TempDir(), "out")
	n.dsec(t, "cp", string(sb.ID)+":/many", dir)
	files := 0
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		rel, err := filepath.Rel(dir, path)
		got, rerr := os.ReadFile(path)
		if string(got) != rel {
			err = errors.Join(err, fmt.Errorf("%s holds %q", rel, got))
		}
		return errors.Join(err, rerr)
	}))
	if files != many {
		t.Errorf("%d files came out, want %d", files, many)
	}
}

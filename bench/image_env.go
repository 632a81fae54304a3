package bench

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// staticShell is a shell with the usual programs that needs nothing of a root.
const staticShell = "/bin/busybox"

// make writes environment i as a tar, imports it, and keeps it compressed for the
// variant that unpacks.
func (b *imageBench) make(ctx context.Context, n *imageNode, tars *blob.Folder, i int) (e environment, err error) {
	file := filepath.Join(b.o.Dir, "env.tar")
	defer os.Remove(file) //nolint:errcheck // the folder goes too
	e.name = fmt.Sprintf("env-%d@1", i)
	if e.plain, e.touched, err = b.write(file, i); err != nil {
		return e, err
	}
	f, err := os.Open(file)
	if err != nil {
		return e, err
	}
	defer f.Close()
	img, err := n.Images.Upload(ctx, dsec.ImportOptions{Name: e.name}, f)
	if err != nil {
		return e, err
	}
	e.digest = img.Digest
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return e, err
	}
	s, err := tars.Stage(ctx)
	if err != nil {
		return e, err
	}
	defer s.Abort() //nolint:errcheck // nothing once it is committed
	z, _ := gzip.NewWriterLevel(s, gzip.BestSpeed)
	if _, err := io.Copy(z, bufio.NewReaderSize(f, 1<<20)); err != nil {
		return e, err
	}
	if err := z.Close(); err != nil {
		return e, err
	}
	info, err := s.Commit(ctx)
	e.tar, e.packed = info.Digest, info.Size
	return e, err
}

// write writes the tar of an environment: files of many sizes, half of whose bytes
// compress, over a shell or over a system; and the list of what its task reads.
func (b *imageBench) write(file string, i int) (plain, touched int64, err error) {
	f, err := os.Create(file)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	buffered := bufio.NewWriterSize(f, 1<<20)
	w := tar.NewWriter(buffered)
	rng := rand.New(rand.NewPCG(1, uint64(i)))
	chosen := &choice{rng: rng, share: b.o.Touched}
	if b.o.Debian != "" {
		plain, err = copySystem(w, b.o.Debian, chosen)
	} else {
		plain, err = putShell(w)
	}
	if err != nil {
		return 0, 0, err
	}
	put := func(name string, data []byte) {
		if err == nil {
			err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(data))})
		}
		if err == nil {
			_, err = w.Write(data)
		}
		plain += int64(len(data))
	}
	for n := 0; plain < b.o.Size && err == nil; n++ {
		name := fmt.Sprintf("opt/data/%d/%d", n/100, n)
		data := halfNoise(rng, 4<<10<<rng.IntN(11)) // 4 KiB to 4 MiB
		chosen.offer(name, int64(len(data)))
		put(name, data)
	}
	put("task/list", []byte(strings.Join(chosen.names, "\n")+"\n"))
	if err == nil {
		err = w.Close()
	}
	return plain, chosen.bytes, errors.Join(err, buffered.Flush())
}

// choice picks files at random until they are a share of the bytes that were
// offered.
type choice struct {
	rng            *rand.Rand
	share          float64
	names          []string
	bytes, offered int64
}

func (c *choice) offer(name string, size int64) {
	c.offered += size
	// The next is taken when too little was: the order of files is random enough.
	if float64(c.bytes)+float64(size)/2 <= c.share*float64(c.offered) && size > 0 && !strings.ContainsAny(name, " \t\n'\"\\") {
		c.names, c.bytes = append(c.names, "/"+name), c.bytes+size
	}
}

// halfNoise is n bytes that compress to about half.
func halfNoise(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for off := 0; off < n; off += 64 {
		for k := off; k < min(off+32, n); k += 8 {
			v := rng.Uint64()
			for j := 0; j < 8 && k+j < n; j++ {
				b[k+j] = byte(v >> (8 * j))
			}
		}
	}
	return b
}

// putShell adds the root that a task needs.
func putShell(w *tar.Writer) (int64, error) {
	shell, err := os.ReadFile(staticShell)
	if err != nil {
		return 0, fmt.Errorf("read static shell: %w (Debian's busybox-static has one)", err)
	}
	for _, d := range append(rootFolders, "task") {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d + "/", Mode: 0o755}); err != nil {
			return 0, err
		}
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755, Size: int64(len(shell))}); err != nil {
		return 0, err
	}
	if _, err := w.Write(shell); err != nil {
		return 0, err
	}
	for _, name := range []string{"sh", "cat", "xargs", "find", "awk"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox", Mode: 0o777}); err != nil {
			return 0, err
		}
	}
	return int64(len(shell)), nil
}

// copySystem copies a root file system and offers its files.
func copySystem(w *tar.Writer, file string, c *choice) (plain int64, err error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, fmt.Errorf("read system: %w (make debian makes one)", err)
	}
	defer f.Close()
	for r := tar.NewReader(bufio.NewReaderSize(f, 1<<20)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return plain, nil
		}
		if err != nil {
			return plain, err
		}
		if err := w.WriteHeader(h); err != nil {
			return plain, err
		}
		if _, err := io.Copy(w, r); err != nil {
			return plain, err
		}
		if h.Typeflag == tar.TypeReg {
			plain += h.Size
			c.offer(path.Clean(h.Name), h.Size)
		}
	}
}

// unpackInto unpacks a compressed tar of the store with the host's tar, as
// somebody would who has no layers, and runs the task on the folder.
func (b *imageBench) unpackInto(ctx context.Context, e environment, dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	r, err := b.limited.Get(ctx, e.tar, 0, e.packed)
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.CommandContext(ctx, "tar", "-xz", "-C", dir)
	cmd.Stdin = r
	endTogether(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack: %w: %s", err, out)
	}
	task := exec.CommandContext(ctx, "sh", "-c", `sed "s,^,$0," <"$0/task/list" | xargs cat >/dev/null`, dir)
	endTogether(task)
	if out, err := task.CombinedOutput(); err != nil {
		return fmt.Errorf("read what was unpacked: %w: %s", err, out)
	}
	return nil
}

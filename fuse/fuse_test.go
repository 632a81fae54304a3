package fuse_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/fuse"
)

// pattern is a folder whose files have bytes that follow from where they are.
type pattern struct {
	files []fuse.File
	gate  func(ctx context.Context, r fuse.Read) error // before each read; none when nil
}

var standard = []fuse.File{
	{Name: "a", Node: 1<<63 | 1, Size: 3 << 20},
	{Name: "b", Node: 1<<63 | 2, Size: 5000},
	{Name: "c", Node: 1<<63 | 3, Size: 0},
}

func fill(node uint64, off int64, b []byte) {
	for i := range b {
		at := uint64(off) + uint64(i)
		b[i] = byte(at) ^ byte(at>>8) ^ byte(at>>16) ^ byte(node)
	}
}

func (p *pattern) Lookup(name string) (fuse.File, bool) {
	i := slices.IndexFunc(p.files, func(f fuse.File) bool { return f.Name == name })
	if i < 0 {
		return fuse.File{}, false
	}
	return p.files[i], true
}

func (p *pattern) File(node uint64) (fuse.File, bool) {
	i := slices.IndexFunc(p.files, func(f fuse.File) bool { return f.Node == node })
	if i < 0 {
		return fuse.File{}, false
	}
	return p.files[i], true
}

func (p *pattern) Files() []fuse.File { return slices.Clone(p.files) }

func (p *pattern) Read(ctx context.Context, r fuse.Read) (int, error) {
	if p.gate != nil {
		if err := p.gate(ctx, r); err != nil {
			return 0, err
		}
	}
	f, ok := p.File(r.Node)
	if !ok {
		return 0, unix.ESTALE
	}
	n := int(max(0, min(int64(r.Size), f.Size-r.Off)))
	b, err := r.Buf()
	if err != nil {
		return 0, err
	}
	fill(r.Node, r.Off, b[:n])
	return n, nil
}

// mount serves p at a folder until the test ends.
func mount(t testing.TB, p *pattern) (dir string, dev *os.File) {
	t.Helper()
	dir = t.TempDir()
	dev, err := fuse.Mount(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := fuse.Serve(dev, p, slog.New(slog.NewTextHandler(failing{t}, nil)))
	t.Cleanup(func() {
		if t.Failed() { // what hangs could not be killed otherwise
			unix.Unmount(dir, unix.MNT_FORCE) //nolint:errcheck // often busy, and aborted nevertheless
		}
		if err := fuse.Unmount(dir); err != nil {
			t.Error(err)
		}
		s.Wait()
		dev.Close()
	})
	return dir, dev
}

// failing fails the test with what is logged.
type failing struct{ t testing.TB }

func (f failing) Write(b []byte) (int, error) {
	f.t.Errorf("logged: %s", b)
	return len(b), nil
}

func want(f fuse.File) []byte {
	b := make([]byte, f.Size)
	fill(f.Node, 0, b)
	return b
}

func TestFolderIsShown(t *testing.T) {
	dir, _ := mount(t, &pattern{files: standard})
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(standard) {
		t.Fatalf("entries %v (%v)", entries, err)
	}
	for i, f := range standard {
		if entries[i].Name() != f.Name {
			t.Errorf("entry %d is %s", i, entries[i].Name())
		}
		fi, err := os.Stat(filepath.Join(dir, f.Name))
		if err != nil || fi.Size() != f.Size || fi.Mode() != 0o444 {
			t.Errorf("%s: %v (%v)", f.Name, fi, err)
		}
		got, err := os.ReadFile(filepath.Join(dir, f.Name))
		if err != nil || !bytes.Equal(got, want(f)) {
			t.Errorf("%s: other bytes (%v)", f.Name, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "d")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("what is not there: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "d"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write: %v", err)
	}
	if _, err := os.OpenFile(filepath.Join(dir, "a"), os.O_RDWR, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("open for writing: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Files != 3 {
		t.Errorf("statfs: %+v (%v)", st, err)
	}
	for path, yes := range map[string]bool{dir: true, "/": false, filepath.Dir(dir): false} {
		if got, err := fuse.Mounted(path); err != nil || got != yes {
			t.Errorf("mounted at %s: %v (%v)", path, got, err)
		}
	}
}

// TestManyReaders reads from many threads at once, at odd places.
func TestManyReaders(t *testing.T) {
	dir, _ := mount(t, &pattern{files: standard})
	f, err := os.Open(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := want(standard[0])
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			buf := make([]byte, 200_001)
			for off := int64(i * 977); off < int64(len(all)); off += 299_993 {
				n, err := f.ReadAt(buf, off)
				if err != nil && err != io.EOF || !bytes.Equal(buf[:n], all[off:][:n]) || n != min(len(buf), len(all)-int(off)) {
					t.Errorf("at %d: %d bytes (%v)", off, n, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestMapping maps a file in another process: who waits for a page in the server's own
// could keep its garbage collector, and so the server, from going on.
func TestMapping(t *testing.T) {
	dir, _ := mount(t, &pattern{files: standard})
	c := exec.Command("/proc/self/exe", filepath.Join(dir, "a"))
	c.Env = append(os.Environ(), "FUSE_TEST=map")
	c.Stderr = os.Stderr
	got, err := c.Output()
	if err != nil || !bytes.Equal(got, want(standard[0])) {
		t.Errorf("other bytes (%v)", err)
	}
}

func writeMapping(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 3<<20, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(bytes.Clone(m))
	return err
}

func TestErrorsReachTheReader(t *testing.T) {
	var give atomic.Pointer[error]
	dir, _ := mount(t, &pattern{files: standard, gate: func(context.Context, fuse.Read) error { return *give.Load() }})
	f, err := os.Open(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, tt := range []struct {
		give error
		want syscall.Errno
	}{
		{errors.New("whatever"), unix.EIO},
		{fmt.Errorf("wrapped: %w", unix.ESTALE), unix.ESTALE},
		{syscall.Errno(600), unix.EIO},
		{nil, 0},
	} {
		give.Store(&tt.give)
		_, err := f.ReadAt(make([]byte, 10), 0)
		if tt.want == 0 && err != nil || tt.want != 0 && !errors.Is(err, tt.want) {
			t.Errorf("%v is %v to the reader", tt.give, err)
		}
	}
}

// TestKilledReader: many reads hang, and nobody else waits for that. Each reader is a process
// that ends when it is killed, since its read is called off.
func TestKilledReader(t *testing.T) {
	const readers = 100
	waiting := make(chan int, readers)
	over := make(chan error, readers)
	dir, _ := mount(t, &pattern{files: standard, gate: func(ctx context.Context, r fuse.Read) error {
		if r.Node != standard[0].Node {
			return nil
		}
		waiting <- r.Pid
		<-ctx.Done()
		over <- context.Cause(ctx)
		return ctx.Err()
	}})
	var all []*exec.Cmd
	for range readers {
		c := exec.Command("head", "-c", "1", filepath.Join(dir, "a"))
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	pids := map[int]bool{}
	for range readers {
		pids[<-waiting] = true
	}
	if got, err := os.ReadFile(filepath.Join(dir, "b")); err != nil || !bytes.Equal(got, want(standard[1])) {
		t.Errorf("beside them: other bytes (%v)", err)
	}
	for _, c := range all {
		if !pids[c.Process.Pid] {
			t.Errorf("no read names process %d", c.Process.Pid)
		}
		if err := c.Process.Kill(); err != nil {
			t.Error(err)
		}
	}
	for _, c := range all {
		c.Wait() //nolint:errcheck // killed
	}
	for range readers {
		if err := <-over; !errors.Is(err, context.Canceled) {
			t.Errorf("a read ended with %v", err)
		}
	}
}

// TestSuccessor kills a serving process with reads in its hand: its successor answers them.
func TestSuccessor(t *testing.T) {
	dir := t.TempDir()
	dev, err := fuse.Mount(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	defer fuse.Unmount(dir) //nolint:errcheck // a second time when all went well
	const readers = 100
	serve := func(mode string) (c *exec.Cmd, asked func()) {
		c = exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), "FUSE_TEST="+mode)
		c.ExtraFiles = []*os.File{dev}
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() }) //nolint:errcheck // dead by then
		if mode == "hang" {
			asked = func() { // it tells of each read that it has got
				if _, err := io.ReadFull(out, make([]byte, readers)); err != nil {
					t.Error(err)
				}
			}
		}
		return c, asked
	}
	c, asked := serve("hang")
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			f, err := os.Open(filepath.Join(dir, "a"))
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			buf := make([]byte, 4096)
			if _, err := f.ReadAt(buf, int64(i)*4096); err != nil {
				t.Errorf("read %d: %v", i, err)
			}
			right := make([]byte, 4096)
			fill(standard[0].Node, int64(i)*4096, right)
			if !bytes.Equal(buf, right) {
				t.Errorf("read %d: other bytes", i)
			}
		})
	}
	asked()
	c.Process.Kill() //nolint:errcheck // it lives
	c.Wait()         //nolint:errcheck // killed
	serve("resend")
	wg.Wait()
	if got, err := os.ReadFile(filepath.Join(dir, "b")); err != nil || !bytes.Equal(got, want(standard[1])) {
		t.Errorf("after that: other bytes (%v)", err)
	}
	if err := fuse.Unmount(dir); err != nil {
		t.Error(err)
	}
}

func TestMain(m *testing.M) {
	mode := os.Getenv("FUSE_TEST")
	if mode == "" {
		os.Exit(m.Run())
	}
	if mode == "map" {
		if err := writeMapping(os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	p := &pattern{files: standard}
	dev := os.NewFile(3, "/dev/fuse")
	if mode == "hang" {
		p.gate = func(context.Context, fuse.Read) error {
			os.Stdout.Write([]byte{1}) //nolint:errcheck
			select {}
		}
	} else if err := fuse.Resend(dev); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fuse.Serve(dev, p, slog.Default()).Wait()
}

func BenchmarkRead4K(b *testing.B) {
	dir, _ := mount(b, &pattern{files: standard})
	f, err := os.Open(filepath.Join(dir, "a"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 4096)
	for b.Loop() {
		if _, err := f.ReadAt(buf, 8192); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for op := range uint32(50) {
		b := make([]byte, 40+64)
		binary.NativeEndian.PutUint32(b, uint32(len(b)))
		binary.NativeEndian.PutUint32(b[4:], op)
		f.Add(b)
		f.Add(b[:40])
	}
	f.Fuzz(func(t *testing.T, b []byte) { fuse.Decode(b) })
}

package depot_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/fuse"
	"github.com/dsec-go/dsec/hold"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/rootfs"
)

// The test program is its own holder and depot: neither may be in a process that reads.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "hold" {
		if err := hold.Serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if dir := os.Getenv("DEPOT_TEST_DIR"); dir != "" {
		if err := serve(dir, os.Getenv("DEPOT_TEST_STORE")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serve(dir, how string) error {
	far, err := blob.OpenFolder(filepath.Join(dir, "store"))
	if err != nil {
		return err
	}
	var s blob.Store = far
	if how == "slow" {
		s = slow{far}
	}
	return depot.Run(context.Background(), depot.Config{
		Dir: filepath.Join(dir, "depot"), Mount: filepath.Join(dir, "mount"), Holder: filepath.Join(dir, "hold"),
		Store: s, Limit: 20 * time.Second, NoteFor: noteFor, Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// noteFor is how long depots of tests note what is read.
const noteFor = 3 * time.Second

// slow answers no question for a part of a blob.
type slow struct{ blob.Store }

func (s slow) Get(ctx context.Context, d blob.Digest, off, n int64) (r io.ReadCloser, err error) {
	if n >= 0 {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	return s.Store.Get(ctx, d, off, n)
}

type rig struct {
	*testing.T
	dir    string
	client *depot.Client
	holder *hold.Client
	files  [][]byte
	tar    []byte
	layer  string
	meta   *image.Manifest
}

const fileSize = 300_000

// newRig makes a layer of n files of noise in a store, and a holder.
func newRig(t *testing.T, n int) *rig {
	t.Helper()
	r := &rig{T: t, dir: t.TempDir()}
	for _, d := range []string{"depot", "hold"} {
		r.must(os.Mkdir(filepath.Join(r.dir, d), 0o700))
	}
	r.client = &depot.Client{Dir: filepath.Join(r.dir, "depot")}
	noise := rand.NewChaCha8([32]byte{1})
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for i := range n {
		b := make([]byte, fileSize)
		noise.Read(b)
		r.files = append(r.files, b)
		r.must(w.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Mode: 0o644, Size: fileSize}))
		_, err := w.Write(b)
		r.must(err)
	}
	r.must(w.Close())
	r.tar = archive.Bytes()
	s, err := blob.OpenFolder(filepath.Join(r.dir, "store"))
	r.must(err)
	l, err := image.New(s, image.LibraryOptions{}).Upload(t.Context(), &archive, image.Options{})
	r.must(err)
	r.layer, r.meta = string(l.Digest), l.Manifest
	r.hold()
	t.Cleanup(func() {
		if h, err := hold.Dial(filepath.Join(r.dir, "hold")); err == nil {
			r.check(h.End())
		}
		r.check(fuse.Unmount(filepath.Join(r.dir, "mount")))
	})
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) check(err error) {
	r.Helper()
	if err != nil {
		r.Error(err)
	}
}

func (r *rig) hold() {
	r.Helper()
	self, err := os.Executable()
	r.must(err)
	r.holder, err = hold.Open(hold.Config{Dir: filepath.Join(r.dir, "hold"), Command: []string{self, "hold"}, Log: os.Stderr})
	r.must(err)
	r.Cleanup(func() { r.holder.Close() })
}

// serve starts a depot and returns how to kill it.
func (r *rig) serve(how string) (kill func()) {
	r.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), "DEPOT_TEST_DIR="+r.dir, "DEPOT_TEST_STORE="+how)
	c.Stderr = os.Stderr
	r.must(c.Start())
	kill = sync.OnceFunc(func() {
		c.Process.Kill() //nolint:errcheck // it may have ended
		c.Wait()         //nolint:errcheck // killed
	})
	r.Cleanup(kill)
	return kill
}

// mount mounts the layer and gives the path of its root for other processes.
func (r *rig) mount() (path string, unmount func()) {
	r.Helper()
	path, unmount, err := r.tryMount()
	r.must(err)
	return path, unmount
}

func (r *rig) tryMount() (path string, unmount func(), err error) {
	r.Helper()
	l, err := r.client.Layer(r.Context(), r.layer, depot.Mount)
	if err != nil {
		return "", nil, err
	}
	m, err := rootfs.MountLayer(rootfs.Layer{Digest: r.layer, Meta: l.Meta, Data: l.Data})
	if err != nil {
		return "", nil, err
	}
	unmount = sync.OnceFunc(func() { rootfs.Unmount(m) }) //nolint:errcheck // the descriptor is all there is
	r.Cleanup(unmount)
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.Fd()), unmount, nil
}

// read has another process read a file.
func (r *rig) read(root string, i int) error {
	c := exec.Command("sha256sum", filepath.Join(root, fmt.Sprint(i)))
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if want := fmt.Sprintf("%x", sha256.Sum256(r.files[i])); !strings.HasPrefix(string(out), want) {
		return fmt.Errorf("file %d has %s, want %s", i, out, want)
	}
	return nil
}

func (r *rig) stats() depot.Stats {
	r.Helper()
	s, err := r.client.Stats(r.Context())
	r.must(err)
	return s
}

// TestKilledWithReadsInHand: a hundred processes read through two mounts when the depot
// is killed, whose store does not answer. They all get the right bytes from the next one.
func TestKilledWithReadsInHand(t *testing.T) {
	const readers = 100
	r := newRig(t, readers)
	kill := r.serve("slow")
	one, _ := r.mount()
	two, _ := r.mount()
	errs := make(chan error, readers)
	for i := range readers {
		go func() { errs <- r.read([]string{one, two}[i%2], i) }()
	}
	for r.stats().Opened < readers/2 { // the others' chunks are on their way for somebody else
		if len(errs) > 0 {
			t.Fatalf("a read ended: %v", <-errs)
		}
		time.Sleep(5 * time.Millisecond)
	}
	kill()
	r.serve("")
	for range readers {
		r.check(<-errs)
	}
	if s := r.stats(); s.Failed != 0 || s.Corrupt != 0 {
		t.Errorf("%+v", s)
	}
}

// TestCorruptStore: a chunk with another byte is an error to who reads it, and counted;
// once the store is mended it is read.
func TestCorruptStore(t *testing.T) {
	r := newRig(t, 4)
	r.serve("")
	root, _ := r.mount()
	s, err := blob.OpenFolder(filepath.Join(r.dir, "store"))
	r.must(err)
	path, err := s.LocalPath(t.Context(), r.meta.Data[0].Digest)
	r.must(err)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	r.must(err)
	defer f.Close()
	flip := func() {
		b := make([]byte, 1)
		_, err := f.ReadAt(b, 2*fileSize+fileSize/2)
		r.must(err)
		b[0] ^= 1
		_, err = f.WriteAt(b, 2*fileSize+fileSize/2)
		r.must(err)
	}
	flip()
	bad := 0
	for i := range r.files {
		if err := r.read(root, i); err != nil {
			if !strings.Contains(err.Error(), "Input/output error") {
				t.Error(err)
			}
			bad++
		}
	}
	if s := r.stats(); bad == 0 || bad > 2 || s.Corrupt == 0 {
		t.Errorf("%d of %d files cannot be read; %+v", bad, len(r.files), s)
	}
	flip()
	for i := range r.files {
		r.check(r.read(root, i))
	}
}

// TestStaleMount: without holder and depot, as after a crash of both, what was mounted is dead.
// The next depot takes it away and makes another.
func TestStaleMount(t *testing.T) {
	r := newRig(t, 2)
	kill := r.serve("")
	root, unmount := r.mount()
	r.check(r.read(root, 0))
	if err := unix.Kill(r.holder.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.holder.Gone()
	kill()
	if _, err := os.Stat(filepath.Join(r.dir, "mount", "x")); err == nil {
		t.Fatal("unreachable")
	}
	unmount()
	r.hold()
	r.serve("")
	root, _ = r.mount()
	for i := range r.files {
		r.check(r.read(root, i))
	}
}

// TestOneOfTwoWaysGoes: two layers have the same bytes, one plain and one packed, and the first is
// deleted while both are mounted. What nobody had read yet comes from the other.
func TestOneOfTwoWaysGoes(t *testing.T) {
	r := newRig(t, 4)
	elsewhere, err := blob.OpenFolder(filepath.Join(r.dir, "elsewhere"))
	r.must(err)
	packed, err := image.New(elsewhere, image.LibraryOptions{Pack: image.Zstd}).Upload(t.Context(), bytes.NewReader(r.tar), image.Options{})
	r.must(err)
	store, err := blob.OpenFolder(filepath.Join(r.dir, "store"))
	r.must(err)
	for info, err := range elsewhere.List(t.Context()) {
		r.must(err)
		b, err := blob.ReadAll(t.Context(), elsewhere, info.Digest)
		r.must(err)
		_, err = blob.PutBytes(t.Context(), store, b)
		r.must(err)
	}
	plain := r.meta.Data[0]
	if len(packed.Manifest.Data) != 1 || packed.Manifest.Data[0].Digest != plain.Digest || packed.Manifest.Data[0].Packed == nil {
		t.Fatalf("%+v and %+v", plain, packed.Manifest.Data)
	}
	kill := r.serve("")
	one, _ := r.mount()
	r.check(r.read(one, 0))
	r.layer = string(packed.Digest)
	two, _ := r.mount()
	r.must(store.Delete(t.Context(), plain.Digest))
	r.must(store.Delete(t.Context(), plain.Chunks.Digest))
	r.check(r.read(two, 1))
	r.check(r.read(one, 2))
	// A successor has no chunk table yet, and finds none of the first.
	kill()
	r.serve("")
	r.check(r.read(two, 3))
	if s := r.stats(); s.Corrupt != 0 {
		t.Errorf("%+v", s)
	}
}

// TestCompleteLayerIsPlain: what is here whole is told as plain files to a mount, and by its
// FUSE path to who opens it again; both have the same bytes.
func TestCompleteLayerIsPlain(t *testing.T) {
	r := newRig(t, 3)
	r.serve("")
	root, _ := r.mount()
	for i := range r.files {
		r.check(r.read(root, i))
	}
	plain, err := r.client.Layer(t.Context(), r.layer, depot.Mount)
	r.must(err)
	again, err := r.client.Layer(t.Context(), r.layer, depot.Files)
	r.must(err)
	if plain.Lazy || !again.Lazy || strings.HasPrefix(plain.Data[0], filepath.Join(r.dir, "mount")) {
		t.Errorf("to mount %+v, to open again %+v", plain, again)
	}
	opened := r.stats().Opened
	root, _ = r.mount()
	for i := range r.files {
		r.check(r.read(root, i))
	}
	if got := r.stats().Opened; got != opened {
		t.Errorf("%d reads of a plain file went through FUSE", got-opened)
	}
	if out, err := exec.Command("cmp", plain.Data[0], again.Data[0]).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if n, err := r.client.Cached(t.Context(), []string{r.layer}); err != nil || n[r.layer] != r.meta.Data[0].Size {
		t.Errorf("cached %v (%v)", n, err)
	}
	_, gone, err := r.client.Watch(t.Context())
	r.must(err)
	r.must(r.client.End(t.Context()))
	<-gone
	if there, err := fuse.Mounted(filepath.Join(r.dir, "mount")); err != nil || there {
		t.Errorf("still mounted (%v)", err)
	}
}

// TestProfile: what one depot saw of a layer the next one brings at once, as pages and nothing
// around them; a pack that is damaged or gone costs nobody his bytes.
func TestProfile(t *testing.T) {
	r := newRig(t, 12)
	r.serve("")
	root, unmount := r.mount()
	want := []int{7, 2, 9}
	for _, i := range want {
		r.check(r.read(root, i))
	}
	ctx := t.Context()
	if b, err := r.client.Profile(ctx, r.layer); err != nil || b != nil {
		t.Errorf("at once: %d bytes, %v", len(b), err)
	}
	time.Sleep(noteFor)
	r.check(r.read(root, 4)) // too late to be noted
	profile, err := r.client.Profile(ctx, r.layer)
	r.must(err)
	pack, err := depot.PackOf(profile)
	r.must(err)
	store, err := blob.OpenFolder(filepath.Join(r.dir, "store"))
	r.must(err)
	packed, err := blob.ReadAll(ctx, store, pack)
	r.must(err)
	if n := len(packed); n < len(want)*fileSize || n > len(want)*(fileSize+2*4096) {
		t.Errorf("%d files of %d bytes are %d bytes of pages", len(want), fileSize, n)
	}
	again := func() {
		t.Helper()
		unmount()
		_, gone, err := r.client.Watch(ctx)
		r.must(err)
		r.must(r.client.End(ctx))
		<-gone
		r.must(os.RemoveAll(filepath.Join(r.dir, "depot", "parts")))
		r.serve("")
		for until := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			if root, unmount, err = r.tryMount(); err == nil || time.Now().After(until) {
				break
			}
		}
		r.must(err)
	}
	again()
	r.must(r.client.Prefetch(ctx, r.layer, profile))
	for _, i := range want {
		r.check(r.read(root, i))
	}
	if s := r.stats(); s.Misses != 0 || s.Fetched != int64(len(packed)) {
		t.Errorf("%d chunks were fetched, %d bytes in all; the pack has %d", s.Misses, s.Fetched, len(packed))
	}
	for i := range r.files {
		r.check(r.read(root, i))
	}
	if err := r.client.Prefetch(ctx, r.layer, []byte("{}")); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("nonsense: %v", err)
	}
	// Damaged in the middle, then gone.
	path, err := store.LocalPath(ctx, pack)
	r.must(err)
	packed[len(packed)/2] ^= 1
	for _, do := range []func() error{
		func() error { return errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, packed, 0o600)) },
		func() error { return os.Remove(path) },
	} {
		r.must(do())
		again()
		r.must(r.client.Prefetch(ctx, r.layer, profile))
		for i := range r.files {
			r.check(r.read(root, i))
		}
		if s := r.stats(); s.Misses == 0 {
			t.Error("all came from a pack that is damaged or gone")
		}
	}
}

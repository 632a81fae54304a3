package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// victimEnv makes this test program do one action in a folder and die of SIGKILL
// on the way: "action number folder". Numbers count the named points of the library
// and the steps of its store.
const victimEnv = "DSEC_TEST_VICTIM"

// victim runs the action if this process is one, and does not return then.
func victim() {
	var action, dir string
	var n int64
	if _, err := fmt.Sscan(os.Getenv(victimEnv), &action, &n, &dir); err != nil {
		return
	}
	made, err := act(action, dir, n)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Print(made)
	os.Exit(0)
}

// A mortal store counts its steps, and the process does not live past the last.
type mortal struct {
	*blob.Folder
	left *atomic.Int64
}

func (m mortal) step() {
	if m.left.Add(-1) == 0 {
		syscall.Kill(os.Getpid(), syscall.SIGKILL) //nolint:errcheck // or the test fails
		select {}
	}
}

func (m mortal) Stage(ctx context.Context) (blob.Staged, error) {
	m.step()
	s, err := m.Folder.Stage(ctx)
	return &mortalStaged{Staged: s, m: m}, err
}

func (m mortal) DeleteIdle(ctx context.Context, d blob.Digest, age time.Duration) (bool, error) {
	m.step()
	defer m.step()
	return m.Folder.DeleteIdle(ctx, d, age)
}

type mortalStaged struct {
	blob.Staged
	m       mortal
	written bool
}

func (s *mortalStaged) Write(p []byte) (int, error) {
	n, err := s.Staged.Write(p)
	if !s.written {
		s.written = true
		s.m.step()
	}
	return n, err
}

func (s *mortalStaged) Commit(ctx context.Context) (blob.Info, error) {
	s.m.step()
	defer s.m.step()
	return s.Staged.Commit(ctx)
}

// act does one action, and dies at the nth step; 0 is never. It gives the layer that
// was made.
func act(action, dir string, n int64) (made blob.Digest, err error) {
	store, err := blob.OpenFolder(filepath.Join(dir, "blobs"))
	if err != nil {
		return "", err
	}
	m := mortal{store, new(atomic.Int64)}
	m.left.Store(n)
	opts := image.LibraryOptions{
		Pack: image.Zstd, Index: filepath.Join(dir, "index"), Temp: filepath.Join(dir, "temp"), MergeBelow: 1,
	}
	if action == "race" {
		opts.Index = "" // nodes that know the same make the same; these know nothing
	}
	lib := image.New(m, opts)
	defer lib.Close()
	image.AtPoint(lib, func(string) { m.step() })
	ctx := context.Background()
	read := func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(dir, name)) }
	switch action {
	case "import", "race":
		b, err := read("image.tar")
		if err != nil {
			return "", err
		}
		l, err := lib.Upload(ctx, bytes.NewReader(b), image.Options{})
		return l.Digest, err
	case "commit":
		base, err := read("base")
		if err != nil {
			return "", err
		}
		upper, err := os.Open(filepath.Join(dir, "upper"))
		if err != nil {
			return "", err
		}
		defer upper.Close()
		l, err := lib.Commit(ctx, image.CommitSource{Upper: upper, Over: blob.Digest(base)})
		return l.Digest, err
	case "collect":
		base, err := read("base")
		if err != nil {
			return "", err
		}
		_, err = lib.Collect(ctx, []blob.Digest{blob.Digest(base)}, image.CollectOptions{Now: time.Now().Add(2 * time.Hour)})
		return "", err
	}
	return "", fmt.Errorf("no action %q", action)
}

// TestKill has a process die at each step of each action. Afterwards nothing is half
// there and nothing is lost, and the action can be done again.
func TestKill(t *testing.T) {
	for _, action := range []string{"import", "commit", "collect"} {
		t.Run(action, func(t *testing.T) {
			want := blob.Digest("")
			steps := 0
			for n := 1; ; n++ {
				dir, base := scene(t, action)
				made, died := run(t, action, n, dir)
				want = aftermath(t, action, dir, base, want, made)
				if t.Failed() {
					t.Fatalf("after a death at step %d", n)
				}
				if !died {
					break
				}
				steps++
			}
			t.Logf("%d steps", steps)
			if steps < 8 {
				t.Errorf("only %d steps", steps)
			}
		})
	}
}

// scene makes a folder with all that an action needs.
func scene(t *testing.T, action string) (dir string, base image.Layer) {
	t.Helper()
	dir = memoryDir(t)
	for _, d := range []string{"temp", "upper", "index"} {
		must(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	store, err := blob.OpenFolder(filepath.Join(dir, "blobs"))
	must(t, err)
	lib := image.New(store, image.LibraryOptions{Pack: image.Zstd, Index: filepath.Join(dir, "index")})
	defer lib.Close()
	base = upload(t, lib, edition(t, 20, "base"), dsec.Workspace)
	must(t, os.WriteFile(filepath.Join(dir, "base"), []byte(base.Digest), 0o600))
	switch action {
	case "import", "race":
		p := packed(t, host, []compress{gz}, edition(t, 20, "next", 4), tarOf(t, entry{name: "top", body: pattern("top", 5000)}))
		must(t, os.WriteFile(filepath.Join(dir, "image.tar"), p.layoutTar(t), 0o600))
	case "commit":
		must(t, os.WriteFile(filepath.Join(dir, "upper/new"), pattern("new", 9000), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "upper/old"), pattern("5", 1000+5*337), 0o644))
		must(t, os.Chtimes(filepath.Join(dir, "upper/new"), time.Unix(1, 0), time.Unix(1, 0)))
		must(t, os.Chtimes(filepath.Join(dir, "upper/old"), time.Unix(1, 0), time.Unix(1, 0)))
		must(t, os.Chtimes(filepath.Join(dir, "upper"), time.Unix(1, 0), time.Unix(1, 0)))
	case "collect":
		upload(t, lib, edition(t, 20, "gone", 1, 2, 3), dsec.Base)
	}
	return dir, base
}

// memoryDir is a folder that needs no sync: what a dead process has done counts, not
// what a power cut leaves.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dsec-image-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// run has a process of its own do an action and die at a step.
func run(t *testing.T, action string, n int, dir string) (made blob.Digest, died bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+action+" "+strconv.Itoa(n)+" "+dir)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err == nil {
		return blob.Digest(stdout.String()), false
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("%s: %v\n%s", action, err, stderr.Bytes())
	}
	return "", true
}

// aftermath looks at what a process left, and does its action again.
func aftermath(t *testing.T, action, dir string, base image.Layer, want, made blob.Digest) blob.Digest {
	t.Helper()
	store, err := blob.OpenFolder(filepath.Join(dir, "blobs")) // as the next process does
	must(t, err)
	for _, d := range []string{"blobs/staging", "temp"} {
		if es, err := os.ReadDir(filepath.Join(dir, d)); err != nil || len(es) != 0 {
			t.Errorf("%d files are left in %s, %v", len(es), d, err)
		}
	}
	wholeStore(t, store)
	copies, err := blob.OpenFolder(filepath.Join(memoryDir(t), "plain"))
	must(t, err)
	lib := image.New(store, image.LibraryOptions{Pack: image.Zstd, Plain: copies})
	if _, err := lib.Open(t.Context(), base.Digest); err != nil {
		t.Errorf("a layer that was there: %v", err)
	}
	if made == "" {
		made, err = act(action, dir, 0)
		must(t, err)
	}
	roots := []blob.Digest{base.Digest}
	if action != "collect" {
		if want == "" {
			want = made
		}
		if made != want {
			t.Errorf("made %s, at other times %s", made, want)
		}
		if _, err := lib.Open(t.Context(), made); err != nil {
			t.Errorf("what was made: %v", err)
		}
		roots = append(roots, made)
	}
	wholeStore(t, store)
	// Nothing is left over but what layers have.
	_, err = lib.Collect(t.Context(), roots, image.CollectOptions{Now: time.Now().Add(2 * time.Hour)})
	must(t, err)
	keep := map[string]bool{}
	for _, d := range roots {
		l, err := lib.Stat(t.Context(), d)
		must(t, err)
		keep[string(d)] = true
		for _, p := range l.Manifest.Parts() {
			keep[string(p.Digest)] = true
		}
	}
	if b := blobs(t, store); len(b) != len(keep) {
		t.Errorf("%d blobs, layers have %d", len(b), len(keep))
	}
	return want
}

// wholeStore checks that every blob is what its name says, and that what a manifest
// names is there.
func wholeStore(t *testing.T, store *blob.Folder) {
	t.Helper()
	for info, err := range store.List(t.Context()) {
		must(t, err)
		b, err := blob.ReadAll(t.Context(), store, info.Digest)
		if err != nil {
			t.Errorf("visible blob: %v", err)
			continue
		}
		m, err := image.ParseManifest(b)
		if err != nil {
			continue
		}
		for _, p := range m.Parts() {
			if got, err := store.Stat(t.Context(), p.Digest); err != nil || got.Size != p.Size {
				t.Errorf("layer %s is visible without its part %s: %v", info.Digest, p.Digest, err)
			}
		}
	}
}

// TestImportAtOnce has several processes import the same image into one store. Some
// die on the way.
func TestImportAtOnce(t *testing.T) {
	dir, base := scene(t, "race")
	type result struct {
		made blob.Digest
		died bool
	}
	results := make(chan result)
	const processes = 6
	for i := range processes {
		go func() {
			made, died := run(t, "race", i%2*(10+3*i), dir)
			results <- result{made, died}
		}()
	}
	var made blob.Digest
	for range processes {
		switch r := <-results; {
		case r.died:
		case made == "":
			made = r.made
		case r.made != made:
			t.Errorf("one process made %s, another %s", made, r.made)
		}
	}
	aftermath(t, "race", dir, base, made, made)
}

// TestStoreFull imports into a file system that is too small, as it really fails.
func TestStoreFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("image-test", dir, "tmpfs", 0, "size=3m"); err != nil {
		t.Skipf("feature mount (tmpfs, needs root): %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	store, err := blob.OpenFolder(filepath.Join(dir, "blobs"))
	must(t, err)
	lib := image.New(store, image.LibraryOptions{Index: filepath.Join(dir, "index"), Temp: t.TempDir()})
	defer lib.Close()
	small := upload(t, lib, edition(t, 30, "small"), dsec.Base)
	before := blobs(t, store)
	large := tarOf(t, entry{name: "large", body: pattern("large", 4<<20)})
	_, err = lib.Upload(t.Context(), bytes.NewReader(large), image.Options{})
	if dsec.KindOf(err) != dsec.Exhausted || !errors.Is(err, blob.ErrFull) {
		t.Errorf("import: %v, want Exhausted", err)
	}
	upper := t.TempDir()
	must(t, os.WriteFile(filepath.Join(upper, "large"), pattern("large", 4<<20), 0o644))
	f, err := os.Open(upper)
	must(t, err)
	defer f.Close()
	if _, err := lib.Commit(t.Context(), image.CommitSource{Upper: f}); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("commit: %v, want Exhausted", err)
	}
	if after := blobs(t, store); !slices.Equal(before, after) {
		t.Errorf("before %v\nafter %v", before, after)
	}
	if es, err := os.ReadDir(filepath.Join(dir, "blobs/staging")); err != nil || len(es) != 0 {
		t.Errorf("%d files are left, %v", len(es), err)
	}
	wholeStore(t, store)
	if _, err := lib.Stat(t.Context(), small.Digest); err != nil {
		t.Error(err)
	}
	// Once there is room it goes on as if nothing had been.
	must(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=32m"))
	upload(t, lib, large, dsec.Base)
	wholeStore(t, store)
}

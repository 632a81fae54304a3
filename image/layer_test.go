package image_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
)

// change mounts lowers, the uppermost first, with an upper folder, and calls f.
func change(t *testing.T, lowers []string, f func(root string)) *os.File {
	t.Helper()
	dir := t.TempDir()
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	must(t, os.Mkdir(upper, 0o755))
	must(t, os.Mkdir(work, 0o755))
	overlay(t, lowers, f, upper, work)
	d, err := os.Open(upper)
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// overlay calls f with an overlay, detached and gone after the call.
func overlay(t *testing.T, lowers []string, f func(root string), upper ...string) {
	t.Helper()
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	must(t, err)
	defer unix.Close(fs)
	for _, l := range lowers {
		fd, err := unix.Open(l, unix.O_PATH|unix.O_CLOEXEC, 0)
		must(t, err)
		err = unix.FsconfigSetFd(fs, "lowerdir+", fd)
		unix.Close(fd)
		must(t, err)
	}
	if len(upper) == 2 {
		must(t, unix.FsconfigSetString(fs, "upperdir", upper[0]))
		must(t, unix.FsconfigSetString(fs, "workdir", upper[1]))
	}
	must(t, unix.FsconfigCreate(fs))
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	f(fmt.Sprintf("/proc/self/fd/%d", fd))
}

func TestCommit(t *testing.T) {
	lib, store := newLibrary(t)
	base, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, append(system(), entry{name: "old/"}, entry{name: "old/a", body: []byte("1")})...)), image.Options{})
	must(t, err)
	b := mounted(t, lib, base)
	upper := change(t, []string{b}, func(root string) {
		must(t, os.RemoveAll(root+"/old"))
		must(t, os.Mkdir(root+"/old", 0o700))
		must(t, os.WriteFile(root+"/old/new", pattern("new", 300000), 0o600))
		must(t, os.Remove(root+"/bin/ash"))
		must(t, os.Chown(root+"/etc/passwd", 12, 34))
	})
	config := image.Config{Cwd: "/work"}
	one, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper, Config: config})
	must(t, err)
	if one.Manifest.Role != dsec.Workspace || one.Manifest.Config.Cwd != "/work" {
		t.Errorf("role %s, config %v", one.Manifest.Role, one.Manifest.Config)
	}
	again, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper, Config: config})
	must(t, err)
	if again.Digest != one.Digest {
		t.Error("a second commit of the same folder is another layer")
	}
	m1 := mounted(t, lib, one)
	overlay(t, []string{m1, b}, func(root string) {
		if _, err := os.Lstat(root + "/old/a"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("what was deleted is back: %v", err)
		}
		if got, err := os.ReadFile(root + "/old/new"); err != nil || !bytes.Equal(got, pattern("new", 300000)) {
			t.Errorf("new file has %d bytes, %v", len(got), err)
		}
	})

	// A second session on top; its commit stands in for both.
	upper2 := change(t, []string{m1, b}, func(root string) {
		must(t, os.WriteFile(root+"/old/newer", []byte("2"), 0o644))
		must(t, os.RemoveAll(root+"/home"))
		must(t, os.Remove(root+"/etc/passwd"))
	})
	before := len(blobs(t, store))
	two, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper2, Over: one.Digest})
	must(t, err)
	if d := two.Manifest.Data; len(d) != 2 || d[0].Part != one.Manifest.Data[0].Part && d[1].Part != one.Manifest.Data[0].Part {
		t.Errorf("data %v does not point into the older blob %v", two.Manifest.Data, one.Manifest.Data)
	}
	if n := len(blobs(t, store)); n != before+5 {
		t.Errorf("%d new blobs, want data, chunk table, pieces, metadata, manifest", n-before)
	}
	delta, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper2})
	must(t, err)
	var want, got map[string]string
	overlay(t, []string{mounted(t, lib, delta), m1, b}, func(root string) { want = describe(t, root) })
	overlay(t, []string{mounted(t, lib, two), b}, func(root string) { got = describe(t, root) })
	same(t, got, want)

	if _, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper, Over: blob.Of(nil)}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("over a layer that is not there: %v", err)
	}
}

// TestCommitShifted commits as a user namespace's overlay leaves its files.
func TestCommitShifted(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/f", []byte("x"), 0o600))
	must(t, os.Lchown(dir+"/f", 101000, 100007))
	must(t, os.Lchown(dir, 100000, 100000))
	d, err := os.Open(dir)
	must(t, err)
	defer d.Close()
	lib, _ := newLibrary(t)
	l, err := lib.Commit(t.Context(), image.CommitSource{Upper: d, IDs: erofs.IDRange{Base: 100000, Count: 65536}})
	must(t, err)
	got := describe(t, mounted(t, lib, l))
	if !strings.Contains(got["f"], " 1000:7 ") || !strings.Contains(got[""], " 0:0 ") {
		t.Errorf("got %v", got)
	}
}

func TestOpenChecks(t *testing.T) {
	lib, store := newLibrary(t)
	l, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
	must(t, err)
	parts := []blob.Digest{l.Digest, l.Manifest.Meta.Digest, l.Manifest.Data[0].Digest}
	for _, d := range parts {
		path, err := store.LocalPath(t.Context(), d)
		must(t, err)
		whole, err := os.ReadFile(path)
		must(t, err)
		for what, content := range map[string][]byte{"altered": damaged(whole, len(whole)/2), "cut": whole[:len(whole)/2], "gone": nil} {
			// Another library: another node, or this one after a restart.
			lib := image.New(store, image.LibraryOptions{})
			if d == l.Digest && what == "gone" {
				continue
			}
			must(t, os.Remove(path))
			if content != nil {
				must(t, os.WriteFile(path, content, 0o600))
			}
			_, err := lib.Open(t.Context(), l.Digest)
			if !errors.Is(err, image.ErrCorrupt) || !strings.Contains(err.Error(), string(d)) {
				t.Errorf("%s %s: %v, want ErrCorrupt naming it", d, what, err)
			}
			// An import of the same content repairs what can be seen to be
			// broken without reading it.
			if what != "altered" {
				_, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
				must(t, err)
				if _, err := lib.Open(t.Context(), l.Digest); err != nil {
					t.Errorf("%s %s and imported again: %v", d, what, err)
				}
			}
			os.Remove(path)
			must(t, os.WriteFile(path, whole, 0o600))
			if _, err := lib.Open(t.Context(), l.Digest); err != nil {
				t.Errorf("restored: %v", err)
			}
		}
	}
	if _, err := lib.Open(t.Context(), blob.Of([]byte("no layer"))); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("no such layer: %v", err)
	}
	if _, err := lib.Open(t.Context(), "sha256:../../etc/passwd"); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("no digest: %v", err)
	}
	if _, err := lib.Open(t.Context(), l.Manifest.Meta.Digest); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("a blob that is no manifest: %v", err)
	}
}

// TestImportIsTrusted tells, as TestOpenReadsOnce does, that the first Open after
// an import reads nothing, nor one after the same import again.
func TestImportIsTrusted(t *testing.T) {
	lib, store := newLibrary(t)
	archive := tarOf(t, system()...)
	for range 2 {
		l, err := lib.Upload(t.Context(), bytes.NewReader(archive), image.Options{})
		must(t, err)
		path, err := store.LocalPath(t.Context(), l.Manifest.Data[0].Digest)
		must(t, err)
		st, err := os.Stat(path)
		must(t, err)
		must(t, os.Chmod(path, 0o600))
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		must(t, err)
		_, err = f.WriteAt([]byte("?"), 5000)
		must(t, err)
		must(t, f.Close())
		must(t, os.Chtimes(path, time.Time{}, st.ModTime()))
		if _, err := lib.Open(t.Context(), l.Digest); err != nil {
			t.Errorf("the file was read: %v", err)
		}
	}
}

// TestOpenReadsOnce tells by what is not noticed that a checked file is not
// read again: a change that leaves all of its stat as it was.
func TestOpenReadsOnce(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	opts := image.LibraryOptions{Verified: filepath.Join(t.TempDir(), "marks")}
	lib := image.New(store, opts)
	l, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
	must(t, err)
	_, err = lib.Open(t.Context(), l.Digest)
	must(t, err)
	path, err := store.LocalPath(t.Context(), l.Manifest.Data[0].Digest)
	must(t, err)
	st, err := os.Stat(path)
	must(t, err)
	must(t, os.Chmod(path, 0o600))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("?"), 5000)
	must(t, err)
	must(t, f.Close())
	must(t, os.Chtimes(path, time.Time{}, st.ModTime()))
	for name, lib := range map[string]*image.Library{"same process": lib, "after a restart": image.New(store, opts)} {
		if _, err := lib.Open(t.Context(), l.Digest); err != nil {
			t.Errorf("%s: the file was read again: %v", name, err)
		}
	}
	must(t, os.Chtimes(path, time.Time{}, st.ModTime().Add(1)))
	if _, err := lib.Open(t.Context(), l.Digest); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("a file that was touched was not checked again: %v", err)
	}
}

func TestOpenFromMemory(t *testing.T) {
	var store blob.Memory
	lib := image.New(&store, image.LibraryOptions{})
	l, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
	must(t, err)
	if _, err := lib.Open(t.Context(), l.Digest); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("got %v, want Unsupported", err)
	}
	// A cache in front makes it possible.
	fast, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib = image.New(blob.NewCached(fast, &store, blob.CacheOptions{}), image.LibraryOptions{})
	if got := describe(t, mounted(t, lib, l)); got["bin/sh"] == "" {
		t.Errorf("got %v", got)
	}
}

func TestOpenTogether(t *testing.T) {
	lib, _ := newLibrary(t)
	l, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
	must(t, err)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := lib.Open(t.Context(), l.Digest); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := image.New(nil, image.LibraryOptions{}).Upload(ctx, neverEnding{}, image.Options{}); err == nil {
		t.Error("upload into nothing worked")
	}
}

func TestCollect(t *testing.T) {
	lib, store := newLibrary(t)
	kept, err := lib.Import(t.Context(), three(t, host).layoutDir(t), image.Options{})
	must(t, err)
	need := blobs(t, store)
	_, err = lib.Upload(t.Context(), bytes.NewReader(tarOf(t, append(system(), entry{name: "more", body: pattern("more", 10000)})...)), image.Options{})
	must(t, err)
	all := blobs(t, store)
	roots := []blob.Digest{kept.Digest, blob.Of([]byte("a name whose layer is gone"))}

	done, err := lib.Collect(t.Context(), roots, image.CollectOptions{})
	must(t, err)
	if got := blobs(t, store); done.Blobs != 0 || len(got) != len(all) {
		t.Errorf("%d young blobs were deleted", done.Blobs)
	}
	later := image.CollectOptions{Now: time.Now().Add(2 * time.Hour)}
	done, err = lib.Collect(t.Context(), roots, later)
	must(t, err)
	if got := blobs(t, store); !slices.Equal(got, need) || done.Blobs != len(all)-len(need) || done.Bytes == 0 {
		t.Errorf("collected %+v of %d blobs, %d left, want %d", done, len(all), len(got), len(need))
	}
	_, err = lib.Open(t.Context(), kept.Digest)
	must(t, err)

	// A root that cannot be read is no reason to delete what it needs.
	path, err := store.LocalPath(t.Context(), kept.Digest)
	must(t, err)
	whole, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, damaged(whole, 20), 0o600))
	if _, err := lib.Collect(t.Context(), roots, later); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("damaged root: %v", err)
	}
	if got := blobs(t, store); len(got) != len(need) {
		t.Errorf("%d blobs left, want %d", len(got), len(need))
	}
	if _, err := lib.Collect(t.Context(), nil, later); err != nil || len(blobs(t, store)) != 0 {
		t.Errorf("without roots %d blobs stay, %v", len(blobs(t, store)), err)
	}
}

func TestCollectKeepsOtherBlobs(t *testing.T) {
	lib, store := newLibrary(t)
	kept, err := blob.PutBytes(t.Context(), store, []byte("a profile"))
	must(t, err)
	gone, err := blob.PutBytes(t.Context(), store, []byte("an old profile"))
	must(t, err)
	_, err = lib.Collect(t.Context(), nil, image.CollectOptions{MinAge: 1, Now: time.Now().Add(time.Hour), Keep: []blob.Digest{kept}})
	must(t, err)
	if got := blobs(t, store); len(got) != 1 || got[0] != string(kept) {
		t.Errorf("%v are left, want %s and not %s", got, kept, gone)
	}
}

// TestCollectMemory has no file times to go by.
func TestCollectMemory(t *testing.T) {
	var store blob.Memory
	made := image.New(&store, image.LibraryOptions{})
	_, err := made.Upload(t.Context(), bytes.NewReader(tarOf(t, system()...)), image.Options{})
	must(t, err)
	lib := image.New(&store, image.LibraryOptions{})
	now := time.Now()
	for i, c := range []struct {
		after time.Duration
		left  int
	}{{0, 5}, {30 * time.Minute, 5}, {time.Hour, 0}} {
		_, err := lib.Collect(t.Context(), nil, image.CollectOptions{Now: now.Add(c.after)})
		must(t, err)
		if got := len(blobs(t, &store)); got != c.left {
			t.Errorf("collection %d: %d blobs left, want %d", i, got, c.left)
		}
	}
}

// TestCollectAndImport runs collections that may delete everything at once
// beside imports of the same layer: what an import returns must be there.
func TestCollectAndImport(t *testing.T) {
	lib, store := newLibrary(t)
	archive := tarOf(t, entry{name: "a", body: pattern("a", 100000)})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if _, err := lib.Collect(ctx, nil, image.CollectOptions{}); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	for range 50 {
		l, err := lib.Upload(t.Context(), bytes.NewReader(archive), image.Options{})
		must(t, err)
		// Age what is there, as if it had lain idle for long, and import it
		// anew: finding it makes it young again.
		for _, d := range blobs(t, store) {
			if p, err := store.LocalPath(t.Context(), blob.Digest(d)); err == nil {
				os.Chtimes(p, time.Time{}, time.Unix(1, 0))
			}
		}
		if _, err := lib.Open(t.Context(), l.Digest); err != nil {
			t.Fatalf("layer just made: %v", err)
		}
	}
	cancel()
	wg.Wait()
}

func FuzzParseManifest(f *testing.F) {
	d := blob.Of(nil)
	m := image.Manifest{Format: "dsec-layer", Version: 1, Role: dsec.Base, Meta: image.Part{Digest: d, Size: 4096},
		Data: []image.Data{{Part: image.Part{Digest: d, Size: 8192}, Chunks: image.Part{Digest: d, Size: 32}}}, Entries: 1}
	b, err := json.Marshal(m)
	must(f, err)
	if _, err := image.ParseManifest(b); err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	m.Version = 2
	m.Content, m.Data[0].Packed, m.Data[0].Pieces = d, &image.Part{Digest: d, Size: 3}, &image.Part{Digest: d, Size: 34}
	m.Data[0].Chunks.Size = 40
	b, err = json.Marshal(m)
	must(f, err)
	if _, err := image.ParseManifest(b); err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	m.Version = 1
	if b, err = json.Marshal(m); err != nil {
		f.Fatal(err)
	}
	if _, err := image.ParseManifest(b); err == nil {
		f.Error("version 1 with what version 2 brought")
	}
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := image.ParseManifest(b)
		if err != nil {
			if !errors.Is(err, image.ErrCorrupt) && dsec.KindOf(err) != dsec.Unsupported {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		if n := len(m.Parts()); m.Stored() < 0 || n < 1+2*len(m.Data) || n > 1+3*len(m.Data) {
			t.Errorf("accepted %s", b)
		}
	})
}

// FuzzUpload imports anything; the store must stay empty if it fails.
func FuzzUpload(f *testing.F) {
	p := packed(f, host, []compress{gz}, tarOf(f, entry{name: "a", body: []byte("1")}))
	f.Add(p.layoutTar(f))
	f.Add(p.dockerTar(f))
	f.Add(tarOf(f, entry{name: "a", body: []byte("1")}))
	f.Add(zst(f, tarOf(f, entry{name: "a/.wh.b"})))
	f.Fuzz(func(t *testing.T, b []byte) {
		var store blob.Memory
		_, err := image.New(&store, image.LibraryOptions{}).Upload(t.Context(), bytes.NewReader(b), image.Options{MaxBytes: 1 << 24})
		if err == nil {
			return
		}
		if dsec.KindOf(err) == dsec.Internal {
			t.Errorf("untyped error: %v", err)
		}
		if n := len(blobs(t, &store)); n != 0 {
			t.Errorf("%d blobs left after %v", n, err)
		}
	})
}

package image_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// An edition is a tar of n files, of which those named are different in this
// edition.
func edition(t testing.TB, n int, name string, changed ...int) []byte {
	t.Helper()
	es := []entry{{name: "./"}}
	for i := range n {
		seed := fmt.Sprint(i)
		for _, c := range changed {
			if c == i {
				seed = fmt.Sprint(name, i)
			}
		}
		es = append(es, entry{name: fmt.Sprintf("d%d/f%d", i%7, i), body: pattern(seed, 1000+i*337%20000)})
	}
	return tarOf(t, append(es, entry{name: "name", body: []byte(name)})...)
}

func withIndex(t testing.TB, store blob.Store, dir string, pack image.Packing) *image.Library {
	t.Helper()
	lib := image.New(store, image.LibraryOptions{Index: dir, Pack: pack, Temp: t.TempDir()})
	t.Cleanup(lib.Close)
	return lib
}

func upload(t testing.TB, lib *image.Library, b []byte, role dsec.Role) image.Layer {
	t.Helper()
	l, err := lib.Upload(t.Context(), bytes.NewReader(b), image.Options{Role: role})
	must(t, err)
	return l
}

// check compares a layer with what tar makes of the same archive, by its files.
func checkFiles(t *testing.T, lib *image.Library, l image.Layer, archive []byte) {
	t.Helper()
	plain, _ := newLibrary(t)
	same(t, describe(t, mounted(t, lib, l)), describe(t, mounted(t, plain, upload(t, plain, archive, l.Manifest.Role))))
}

// newBytes is what a layer stores that no other of those does.
func newBytes(l image.Layer, others ...image.Layer) int64 {
	n := int64(0)
	for _, d := range l.Manifest.Data {
		old := false
		for _, o := range others {
			for _, od := range o.Manifest.Data {
				old = old || od.Digest == d.Digest
			}
		}
		if !old {
			n += d.Size
		}
	}
	return n
}

func TestEqualFilesAreStoredOnce(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := withIndex(t, store, t.TempDir(), image.None)
	one := upload(t, lib, edition(t, 200, "one"), dsec.Base)
	// In another role, in another archive: an edition with a few new files.
	second := edition(t, 200, "two", 3, 77, 150)
	two := upload(t, lib, second, dsec.Toolkit)
	if n := newBytes(two, one); n > 80000 || n == 0 || len(two.Manifest.Data) != 2 {
		t.Errorf("%d new bytes in %+v", n, two.Manifest.Data)
	}
	checkFiles(t, lib, two, second)
	third := edition(t, 200, "three", 3, 150)
	three := upload(t, lib, third, dsec.Workspace)
	if n := newBytes(three, one, two); n > 80000 {
		t.Errorf("%d new bytes in %+v", n, three.Manifest.Data)
	}
	checkFiles(t, lib, three, third)

	// What others point into is kept when its own layer is gone.
	_, err = lib.Collect(t.Context(), []blob.Digest{three.Digest}, image.CollectOptions{MinAge: 1})
	must(t, err)
	if _, err := lib.Stat(t.Context(), one.Digest); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("first layer: %v", err)
	}
	checkFiles(t, lib, three, third)
}

// The same input is the same layer again, on this node and on one that has
// learned, whatever came in between.
func TestImportAgainIsTheSameLayer(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := withIndex(t, store, t.TempDir(), image.Zstd)
	var layers []image.Layer
	var digests []blob.Digest
	for i := range 12 {
		l := upload(t, lib, edition(t, 100, fmt.Sprint(i), i, i+1, i+2), dsec.Base)
		layers, digests = append(layers, l), append(digests, l.Digest)
	}
	other := withIndex(t, store, t.TempDir(), image.Zstd)
	must(t, other.Learn(t.Context(), digests))
	for i, want := range layers {
		for name, lib := range map[string]*image.Library{"same node": lib, "other node": other} {
			if l := upload(t, lib, edition(t, 100, fmt.Sprint(i), i, i+1, i+2), dsec.Base); l.Digest != want.Digest {
				t.Errorf("edition %d again on the %s is %s, was %s", i, name, l.Digest, want.Digest)
			}
		}
		if l := upload(t, lib, edition(t, 100, fmt.Sprint(i), i, i+1, i+2), dsec.Toolkit); l.Digest == want.Digest {
			t.Errorf("edition %d in another role is the same layer", i)
		}
	}

	// Nodes that know the same make the same of something new.
	a := upload(t, lib, edition(t, 100, "new", 50), dsec.Workspace)
	if b := upload(t, other, edition(t, 100, "new", 50), dsec.Workspace); a.Digest != b.Digest {
		t.Errorf("one node made %s, the other %s", a.Digest, b.Digest)
	}
}

// An image that is there already is not fetched again.
func TestPullAgainFetchesNothing(t *testing.T) {
	p := three(t, host)
	var fetched atomic.Int64
	ref := serve(t, p, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, layer := range p.names {
				if r.Method == http.MethodGet && strings.Contains(r.URL.Path, layer) {
					fetched.Add(1)
				}
			}
			h.ServeHTTP(w, r)
		})
	})
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := withIndex(t, store, t.TempDir(), image.None)
	one, err := lib.Pull(t.Context(), ref, image.Options{})
	must(t, err)
	n := fetched.Load()
	two, err := lib.Pull(t.Context(), ref, image.Options{})
	must(t, err)
	if two.Digest != one.Digest || fetched.Load() != n || n == 0 {
		t.Errorf("%s, then %s; %d layers fetched, then %d", one.Digest, two.Digest, n, fetched.Load()-n)
	}
	// A layer that lost a part is no layer that is there.
	must(t, store.Delete(t.Context(), one.Manifest.Data[0].Digest))
	three, err := lib.Pull(t.Context(), ref, image.Options{})
	must(t, err)
	if _, err := lib.Open(t.Context(), three.Digest); err != nil {
		t.Error(err)
	}
}

// No layer has more devices than it may, and those that it has are worth it.
func TestOlderBlobsAreBounded(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := withIndex(t, store, t.TempDir(), image.None)
	var all []entry
	for i := range 100 {
		var es []entry
		for j := range 4 {
			// Half of the layers have more to give.
			es = append(es, entry{name: fmt.Sprintf("l%d/f%d", i, j), body: pattern(fmt.Sprint(i, j), 4000+i%2*60000)})
		}
		upload(t, lib, tarOf(t, es...), dsec.Base)
		all = append(all, es...)
	}
	archive := tarOf(t, all...)
	l := upload(t, lib, archive, dsec.Base)
	if n := len(l.Manifest.Data); n > 65 || n < 40 {
		t.Errorf("%d devices", n)
	}
	checkFiles(t, lib, l, archive)
}

// An index may be wrong in any way: that costs space and nothing else.
func TestIndexThatLies(t *testing.T) {
	archive := edition(t, 150, "same")
	next := edition(t, 150, "next", 7)
	spoil := map[string]func(t *testing.T, store *blob.Folder, dir string, l image.Layer){
		"lost": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) { must(t, os.RemoveAll(dir)) },
		"of another store": func(t *testing.T, store *blob.Folder, _ string, l image.Layer) {
			for _, p := range l.Manifest.Parts() {
				must(t, store.Delete(t.Context(), p.Digest))
			}
			must(t, store.Delete(t.Context(), l.Digest))
		},
		"data is gone": func(t *testing.T, store *blob.Folder, _ string, l image.Layer) {
			must(t, store.Delete(t.Context(), l.Manifest.Data[0].Digest))
		},
		"data is short": func(t *testing.T, store *blob.Folder, _ string, l image.Layer) {
			path, err := store.LocalPath(t.Context(), l.Manifest.Data[0].Digest)
			must(t, err)
			must(t, os.Truncate(path, 4096))
		},
		"list of pieces is damaged": func(t *testing.T, store *blob.Folder, _ string, l image.Layer) {
			path, err := store.LocalPath(t.Context(), l.Manifest.Data[0].Pieces.Digest)
			must(t, err)
			b, err := os.ReadFile(path)
			must(t, err)
			must(t, os.Chmod(path, 0o600))
			must(t, os.WriteFile(path, damaged(b, 40), 0o600))
		},
		"records are rotated": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			eachRun(t, dir, func(b []byte) []byte {
				for at := 16; at+16 <= len(b); at += 16 {
					b[at+15] ^= 1 // other blocks, other blobs, same keys
				}
				return b
			})
		},
		"records are noise": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			eachRun(t, dir, func(b []byte) []byte { return append(b[:16:16], pattern("noise", len(b)-16)...) })
		},
		"run is cut off": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			eachRun(t, dir, func(b []byte) []byte { return b[:len(b)/2] })
		},
		"run is empty": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			eachRun(t, dir, func(b []byte) []byte { return nil })
		},
		"log is cut off": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			must(t, os.Truncate(filepath.Join(dir, "log"), 100))
		},
		"log is noise": func(t *testing.T, _ *blob.Folder, dir string, _ image.Layer) {
			must(t, os.WriteFile(filepath.Join(dir, "log"), pattern("log", 1000), 0o600))
		},
	}
	for name, f := range spoil {
		t.Run(name, func(t *testing.T) {
			store, err := blob.OpenFolder(t.TempDir())
			must(t, err)
			dir := t.TempDir()
			first := image.New(store, image.LibraryOptions{Index: dir})
			l := upload(t, first, archive, dsec.Base)
			first.Close()
			f(t, store, dir, l)
			lib := withIndex(t, store, dir, image.None)
			for _, b := range [][]byte{next, archive, next} {
				checkFiles(t, lib, upload(t, lib, b, dsec.Base), b)
			}
		})
	}
}

func eachRun(t *testing.T, dir string, change func([]byte) []byte) {
	t.Helper()
	runs, err := filepath.Glob(dir + "/*.run")
	must(t, err)
	if len(runs) == 0 {
		t.Fatal("no runs")
	}
	for _, r := range runs {
		b, err := os.ReadFile(r)
		must(t, err)
		must(t, os.WriteFile(r, change(b), 0o600))
	}
}

// A node that lost its index, or is new, learns from the lists of pieces.
func TestLearn(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	one := upload(t, withIndex(t, store, t.TempDir(), image.Zstd), edition(t, 200, "one"), dsec.Base)
	lib := withIndex(t, store, t.TempDir(), image.Zstd)
	must(t, lib.Learn(t.Context(), []blob.Digest{blob.Of([]byte("no such layer")), one.Digest, one.Digest}))
	if two := upload(t, lib, edition(t, 200, "two", 9), dsec.Base); newBytes(two, one) > 50000 {
		t.Errorf("%d new bytes", newBytes(two, one))
	}
	// While one process has the index another does without.
	dir := t.TempDir()
	a, b := withIndex(t, store, dir, image.Zstd), withIndex(t, store, dir, image.Zstd)
	must(t, a.Learn(t.Context(), []blob.Digest{one.Digest}))
	upload(t, b, edition(t, 200, "three", 9), dsec.Base)
	if three := upload(t, a, edition(t, 200, "four", 9), dsec.Base); newBytes(three, one) > 50000 {
		t.Errorf("%d new bytes", newBytes(three, one))
	}
}

// Many runs are joined, and what they knew is still known.
func TestIndexIsJoined(t *testing.T) {
	var store blob.Memory
	dir := t.TempDir()
	lib := withIndex(t, &store, dir, image.None)
	var layers []image.Layer
	archives := map[int][]byte{}
	for i := range 60 {
		archives[i] = tarOf(t, entry{name: "a", body: pattern(fmt.Sprint("a", i), 5000)}, entry{name: "b", body: pattern(fmt.Sprint("b", i), 9000+i*4096)})
		layers = append(layers, upload(t, lib, archives[i], dsec.Base))
	}
	runs, err := filepath.Glob(dir + "/*.run")
	must(t, err)
	if len(runs) > 8 {
		t.Errorf("%d runs", len(runs))
	}
	for i, l := range layers {
		again := upload(t, lib, append(archives[i][:len(archives[i])-1024:len(archives[i])-1024],
			tarOf(t, entry{name: "c", body: []byte(fmt.Sprint(i))})...), dsec.Base)
		if again.Manifest.Entries != 4 || newBytes(again, l) > 4096 {
			t.Fatalf("layer %d: %d entries, %d new bytes", i, again.Manifest.Entries, newBytes(again, l))
		}
	}
}

// A commit finds what other layers have, too.
func TestCommitFindsOlderFiles(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := withIndex(t, store, t.TempDir(), image.None)
	tools := upload(t, lib, tarOf(t, entry{name: "tool", body: pattern("tool", 500000)}), dsec.Toolkit)
	upper := t.TempDir()
	must(t, os.WriteFile(upper+"/copy", pattern("tool", 500000), 0o644))
	must(t, os.WriteFile(upper+"/own", []byte("own"), 0o644))
	dir, err := os.Open(upper)
	must(t, err)
	defer dir.Close()
	l, err := lib.Commit(t.Context(), image.CommitSource{Upper: dir})
	must(t, err)
	if n := newBytes(l, tools); n != 4096 {
		t.Errorf("%d new bytes", n)
	}
	same(t, describe(t, mounted(t, lib, l)), describe(t, upper))
}

// What an import points into is kept, however old it is, from when it was found.
func TestFoundBlobsAreNotCollected(t *testing.T) {
	for _, pack := range []image.Packing{image.None, image.Zstd} {
		store, err := blob.OpenFolder(t.TempDir())
		must(t, err)
		copies, err := blob.OpenFolder(t.TempDir())
		must(t, err)
		lib := image.New(store, image.LibraryOptions{Index: t.TempDir(), Pack: pack, Plain: copies})
		defer lib.Close()
		one := upload(t, lib, edition(t, 100, "one"), dsec.Base)
		gone := upload(t, lib, tarOf(t, entry{name: "unrelated", body: pattern("unrelated", 10000)}), dsec.Base)
		old := time.Now().Add(-2 * time.Hour)
		for info, err := range store.List(t.Context()) {
			must(t, err)
			path, err := store.LocalPath(t.Context(), info.Digest)
			must(t, err)
			must(t, os.Chtimes(path, old, old))
		}
		// A node that was started anew, and so remembers no use.
		next := image.New(store, image.LibraryOptions{Pack: pack, Plain: copies})
		collect := func() {
			_, err := next.Collect(t.Context(), nil, image.CollectOptions{})
			must(t, err)
		}
		image.AtPoint(lib, func(point string) {
			if point == "publish" {
				collect()
			}
		})
		archive := edition(t, 100, "two", 5)
		two := upload(t, lib, archive, dsec.Base)
		if newBytes(two, one) > 50000 {
			t.Errorf("%d new bytes", newBytes(two, one))
		}
		if _, err := store.Stat(t.Context(), gone.Digest); err == nil {
			t.Error("nothing was collected")
		}
		image.AtPoint(lib, nil)
		collect()
		checkFiles(t, lib, two, archive)
	}
}

// A node whose layers are files to be mounted points into no packed blob; one that
// packs takes either.
func TestPlainLayersStayPlain(t *testing.T) {
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	plain, packs := withIndex(t, store, t.TempDir(), image.None), withIndex(t, store, t.TempDir(), image.Zstd)
	archive := edition(t, 50, "one")
	one := upload(t, packs, archive, dsec.Base)
	must(t, plain.Learn(t.Context(), []blob.Digest{one.Digest}))
	two := upload(t, plain, archive, dsec.Base)
	for _, d := range two.Manifest.Data {
		if d.Packed != nil {
			t.Errorf("packed data %s in a plain layer", d.Digest)
		}
	}
	checkFiles(t, plain, two, archive)
	if one.Manifest.Content != two.Manifest.Content || one.Manifest.Content == "" {
		t.Errorf("contents %q and %q of the same archive", one.Manifest.Content, two.Manifest.Content)
	}
	next := edition(t, 50, "two", 7)
	a := upload(t, plain, next, dsec.Base)
	must(t, packs.Learn(t.Context(), []blob.Digest{two.Digest, a.Digest}))
	if b := upload(t, packs, edition(t, 50, "three", 9), dsec.Base); newBytes(b, one, two, a) > 50000 {
		t.Errorf("%d new bytes", newBytes(b, one, two, a))
	}
}

package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// TestMain fails the run if the tests leave a descriptor, and so a mount: all
// they make are detached, in no table, and live as long as their descriptor.
func TestMain(m *testing.M) {
	victim()
	before := resources()
	code := m.Run()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	if after := resources(); code == 0 && after != before {
		fmt.Fprintf(os.Stderr, "before: %s\nafter: %s\n", before, after)
		code = 1
	}
	os.Exit(code)
}

func resources() string {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err.Error()
	}
	n := 0
	for _, fd := range fds {
		to, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && !strings.HasPrefix(to, "anon_inode:[event") && !strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return fmt.Sprintf("%d files", n)
}

func TestUploadIsExtraction(t *testing.T) {
	archive := tarOf(t, system()...)
	want := t.TempDir()
	cmd := exec.Command("tar", "-C", want, "--numeric-owner", "--xattrs", "--xattrs-include=*", "-xpf", "-")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	// Folders that the archive does not name: tar gives them the time of day.
	entries := describe(t, want)
	for _, p := range []string{"usr"} {
		delete(entries, p)
	}
	var first blob.Digest
	for name, how := range map[string]compress{"plain": plain, "gzip": gz, "zstd": zst} {
		t.Run(name, func(t *testing.T) {
			lib, _ := newLibrary(t)
			l, err := lib.Upload(t.Context(), bytes.NewReader(how(t, archive)), image.Options{})
			must(t, err)
			got := describe(t, mounted(t, lib, l))
			delete(got, "usr")
			same(t, got, entries)
			if first == "" {
				first = l.Digest
			}
			if l.Digest != first {
				t.Errorf("layer %s, others got %s", l.Digest, first)
			}
			if m := l.Manifest; m.Entries != int64(len(entries)+1) || m.Size < 1<<20 || m.Role != dsec.Base {
				t.Errorf("%d entries, %d bytes, role %s", m.Entries, m.Size, m.Role)
			}
		})
	}
}

func TestImportFolder(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "a/b"), 0o711))
	must(t, os.WriteFile(filepath.Join(dir, "a/b/c"), pattern("c", 9000), 0o600))
	f, err := os.Create(filepath.Join(dir, "holes"))
	must(t, err)
	_, err = f.WriteAt([]byte("end"), 50<<20)
	must(t, err)
	must(t, f.Close())
	lib, _ := newLibrary(t)
	l, err := lib.Import(t.Context(), dir, image.Options{Role: dsec.Toolkit})
	must(t, err)
	same(t, describe(t, mounted(t, lib, l)), describe(t, dir))
	if l.Manifest.Stored() > 1<<20 {
		t.Errorf("%d bytes stored of a sparse file", l.Manifest.Stored())
	}
	again, err := lib.Import(t.Context(), dir, image.Options{Role: dsec.Toolkit})
	must(t, err)
	if again.Digest != l.Digest {
		t.Error("a second import of the same folder is another layer")
	}
	if _, err := lib.Import(t.Context(), dir+"/none", image.Options{}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("no such path: %v", err)
	}
	if _, err := lib.Import(t.Context(), "/dev/null", image.Options{}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("device: %v", err)
	}
}

// three is an image of three layers, each compressed in another way.
func three(t testing.TB, arch string) *pack {
	t.Helper()
	return packed(t, arch, []compress{plain, gz, zst},
		tarOf(t, append(system(), entry{name: "old/"}, entry{name: "old/a", body: []byte("1")}, entry{name: "gone", body: []byte("2")})...),
		tarOf(t, entry{name: ".wh.gone"}, entry{name: "old/.wh..wh..opq"}, entry{name: "old/b", body: []byte("3")},
			entry{name: "bin/dash", kind: tar.TypeLink, link: "bin/sh"}, entry{name: "lib/extra", body: []byte("4")}),
		tarOf(t, entry{name: "etc/passwd", body: []byte("changed")}, entry{name: "tmp/.wh.nothing"}))
}

// push puts an image into a registry.
func push(t testing.TB, url string, p *pack) {
	t.Helper()
	send := func(method, path, media string, b []byte) {
		req, err := http.NewRequest(method, url+path, bytes.NewReader(b))
		must(t, err)
		req.Header.Set("Content-Type", media)
		res, err := http.DefaultClient.Do(req)
		must(t, err)
		res.Body.Close()
		if res.StatusCode >= 300 {
			t.Fatalf("%s %s: %s", method, path, res.Status)
		}
	}
	for d, b := range p.blobs {
		send("POST", "/v2/img/blobs/uploads/?digest="+d, "application/octet-stream", b)
	}
	for d, b := range p.blobs {
		switch {
		case bytes.Contains(b, []byte(`"mediaType":"`+mediaManifest+`","schemaVersion"`)):
			send("PUT", "/v2/img/manifests/"+d, mediaManifest, b)
		}
	}
	send("PUT", "/v2/img/manifests/v1", p.root["mediaType"].(string), p.blobs[p.root["digest"].(string)])
}

// serve runs a registry that holds p, with break in front if not nil.
func serve(t testing.TB, p *pack, change func(http.Handler) http.Handler) string {
	t.Helper()
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if change != nil {
		h = change(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	push(t, s.URL, p)
	return strings.TrimPrefix(s.URL, "http://") + "/img:v1"
}

func TestOneImageFromAnywhere(t *testing.T) {
	p := three(t, host)
	multi := indexed(map[string]*pack{host: p, foreign: three(t, foreign)})
	lib, _ := newLibrary(t)
	sources := map[string]func() (image.Layer, error){
		"registry": func() (image.Layer, error) { return lib.Pull(t.Context(), serve(t, p, nil), image.Options{}) },
		"registry, several platforms": func() (image.Layer, error) {
			return lib.Pull(t.Context(), serve(t, multi, nil), image.Options{})
		},
		"layout":                    func() (image.Layer, error) { return lib.Import(t.Context(), p.layoutDir(t), image.Options{}) },
		"layout, several platforms": func() (image.Layer, error) { return lib.Import(t.Context(), multi.layoutDir(t), image.Options{}) },
		"layout as tar": func() (image.Layer, error) {
			return lib.Upload(t.Context(), bytes.NewReader(p.layoutTar(t)), image.Options{})
		},
		"layout as tar.gz": func() (image.Layer, error) {
			return lib.Upload(t.Context(), bytes.NewReader(gz(t, p.layoutTar(t))), image.Options{})
		},
		"docker save": func() (image.Layer, error) {
			return lib.Upload(t.Context(), bytes.NewReader(p.dockerTar(t)), image.Options{})
		},
		"docker save without a docker": func() (image.Layer, error) {
			return lib.Upload(t.Context(), bytes.NewReader(p.plainDockerTar(t)), image.Options{})
		},
		"docker save to a file": func() (image.Layer, error) {
			path := filepath.Join(t.TempDir(), "saved.tar")
			must(t, os.WriteFile(path, zst(t, p.dockerTar(t)), 0o600))
			return lib.Import(t.Context(), path, image.Options{})
		},
	}
	var first image.Layer
	for name, load := range sources {
		l, err := load()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if first.Digest == "" {
			first = l
		}
		if l.Digest != first.Digest {
			t.Errorf("%s: layer %s, others got %s", name, l.Digest, first.Digest)
		}
	}
	if first.Digest == "" {
		t.FailNow()
	}
	root := mounted(t, lib, first)
	for path, want := range map[string]string{"old/b": "3", "usr/lib/extra": "4", "etc/passwd": "changed", "lib/extra": "4"} {
		if got, err := os.ReadFile(root + "/" + path); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	for _, path := range []string{"old/a", "gone", ".wh.gone", "tmp/nothing"} {
		if _, err := os.Lstat(root + "/" + path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there (%v)", path, err)
		}
	}
	files := describe(t, root)
	for _, path := range []string{"bin/sh", "bin/ash", "bin/dash"} {
		if !strings.Contains(files[path], "nlink=3") {
			t.Errorf("%s: %s", path, files[path])
		}
	}
	img := first.Image()
	if got := strings.Join(append(img.Config.Env, img.Config.Cwd, img.Config.User, strings.Join(img.Config.Shell, " ")), "|"); got != "PATH=/bin|A=b|/srv|1000:1000|/init -x" {
		t.Errorf("config %s", got)
	}
	if o := first.Manifest.Origin; o == nil || string(o.Config) != p.conf || len(o.DiffIDs) != 3 {
		t.Errorf("origin %v", o)
	}
}

// Images share the blobs of the layers that they begin with, from a size on, with
// no index to tell. What comes after has few blobs, however many layers it is.
func TestSharedLayersAreStoredOnce(t *testing.T) {
	base := tarOf(t, system()...)
	image1 := [][]byte{base, tarOf(t, entry{name: "x", body: []byte("1")}), tarOf(t, entry{name: "y", body: []byte("1")})}
	image2 := [][]byte{base, tarOf(t, entry{name: "x", body: []byte("2")}), tarOf(t, entry{name: "y", body: []byte("2")})}
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib := image.New(store, image.LibraryOptions{MergeBelow: 1 << 20})
	one, err := lib.Import(t.Context(), packed(t, host, []compress{gz}, image1...).layoutDir(t), image.Options{})
	must(t, err)
	n := len(blobs(t, store))
	two, err := lib.Import(t.Context(), packed(t, host, []compress{zst}, image2...).layoutDir(t), image.Options{})
	must(t, err)
	if a, b := one.Manifest.Data, two.Manifest.Data; len(a) != 2 || len(b) != 2 || newBytes(two, one) != 4096 {
		t.Errorf("data of one %+v, of two %+v: the common layer should have one blob and the others one of their own", one.Manifest.Data, two.Manifest.Data)
	}
	if got := len(blobs(t, store)); got != n+5 {
		t.Errorf("%d new blobs, want data, chunk table, pieces, metadata and manifest", got-n)
	}
}

func TestDeepImageHasFewBlobs(t *testing.T) {
	var tars [][]byte
	for i := range 100 {
		tars = append(tars, tarOf(t, entry{name: fmt.Sprintf("f%d", i), body: pattern(fmt.Sprint(i), 8192)}))
	}
	for below, most := range map[int64]int{1: 32, 0: 1, 100 << 10: 10} {
		store, err := blob.OpenFolder(t.TempDir())
		must(t, err)
		lib := image.New(store, image.LibraryOptions{MergeBelow: below})
		l, err := lib.Import(t.Context(), packed(t, host, []compress{plain}, tars...).layoutDir(t), image.Options{Role: dsec.Workspace})
		must(t, err)
		if n := len(l.Manifest.Data); n > most || n < most-2 {
			t.Errorf("merged below %d: %d data blobs, want %d", below, n, most)
		}
		root := mounted(t, lib, l)
		for _, i := range []int{0, 31, 32, 99} {
			if b, err := os.ReadFile(fmt.Sprintf("%s/f%d", root, i)); err != nil || !bytes.Equal(b, pattern(fmt.Sprint(i), 8192)) {
				t.Errorf("file %d: %v", i, err)
			}
		}
	}
}

func TestWorkspaceKeepsWhiteouts(t *testing.T) {
	lib, _ := newLibrary(t)
	p := packed(t, host, []compress{plain}, tarOf(t, entry{name: ".wh.a"}, entry{name: "d/.wh..wh..opq"}), tarOf(t, entry{name: "d/x", body: []byte("1")}, entry{name: ".wh.b"}))
	l, err := lib.Import(t.Context(), p.layoutDir(t), image.Options{Role: dsec.Workspace})
	must(t, err)
	got := describe(t, mounted(t, lib, l))
	for _, w := range []string{"a", "b"} {
		if !strings.HasPrefix(got[w], "20000 ") {
			t.Errorf("%s is no whiteout: %q", w, got[w])
		}
	}
	if !strings.Contains(got["d"], "trusted.overlay.opaque=79") {
		t.Errorf("folder is not opaque: %q", got["d"])
	}
}

func TestForeignPlatform(t *testing.T) {
	lib, store := newLibrary(t)
	p := three(t, foreign)
	for name, dir := range map[string]string{"index": indexed(map[string]*pack{foreign: p, "riscv64": three(t, "riscv64")}).layoutDir(t), "manifest": p.layoutDir(t)} {
		_, err := lib.Import(t.Context(), dir, image.Options{})
		if dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), foreign) {
			t.Errorf("%s: %v, want Unsupported naming %s", name, err, foreign)
		}
	}
	if b := blobs(t, store); len(b) != 0 {
		t.Errorf("left %d blobs", len(b))
	}
}

// TestDamagedImage changes or cuts every blob of an image in turn.
func TestDamagedImage(t *testing.T) {
	whole := three(t, host)
	for d := range whole.blobs {
		for what, change := range map[string]func([]byte) []byte{
			"changed": func(b []byte) []byte { return damaged(b, len(b)/2) },
			"cut":     func(b []byte) []byte { return b[:len(b)*2/3] },
			"longer":  func(b []byte) []byte { return append(bytes.Clone(b), make([]byte, 600)...) },
		} {
			p := three(t, host)
			p.blobs[d] = change(p.blobs[d])
			lib, store := newLibrary(t)
			_, err := lib.Import(t.Context(), p.layoutDir(t), image.Options{})
			if !errors.Is(err, image.ErrCorrupt) || dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), d) {
				t.Errorf("%s %s: %v, want ErrCorrupt naming it", d, what, err)
			}
			if b := blobs(t, store); len(b) != 0 {
				t.Errorf("%s %s: left %d blobs", d, what, len(b))
			}
		}
	}
}

func TestWrongDiffID(t *testing.T) {
	good := packed(t, host, []compress{gz}, tarOf(t, system()...))
	p := packed(t, host, []compress{gz}, tarOf(t, entry{name: "other", body: []byte("x")}))
	// The manifest of one with the config of the other.
	conf := good.blobs[good.conf]
	m := p.blobs[p.root["digest"].(string)]
	m = bytes.ReplaceAll(m, []byte(p.conf), []byte(good.conf))
	p.put(mediaConfig, conf)
	p.root = p.put(mediaManifest, m)
	lib, store := newLibrary(t)
	_, err := lib.Import(t.Context(), p.layoutDir(t), image.Options{})
	if !errors.Is(err, image.ErrCorrupt) || !strings.Contains(err.Error(), string(blob.Of(good.tars[0]))) {
		t.Errorf("got %v, want ErrCorrupt naming the diff id", err)
	}
	// The same in an old archive, whose layers have no other digest.
	p.tars = [][]byte{tarOf(t, entry{name: "other", body: []byte("y")})}
	if _, err := lib.Upload(t.Context(), bytes.NewReader(p.dockerTar(t)), image.Options{}); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("docker save: %v", err)
	}
	if b := blobs(t, store); len(b) != 0 {
		t.Errorf("left %d blobs", len(b))
	}
}

// TestRegistryErrors has the registry misbehave while a layer is fetched.
func TestRegistryErrors(t *testing.T) {
	p := three(t, host)
	layer := p.names[1]
	for name, c := range map[string]struct {
		answer func(http.ResponseWriter)
		kind   dsec.ErrorKind
	}{
		"gone":    {func(w http.ResponseWriter) { http.Error(w, "no", http.StatusNotFound) }, dsec.NotFound},
		"denied":  {func(w http.ResponseWriter) { http.Error(w, "no", http.StatusForbidden) }, dsec.Denied},
		"altered": {func(w http.ResponseWriter) { w.Write(damaged(p.blobs[layer], 100)) }, dsec.Invalid},
		"cut short": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", fmt.Sprint(len(p.blobs[layer])))
			w.Write(p.blobs[layer][:200])
			panic(http.ErrAbortHandler)
		}, dsec.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			lib, store := newLibrary(t)
			ref := serve(t, p, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, layer) {
						c.answer(w)
						return
					}
					h.ServeHTTP(w, r)
				})
			})
			_, err := lib.Pull(t.Context(), ref, image.Options{})
			if dsec.KindOf(err) != c.kind || !strings.Contains(err.Error(), layer) {
				t.Errorf("got %s: %v, want %s naming %s", dsec.KindOf(err), err, c.kind, layer)
			}
			if b := blobs(t, store); len(b) != 0 {
				t.Errorf("left %d blobs", len(b))
			}
		})
	}
	lib, _ := newLibrary(t)
	if _, err := lib.Pull(t.Context(), "UPPER/case:x:y", image.Options{}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("bad reference: %v", err)
	}
	ref := serve(t, p, nil)
	if _, err := lib.Pull(t.Context(), strings.TrimSuffix(ref, "v1")+"v2", image.Options{}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("no such tag: %v", err)
	}
}

// TestBrokenConnections cuts every answer that has a layer short; the registry
// knows ranges.
func TestBrokenConnections(t *testing.T) {
	p := three(t, host)
	lib, _ := newLibrary(t)
	want, err := lib.Import(t.Context(), p.layoutDir(t), image.Options{})
	must(t, err)
	for name, ranges := range map[string]bool{"with ranges": true, "without ranges": false} {
		t.Run(name, func(t *testing.T) {
			cuts := 0
			ref := serve(t, p, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					b, ok := p.blobs[r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]]
					if r.Method != http.MethodGet || !ok || !strings.Contains(r.URL.Path, "/blobs/") {
						h.ServeHTTP(w, r)
						return
					}
					off := 0
					if ranges {
						fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &off)
					}
					w.Header().Set("Content-Length", fmt.Sprint(len(b)-off))
					if off > 0 {
						w.WriteHeader(http.StatusPartialContent)
					}
					n := len(b)/2 + 1
					if off == 0 && len(b) > 100 && (ranges || cuts == 0) {
						cuts++
						w.Write(b[:n])
						w.(http.Flusher).Flush()
						panic(http.ErrAbortHandler)
					}
					w.Write(b[off:])
				})
			})
			lib, _ := newLibrary(t)
			got, err := lib.Pull(t.Context(), ref, image.Options{})
			must(t, err)
			if got.Digest != want.Digest || cuts == 0 {
				t.Errorf("layer %s after %d cuts, want %s", got.Digest, cuts, want.Digest)
			}
		})
	}
}

// TestDiskFull breaks an import at every kind of step.
func TestDiskFull(t *testing.T) {
	p := three(t, host)
	dir := p.layoutDir(t)
	for name, f := range map[string]*faulty{
		"first write":    {writes: 0, commit: -1},
		"later write":    {writes: 1 << 20, commit: -1},
		"metadata write": {writes: 1<<20 + 130000, commit: -1},
		"first commit":   {writes: -1, commit: 0},
		"last commit":    {writes: -1, commit: 4},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			store, err := blob.OpenFolder(root)
			must(t, err)
			f.Folder = store
			kept, err := image.New(store, image.LibraryOptions{}).Import(t.Context(), packed(t, host, []compress{plain}, p.tars[0]).layoutDir(t), image.Options{})
			must(t, err)
			before := blobs(t, store)
			lib := image.New(f, image.LibraryOptions{})
			if _, err := lib.Import(t.Context(), dir, image.Options{}); dsec.KindOf(err) != dsec.Exhausted {
				t.Fatalf("got %v, want Exhausted", err)
			}
			if after := blobs(t, store); strings.Join(after, " ") != strings.Join(before, " ") {
				t.Errorf("before %v\nafter %v", before, after)
			}
			if es, err := os.ReadDir(filepath.Join(root, "staging")); err != nil || len(es) != 0 {
				t.Errorf("%d files left in staging, %v", len(es), err)
			}
			// What was there before is whole, and the same import works later.
			_, err = image.New(store, image.LibraryOptions{}).Open(t.Context(), kept.Digest)
			must(t, err)
			f.writes, f.commit = -1, -1
			l, err := lib.Import(t.Context(), dir, image.Options{})
			must(t, err)
			_, err = lib.Open(t.Context(), l.Digest)
			must(t, err)
		})
	}
}

func TestUploadRefused(t *testing.T) {
	lib, store := newLibrary(t)
	whole := tarOf(t, system()...)
	for name, b := range map[string][]byte{
		"nothing":       nil,
		"zeros":         make([]byte, 10240),
		"junk":          pattern("junk", 10000),
		"cut":           whole[:5000],
		"cut gzip":      gz(t, whole)[:40000],
		"cut zstd":      zst(t, whole)[:40000],
		"damaged gzip":  damaged(gz(t, whole), 30000),
		"hostile name":  tarOf(t, entry{name: "../../x", body: []byte("1")}),
		"empty archive": tarOf(t, entry{name: "manifest.json", body: []byte("[]")}),
		"no config":     tarOf(t, entry{name: "manifest.json", body: []byte(`[{"Config":"../../../etc/passwd","Layers":[]}]`)}),
	} {
		_, err := lib.Upload(t.Context(), bytes.NewReader(b), image.Options{})
		if k := dsec.KindOf(err); err == nil || k != dsec.Invalid && k != dsec.NotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := lib.Upload(t.Context(), bytes.NewReader([]byte("BZh91AY")), image.Options{}); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("bzip2: %v", err)
	}
	if _, err := lib.Upload(t.Context(), bytes.NewReader(whole), image.Options{MaxBytes: 500000}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("too big: %v", err)
	}
	if _, err := lib.Upload(t.Context(), bytes.NewReader(whole), image.Options{Role: "lid"}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("unknown role: %v", err)
	}
	if b := blobs(t, store); len(b) != 0 {
		t.Errorf("left %d blobs", len(b))
	}
}

func TestCanceledImport(t *testing.T) {
	lib, store := newLibrary(t)
	ctx, cancel := context.WithCancel(t.Context())
	// Cancelled by its own first report.
	opts := image.Options{Progress: func(dsec.Progress) { cancel() }}
	_, err := lib.Import(ctx, three(t, host).layoutDir(t), opts)
	if dsec.KindOf(err) != dsec.Canceled {
		t.Errorf("got %v, want Canceled", err)
	}
	if b := blobs(t, store); len(b) != 0 {
		t.Errorf("left %d blobs", len(b))
	}
}

func TestProgress(t *testing.T) {
	lib, _ := newLibrary(t)
	var last dsec.Progress
	stages := ""
	opts := image.Options{Progress: func(p dsec.Progress) {
		if p.Stage != last.Stage {
			stages += p.Stage + " "
		} else if p.Done < last.Done {
			t.Errorf("%v after %v", p, last)
		}
		if p.Total > 0 && p.Done > p.Total {
			t.Errorf("%v is more than all", p)
		}
		last = p
	}}
	_, err := lib.Import(t.Context(), three(t, host).layoutDir(t), opts)
	must(t, err)
	if stages != "fetch store " || last.Done != last.Total {
		t.Errorf("stages %q, last %v", stages, last)
	}
}

// TestFileSystemThatLooksLikeAnImage is one whose first entry is called blobs.
func TestFileSystemThatLooksLikeAnImage(t *testing.T) {
	lib, _ := newLibrary(t)
	l, err := lib.Upload(t.Context(), bytes.NewReader(tarOf(t, entry{name: "blobs/"}, entry{name: "blobs/x", body: []byte("1")})), image.Options{})
	must(t, err)
	if got := describe(t, mounted(t, lib, l)); got["blobs/x"] == "" {
		t.Errorf("got %v", got)
	}
}

package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

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

// An entry is a line of a tar.
type entry struct {
	name, link   string
	body         []byte
	kind         byte
	mode         int64
	uid          int
	major, minor int64
	pax          map[string]string
}

func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				e.kind = tar.TypeDir
			}
		}
		if e.mode == 0 {
			e.mode = 0o755
		}
		must(t, w.WriteHeader(&tar.Header{
			Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Size: int64(len(e.body)),
			Uid: e.uid, Gid: e.uid, Devmajor: e.major, Devminor: e.minor,
			ModTime: time.Unix(1700000000, 123456789), PAXRecords: e.pax, Format: tar.FormatPAX,
		}))
		_, err := w.Write(e.body)
		must(t, err)
	}
	must(t, w.Close())
	return out.Bytes()
}

func gz(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(b)
	must(t, err)
	must(t, w.Close())
	return out.Bytes()
}

func zst(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	must(t, err)
	defer w.Close()
	return w.EncodeAll(b, nil)
}

func plain(_ testing.TB, b []byte) []byte { return b }

// system is a file system with one of most things.
func system() []entry {
	return []entry{
		{name: "./", mode: 0o755},
		{name: "bin/", mode: 0o755}, {name: "bin/sh", body: pattern("sh", 100000), mode: 0o4755},
		{name: "bin/ash", kind: tar.TypeLink, link: "bin/sh"},
		{name: "lib", kind: tar.TypeSymlink, link: "usr/lib", mode: 0o777},
		{name: "usr/lib/", mode: 0o755}, {name: "usr/lib/libc", body: pattern("libc", 1<<20+1), mode: 0o644},
		{name: "dev/", mode: 0o755}, {name: "dev/null", kind: tar.TypeChar, major: 1, minor: 3, mode: 0o666},
		{name: "dev/sda", kind: tar.TypeBlock, major: 8, minor: 300, mode: 0o660}, {name: "dev/pipe", kind: tar.TypeFifo, mode: 0o600},
		{name: "etc/", mode: 0o755}, {name: "etc/passwd", body: []byte("root:x:0:0::/:/bin/sh\n"), mode: 0o644},
		{name: "etc/rich", body: []byte("caps"), mode: 0o755, pax: map[string]string{
			"SCHILY.xattr.user.note": "a\nb=c", "SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}},
		{name: "home/", mode: 0o755}, {name: "home/huge", body: []byte("uid"), uid: 4294967294, mode: 0o600},
		{name: "home/" + strings.Repeat("n", 255), body: []byte("long"), mode: 0o600},
		{name: "tmp/", mode: 0o1777},
	}
}

// describe lists a folder, one line a file. Symlinked roots are followed.
func describe(t *testing.T, root string) map[string]string {
	t.Helper()
	out := map[string]string{}
	inodes := map[uint64]string{}
	var walk func(rel string)
	walk = func(rel string) {
		p := root + "/" + rel
		var st unix.Stat_t
		must(t, unix.Lstat(p, &st))
		kind := st.Mode & unix.S_IFMT
		line := fmt.Sprintf("%o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		if kind != unix.S_IFDIR {
			line += fmt.Sprintf(" nlink=%d rdev=%d", st.Nlink, st.Rdev)
			if st.Nlink > 1 {
				if _, ok := inodes[st.Ino]; !ok {
					inodes[st.Ino] = rel
				}
				line += " link=" + inodes[st.Ino]
			}
		}
		switch kind {
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			must(t, err)
			line += " -> " + to
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			must(t, err)
			line += fmt.Sprintf(" %d %x", len(b), sha256.Sum256(b))
		}
		buf := make([]byte, 4096)
		n, err := unix.Llistxattr(p, buf)
		must(t, err)
		var attrs []string
		for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
			if name != "" {
				v := make([]byte, 4096)
				n, err := unix.Lgetxattr(p, name, v)
				must(t, err)
				attrs = append(attrs, fmt.Sprintf(" %s=%x", name, v[:n]))
			}
		}
		slices.Sort(attrs)
		out[rel] = line + strings.Join(attrs, "")
		if kind == unix.S_IFDIR {
			es, err := os.ReadDir(p + "/.")
			must(t, err)
			for _, e := range es {
				walk(strings.TrimPrefix(rel+"/"+e.Name(), "/"))
			}
		}
	}
	walk("")
	return out
}

func same(t *testing.T, got, want map[string]string) {
	t.Helper()
	for p, w := range want {
		if g := got[p]; g != w {
			t.Errorf("%.60q:\n got %s\nwant %s", p, g, w)
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%.60q should not be there: %s", p, got[p])
		}
	}
}

// mountFiles mounts a layer for the time of the test, in no table.
func mountFiles(t *testing.T, f image.Files) string {
	t.Helper()
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	must(t, err)
	defer unix.Close(fs)
	must(t, unix.FsconfigSetString(fs, "source", f.Meta))
	must(t, unix.FsconfigSetFlag(fs, "ro"))
	for _, d := range f.Data {
		must(t, unix.FsconfigSetString(fs, "device", d))
	}
	must(t, unix.FsconfigCreate(fs))
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

func mounted(t *testing.T, lib *image.Library, l image.Layer) string {
	t.Helper()
	f, err := lib.Open(t.Context(), l.Digest)
	must(t, err)
	return mountFiles(t, f)
}

func newLibrary(t *testing.T) (*image.Library, *blob.Folder) {
	t.Helper()
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	return image.New(store, image.LibraryOptions{Verified: t.TempDir(), Temp: t.TempDir()}), store
}

// blobs lists a store.
func blobs(t *testing.T, s blob.Store) []string {
	t.Helper()
	var out []string
	for info, err := range s.List(t.Context()) {
		must(t, err)
		out = append(out, string(info.Digest))
	}
	slices.Sort(out)
	return out
}

// A pack is an OCI image as a set of blobs.
type pack struct {
	blobs map[string][]byte
	root  map[string]any // descriptor
	tars  [][]byte
	names []string // digests of layers, as packed
	conf  string
}

type compress func(testing.TB, []byte) []byte

func (p *pack) put(media string, b []byte) map[string]any {
	d := string(blob.Of(b))
	p.blobs[d] = b
	return map[string]any{"mediaType": media, "digest": d, "size": len(b)}
}

func (p *pack) json(media string, v any) map[string]any {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return p.put(media, b)
}

const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// packed makes an image of tars; how, in turn, compresses them.
func packed(t testing.TB, arch string, how []compress, tars ...[]byte) *pack {
	t.Helper()
	p := &pack{blobs: map[string][]byte{}, tars: tars}
	var diffs []string
	var layers []any
	for i, b := range tars {
		diffs = append(diffs, string(blob.Of(b)))
		d := p.put(mediaLayer, how[i%len(how)](t, b))
		layers = append(layers, d)
		p.names = append(p.names, d["digest"].(string))
	}
	config := p.json(mediaConfig, map[string]any{
		"os": "linux", "architecture": arch,
		"config": map[string]any{"Env": []string{"PATH=/bin", "A=b"}, "WorkingDir": "/srv", "User": "1000:1000", "Entrypoint": []string{"/init"}, "Cmd": []string{"-x"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	})
	p.conf = config["digest"].(string)
	p.root = p.json(mediaManifest, map[string]any{"schemaVersion": 2, "mediaType": mediaManifest, "config": config, "layers": layers})
	return p
}

// indexed joins images of several platforms.
func indexed(packs map[string]*pack) *pack {
	out := &pack{blobs: map[string][]byte{}}
	var list []any
	for _, arch := range slices.Sorted(func(yield func(string) bool) {
		for a := range packs {
			if !yield(a) {
				return
			}
		}
	}) {
		p := packs[arch]
		for d, b := range p.blobs {
			out.blobs[d] = b
		}
		d := map[string]any{"platform": map[string]any{"os": "linux", "architecture": arch}}
		for k, v := range p.root {
			d[k] = v
		}
		list = append(list, d)
	}
	attestation := out.json(mediaManifest, map[string]any{"schemaVersion": 2, "mediaType": mediaManifest,
		"config": out.json(mediaConfig, map[string]any{}), "layers": []any{}})
	attestation["platform"] = map[string]any{"os": "unknown", "architecture": "unknown"}
	list = append(list, attestation)
	out.root = out.json(mediaIndex, map[string]any{"schemaVersion": 2, "mediaType": mediaIndex, "manifests": list})
	return out
}

// layoutDir writes an OCI layout.
func (p *pack) layoutDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "blobs/sha256"), 0o755))
	for d, b := range p.blobs {
		must(t, os.WriteFile(filepath.Join(dir, "blobs/sha256", d[7:]), b, 0o644))
	}
	must(t, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	b, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []any{p.root}})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "index.json"), b, 0o644))
	return dir
}

// layoutTar packs an OCI layout, as "tar -c ." does.
func (p *pack) layoutTar(t testing.TB) []byte {
	t.Helper()
	dir := p.layoutDir(t)
	es := []entry{{name: "./"}}
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		es = append(es, entry{name: "./" + rel, body: b, mode: 0o644})
		return err
	}))
	return tarOf(t, es...)
}

// dockerTar packs the image as docker save did before it knew OCI layouts.
func (p *pack) dockerTar(t testing.TB) []byte {
	t.Helper()
	var es []entry
	var layers []string
	for i, b := range p.tars {
		dir := fmt.Sprintf("%064d", i)
		layers = append(layers, dir+"/layer.tar")
		es = append(es, entry{name: dir + "/"}, entry{name: dir + "/VERSION", body: []byte("1.0")})
		if i > 0 && bytes.Equal(b, p.tars[i-1]) {
			es = append(es, entry{name: dir + "/layer.tar", kind: tar.TypeSymlink, link: fmt.Sprintf("../%064d/layer.tar", i-1)})
			continue
		}
		es = append(es, entry{name: dir + "/layer.tar", body: b})
	}
	name := p.conf[7:] + ".json"
	m, err := json.Marshal([]any{map[string]any{"Config": name, "RepoTags": []string{"a:1"}, "Layers": layers}})
	must(t, err)
	es = append(es, entry{name: name, body: p.blobs[p.conf]}, entry{name: "manifest.json", body: m})
	return tarOf(t, es...)
}

// plainDockerTar packs it as tools without a docker do: compressed layers and
// the config under their digests, the manifest last.
func (p *pack) plainDockerTar(t testing.TB) []byte {
	t.Helper()
	es := []entry{{name: p.conf, body: p.blobs[p.conf]}}
	var layers []string
	for _, b := range p.tars {
		body := gz(t, b)
		layers = append(layers, blob.Of(body).Hex()+".tar.gz")
		es = append(es, entry{name: layers[len(layers)-1], body: body})
	}
	m, err := json.Marshal([]any{map[string]any{"Config": p.conf, "RepoTags": []string{"a:1"}, "Layers": layers}})
	must(t, err)
	return tarOf(t, append(es, entry{name: "manifest.json", body: m})...)
}

// host is this host's architecture, foreign another.
const (
	host    = runtime.GOARCH
	foreign = "s390x"
)

// A faulty store fails the nth write or commit.
type faulty struct {
	*blob.Folder
	mu     sync.Mutex
	writes int // allowed bytes, if not negative
	commit int // allowed commits, if not negative
}

var errDisk = fmt.Errorf("write: %w", unix.ENOSPC)

func (f *faulty) Stage(ctx context.Context) (blob.Staged, error) {
	s, err := f.Folder.Stage(ctx)
	return &faultyStaged{s, f}, err
}

type faultyStaged struct {
	blob.Staged
	f *faulty
}

func (s *faultyStaged) Write(p []byte) (int, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if s.f.writes >= 0 {
		if s.f.writes -= len(p); s.f.writes < 0 {
			s.f.writes = 0
			return 0, errDisk
		}
	}
	return s.Staged.Write(p)
}

func (s *faultyStaged) Commit(ctx context.Context) (blob.Info, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if s.f.commit >= 0 {
		if s.f.commit--; s.f.commit < 0 {
			s.f.commit = 0
			return blob.Info{}, errors.Join(errDisk, s.Abort())
		}
	}
	return s.Staged.Commit(ctx)
}

// damaged reads its input with one byte changed.
func damaged(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 0x40
	return b
}

type neverEnding struct{}

func (neverEnding) Read(p []byte) (int, error) { return len(p), nil }

var _ io.Reader = neverEnding{}

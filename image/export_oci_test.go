package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// An environment is a base, a workspace that was committed over it, and a
// toolkit.
func exportable(t *testing.T, lib *image.Library) []blob.Digest {
	t.Helper()
	base, err := lib.Import(t.Context(), three(t, host).layoutDir(t), image.Options{})
	must(t, err)
	b := mounted(t, lib, base)
	upper := change(t, []string{b}, func(root string) {
		must(t, os.RemoveAll(root+"/old"))
		must(t, os.Mkdir(root+"/old", 0o700))
		must(t, os.WriteFile(root+"/old/new", pattern("new", 300000), 0o600))
		must(t, os.Remove(root+"/bin/ash"))
		must(t, os.RemoveAll(root+"/home"))
		must(t, os.WriteFile(root+"/home", []byte("a file now"), 0o600))
		must(t, os.Chown(root+"/etc/passwd", 12, 34))
		must(t, os.Link(root+"/old/new", root+"/linked"))
		f, err := os.Create(root + "/holes")
		must(t, err)
		_, err = f.WriteAt([]byte("end"), 5<<20)
		must(t, err)
		must(t, f.Close())
	})
	work, err := lib.Commit(t.Context(), image.CommitSource{Upper: upper,
		Config: image.Config{Env: []string{"PATH=/work/bin", "W=1"}, Cwd: "/work"}})
	must(t, err)
	tools, err := lib.Import(t.Context(), packed(t, host, []compress{plain},
		tarOf(t, entry{name: "opt/tool", body: pattern("tool", 70000), mode: 0o755}, entry{name: "etc/.wh.rich"})).layoutDir(t), image.Options{Role: dsec.Toolkit})
	must(t, err)
	return []blob.Digest{base.Digest, work.Digest, tools.Digest}
}

// whole describes the layers as a sandbox sees them. Link counts are those of one
// file system and no other.
func whole(t *testing.T, lib *image.Library, layers []blob.Digest) map[string]string {
	t.Helper()
	var lowers []string
	for _, d := range layers {
		l, err := lib.Stat(t.Context(), d)
		must(t, err)
		lowers = append([]string{mounted(t, lib, l)}, lowers...)
	}
	if len(lowers) == 1 {
		return withoutLinks(describe(t, lowers[0]))
	}
	var out map[string]string
	overlay(t, lowers, func(root string) { out = describe(t, root) })
	return withoutLinks(out)
}

func withoutLinks(files map[string]string) map[string]string {
	for p, line := range files {
		if i := strings.Index(line, " nlink="); i >= 0 {
			_, rest, _ := strings.Cut(line[i+1:], " ")
			files[p] = line[:i] + " " + rest
			// A link to a name that is hidden is none.
			if j := strings.Index(files[p], " link="); j >= 0 {
				_, rest, _ := strings.Cut(files[p][j+1:], " ")
				files[p] = files[p][:j] + " " + rest
			}
		}
	}
	return files
}

func export(t *testing.T, lib *image.Library, layers []blob.Digest, opts image.ExportOptions) []byte {
	t.Helper()
	var out bytes.Buffer
	must(t, lib.Export(t.Context(), layers, &out, opts))
	return out.Bytes()
}

func TestExportAndImport(t *testing.T) {
	for name, pack := range map[string]image.Packing{"plain": image.None, "packed": image.Zstd} {
		for how, layers := range map[string]image.Layering{"layered": image.Layered, "squashed": image.Squashed} {
			t.Run(name+" "+how, func(t *testing.T) {
				store, err := blob.OpenFolder(t.TempDir())
				must(t, err)
				copies, err := blob.OpenFolder(t.TempDir())
				must(t, err)
				lib := image.New(store, image.LibraryOptions{Pack: pack, Plain: copies, Temp: t.TempDir()})
				env := exportable(t, lib)
				var told dsec.Progress
				opts := image.ExportOptions{Layers: layers, Ref: "task:1", Progress: func(p dsec.Progress) { told = p }}
				b := export(t, lib, env, opts)
				if !bytes.Equal(b, export(t, lib, env, opts)) {
					t.Error("two exports differ")
				}
				if told.Done == 0 || told.Done > told.Total {
					t.Errorf("progress %+v", told)
				}
				back, err := lib.Upload(t.Context(), bytes.NewReader(b), image.Options{})
				must(t, err)
				same(t, whole(t, lib, []blob.Digest{back.Digest}), whole(t, lib, env))
				c := back.Manifest.Config
				if got := strings.Join(append(c.Env, c.Cwd, c.User), "|"); got != "PATH=/work/bin:/bin|A=b|W=1|/work|1000:1000" || strings.Join(append(c.Entrypoint, c.Cmd...), " ") != "/init -x" {
					t.Errorf("config %+v", c)
				}
				want := 3
				if layers == image.Squashed {
					want = 1
				}
				if n := len(back.Manifest.Origin.DiffIDs); n != want {
					t.Errorf("%d layers, want %d", n, want)
				}
				// And once more: what was exported of it is the same file system.
				again, err := lib.Upload(t.Context(), bytes.NewReader(export(t, lib, []blob.Digest{back.Digest}, image.ExportOptions{})), image.Options{})
				must(t, err)
				if again.Manifest.Meta != back.Manifest.Meta {
					same(t, whole(t, lib, []blob.Digest{again.Digest}), whole(t, lib, env))
				}
			})
		}
	}
}

// unpackTar makes a folder of a tar, for tools that want an OCI layout as one.
func unpackTar(t *testing.T, b []byte) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("tar", "-C", dir, "-xf", "-")
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	return dir
}

// Other people's programs are asked whether it is an OCI image, and what is in it.
func TestExportForOthers(t *testing.T) {
	lib, _ := newLibrary(t)
	env := exportable(t, lib)
	want := whole(t, lib, env)
	b := export(t, lib, env, image.ExportOptions{Ref: "task:1"})
	dir := unpackTar(t, b)

	t.Run("go-containerregistry, layout", func(t *testing.T) {
		index, err := layout.ImageIndexFromPath(dir)
		must(t, err)
		must(t, validate.Index(index))
	})
	t.Run("go-containerregistry, docker archive", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "image.tar")
		must(t, os.WriteFile(path, b, 0o600))
		img, err := tarball.ImageFromPath(path, nil)
		must(t, err)
		must(t, validate.Image(img))
	})
	t.Run("skopeo", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "image.tar")
		must(t, os.WriteFile(path, b, 0o600))
		for _, from := range []string{"oci-archive:" + path + ":task:1", "docker-archive:" + path} {
			out := tool(t, "skopeo", "inspect", "--config", from)
			if !strings.Contains(out, "/work/bin:/bin") {
				t.Errorf("skopeo inspect of %s: %s", from, out)
			}
			to := t.TempDir()
			tool(t, "skopeo", "copy", "--insecure-policy", from, "dir:"+to)
			if es, err := os.ReadDir(to); err != nil || len(es) < 5 {
				t.Errorf("skopeo copied %d files, %v", len(es), err)
			}
		}
	})
	t.Run("umoci", func(t *testing.T) {
		bundle := filepath.Join(t.TempDir(), "bundle")
		tool(t, "umoci", "unpack", "--image", dir+":task:1", bundle)
		got := withoutLinks(describe(t, bundle+"/rootfs"))
		for p := range got {
			// It cannot set these, or sets a time of its own.
			got[p], want[p] = coarse(got[p]), coarse(want[p])
		}
		same(t, got, want)
	})
}

// coarse leaves out of a line what umoci changes: times of folders that it writes
// to later, and fractions of seconds.
func coarse(line string) string {
	f := strings.Fields(line)
	if len(f) < 3 {
		return line
	}
	f[2], _, _ = strings.Cut(f[2], ".")
	if strings.HasPrefix(f[0], "4") {
		f[2] = ""
	}
	return strings.Join(f, " ")
}

// tool runs a program that make deps has installed.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestExportRefused(t *testing.T) {
	lib, store := newLibrary(t)
	env := exportable(t, lib)
	for name, c := range map[string]struct {
		layers []blob.Digest
		kind   dsec.ErrorKind
	}{
		"nothing":   {nil, dsec.Invalid},
		"no base":   {env[1:], dsec.Invalid},
		"two bases": {[]blob.Digest{env[0], env[0]}, dsec.Invalid},
		"unknown":   {[]blob.Digest{env[0], blob.Of(nil)}, dsec.NotFound},
	} {
		if err := lib.Export(t.Context(), c.layers, io.Discard, image.ExportOptions{}); dsec.KindOf(err) != c.kind {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := lib.Export(ctx, env, io.Discard, image.ExportOptions{}); dsec.KindOf(err) != dsec.Canceled {
		t.Errorf("canceled: %v", err)
	}
	full := errors.New("full")
	if err := lib.Export(t.Context(), env, failing{full}, image.ExportOptions{}); !errors.Is(err, full) {
		t.Errorf("writer that fails: %v", err)
	}
	// Damaged data is found out before it leaves.
	l, err := lib.Stat(t.Context(), env[2])
	must(t, err)
	path, err := store.LocalPath(t.Context(), l.Manifest.Data[0].Digest)
	must(t, err)
	data, err := os.ReadFile(path)
	must(t, err)
	must(t, os.Chmod(path, 0o600))
	must(t, os.WriteFile(path, damaged(data, 100), 0o600))
	var out bytes.Buffer
	if err := lib.Export(t.Context(), env, &out, image.ExportOptions{}); !errors.Is(err, image.ErrCorrupt) || dsec.KindOf(err) != dsec.Lost {
		t.Errorf("damaged data: %v", err)
	}
	if out.Len() != 0 {
		t.Errorf("%d bytes were written of an image that cannot be", out.Len())
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// The archive says what it should, in the order that lets it be read as a stream.
func TestExportArchive(t *testing.T) {
	lib, _ := newLibrary(t)
	b := export(t, lib, exportable(t, lib), image.ExportOptions{})
	var names []string
	var index struct {
		Manifests []struct {
			Annotations map[string]string
		}
	}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s: %+v", h.Name, h)
		}
		names = append(names, h.Name)
		if h.Name == "index.json" {
			must(t, json.NewDecoder(r).Decode(&index))
		}
	}
	if len(names) != 8 || names[0] != "oci-layout" || names[6] != "index.json" || names[7] != "manifest.json" {
		t.Errorf("names %v", names)
	}
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations != nil {
		t.Errorf("index %+v", index)
	}
}

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// Layering is how many layers an exported image has.
type Layering int

const (
	// Layered gives the image a layer for each of the environment's.
	Layered Layering = iota
	// Squashed joins them into one.
	Squashed
)

// ExportOptions are what is optional about an export.
type ExportOptions struct {
	Layers Layering
	// Ref, if set, is the name that tools which load the image give it, such as
	// "task:1".
	Ref string
	// Progress, if set, is called now and then, never twice at a time, with the
	// bytes of files that were read.
	Progress func(dsec.Progress)
}

const stageExport = "export"

// Export writes an environment as an OCI image to w: an OCI layout in a tar, which
// is also what docker loads. layers are a base, which comes first, then workspace
// and toolkits as they lie on it. The same layers and options give the same bytes,
// for one version of dsec.
//
// Config is composed as that of a sandbox: of variables the higher layer wins, of
// PATH both have a part; folder, user and command are those of the last layer that
// is no toolkit and has them. Sockets are left out, and holes become zeros.
func (l *Library) Export(ctx context.Context, layers []blob.Digest, w io.Writer, opts ExportOptions) error {
	return stored("image.Export", l.export(ctx, layers, w, opts))
}

func (l *Library) export(ctx context.Context, layers []blob.Digest, w io.Writer, opts ExportOptions) error {
	if len(layers) == 0 {
		return dsec.Errorf(dsec.Invalid, "no layers to export")
	}
	e := &exporter{ctx: ctx, lib: l, opts: opts, prog: dsec.Progress{Stage: stageExport}}
	defer e.close()
	if err := e.load(layers); err != nil {
		return err
	}
	for i := range e.layers {
		if err := e.pack(&e.layers[i]); err != nil {
			return fmt.Errorf("layer %s: %w", e.layers[i].name, err)
		}
	}
	return e.write(w)
}

type exporter struct {
	ctx    context.Context
	lib    *Library
	opts   ExportOptions
	config Config
	vars   []string // names of variables, in the order of their first layer
	values map[string]string
	layers []exportLayer
	prog   dsec.Progress
}

// An exportLayer is one layer of the image.
type exportLayer struct {
	name string // for people
	tree *erofs.Tree
	data map[string]io.ReaderAt
	file *os.File // the compressed tar
	size int64
	sum  v1.Hash
	diff v1.Hash
}

func (e *exporter) close() {
	for _, x := range e.layers {
		if x.file != nil {
			x.file.Close()
		}
	}
}

// load reads what all layers are, and what they are together.
func (e *exporter) load(layers []blob.Digest) error {
	below := erofs.New()
	var all []Data
	var names []string
	e.values = map[string]string{}
	for i, d := range layers {
		m, err := e.lib.manifest(e.ctx, d)
		if err != nil {
			return fmt.Errorf("layer %s: %w", d, err)
		}
		switch {
		case m.Role == dsec.Disk:
			return dsec.Errorf(dsec.Unsupported, "layer %s is the disk of a machine, which is no container image", d)
		case (i == 0) != (m.Role == dsec.Base):
			return dsec.Errorf(dsec.Invalid, "layer %d of the image is a %s: the first has to be a base, and no other", i+1, m.Role)
		}
		t, _, err := e.lib.tree(e.ctx, d)
		if err != nil {
			return fmt.Errorf("layer %s: %w", d, err)
		}
		merged, err := erofs.Merge(below, t)
		if err != nil {
			return fmt.Errorf("layer %s: %w", d, err)
		}
		all = append(all, m.Data...)
		if t, err = erofs.Explicit(below, t); err != nil {
			return fmt.Errorf("layer %s: %w", d, err)
		}
		// What was redirected has its data in the layers below.
		e.layers = append(e.layers, exportLayer{name: string(d), tree: t, data: e.lib.contents(e.ctx, slices.Clone(all))})
		names = append(names, string(d))
		e.prog.Total += m.Size
		e.compose(m)
		below = merged
	}
	if e.opts.Layers == Squashed {
		e.layers = []exportLayer{{name: strings.Join(names, " + "), tree: below, data: e.lib.contents(e.ctx, all)}}
	}
	for _, k := range e.vars {
		e.config.Env = append(e.config.Env, k+"="+e.values[k])
	}
	return nil
}

// compose takes a layer's config over those below.
func (e *exporter) compose(m *Manifest) {
	for _, kv := range m.Config.Env {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			continue
		}
		old, known := e.values[k]
		if !known {
			e.vars = append(e.vars, k)
		} else if k == "PATH" {
			v = joinPath(v, old)
		}
		e.values[k] = v
	}
	if m.Role == dsec.Toolkit {
		return
	}
	if m.Config.Cwd != "" {
		e.config.Cwd = m.Config.Cwd
	}
	if m.Config.User != "" {
		e.config.User = m.Config.User
	}
	if len(m.Config.Entrypoint)+len(m.Config.Cmd) > 0 {
		e.config.Entrypoint, e.config.Cmd = m.Config.Entrypoint, m.Config.Cmd
	}
}

// joinPath puts the folders of upper that lower does not have before lower.
func joinPath(upper, lower string) string {
	have := strings.Split(lower, ":")
	var dirs []string
	for d := range strings.SplitSeq(upper, ":") {
		if !slices.Contains(have, d) && !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	return strings.Join(append(dirs, have...), ":")
}

// pack makes the compressed tar of a layer, in a file without a name: an archive
// names a blob and its size before its bytes.
func (e *exporter) pack(x *exportLayer) error {
	f, err := os.CreateTemp(e.lib.opts.Temp, "dsec-export-*")
	if err != nil {
		return fmt.Errorf("create layer: %w", err)
	}
	x.file = f
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	sum, diff := sha256.New(), sha256.New()
	counted := &countWriter{w: io.MultiWriter(f, sum)}
	z := gzip.NewWriter(counted)
	plain := io.MultiWriter(z, diff, progressWriter{e})
	if err := x.tree.WriteTar(e.ctx, plain, x.data); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	x.size = counted.n
	x.sum = v1.Hash{Algorithm: "sha256", Hex: blob.FromHash(sum).Hex()}
	x.diff = v1.Hash{Algorithm: "sha256", Hex: blob.FromHash(diff).Hex()}
	return nil
}

type countWriter struct {
	w io.Writer
	n int64
}

func (c *countWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// progressWriter counts what of the tars is made.
type progressWriter struct{ e *exporter }

func (p progressWriter) Write(b []byte) (int, error) {
	e := p.e
	before := e.prog.Done / reportEvery
	e.prog.Done += int64(len(b))
	e.prog.Total = max(e.prog.Total, e.prog.Done) // headers count, too
	if e.opts.Progress != nil && e.prog.Done/reportEvery != before {
		e.opts.Progress(e.prog)
	}
	return len(b), nil
}

// write puts the archive together.
func (e *exporter) write(w io.Writer) error {
	config, manifest, index, docker := e.documents()
	out := tar.NewWriter(w)
	put := func(name string, size int64, r io.Reader) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.Copy(out, r)
		return err
	}
	small := func(name string, b []byte) error { return put(name, int64(len(b)), bytes.NewReader(b)) }
	blobName := func(hex string) string { return "blobs/sha256/" + hex }
	if err := small(layoutMark, []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, x := range e.layers {
		if seen[x.sum.Hex] {
			continue // two layers may be the same tar
		}
		seen[x.sum.Hex] = true
		if err := e.ctx.Err(); err != nil {
			return context.Cause(e.ctx)
		}
		if err := put(blobName(x.sum.Hex), x.size, io.NewSectionReader(x.file, 0, x.size)); err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
	}
	for _, d := range []struct {
		name string
		b    []byte
	}{
		{blobName(blob.Of(config).Hex()), config}, {blobName(blob.Of(manifest).Hex()), manifest},
		{layoutIndex, index}, {dockerManifest, docker},
	} {
		if err := small(d.name, d.b); err != nil {
			return fmt.Errorf("write archive: %w", err)
		}
	}
	return out.Close()
}

// documents makes the JSON that describes the image.
func (e *exporter) documents() (config, manifest, index, docker []byte) {
	c := v1.ConfigFile{
		Architecture: runtime.GOARCH, OS: "linux", RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Env: e.config.Env, WorkingDir: e.config.Cwd, User: e.config.User,
			Entrypoint: e.config.Entrypoint, Cmd: e.config.Cmd,
		},
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	var paths []string
	for _, x := range e.layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, x.diff)
		c.History = append(c.History, v1.History{Created: v1.Time{Time: time.Unix(0, 0).UTC()}, CreatedBy: "dsec layer " + x.name})
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: types.OCILayer, Size: x.size, Digest: x.sum})
		paths = append(paths, "blobs/sha256/"+x.sum.Hex)
	}
	c.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
	config = marshal(c)
	m.Config = described(types.OCIConfigJSON, config)
	manifest = marshal(m)
	top := described(types.OCIManifestSchema1, manifest)
	top.Platform = &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	var tags []string
	if e.opts.Ref != "" {
		top.Annotations = map[string]string{refAnnotation: e.opts.Ref}
		tags = []string{e.opts.Ref}
	}
	index = marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{top}})
	docker = marshal([]map[string]any{{"Config": "blobs/sha256/" + m.Config.Digest.Hex, "RepoTags": tags, "Layers": paths}})
	return config, manifest, index, docker
}

func described(t types.MediaType, b []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: t, Size: int64(len(b)), Digest: v1.Hash{Algorithm: "sha256", Hex: blob.Of(b).Hex()}}
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data marshals
	}
	return b
}

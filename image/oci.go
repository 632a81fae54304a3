package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	maxOCIDocument = 8 << 20 // an index, manifest or config
	maxIndexDepth  = 4
	maxOCILayers   = 500 // more could nobody mount
	refAnnotation  = "org.opencontainers.image.ref.name"
	fullAnnotation = "io.containerd.image.name"
)

// An origin is a place that OCI images come from: registry, layout, archive.
type origin interface {
	// open reads the named manifest, config or layer. What it reads is
	// checked by the caller.
	open(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error)
}

// An ociImage is one image of one platform, before its layers are read.
type ociImage struct {
	config *v1.ConfigFile
	digest blob.Digest // of the config
	layers []v1.Descriptor
	// unnamed layers are known by their uncompressed digest alone, as in old
	// archives.
	unnamed bool
}

// resolve follows indexes from root to this platform's image.
func (w *work) resolve(ctx context.Context, o origin, root v1.Descriptor) (*ociImage, error) {
	for depth := 0; depth < maxIndexDepth; depth++ {
		b, err := readDocument(ctx, o, root)
		if err != nil {
			return nil, fmt.Errorf("manifest %s: %w", root.Digest, err)
		}
		if !isIndex(root.MediaType, b) {
			return readManifest(ctx, o, root, b)
		}
		index, err := v1.ParseIndexManifest(bytes.NewReader(b))
		if err != nil {
			return nil, fmt.Errorf("index %s: %w: %w", root.Digest, ErrCorrupt, err)
		}
		if root, err = choose(index.Manifests, w.opts.Ref); err != nil {
			return nil, fmt.Errorf("index %s: %w", root.Digest, err)
		}
	}
	return nil, fmt.Errorf("index within index, %d deep: %w", maxIndexDepth, ErrCorrupt)
}

// isIndex trusts a media type that is known; some registries and layouts leave
// it out.
func isIndex(t types.MediaType, b []byte) bool {
	switch {
	case t.IsIndex():
		return true
	case t.IsImage():
		return false
	}
	return bytes.Contains(b, []byte(`"manifests"`)) && !bytes.Contains(b, []byte(`"layers"`))
}

// choose picks the entry for this host, by name first if there are names.
func choose(list []v1.Descriptor, ref string) (v1.Descriptor, error) {
	var named, fit []v1.Descriptor
	var have []string
	for _, d := range list {
		if ref != "" && (d.Annotations[refAnnotation] == ref || d.Annotations[fullAnnotation] == ref) {
			named = append(named, d)
		}
	}
	if len(named) > 0 {
		list = named
	}
	for _, d := range list {
		switch p := d.Platform; {
		case p == nil || p.OS == "" && p.Architecture == "":
			if d.MediaType.IsImage() || d.MediaType.IsIndex() || d.MediaType == "" {
				fit = append(fit, d)
			}
		case p.OS == "unknown": // an attestation beside an image
		case p.OS == "linux" && p.Architecture == runtime.GOARCH:
			fit = append(fit, d)
		default:
			have = append(have, p.String())
		}
	}
	switch {
	case len(fit) == 0 && len(have) == 0:
		return v1.Descriptor{}, dsec.Errorf(dsec.Invalid, "no image in it")
	case len(fit) == 0:
		return v1.Descriptor{}, dsec.Errorf(dsec.Unsupported, "no image for linux/%s, only for %s", runtime.GOARCH, strings.Join(have, ", "))
	}
	for _, d := range fit[1:] {
		// Several variants are usual, and the first is the plain one. Several
		// without a platform are several images.
		if d.Platform == nil && d.Digest != fit[0].Digest {
			return v1.Descriptor{}, dsec.Errorf(dsec.Invalid, "several images in it: say which by its name")
		}
	}
	return fit[0], nil
}

func readManifest(ctx context.Context, o origin, root v1.Descriptor, b []byte) (*ociImage, error) {
	m, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w: %w", root.Digest, ErrCorrupt, err)
	}
	if m.SchemaVersion != 2 || m.Config.Digest.Hex == "" {
		return nil, dsec.Errorf(dsec.Unsupported, "manifest %s of schema %d", root.Digest, m.SchemaVersion)
	}
	switch m.Config.MediaType {
	case types.OCIConfigJSON, types.DockerConfigJSON, "":
	default:
		return nil, dsec.Errorf(dsec.Unsupported, "manifest %s holds no file system: its config is %s", root.Digest, m.Config.MediaType)
	}
	c, err := readDocument(ctx, o, m.Config)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", m.Config.Digest, err)
	}
	return parseConfig(c, m.Layers)
}

func parseConfig(b []byte, layers []v1.Descriptor) (*ociImage, error) {
	digest := blob.Of(b)
	c, err := v1.ParseConfigFile(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("config %s: %w: %w", digest, ErrCorrupt, err)
	}
	if c.OS != "" && c.OS != "linux" || c.Architecture != "" && c.Architecture != runtime.GOARCH {
		return nil, dsec.Errorf(dsec.Unsupported, "no image for linux/%s, only for %s/%s", runtime.GOARCH, c.OS, c.Architecture)
	}
	if len(layers) > maxOCILayers {
		return nil, dsec.Errorf(dsec.Unsupported, "image of %d layers, more than %d", len(layers), maxOCILayers)
	}
	if len(c.RootFS.DiffIDs) != len(layers) {
		return nil, fmt.Errorf("config %s: %d layers, but %d digests of them: %w", digest, len(layers), len(c.RootFS.DiffIDs), ErrCorrupt)
	}
	return &ociImage{config: c, digest: digest, layers: layers}, nil
}

// readDocument reads and checks one JSON document.
func readDocument(ctx context.Context, o origin, d v1.Descriptor) ([]byte, error) {
	want, err := blob.Parse(d.Digest.String())
	if err != nil {
		return nil, err
	}
	r, err := o.open(ctx, d)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxOCIDocument+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxOCIDocument {
		return nil, fmt.Errorf("more than %d bytes: %w", maxOCIDocument, ErrCorrupt)
	}
	if got := blob.Of(b); got != want {
		return nil, fmt.Errorf("content of %d bytes is %s: %w", len(b), got, ErrCorrupt)
	}
	return b, nil
}

// maxOwn bounds the data blobs made for one image; the last takes the rest.
const maxOwn = 32

// convert makes the layer of an OCI image.
func (w *work) convert(ctx context.Context, o origin, img *ociImage) (Layer, error) {
	m := Manifest{
		Config: Config{
			Env: img.config.Config.Env, Cwd: img.config.Config.WorkingDir, User: img.config.Config.User,
			Entrypoint: img.config.Config.Entrypoint, Cmd: img.config.Config.Cmd,
		},
		Origin:  &Origin{Config: img.digest, DiffIDs: []blob.Digest{}},
		Content: w.ociIdentity(img.digest),
	}
	w.prog = dsec.Progress{Stage: stageFetch}
	for _, d := range img.layers {
		w.prog.Total += d.Size
	}
	tree := erofs.New()
	var trees []*erofs.Tree
	for i, d := range img.layers {
		diff, err := blob.Parse(img.config.RootFS.DiffIDs[i].String())
		if err != nil {
			return Layer{}, fmt.Errorf("diff id %d: %w", i, err)
		}
		m.Origin.DiffIDs = append(m.Origin.DiffIDs, diff)
		t, err := w.ociLayer(ctx, o, d, diff, img.unnamed, tree)
		if err != nil {
			return Layer{}, fmt.Errorf("layer %d of %d: %w", i+1, len(img.layers), err)
		}
		trees = append(trees, t)
		if w.open.blob.Size() >= w.lib.opts.MergeBelow && w.blobs < maxOwn {
			if err := w.end(); err != nil {
				return Layer{}, err
			}
		}
		if tree, err = erofs.Merge(tree, t); err != nil {
			return Layer{}, err
		}
	}
	if w.opts.Role != dsec.Base {
		var err error
		if tree, err = erofs.Fold(trees...); err != nil {
			return Layer{}, err
		}
	}
	return w.finish(ctx, tree, m, nil)
}

// ociLayer reads one layer, which lies on below.
func (w *work) ociLayer(ctx context.Context, o origin, d v1.Descriptor, diff blob.Digest, unnamed bool, below *erofs.Tree) (*erofs.Tree, error) {
	r, err := o.open(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Digest, err)
	}
	defer r.Close()
	src := newSource(ctx, r, w.advance)
	if !unnamed {
		src.hashed()
	}
	t, err := w.unpack(ctx, src, diff, below)
	if unnamed {
		return t, err
	}
	// Bytes that are not what they should be explain most other errors, and
	// better. It is not worth fetching the rest to learn it when they do not.
	if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, erofs.ErrCorrupt) &&
		!errors.Is(err, erofs.ErrInvalid) && !errors.Is(err, erofs.ErrUnsupported) {
		return nil, fmt.Errorf("%s: %w", d.Digest, err)
	}
	want, perr := blob.Parse(d.Digest.String())
	if perr != nil {
		return nil, perr
	}
	if src.err != nil {
		return nil, fmt.Errorf("%s: %w", d.Digest, src.err)
	}
	if cerr := src.check(want, d.Size); cerr != nil {
		return nil, fmt.Errorf("%s: %w", d.Digest, cerr)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Digest, err)
	}
	return t, nil
}

// unpack reads a tar, maybe compressed, to its end. With a diff id the
// uncompressed bytes must be that.
func (w *work) unpack(ctx context.Context, src *source, diff blob.Digest, below *erofs.Tree) (*erofs.Tree, error) {
	plain, done, err := expand(src)
	if err != nil {
		return nil, err
	}
	defer done()
	sum := newSource(ctx, bounded{w, plain}, nil)
	if diff != "" {
		sum.hashed()
	}
	early, stop := ahead(sum)
	defer stop()
	t, err := w.tree(ctx, func(b *erofs.Blob) (*erofs.Tree, error) {
		t, err := erofs.FromTar(ctx, early, b, erofs.TarOptions{Below: below, Budget: w.budget, Marked: diff == ""})
		if err != nil {
			return nil, err
		}
		// After the end mark there may be padding, which counts as content.
		_, err = io.Copy(io.Discard, early)
		return t, err
	})
	if err != nil {
		return nil, err
	}
	if diff == "" {
		return t, nil
	}
	if got := blob.FromHash(sum.hash); got != diff {
		return nil, fmt.Errorf("uncompressed content is %s, should be %s: %w", got, diff, ErrCorrupt)
	}
	return t, nil
}

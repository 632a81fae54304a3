package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

const (
	layoutMark     = "oci-layout"
	layoutIndex    = "index.json"
	dockerManifest = "manifest.json"
	maxArchived    = 100000 // entries in an archive of an image
	maxArchiveName = 512
)

// ofImage matches the names that archives of images consist of, in all
// versions of their makers. Compiled when first used, since every command line
// of dsec starts with this package.
var ofImage = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(blobs(/sha256(/[0-9a-f]{64})?)?|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}(/(layer\.tar|json|VERSION))?|(sha256:)?[0-9a-f]{64}(\.(json|tar|tar\.gz))?)$`)
})

// looksLikeImage tells an archive of an image from one of a file system by the
// name of its first entry that has one.
func looksLikeImage(header []byte) bool {
	for r := tar.NewReader(bytes.NewReader(header)); ; {
		h, err := r.Next()
		if err != nil {
			return false
		}
		if name := path.Clean(h.Name); name != "." {
			return ofImage().MatchString(name)
		}
	}
}

// files is a set of named files to find the pieces of an image in.
type files interface {
	file(name string) (io.ReadCloser, error) // fs.ErrNotExist if there is none
}

// dirFiles are those of a folder; symlinks out of it are not followed.
type dirFiles struct{ *os.Root }

func (d dirFiles) file(name string) (io.ReadCloser, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// tarFiles are those of an archive in a file.
type tarFiles struct {
	f       *os.File
	entries map[string]tarEntry
}

type tarEntry struct {
	off, size int64
	link      string // to another entry
}

// indexTar notes where everything in an archive is.
func indexTar(ctx context.Context, f *os.File) (*tarFiles, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	t := &tarFiles{f: f, entries: map[string]tarEntry{}}
	// The reader asks the file for whole headers and nothing more, so the
	// file's offset after Next is where the content begins.
	r := tar.NewReader(f)
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		h, err := r.Next()
		if err == io.EOF {
			return t, nil
		}
		if err != nil {
			return nil, fmt.Errorf("archive: %w: %w", ErrCorrupt, err)
		}
		if len(t.entries) > maxArchived {
			return nil, fmt.Errorf("archive of more than %d entries: %w", maxArchived, ErrCorrupt)
		}
		off, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		name := path.Clean(h.Name)
		if len(name) > maxArchiveName || len(h.Linkname) > maxArchiveName {
			continue // of no part of an image
		}
		switch h.Typeflag {
		case tar.TypeReg:
			t.entries[name] = tarEntry{off: off, size: h.Size}
		case tar.TypeSymlink:
			t.entries[name] = tarEntry{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			t.entries[name] = tarEntry{link: path.Clean(h.Linkname)}
		}
	}
}

func (t *tarFiles) file(name string) (io.ReadCloser, error) {
	for range 10 {
		e, ok := t.entries[path.Clean(name)]
		if !ok {
			return nil, fmt.Errorf("%.200q is not in the archive: %w", name, os.ErrNotExist)
		}
		if e.link == "" {
			return io.NopCloser(io.NewSectionReader(t.f, e.off, e.size)), nil
		}
		name = e.link
	}
	return nil, fmt.Errorf("%.200q: links in a circle: %w", name, ErrCorrupt)
}

// layout is the origin of an OCI layout.
type layout struct{ files }

func (o layout) open(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	digest, err := blob.Parse(d.Digest.String())
	if err != nil {
		return nil, err
	}
	return o.file("blobs/sha256/" + digest.Hex())
}

// loadImage makes a layer of a layout or of what docker saved. Newer archives
// are both, and then the layout says more.
func (w *work) loadImage(ctx context.Context, f files) (Layer, error) {
	index, err := readFile(f, layoutIndex)
	if err == nil {
		return w.loadLayout(ctx, f, index)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return Layer{}, err
	}
	list, err := readFile(f, dockerManifest)
	if errors.Is(err, os.ErrNotExist) {
		return Layer{}, fmt.Errorf("archive has neither %s nor %s: %w", layoutIndex, dockerManifest, ErrCorrupt)
	}
	if err != nil {
		return Layer{}, err
	}
	return w.loadDocker(ctx, f, list)
}

func (w *work) loadLayout(ctx context.Context, f files, b []byte) (Layer, error) {
	index, err := v1.ParseIndexManifest(bytes.NewReader(b))
	if err != nil {
		return Layer{}, fmt.Errorf("%s: %w: %w", layoutIndex, ErrCorrupt, err)
	}
	root, err := choose(index.Manifests, w.opts.Ref)
	if err != nil {
		return Layer{}, fmt.Errorf("%s: %w", layoutIndex, err)
	}
	img, err := w.resolve(ctx, layout{f}, root)
	if err != nil {
		return Layer{}, err
	}
	return w.convert(ctx, layout{f}, img)
}

// docker is the origin of an old archive: layers are found by name.
type docker struct {
	files
	names map[v1.Hash]string
}

func (o docker) open(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	return o.file(o.names[d.Digest])
}

func (w *work) loadDocker(ctx context.Context, f files, b []byte) (Layer, error) {
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return Layer{}, fmt.Errorf("%s: %w: %w", dockerManifest, ErrCorrupt, err)
	}
	var tags []string
	for i := range list {
		if w.opts.Ref != "" && slices.Contains(list[i].RepoTags, w.opts.Ref) {
			list = list[i : i+1]
			break
		}
		tags = append(tags, list[i].RepoTags...)
	}
	if len(list) == 0 {
		return Layer{}, dsec.Errorf(dsec.Invalid, "no image in the archive")
	}
	if len(list) > 1 {
		return Layer{}, dsec.Errorf(dsec.Invalid, "several images in the archive (%s): say which", strings.Join(tags, ", "))
	}
	one := list[0]
	config, err := readFile(f, one.Config)
	if err != nil {
		return Layer{}, fmt.Errorf("config: %w", err)
	}
	// Its name is its digest in every version of the format.
	hex := strings.TrimPrefix(strings.TrimSuffix(path.Base(one.Config), ".json"), "sha256:")
	if got := blob.Of(config); len(hex) == 64 && got.Hex() != hex {
		return Layer{}, fmt.Errorf("config %s: content is %s: %w", hex, got, ErrCorrupt)
	}
	o := docker{files: f, names: map[v1.Hash]string{}}
	var layers []v1.Descriptor
	for i, name := range one.Layers {
		h := v1.Hash{Algorithm: "layer", Hex: fmt.Sprint(i)} // a place, not a digest
		o.names[h] = name
		layers = append(layers, v1.Descriptor{MediaType: types.DockerUncompressedLayer, Digest: h})
	}
	img, err := parseConfig(config, layers)
	if err != nil {
		return Layer{}, err
	}
	img.unnamed = true
	return w.convert(ctx, o, img)
}

func readFile(f files, name string) ([]byte, error) {
	r, err := f.file(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxOCIDocument+1))
	if err == nil && len(b) > maxOCIDocument {
		err = fmt.Errorf("%s of more than %d bytes: %w", name, maxOCIDocument, ErrCorrupt)
	}
	return b, err
}

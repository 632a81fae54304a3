package main

import (
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/rootfs"
)

// images is dsec.Images: the layers of a library under the names of a cluster.
// Neither of the two knows the other.
type images struct {
	library *image.Library
	names   cluster.Names

	// inUse gives the layers that sandboxes use, which a collection keeps. It
	// lets go of mounts that nobody uses first.
	inUse func() map[string]int
}

var _ dsec.Images = (*images)(nil)

// Pull imports from a registry. The fetch ends with the loop over it.
func (s *images) Pull(ctx context.Context, ref string, opt dsec.ImportOptions) iter.Seq2[dsec.Progress, error] {
	return func(yield func(dsec.Progress, error) bool) {
		if err := check(opt); err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		var work sync.WaitGroup
		defer work.Wait()
		defer cancel()
		reports := make(chan dsec.Progress, 1)
		var img dsec.Image
		var err error
		work.Go(func() {
			defer close(reports)
			var l image.Layer
			l, err = s.library.Pull(ctx, ref, image.Options{Role: opt.Role, Progress: func(p dsec.Progress) {
				select {
				case reports <- p:
				default: // a slow reader misses reports, the fetch goes on
				}
			}})
			if err == nil {
				img, err = s.name(ctx, l, opt, ref)
			}
		})
		for p := range reports {
			if !yield(p, nil) {
				return
			}
		}
		if err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		yield(dsec.Progress{Stage: "store", Done: img.Size, Total: img.Size, Image: &img}, nil)
	}
}

// Upload imports a tar stream.
func (s *images) Upload(ctx context.Context, opt dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	if err := check(opt); err != nil {
		return dsec.Image{}, err
	}
	l, err := s.library.Upload(ctx, r, image.Options{Role: opt.Role})
	if err != nil {
		return dsec.Image{}, err
	}
	return s.name(ctx, l, opt, "upload")
}

// check refuses bad options before any work is done.
func check(opt dsec.ImportOptions) error {
	if opt.Role != "" {
		if err := opt.Role.Check(); err != nil {
			return err
		}
	}
	return dsec.CheckNewImageName(opt.Name)
}

// name makes an image of a layer.
func (s *images) name(ctx context.Context, l image.Layer, opt dsec.ImportOptions, source string) (dsec.Image, error) {
	img := l.Image()
	img.Name, img.Version = dsec.SplitImageName(opt.Name)
	if img.Version == "" {
		img.Version = l.Digest.Hex()[:12]
	}
	img.Created, img.Source = time.Now().UTC(), source
	if c, ok := dsec.CallerFrom(ctx); ok && !c.Admin {
		img.Project = c.Project
	}
	if err := (names{s.names}).Register(ctx, img); err != nil {
		return dsec.Image{}, err
	}
	// Who gives the same content the same name again gets the first record.
	return s.Inspect(ctx, img.Ref())
}

// view gives the names that the caller sees: a project's token its own and
// everybody's, an operator's all.
func (s *images) view(ctx context.Context) cluster.Names {
	if c, ok := dsec.CallerFrom(ctx); ok && !c.Admin {
		return s.names.Of(c.Project)
	}
	return s.names
}

// List gives all images that the caller sees.
func (s *images) List(ctx context.Context) ([]dsec.Image, error) {
	entries := s.view(ctx).List()
	list := make([]dsec.Image, len(entries))
	for i, e := range entries {
		list[i] = e.Image
	}
	return list, nil
}

// Inspect resolves a name.
func (s *images) Inspect(ctx context.Context, name string) (dsec.Image, error) {
	e, err := s.view(ctx).Resolve(name)
	return e.Image, err
}

// Remove forgets a name.
func (s *images) Remove(ctx context.Context, name string) error {
	return s.view(ctx).Delete(ctx, name)
}

// Collect deletes what no name and no sandbox needs. The names are read after
// the sandboxes: a create takes its layers before it could lose their name.
func (s *images) Collect(ctx context.Context) (dsec.Collected, error) {
	keep := map[string]int{}
	if s.inUse != nil {
		keep = s.inUse()
	}
	for _, e := range s.names.List() {
		keep[e.Digest]++
	}
	roots := make([]blob.Digest, 0, len(keep))
	for digest := range keep {
		d, err := blob.Parse(digest)
		if err != nil {
			return dsec.Collected{}, fmt.Errorf("read digest %s: %w", digest, err)
		}
		roots = append(roots, d)
	}
	return s.library.Collect(ctx, roots, image.CollectOptions{})
}

// Layer gives the verified files of a layer: images is the rootfs.Source.
func (s *images) Layer(ctx context.Context, digest string) (rootfs.Layer, error) {
	d, err := blob.Parse(digest)
	if err != nil {
		return rootfs.Layer{}, dsec.Errorf(dsec.NotFound, "layer %q: %w", digest, err)
	}
	f, err := s.library.Open(ctx, d)
	if err != nil {
		return rootfs.Layer{}, err
	}
	return rootfs.Layer{Digest: digest, Meta: f.Meta, Data: f.Data}, nil
}

// Commit writes a layer of a sandbox's changes: images is the edge.Committer.
// The new layer stands in for the workspace that lay below it.
func (s *images) Commit(ctx context.Context, src edge.CommitSource) (dsec.Image, error) {
	upper, err := os.Open(src.Dir)
	if err != nil {
		return dsec.Image{}, fmt.Errorf("open writable layer: %w", err)
	}
	defer upper.Close()
	from := image.CommitSource{Upper: upper, IDs: erofs.IDRange{Base: src.IDBase, Count: jail.IDRange}}
	if src.Base != nil {
		if from.Over, err = blob.Parse(src.Base.Digest); err != nil {
			return dsec.Image{}, fmt.Errorf("read digest of workspace: %w", err)
		}
		c := src.Base.Config
		from.Config = image.Config{Env: c.Env, Cwd: c.Cwd, User: c.User, Cmd: c.Shell}
	}
	l, err := s.library.Commit(ctx, from)
	if err != nil {
		return dsec.Image{}, err
	}
	return l.Image(), nil
}

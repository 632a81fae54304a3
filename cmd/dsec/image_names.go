package main

import (
	"cmp"
	"context"
	"io"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/image"
)

// names makes the image names of a cluster fit the edge.
type names struct{ *images }

// ByDigest reads what a layer says of itself.
func (n names) ByDigest(ctx context.Context, digest string) (dsec.Image, error) {
	d, err := blob.Parse(digest)
	if err != nil {
		return dsec.Image{}, dsec.Errorf(dsec.NotFound, "layer %q: %w", digest, err)
	}
	l, err := n.library.Stat(ctx, d)
	if err != nil {
		return dsec.Image{}, err
	}
	return l.Image(), nil
}

// Resolve gives the image that a name is to a project, and pins its layer for
// as long as a create can take until it counts as a sandbox.
func (n names) Resolve(_ context.Context, project dsec.ProjectID, name string) (dsec.Image, error) {
	return n.pin(n.images.names.Of(project), name)
}

// pin resolves a name and keeps collections away from its layer for a while.
func (s *images) pin(view cluster.Names, name string) (dsec.Image, error) {
	s.pinMu.Lock()
	defer s.pinMu.Unlock()
	e, err := view.Resolve(name)
	if err == nil {
		s.pinned[e.Digest] = time.Now().Add(pinTime)
	}
	return e.Image, err
}

// Register makes an image known, if its project has room for it.
func (n names) Register(ctx context.Context, img dsec.Image) error {
	caller, _ := dsec.CallerFrom(ctx)
	return n.stock.Put(ctx, cluster.Entry{Image: img, Creator: caller.Token})
}

// pinTime is far beyond what a create takes.
const pinTime = time.Hour

// named adds to keep what has a name or is pinned, all at one moment: a name
// that goes later was pinned before by who found it.
func (s *images) named(keep map[string]int) {
	s.pinMu.Lock()
	defer s.pinMu.Unlock()
	for d, n := range s.names.Layers() {
		keep[d] += n
	}
	now := time.Now()
	for d, until := range s.pinned {
		if until.Before(now) {
			delete(s.pinned, d)
		} else {
			keep[d]++
		}
	}
}

// Adopt names a layer that is in the store.
func (s *images) Adopt(ctx context.Context, digest string, opt dsec.ImportOptions) (dsec.Image, error) {
	const op = "images.Adopt"
	if c, ok := dsec.CallerFrom(ctx); ok && !c.Admin {
		return dsec.Image{}, dsec.WithOp(op, "", dsec.Errorf(dsec.Denied, "a layer without a name is an operator's to name"))
	}
	if err := check(opt); err != nil {
		return dsec.Image{}, err
	}
	d, err := blob.Parse(digest)
	if err != nil {
		return dsec.Image{}, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "layer %.80q: %v", digest, err))
	}
	if !s.collecting.TryRLock() {
		return dsec.Image{}, dsec.WithOp(op, "", dsec.Errorf(dsec.Unavailable, "a collection is under way, which may be about to delete the layer"))
	}
	defer s.collecting.RUnlock()
	l, err := s.library.Stat(ctx, d)
	if err != nil {
		return dsec.Image{}, err
	}
	if opt.Role != "" && opt.Role != l.Manifest.Role {
		return dsec.Image{}, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "layer %s is a %s, not a %s", d, l.Manifest.Role, opt.Role))
	}
	return s.name(ctx, l, opt, "layer")
}

// Tag lets a tag stand for a version.
func (s *images) Tag(ctx context.Context, name, tag string) (dsec.Image, error) {
	caller, _ := dsec.CallerFrom(ctx)
	e, err := s.view(ctx).Tag(ctx, name, tag, caller.Token)
	return e.Image, err
}

// List gives the images that the caller sees.
func (s *images) List(ctx context.Context, q dsec.ImageQuery) (dsec.ImagePage, error) {
	if q.Limit < 0 {
		return dsec.ImagePage{}, dsec.Errorf(dsec.Invalid, "a page of %d images", q.Limit)
	}
	if q.Limit == 0 || q.Limit > dsec.MaxImagePage {
		q.Limit = dsec.MaxImagePage
	}
	entries, next, err := s.view(ctx).Page(cluster.Query{Prefix: q.Prefix, Digest: q.Digest, Limit: q.Limit, After: q.After})
	if err != nil {
		return dsec.ImagePage{}, err
	}
	page := dsec.ImagePage{Images: make([]dsec.Image, len(entries)), Next: next}
	for i, e := range entries {
		page.Images[i] = e.Image
	}
	if q.Usage {
		s.fillUsage(ctx, page.Images)
		for _, img := range page.Images {
			if img.Usage != nil {
				img.Usage.Parts = nil // a page of them would be long
			}
		}
	}
	return page, nil
}

// Inspect resolves a name.
func (s *images) Inspect(ctx context.Context, name string) (dsec.Image, error) {
	e, err := s.view(ctx).Resolve(name)
	if err != nil {
		return dsec.Image{}, err
	}
	one := []dsec.Image{e.Image}
	s.fillUsage(ctx, one)
	return one[0], nil
}

// Export writes an environment as an OCI image. What is wrong with the names is
// told at once, what goes wrong on the way by the reader.
func (s *images) Export(ctx context.Context, e dsec.Environment) (io.ReadCloser, error) {
	const op = "images.Export"
	if e.Base == "" {
		return nil, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "environment has no base image"))
	}
	var layers []blob.Digest
	for i, name := range e.Parts() {
		role := dsec.Toolkit
		switch {
		case i == 0:
			role = dsec.Base
		case i == 1 && e.Workspace != "":
			role = dsec.Workspace
		}
		img, err := s.pin(s.view(ctx), name)
		if err != nil {
			return nil, err
		}
		if img.Role != role {
			return nil, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "image %s is a %s, not a %s", img.Ref(), img.Role, role))
		}
		layers = append(layers, blob.Digest(img.Digest))
	}
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.CloseWithError(s.library.Export(ctx, layers, w, image.ExportOptions{Ref: exportRef(e)}))
	}()
	return &exporting{r, cancel, done}, nil
}

// exportRef is what tools call an exported image: what lies highest of base and
// workspace.
func exportRef(e dsec.Environment) string {
	name, version := dsec.SplitImageName(cmp.Or(e.Workspace, e.Base))
	return name + ":" + cmp.Or(version, dsec.LatestVersion)
}

// exporting is an export under way. Close ends it and waits for it.
type exporting struct {
	*io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
}

func (e *exporting) Close() error {
	e.cancel()
	err := e.PipeReader.Close()
	<-e.done
	return err
}

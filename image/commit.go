package image

import (
	"context"
	"fmt"
	"os"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// A CommitSource is what a Commit makes a layer from.
type CommitSource struct {
	// Upper is the upper folder of the sandbox's overlay. Nothing may write
	// to it while the call runs.
	Upper *os.File
	// IDs is the range of host ids that the sandbox's user namespace has.
	IDs erofs.IDRange
	// Over, if set, is a layer that the new one shall stand in for as well:
	// the workspace that lay directly below. Its data is pointed to, not
	// copied.
	Over blob.Digest
	// Config is taken into the manifest.
	Config Config
	// Role is the new layer's; default dsec.Workspace.
	Role dsec.Role
}

// Commit writes what a sandbox changed as a layer. A file that changes while
// it is read is Conflict.
func (l *Library) Commit(ctx context.Context, src CommitSource) (Layer, error) {
	layer, err := l.commit(ctx, src)
	return layer, fault("image.Commit", err)
}

func (l *Library) commit(ctx context.Context, src CommitSource) (Layer, error) {
	if src.Role == "" {
		src.Role = dsec.Workspace
	}
	w, err := l.begin(Options{Role: src.Role})
	if err != nil {
		return Layer{}, err
	}
	defer w.abort()
	t, err := w.tree(ctx, func(b *erofs.Blob) (*erofs.Tree, error) {
		return erofs.FromDir(ctx, src.Upper, b, erofs.DirOptions{IDs: src.IDs, Source: erofs.Upper})
	})
	if err != nil {
		return Layer{}, err
	}
	m := Manifest{Config: src.Config}
	if src.Over == "" {
		return w.finish(ctx, t, m, nil)
	}
	below, old, err := l.tree(ctx, src.Over)
	if err != nil {
		return Layer{}, stored("", fmt.Errorf("layer %s: %w", src.Over, err))
	}
	if t, err = erofs.Fold(below, t); err != nil {
		return Layer{}, err
	}
	return w.finish(ctx, t, m, old)
}

// tree reads a layer's metadata back, with its data blobs by tag.
func (l *Library) tree(ctx context.Context, digest blob.Digest) (*erofs.Tree, map[string]Data, error) {
	m, err := l.manifest(ctx, digest)
	if err != nil {
		return nil, nil, err
	}
	b, err := blob.ReadAll(ctx, l.store, m.Meta.Digest)
	if err != nil {
		return nil, nil, err
	}
	t, err := erofs.Decode(b)
	if err != nil {
		return nil, nil, err
	}
	data := map[string]Data{}
	for _, d := range m.Data {
		data[d.Digest.Hex()] = d
	}
	return t, data, nil
}

package image

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"

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
	// Below are the other layers that the sandbox's root is made of: what hides
	// nothing of theirs is left out. A name that was deleted would be listed
	// otherwise, without a file.
	Below []blob.Digest
	// Config is taken into the manifest.
	Config Config
	// Role is the new layer's; default dsec.Workspace.
	Role dsec.Role
	// Read, if set, is called when Upper has been read and may be written to again.
	Read func()
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
	w, err := l.newWork(ctx, Options{Role: src.Role})
	if err != nil {
		return Layer{}, err
	}
	defer w.abort()
	var old map[string]Data
	t, err := w.tree(ctx, func(b *erofs.Blob) (*erofs.Tree, error) {
		t, err := erofs.FromDir(ctx, src.Upper, b, erofs.DirOptions{IDs: src.IDs, Source: erofs.Upper})
		if err != nil {
			return nil, err
		}
		if src.Read != nil {
			src.Read()
		}
		if src.Over != "" {
			if t, old, err = l.over(ctx, b, src.Over, t); err != nil {
				return nil, err
			}
		}
		return l.pruned(ctx, t, src.Below)
	})
	if err != nil {
		return Layer{}, err
	}
	return w.finish(ctx, t, Manifest{Config: src.Config}, old)
}

// pruned takes the whiteouts out of t that hide nothing of what lies below.
func (l *Library) pruned(ctx context.Context, t *erofs.Tree, below []blob.Digest) (*erofs.Tree, error) {
	if len(below) == 0 || !t.HasWhiteouts() {
		return t, nil
	}
	trees := make([]*erofs.Tree, len(below))
	for i, d := range below {
		var err error
		if trees[i], _, err = l.tree(ctx, d); err != nil {
			return nil, stored("", fmt.Errorf("layer %s: %w", d, err))
		}
	}
	return erofs.Prune(t, trees...), nil
}

// over folds changes into the layer below them. A chain of commits would come to
// have a blob for each, so beyond maxChain the smaller ones are laid into the new
// one.
func (l *Library) over(ctx context.Context, b *erofs.Blob, digest blob.Digest, upper *erofs.Tree) (*erofs.Tree, map[string]Data, error) {
	below, old, err := l.tree(ctx, digest)
	if err != nil {
		return nil, nil, stored("", fmt.Errorf("layer %s: %w", digest, err))
	}
	t, err := erofs.Fold(below, upper)
	if err != nil {
		return nil, nil, err
	}
	type aged struct {
		dev  *erofs.Device
		live int64
	}
	var all []aged
	for dev, live := range t.Live() {
		if _, ok := old[dev.Tag]; ok {
			all = append(all, aged{dev, live})
		}
	}
	if len(all) <= maxChain {
		return t, old, nil
	}
	slices.SortFunc(all, func(a, b aged) int {
		return cmp.Or(cmp.Compare(a.live, b.live), cmp.Compare(a.dev.Tag, b.dev.Tag))
	})
	all = all[:len(all)-maxChain/2]
	data := make([]Data, len(all))
	for i, a := range all {
		data[i] = old[a.dev.Tag]
	}
	contents, from := l.contents(ctx, data), map[*erofs.Device]io.ReaderAt{}
	for _, a := range all {
		from[a.dev] = contents[a.dev.Tag]
	}
	return t, old, stored("", b.Bring(t, from))
}

// maxChain is how many blobs of earlier commits a commit points into: each is a
// device of the mount. Beyond it half of them are left.
const maxChain = 32

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

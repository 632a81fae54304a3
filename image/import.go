package image

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/erofs"
)

// Upload imports a tar stream, plain or compressed with gzip or zstd: of a root
// file system, of an OCI layout, or what docker saved. r is read to its end
// unless the import fails.
func (l *Library) Upload(ctx context.Context, r io.Reader, opts Options) (Layer, error) {
	layer, err := l.upload(ctx, r, 0, opts)
	return layer, fault("image.Upload", err)
}

// Import imports from a path of this host: a folder that is an OCI layout, any
// other folder as a root file system, or a file as Upload takes it.
func (l *Library) Import(ctx context.Context, path string, opts Options) (Layer, error) {
	layer, err := l.importPath(ctx, path, opts)
	return layer, fault("image.Import", err)
}

func (l *Library) importPath(ctx context.Context, path string, opts Options) (Layer, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Layer{}, err
	}
	if !st.IsDir() && !st.Mode().IsRegular() {
		return Layer{}, dsec.Errorf(dsec.Invalid, "%s is neither a folder nor a file", path)
	}
	if !st.IsDir() {
		f, err := os.Open(path)
		if err != nil {
			return Layer{}, err
		}
		defer f.Close()
		return l.upload(ctx, f, st.Size(), opts)
	}
	w, err := l.newWork(ctx, opts)
	if err != nil {
		return Layer{}, err
	}
	defer w.abort()
	if _, err := os.Stat(filepath.Join(path, layoutMark)); err == nil {
		root, err := os.OpenRoot(path)
		if err != nil {
			return Layer{}, err
		}
		defer root.Close()
		return w.loadImage(ctx, dirFiles{root})
	}
	dir, err := os.Open(path)
	if err != nil {
		return Layer{}, err
	}
	defer dir.Close()
	t, err := w.tree(ctx, func(b *erofs.Blob) (*erofs.Tree, error) {
		return erofs.FromDir(ctx, dir, b, erofs.DirOptions{})
	})
	if err != nil {
		return Layer{}, err
	}
	return w.root(ctx, t)
}

// upload reads a stream of that size, 0 if it is not known.
func (l *Library) upload(ctx context.Context, r io.Reader, size int64, opts Options) (Layer, error) {
	w, err := l.newWork(ctx, opts)
	if err != nil {
		return Layer{}, err
	}
	defer w.abort()
	w.prog = dsec.Progress{Stage: stageFetch, Total: size}
	src := newSource(ctx, r, w.advance)
	plain, done, err := expand(src)
	if err != nil {
		return Layer{}, err
	}
	defer done()
	// One entry may take three headers: long names, attributes, itself. The
	// first two need no more than this with the names that matter here.
	b := bufio.NewReaderSize(plain, 8<<10)
	header, err := b.Peek(4 << 10)
	if err != nil && err != io.EOF {
		return Layer{}, err
	}
	if len(header) < 512 || bytes.Equal(header[:512], make([]byte, 512)) {
		return Layer{}, fmt.Errorf("not a tar, or an empty one: %w", ErrCorrupt)
	}
	if looksLikeImage(header) {
		return w.spool(ctx, b)
	}
	return w.rootfs(ctx, b)
}

// spool brings an archive of an image into a file, since its parts come in any
// order.
func (w *work) spool(ctx context.Context, r io.Reader) (Layer, error) {
	f, err := os.CreateTemp(w.lib.opts.Temp, "dsec-archive-*")
	if err != nil {
		return Layer{}, fmt.Errorf("create archive: %w", err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		return Layer{}, err
	}
	if _, err := io.Copy(f, bounded{w, r}); err != nil {
		return Layer{}, fmt.Errorf("receive archive: %w", err)
	}
	w.input = w.opts.MaxInput // the layers in it count by themselves
	t, err := indexTar(ctx, f)
	if err != nil {
		return Layer{}, err
	}
	_, isLayout := t.entries[layoutIndex]
	_, isDocker := t.entries[dockerManifest]
	if isLayout || isDocker {
		return w.loadImage(ctx, t)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return Layer{}, err
	}
	return w.rootfs(ctx, f)
}

// rootfs makes a layer of an uncompressed tar of a file system.
func (w *work) rootfs(ctx context.Context, r io.Reader) (Layer, error) {
	t, err := w.unpack(ctx, newSource(ctx, r, nil), "", nil)
	if err != nil {
		return Layer{}, err
	}
	return w.root(ctx, t)
}

// root makes a layer of the tree of a root file system.
func (w *work) root(ctx context.Context, t *erofs.Tree) (Layer, error) {
	if w.opts.Role == dsec.Base {
		var err error
		if t, err = erofs.Merge(t); err != nil {
			return Layer{}, err
		}
	}
	m := Manifest{Role: w.opts.Role}
	m.Content = identity(t, &m)
	return w.finish(ctx, t, m, nil)
}

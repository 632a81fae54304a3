package erofs

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// TarOptions are what is optional about reading a tar.
type TarOptions struct {
	// Below is what the layer is made to lie on, if known: hard links may
	// then point at its files and paths may lead through its symlinks. It is
	// not changed.
	Below *Tree
	// MaxEntries and MaxBytes bound the number of entries and the sum of file
	// sizes (as stated, holes included). Their defaults are 16 million and
	// 4 TiB.
	MaxEntries int
	MaxBytes   int64
}

const (
	xattrRecord   = "SCHILY.xattr."
	sparseRecord  = "GNU.sparse."
	whiteoutMark  = ".wh."
	whiteoutMeta  = ".wh..wh."
	whiteoutAll   = ".wh..wh..opq"
	overlayXattrs = "trusted.overlay."
)

// FromTar reads an uncompressed tar, lays its file contents into blob, and
// returns its tree. OCI whiteouts become those of overlayfs. Of overlay's own
// attributes only the opaque mark is taken, as the others could make one layer
// name parts of another. A repeated entry replaces the earlier one.
//
// A name that leaves the tree, an impossible owner and the like are
// ErrInvalid; a stream that ends early or is no tar is ErrCorrupt. Errors of r
// itself are wrapped as they are. r is read to the end of the archive, which
// may be before its own end.
func FromTar(ctx context.Context, r io.Reader, blob *Blob, opts TarOptions) (*Tree, error) {
	if opts.MaxEntries == 0 {
		opts.MaxEntries = 16 << 20
	}
	if opts.MaxBytes == 0 {
		opts.MaxBytes = 4 << 40
	}
	t := New()
	t.below = opts.Below
	tr := &tarReader{tree: t, blob: blob, opts: opts, tar: tar.NewReader(r)}
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("read tar: %w", context.Cause(ctx))
		}
		h, err := tr.tar.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read tar: %w", tarError(err))
		}
		if err := tr.entry(h); err != nil {
			return nil, fmt.Errorf("read tar: entry %q: %w", h.Name, err)
		}
	}
	t.below = nil
	reveal(t.root, false)
	return t, nil
}

func tarError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, tar.ErrFieldTooLong) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

type tarReader struct {
	tree    *Tree
	blob    *Blob
	opts    TarOptions
	tar     *tar.Reader
	entries int
	bytes   int64
}

func (r *tarReader) entry(h *tar.Header) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if r.entries++; r.entries > r.opts.MaxEntries {
		return fmt.Errorf("more than %d entries: %w", r.opts.MaxEntries, ErrTooBig)
	}
	parts, err := splitPath(h.Name)
	if err != nil {
		return err
	}
	if n := len(parts); n > 0 && strings.HasPrefix(parts[n-1], whiteoutMark) {
		return r.whiteout(parts)
	}
	// Below a whiteout's name nothing can be meant.
	if slices.ContainsFunc(parts, func(s string) bool { return strings.HasPrefix(s, whiteoutMeta) }) {
		return nil
	}
	if h.Typeflag == tar.TypeLink {
		return r.link(h)
	}
	n, err := r.inode(h)
	if err != nil {
		return err
	}
	if err := n.check(); err != nil {
		return err
	}
	if n.IsRegular() {
		if err := r.contents(h, n); err != nil {
			return err
		}
	}
	return r.tree.Add(h.Name, n)
}

// whiteout notes that a name, or all of a folder, hides lower layers. It says
// nothing about entries of the same tar, before or after it.
func (r *tarReader) whiteout(parts []string) error {
	name := parts[len(parts)-1]
	if name != whiteoutAll && strings.HasPrefix(name, whiteoutMeta) {
		return nil // bookkeeping of a file system long gone
	}
	dir, err := r.tree.descend(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	if name == whiteoutAll {
		name = ""
	} else if name = name[len(whiteoutMark):]; name == "" || name == "." || name == ".." {
		return fmt.Errorf("whiteout of %q: %w", name, ErrInvalid)
	}
	if dir.hidden == nil {
		dir.hidden = map[string]bool{}
	}
	dir.hidden[name] = true
	return nil
}

// reveal makes whiteouts of what is hidden, now that all names are known. In an
// opaque folder (covered) everything is hidden already.
func reveal(dir *Inode, covered bool) {
	if dir.hidden[""] {
		dir.setXattr(XattrOpaque, "y")
	}
	covered = covered || dir.IsOpaque()
	for name := range dir.hidden {
		switch n := dir.children[name]; {
		case name == "" || covered:
		case n == nil:
			dir.children[name] = newWhiteout()
		case n.IsDir():
			n.setXattr(XattrOpaque, "y")
		}
	}
	dir.hidden = nil
	for _, n := range dir.children {
		if n.IsDir() {
			reveal(n, covered)
		}
	}
}

func (r *tarReader) link(h *tar.Header) error {
	parts, err := splitPath(h.Linkname)
	if err != nil {
		return err
	}
	target := r.tree.Lookup(h.Linkname)
	if target == nil && len(parts) > 0 {
		// The path may lead through symlinks; a folder made on the way is
		// harmless, since the error below ends the whole read.
		dir, err := r.tree.descend(parts[:len(parts)-1])
		if err != nil {
			return err
		}
		target = dir.children[parts[len(parts)-1]]
	}
	if target == nil && r.opts.Below != nil {
		target = r.opts.Below.Lookup(h.Linkname)
	}
	if target == nil {
		return fmt.Errorf("hard link to %q, which is not there: %w", h.Linkname, ErrInvalid)
	}
	if target.IsDir() {
		return fmt.Errorf("hard link to folder %q: %w", h.Linkname, ErrInvalid)
	}
	return r.tree.Add(h.Name, target)
}

func (r *tarReader) inode(h *tar.Header) (*Inode, error) {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return nil, fmt.Errorf("owner %d:%d: %w", h.Uid, h.Gid, ErrInvalid)
	}
	n := &Inode{
		Mode: uint32(h.Mode) & 0o7777, UID: uint32(h.Uid), GID: uint32(h.Gid), ModTime: h.ModTime,
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		n.Mode |= typeRegular
		n.Size = h.Size
		// Old archives mark a folder by the slash alone.
		if strings.HasSuffix(h.Name, "/") && h.Size == 0 {
			n.Mode ^= typeRegular ^ typeDir
		}
	case tar.TypeDir:
		n.Mode |= typeDir
	case tar.TypeSymlink:
		n.Mode |= typeSymlink
		n.Target = h.Linkname
	case tar.TypeFifo:
		n.Mode |= typeFIFO
	case tar.TypeChar, tar.TypeBlock:
		n.Mode |= typeChar
		if h.Typeflag == tar.TypeBlock {
			n.Mode ^= typeChar ^ typeBlock
		}
		if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 0xfff || h.Devminor > 0xfffff {
			return nil, fmt.Errorf("device %d:%d: %w", h.Devmajor, h.Devminor, ErrInvalid)
		}
		n.Major, n.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	default:
		return nil, fmt.Errorf("entry of type %q: %w", h.Typeflag, ErrUnsupported)
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrRecord)
		if !ok {
			continue
		}
		if _, _, ok := splitXattr(name); !ok {
			continue // of another system, and without meaning here
		}
		if strings.HasPrefix(name, overlayXattrs) && name != XattrOpaque {
			continue
		}
		n.setXattr(name, value)
	}
	return n, nil
}

// contents streams a file's data. Archives say where holes are only to their
// reader's inside, so zeros in a file marked sparse are taken for holes.
func (r *tarReader) contents(h *tar.Header, n *Inode) error {
	if r.bytes += n.Size; r.bytes > r.opts.MaxBytes {
		return fmt.Errorf("more than %d bytes of files: %w", r.opts.MaxBytes, ErrTooBig)
	}
	d := dense
	if h.Typeflag == tar.TypeGNUSparse {
		d = sparse
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, sparseRecord) {
			d = sparse
		}
	}
	c := r.blob.file(n.Size, d)
	if err := c.data(0, n.Size, r.tar); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return tarError(err)
	}
	var err error
	n.Extents, err = c.finish()
	return err
}

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
	// Budget is what the tar may use; FromTar takes from it, so that several can
	// share one. Without it the tar has a default one of its own.
	Budget *Budget
	// Marked refuses an archive without its end mark. Nothing else tells one that
	// was cut between two entries; of a layer the digest does.
	Marked bool
}

// A Budget is what is left for trees to be made of what somebody else wrote. A
// small archive can mean a large tree.
type Budget struct {
	// Entries is the number of entries, and of folders that are made since
	// a path leads through them.
	Entries int64
	// Bytes is the sum of file sizes, as stated, holes included.
	Bytes int64
	// Meta is the memory for names, targets of symlinks and attributes.
	Meta int64
}

// DefaultBudget is that of a large image: four million entries with 1 GiB of
// names and attributes, and 256 GiB of files.
func DefaultBudget() *Budget { return &Budget{Entries: 4 << 20, Bytes: 256 << 30, Meta: 1 << 30} }

// take pays for something; what is short is said.
func (b *Budget) take(entries, bytes, meta int64) error {
	b.Entries -= entries
	b.Bytes -= bytes
	b.Meta -= meta
	switch {
	case b.Entries < 0:
		return fmt.Errorf("more entries than are allowed: %w", ErrTooBig)
	case b.Bytes < 0:
		return fmt.Errorf("more bytes of files than are allowed: %w", ErrTooBig)
	case b.Meta < 0:
		return fmt.Errorf("more names and attributes than are allowed: %w", ErrTooBig)
	}
	return nil
}

// weigh is what an inode needs beside its fixed part.
func (n *Inode) weigh() int64 {
	w := int64(len(n.Target))
	for k, v := range n.Xattrs {
		w += int64(len(k) + len(v))
	}
	return w
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
	if opts.Budget == nil {
		opts.Budget = DefaultBudget()
	}
	t := New()
	t.below, t.budget = opts.Below, opts.Budget
	end := &ending{r: r}
	tr := &tarReader{tree: t, blob: blob, opts: opts, tar: tar.NewReader(end)}
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("read tar: %w", context.Cause(ctx))
		}
		h, err := tr.tar.Next()
		if err == io.EOF && end.came && opts.Marked {
			return nil, fmt.Errorf("read tar: it has no end mark, so it was cut off: %w", ErrCorrupt)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read tar: %w", tarError(err))
		}
		if err := tr.entry(h); err != nil {
			return nil, fmt.Errorf("read tar: entry %.200q: %w", h.Name, err)
		}
	}
	t.below, t.budget = nil, nil
	reveal(t.root, false)
	return t, nil
}

// ending notes that a stream was read to its end: whoever reads an archive up to its mark
// has not seen that.
type ending struct {
	r    io.Reader
	came bool
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.came = e.came || n == 0 && err == io.EOF
	return n, err
}

func tarError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, tar.ErrFieldTooLong) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

type tarReader struct {
	tree *Tree
	blob *Blob
	opts TarOptions
	tar  *tar.Reader
}

func (r *tarReader) entry(h *tar.Header) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := splitPath(h.Name)
	if err != nil {
		return err
	}
	last := 0 // the others are those of folders
	if n := len(parts); n > 0 {
		last = len(parts[n-1])
	}
	if err := r.opts.Budget.take(1, 0, int64(last)); err != nil {
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
	if err := r.opts.Budget.take(0, 0, n.weigh()); err != nil {
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
	if err := r.opts.Budget.take(0, n.Size, 0); err != nil {
		return err
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
	return c.finish(n)
}

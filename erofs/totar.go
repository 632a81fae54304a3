package erofs

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"strings"
)

// WriteTar writes the tree as an uncompressed tar, as the layers of OCI images
// are: the inverse of FromTar. Whiteouts and opaque marks become OCI's. data has
// the contents of each device by its Tag. The same tree and data give the same
// bytes. Sockets, which a tar has no word for, are left out; holes are written as
// zeros. A tree with redirects is ErrUnsupported: see Explicit.
func (t *Tree) WriteTar(ctx context.Context, w io.Writer, data map[string]io.ReaderAt) error {
	o := &tarWriter{ctx: ctx, tar: tar.NewWriter(w), data: data, links: map[*Inode]string{}, buf: make([]byte, 256<<10)}
	for path, n := range t.Walk() {
		if ctx.Err() != nil {
			return fmt.Errorf("write tar: %w", context.Cause(ctx))
		}
		if err := o.entry(path, n); err != nil {
			return fmt.Errorf("write tar: entry %q: %w", path, err)
		}
	}
	if err := o.tar.Close(); err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	return nil
}

type tarWriter struct {
	ctx   context.Context
	tar   *tar.Writer
	data  map[string]io.ReaderAt
	links map[*Inode]string // the first name of what may have several
	buf   []byte
}

func (w *tarWriter) entry(path string, n *Inode) error {
	if i := strings.LastIndexByte(path, '/') + 1; strings.HasPrefix(path[i:], whiteoutMark) {
		return fmt.Errorf("a name that means a whiteout in a tar: %w", ErrUnsupported)
	} else if n.IsWhiteout() {
		return w.mark(path[:i] + whiteoutMark + path[i:])
	}
	if hasXattr(n, XattrRedirect) || hasXattr(n, XattrMetacopy) {
		return fmt.Errorf("redirect: %w", ErrUnsupported)
	}
	if n.Mode&typeMask == typeSocket {
		return nil
	}
	h := &tar.Header{
		Name: path, Mode: int64(n.Mode & 0o7777), Uid: int(n.UID), Gid: int(n.GID),
		ModTime: n.ModTime, Format: tar.FormatPAX,
	}
	if path == "" {
		h.Name = "."
	}
	if first, ok := w.links[n]; ok {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return w.tar.WriteHeader(h)
	}
	for name, value := range n.Xattrs {
		if !strings.HasPrefix(name, overlayXattrs) {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords[xattrRecord+name] = value
		}
	}
	switch n.Mode & typeMask {
	case typeDir:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case typeRegular:
		h.Typeflag, h.Size = tar.TypeReg, n.Size
	case typeSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.Target
	case typeFIFO:
		h.Typeflag = tar.TypeFifo
	case typeChar, typeBlock:
		h.Typeflag = tar.TypeChar
		if n.Mode&typeMask == typeBlock {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(n.Major), int64(n.Minor)
	}
	if err := w.tar.WriteHeader(h); err != nil {
		return err
	}
	if n.IsDir() {
		if n.IsOpaque() {
			return w.mark(strings.TrimPrefix(path+"/", "/") + whiteoutAll)
		}
		return nil
	}
	w.links[n] = path
	if n.IsRegular() {
		return w.contents(n)
	}
	return nil
}

// mark writes an empty file whose name means something.
func (w *tarWriter) mark(name string) error {
	return w.tar.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, Format: tar.FormatPAX})
}

// contents writes a file, with zeros where no extent is.
func (w *tarWriter) contents(n *Inode) error {
	at := int64(0)
	for _, x := range n.Extents {
		from := w.data[x.Device.Tag]
		if from == nil {
			return fmt.Errorf("contents of device %q: %w", x.Device.Tag, ErrCorrupt)
		}
		start := int64(x.File) * BlockSize
		if err := w.copy(zeroReader{}, start-at); err != nil {
			return err
		}
		size := min(int64(x.Count)*BlockSize, n.Size-start)
		if err := w.copy(io.NewSectionReader(from, int64(x.Start)*BlockSize, size), size); err != nil {
			return err
		}
		at = start + size
	}
	return w.copy(zeroReader{}, n.Size-at)
}

func (w *tarWriter) copy(r io.Reader, n int64) error {
	for n > 0 {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		k, err := io.ReadFull(r, w.buf[:min(n, int64(len(w.buf)))])
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = fmt.Errorf("contents end early: %w", ErrCorrupt)
		}
		if err != nil {
			return err
		}
		if _, err := w.tar.Write(w.buf[:k]); err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

package erofs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// DirOptions are what is optional about reading a folder.
type DirOptions struct {
	// IDs undoes the shift of a user namespace.
	IDs IDRange
	// Source says what the folder is.
	Source DirSource
}

// DirSource says what kind of folder is read.
type DirSource int

const (
	// Plain is any folder; everything is taken as it is.
	Plain DirSource = iota
	// Upper is the upper folder of an overlay: of overlay's own attributes
	// those that belong to the layer's meaning are kept (opaque, redirect,
	// metacopy) and those of one mount dropped.
	Upper
)

// An IDRange is the range of host ids that a user namespace maps to
// 0..Count-1. Ids outside become Nobody. The zero value changes nothing.
type IDRange struct{ Base, Count uint32 }

// Nobody is the id of owners a namespace does not know.
const Nobody = 65534

func (r IDRange) back(id uint32) uint32 {
	switch {
	case r == IDRange{}:
		return id
	case id >= r.Base && id-r.Base < r.Count:
		return id - r.Base
	}
	return Nobody
}

// FromDir walks the folder that root is open on, lays the file contents into
// blob and returns the tree. It follows no symlink and stays on one file
// system: a mount point becomes an empty folder. Nothing may write to the
// folder meanwhile; a file that shrinks or vanishes is ErrChanged.
func FromDir(ctx context.Context, root *os.File, blob *Blob, opts DirOptions) (*Tree, error) {
	w := &dirWalk{ctx: ctx, blob: blob, opts: opts, links: map[[2]uint64]*Inode{}}
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", root.Name(), err)
	}
	if st.Mode&typeMask != typeDir {
		return nil, fmt.Errorf("read folder %s: not a folder: %w", root.Name(), ErrInvalid)
	}
	w.dev = uint64(st.Dev)
	n := w.inode(&st)
	if err := w.xattrs(fdPath(int(root.Fd())), n, followed); err != nil {
		return nil, fmt.Errorf("read folder %s: %w", root.Name(), err)
	}
	// The walk opens the folder anew: reading names moves a descriptor's offset.
	fd, err := unix.Openat(int(root.Fd()), ".", dirFlags, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root.Name(), err)
	}
	if err := w.dir(fd, n, 0); err != nil {
		return nil, fmt.Errorf("read folder %s: %w", root.Name(), err)
	}
	return &Tree{root: n}, nil
}

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

type dirWalk struct {
	ctx   context.Context
	blob  *Blob
	opts  DirOptions
	dev   uint64
	links map[[2]uint64]*Inode // by device and inode number
}

func fdPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// dir reads the folder at fd, which it closes, into n.
func (w *dirWalk) dir(fd int, n *Inode, depth int) error {
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	if depth > maxDepth {
		return fmt.Errorf("folders nested over %d: %w", maxDepth, ErrInvalid)
	}
	if err := w.ctx.Err(); err != nil {
		return context.Cause(w.ctx)
	}
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	slices.Sort(names) // so that the blob does not depend on the file system
	for _, name := range names {
		c, err := w.entry(fd, name, depth)
		if errors.Is(err, unix.ENOENT) {
			err = fmt.Errorf("%w: %w", ErrChanged, err)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		n.children[name] = c
	}
	return nil
}

func (w *dirWalk) entry(dir int, name string, depth int) (*Inode, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	isDir := st.Mode&typeMask == typeDir
	key := [2]uint64{uint64(st.Dev), st.Ino}
	if n := w.links[key]; n != nil && !isDir {
		return n, nil
	}
	n := w.inode(&st)
	if !isDir && st.Nlink > 1 {
		w.links[key] = n
	}
	if err := w.xattrs(fdPath(dir)+"/"+name, n, notFollowed); err != nil {
		return nil, err
	}
	switch n.Mode & typeMask {
	case typeSymlink:
		buf := make([]byte, maxTarget+1)
		size, err := unix.Readlinkat(dir, name, buf)
		if err != nil {
			return nil, err
		}
		n.Target = string(buf[:size])
	case typeRegular:
		if err := w.file(dir, name, &st, n); err != nil {
			return nil, err
		}
	case typeDir:
		if uint64(st.Dev) != w.dev {
			return n, nil
		}
		fd, err := unix.Openat(dir, name, dirFlags, 0)
		if err != nil {
			return nil, err
		}
		if err := w.dir(fd, n, depth+1); err != nil {
			return nil, err
		}
	}
	return n, n.check()
}

func (w *dirWalk) inode(st *unix.Stat_t) *Inode {
	n := &Inode{
		Mode: st.Mode, UID: w.opts.IDs.back(st.Uid), GID: w.opts.IDs.back(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec),
	}
	switch st.Mode & typeMask {
	case typeDir:
		n.children = map[string]*Inode{}
	case typeChar, typeBlock:
		n.Major, n.Minor = unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev))
	}
	return n
}

// file streams the data ranges of a regular file.
func (w *dirWalk) file(dir int, name string, st *unix.Stat_t, n *Inode) error {
	n.Size = st.Size
	if n.Size == 0 {
		return nil
	}
	if n.Size > maxFile {
		return fmt.Errorf("size %d: %w", n.Size, ErrTooBig)
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil {
		return err
	}
	if now.Ino != st.Ino || now.Dev != st.Dev || now.Size != st.Size {
		return ErrChanged
	}
	d := dense
	if st.Blocks*512 < st.Size {
		d = sparse
	}
	c := w.blob.file(n.Size, d)
	for off := int64(0); off < n.Size; {
		if err := w.ctx.Err(); err != nil {
			return context.Cause(w.ctx)
		}
		start, end, err := dataRange(fd, off, n.Size)
		if err != nil {
			return err
		}
		if start == n.Size {
			break
		}
		if err := c.data(start, end-start, io.NewSectionReader(f, start, end-start)); err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				return ErrChanged
			}
			return err
		}
		off = end
	}
	return c.finish(n)
}

// dataRange returns the next range of data at or after off. Where the file
// system cannot tell, all is data.
func dataRange(fd int, off, size int64) (start, end int64, err error) {
	start, err = unix.Seek(fd, off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return size, size, nil
	case errors.Is(err, unix.EINVAL):
		return off, size, nil
	case err != nil:
		return 0, 0, err
	}
	end, err = unix.Seek(fd, start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, err
	}
	return min(start, size), min(end, size), nil
}

type symlinks int

const (
	notFollowed symlinks = iota
	followed
)

// xattrs reads the attributes of the file at path, which goes through an open
// folder's descriptor, so that a renamed parent leads nowhere else.
func (w *dirWalk) xattrs(path string, n *Inode, s symlinks) error {
	list, get := unix.Llistxattr, unix.Lgetxattr
	if s == followed {
		list, get = unix.Listxattr, unix.Getxattr
	}
	names, err := grow(func(b []byte) (int, error) { return list(path, b) })
	if errors.Is(err, unix.ENOTSUP) || len(names) == 0 && err == nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list attributes: %w", err)
	}
	for raw := range bytes.SplitSeq(names, []byte{0}) {
		name := string(raw)
		if _, _, ok := splitXattr(name); !ok || w.drops(name) {
			continue
		}
		value, err := grow(func(b []byte) (int, error) { return get(path, name, b) })
		if err != nil {
			return fmt.Errorf("read attribute %s: %w", name, err)
		}
		n.setXattr(name, string(w.shift(name, value)))
	}
	return nil
}

func (w *dirWalk) drops(name string) bool {
	if w.opts.Source != Upper || !strings.HasPrefix(name, overlayXattrs) {
		return false
	}
	return name != XattrOpaque && name != XattrRedirect && name != XattrMetacopy
}

// Parts of a file capability, as attribute.
const capV2, capV3, capMask, capV2Size = 0x02000000, 0x03000000, 0xff000000, 20

func isACL(name string) bool { return strings.HasPrefix(name, "system.posix_acl_") }

// mapACL changes the ids that an ACL names, in place.
func mapACL(v []byte, to func(uint32) uint32) {
	const head, entry, user, group = 4, 8, 2, 8
	for at := head; at+entry <= len(v); at += entry {
		if tag := le.Uint16(v[at:]); tag == user || tag == group {
			le.PutUint32(v[at+4:], to(le.Uint32(v[at+4:])))
		}
	}
}

// shift undoes the namespace's ids inside attribute values: the owners in ACLs,
// and the root a file capability is valid for.
func (w *dirWalk) shift(name string, v []byte) []byte {
	if w.opts.IDs == (IDRange{}) {
		return v
	}
	switch {
	case isACL(name):
		mapACL(v, w.opts.IDs.back)
	case name == "security.capability" && len(v) == capV2Size+4:
		magic := le.Uint32(v)
		if magic&capMask == capV3 && le.Uint32(v[capV2Size:]) == w.opts.IDs.Base {
			le.PutUint32(v, magic&^capMask|capV2)
			return v[:capV2Size]
		}
	}
	return v
}

// grow calls read with buffers that grow until one is large enough.
func grow(read func([]byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 4 {
		b := make([]byte, size)
		n, err := read(b)
		if errors.Is(err, unix.ERANGE) && size < 1<<20 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return b[:n], nil
	}
}

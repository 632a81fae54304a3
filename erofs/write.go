package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// WriteOptions are what is optional about WriteDir.
type WriteOptions struct {
	// IDs is the range that owners are shifted to, the inverse of
	// DirOptions.IDs: the user namespace's 0 becomes its first.
	IDs IDRange
}

// WriteDir makes the files of the tree in an empty folder that root is open on:
// the inverse of FromDir, except for what that leaves out. data has the contents
// of each device by its Tag. Holes stay holes. Nothing else may write to the
// folder meanwhile; what a failure leaves in it is the caller's to remove.
func (t *Tree) WriteDir(ctx context.Context, root *os.File, data map[string]io.ReaderAt, opts WriteOptions) error {
	w := &dirWrite{ctx: ctx, root: int(root.Fd()), data: data, opts: opts, links: map[*Inode]string{}, buf: make([]byte, 1<<20)}
	if err := w.children(w.root, t.root, ""); err != nil {
		return fmt.Errorf("write folder %s: %w", root.Name(), err)
	}
	if err := w.attributes(fdPath(w.root), t.root, followed); err != nil {
		return fmt.Errorf("write folder %s: %w", root.Name(), err)
	}
	return nil
}

type dirWrite struct {
	ctx   context.Context
	root  int
	data  map[string]io.ReaderAt
	opts  WriteOptions
	links map[*Inode]string // the first name of what may have several
	buf   []byte
}

// forth is the inverse of back.
func (r IDRange) forth(id uint32) uint32 {
	switch {
	case r == IDRange{}:
		return id
	case id < r.Count:
		return r.Base + id
	}
	return r.Base + min(Nobody, r.Count-1)
}

func (w *dirWrite) children(dir int, n *Inode, path string) error {
	for _, name := range n.Names() {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		if err := w.entry(dir, name, n.Child(name), path+name); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	return nil
}

func (w *dirWrite) entry(dir int, name string, n *Inode, path string) error {
	if first, ok := w.links[n]; ok {
		return unix.Linkat(w.root, first, dir, name, 0)
	}
	switch n.Mode & typeMask {
	case typeDir:
		if err := unix.Mkdirat(dir, name, 0o700); err != nil {
			return err
		}
		fd, err := unix.Openat(dir, name, dirFlags, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := w.children(fd, n, path+"/"); err != nil {
			return err
		}
	case typeRegular:
		if err := w.file(dir, name, n); err != nil {
			return err
		}
	case typeSymlink:
		if err := unix.Symlinkat(n.Target, dir, name); err != nil {
			return err
		}
	default:
		if err := unix.Mknodat(dir, name, n.Mode&typeMask|0o600, int(unix.Mkdev(n.Major, n.Minor))); err != nil {
			return err
		}
	}
	if !n.IsDir() {
		w.links[n] = path
	}
	return w.attributes(fdPath(dir)+"/"+name, n, notFollowed)
}

// file writes contents and leaves out what no extent covers.
func (w *dirWrite) file(dir int, name string, n *Inode) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if err := f.Truncate(n.Size); err != nil {
		return err
	}
	for _, e := range n.Extents {
		from := w.data[e.Device.Tag]
		if from == nil {
			return fmt.Errorf("contents of device %q: %w", e.Device.Tag, ErrCorrupt)
		}
		start := int64(e.File) * BlockSize
		src := io.NewSectionReader(from, int64(e.Start)*BlockSize, min(int64(e.Count)*BlockSize, n.Size-start))
		for off := start; ; {
			if w.ctx.Err() != nil {
				return context.Cause(w.ctx)
			}
			k, err := io.ReadFull(src, w.buf)
			if _, werr := f.WriteAt(w.buf[:k], off); werr != nil {
				return werr
			}
			off += int64(k)
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				if off != start+src.Size() {
					return fmt.Errorf("contents end early: %w", ErrCorrupt)
				}
				break
			}
			if err != nil {
				return err
			}
		}
	}
	return f.Close()
}

// attributes sets what the making of a file does not. Owners come first, since
// giving a file away takes its capabilities and set-user-ID bits.
func (w *dirWrite) attributes(path string, n *Inode, s symlinks) error {
	flags, set := unix.AT_SYMLINK_NOFOLLOW, unix.Lsetxattr
	if s == followed {
		flags, set = 0, unix.Setxattr
	}
	if err := unix.Fchownat(unix.AT_FDCWD, path, int(w.opts.IDs.forth(n.UID)), int(w.opts.IDs.forth(n.GID)), flags); err != nil {
		return fmt.Errorf("set owner: %w", err)
	}
	if !n.IsSymlink() {
		if err := unix.Fchmodat(unix.AT_FDCWD, path, n.Mode&0o7777, 0); err != nil {
			return fmt.Errorf("set mode: %w", err)
		}
	}
	for name, value := range n.Xattrs {
		if err := set(path, name, w.shift(name, []byte(value)), 0); err != nil {
			if errors.Is(err, unix.ENOTSUP) && !strings.HasPrefix(name, overlayXattrs) {
				continue // the file system that it came from had more than this one
			}
			return fmt.Errorf("set attribute %s: %w", name, err)
		}
	}
	ts := []unix.Timespec{timespec(n.ModTime), timespec(n.ModTime)}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, flags); err != nil {
		return fmt.Errorf("set time: %w", err)
	}
	return nil
}

func timespec(t time.Time) unix.Timespec {
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

// shift is the inverse of that of dirWalk.
func (w *dirWrite) shift(name string, v []byte) []byte {
	if w.opts.IDs == (IDRange{}) {
		return v
	}
	switch {
	case isACL(name):
		mapACL(v, w.opts.IDs.forth)
	case name == "security.capability" && len(v) == capV2Size && le.Uint32(v)&capMask == capV2:
		le.PutUint32(v, le.Uint32(v)&^capMask|capV3)
		return le.AppendUint32(v, w.opts.IDs.Base)
	}
	return v
}

package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// xattrPrefix is how PAX records name extended attributes.
const xattrPrefix = "SCHILY.xattr."

// pack writes the tree below dir as a PAX tar: parents before children, names
// in byte order, members relative to dir, so that the same tree gives the same
// bytes. Hard links, devices, extended attributes and nanosecond times are
// kept; access times, owner names and sockets are not.
func pack(w io.Writer, dir string, opt packOptions) error {
	p := packer{w: tar.NewWriter(w), dir: dir, opt: opt, seen: make(map[inode]string)}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return p.add(path)
	})
	if err != nil {
		return fmt.Errorf("pack %s: %w", dir, err)
	}
	if err := p.w.Close(); err != nil {
		return fmt.Errorf("pack %s: %w", dir, err)
	}
	return nil
}

type inode struct{ dev, ino uint64 }

type packer struct {
	w    *tar.Writer
	dir  string
	opt  packOptions
	seen map[inode]string // first name of a file with several links
}

func (p *packer) add(path string) error {
	rel, err := filepath.Rel(p.dir, path)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	h := &tar.Header{
		Format:     tar.FormatPAX,
		Name:       filepath.ToSlash(rel),
		Mode:       int64(st.Mode & 0o7777),
		Uid:        int(st.Uid),
		Gid:        int(st.Gid),
		ModTime:    info.ModTime(),
		PAXRecords: map[string]string{},
	}
	if p.opt.Anonymous {
		h.Uid, h.Gid = 0, 0
	} else if err := readXattrs(path, h.PAXRecords); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(path); err != nil {
			return err
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default: // a socket means nothing without its server
		if p.opt.Skip != nil {
			p.opt.Skip(h.Name)
		}
		return nil
	}
	if st.Nlink > 1 && h.Typeflag != tar.TypeDir {
		key := inode{st.Dev, st.Ino}
		if first, ok := p.seen[key]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else {
			p.seen[key] = h.Name
		}
	}
	if err := p.w.WriteHeader(h); err != nil {
		return fmt.Errorf("write header of %s: %w", path, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	return p.content(path, h.Size)
}

// content copies exactly n bytes: a file that grows is cut, one that shrinks
// is an error.
func (p *packer) content(path string, n int64) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if got, err := io.CopyN(p.w, f, n); err != nil {
		return fmt.Errorf("read %s: %d of %d bytes: %w", path, got, n, err)
	}
	return nil
}

// readXattrs adds a file's extended attributes to a header's records. A file
// system without them has none.
func readXattrs(path string, records map[string]string) error {
	names := make([]byte, 4096)
	for {
		n, err := unix.Llistxattr(path, names)
		if errors.Is(err, unix.ERANGE) {
			names = make([]byte, 2*len(names))
			continue
		}
		if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list attributes of %s: %w", path, err)
		}
		names = names[:n]
		break
	}
	value := make([]byte, 64<<10) // the kernel's limit for one value
	for name := range strings.SplitSeq(strings.TrimRight(string(names), "\x00"), "\x00") {
		if name == "" || strings.Contains(name, "=") {
			continue
		}
		n, err := unix.Lgetxattr(path, name, value)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read attribute %s of %s: %w", name, path, err)
		}
		// A value may hold NUL, as that of a file capability does; the tar
		// writer refuses NUL in records of other names only.
		records[xattrPrefix+name] = string(value[:n])
	}
	return nil
}

// unpack writes the members of a tar below root, a folder on this machine.
// Whatever members are named or link to, nothing outside is touched; owners
// are this account's; devices and pipes are left out, and skip is told.
func unpack(root *os.Root, r io.Reader, skip func(name string)) error {
	type folder struct {
		name string
		h    *tar.Header
	}
	var folders []folder // their times and modes are set last
	skipped := make(map[string]bool)
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		name := filepath.Clean(filepath.FromSlash(h.Name))
		if !filepath.IsLocal(name) {
			return fmt.Errorf("archive member %q is outside its folder", h.Name)
		}
		switch {
		case h.Typeflag == tar.TypeDir:
			folders = append(folders, folder{name, h})
		case h.Typeflag == tar.TypeXGlobalHeader:
			continue
		case h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeFifo,
			h.Typeflag == tar.TypeLink && skipped[filepath.Clean(filepath.FromSlash(h.Linkname))]:
			skipped[name] = true
			skip(name)
			continue
		}
		if err := unpackMember(root, name, h, t); err != nil {
			return fmt.Errorf("unpack %q: %w", h.Name, err)
		}
	}
	for i := len(folders) - 1; i >= 0; i-- {
		f := folders[i]
		err := root.Chmod(f.name, f.h.FileInfo().Mode().Perm())
		if err == nil {
			err = root.Chtimes(f.name, f.h.ModTime, f.h.ModTime)
		}
		if err != nil {
			return fmt.Errorf("unpack %q: %w", f.h.Name, err)
		}
	}
	return nil
}

func unpackMember(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeDir {
		return root.MkdirAll(name, 0o700)
	}
	if parent := filepath.Dir(name); parent != "." {
		if err := root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
		// What lies there is replaced, never written through.
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		err = copySparse(f, r)
		// setuid and setgid bits are not taken over: the owner is another.
		err = errors.Join(err, f.Chmod(h.FileInfo().Mode().Perm()), f.Close())
		if err == nil {
			err = root.Chtimes(name, h.ModTime, h.ModTime)
		}
		return err
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(filepath.Clean(filepath.FromSlash(h.Linkname)), name)
	}
	return nil
}

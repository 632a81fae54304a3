package guest

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// maxMember bounds the size a sparse member may claim. The holes of an archive
// of a few bytes could otherwise keep the agent busy for years.
const maxMember = 1 << 40

// Unpack implements dsec.Files. Every path is resolved by the kernel with the
// folder as its root, so neither .. nor a symlink, of the archive or of the
// workload, leads out. A folder of the archive keeps a symlink to a folder that
// is in its place; anything else replaces what is not a folder. Device nodes
// are Unsupported. Ids that do not exist in the sandbox are left alone.
func (f files) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, r io.Reader) error {
	t, err := f.target(op)
	if err != nil {
		return err
	}
	do := func(r io.Reader) error {
		return fileError("unpack into", op.Path, as(t.id, func() error { return unpack(ctx, t, r) }))
	}
	if on.Step.IsZero() {
		return do(r)
	}
	s := &f.a.steps
	fields := []field{s.text("path", op.Path), s.text("user", op.User)}
	o, first, err := s.begin(ctx, on.Step, "unpack", fields)
	if err != nil {
		return err
	}
	sum := &summed{r: r}
	sum.h.SetSeed(s.seed)
	if first {
		err := do(sum)
		o.content = sum.h.Sum64()
		s.end(on.Step, o, nil, err)
		return err
	}
	if _, err := io.Copy(io.Discard, sum); err != nil {
		return err
	}
	if sum.h.Sum64() != o.content {
		return diverged(on.Step, "content")
	}
	return nil
}

// unpacker is one archive being extracted.
type unpacker struct {
	root   int // descriptor of the folder
	owner  bool
	dir    string // last parent folder, and
	dirFD  int    // its descriptor; -1 for none
	later  []laterDir
	tr     *tar.Reader
	ctx    context.Context // of the whole archive
	source *sourceReader
}

// laterDir is a folder whose time is set when nothing more is put in it.
type laterDir struct {
	name string
	mod  time.Time
}

// maxLater bounds the folders whose times are remembered.
const maxLater = 100_000

// sourceReader tells a fault of the source from one of the archive.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

func unpack(ctx context.Context, t target, r io.Reader) error {
	if err := mkdirAll(t.path, 0o755); err != nil {
		return err
	}
	fd, err := unix.Open(t.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	src := &sourceReader{r: r}
	u := &unpacker{root: fd, owner: t.id.uid == 0, dirFD: -1, tr: tar.NewReader(src), ctx: ctx, source: src}
	defer u.closeDir()
	for {
		h, err := u.tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		// A name that leads out of the archive leads nowhere here.
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return u.readError(err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := u.member(h); err != nil {
			return fileError("member", h.Name, err)
		}
	}
	for i := len(u.later) - 1; i >= 0; i-- {
		if dir, name, err := u.parent(u.later[i].name, false); err == nil {
			setTime(dir, name, u.later[i].mod)
		}
	}
	// What follows the end of the archive is padding; the sender is not to be
	// cut off in it.
	_, err = io.Copy(io.Discard, src)
	return err
}

// readError names the archive as what is wrong, unless the source is.
func (u *unpacker) readError(err error) error {
	if u.source.err != nil {
		return u.source.err
	}
	return dsec.Errorf(dsec.Invalid, "archive: %w", err)
}

// openIn opens a path below the folder, and never above it.
func (u *unpacker) openIn(name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat2(u.root, name, &unix.OpenHow{
			Flags:   uint64(flags | unix.O_CLOEXEC),
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		// EAGAIN says that a rename interfered with a ..
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return fd, err
		}
		if u.ctx.Err() != nil {
			return -1, context.Cause(u.ctx)
		}
	}
}

func (u *unpacker) closeDir() {
	if u.dirFD >= 0 {
		unix.Close(u.dirFD)
		u.dirFD = -1
	}
}

// parent opens the folder of a member, making it if asked to, and gives its
// descriptor, which is the unpacker's, and the last name. The name is clean
// and not empty.
func (u *unpacker) parent(name string, build bool) (int, string, error) {
	dir, base := path.Split(name)
	dir = "./" + strings.TrimRight(dir, "/")
	if u.dirFD >= 0 && u.dir == dir {
		return u.dirFD, base, nil
	}
	u.closeDir()
	fd, err := u.openIn(dir, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) && build {
		if err = u.mkdirs(dir); err == nil {
			fd, err = u.openIn(dir, unix.O_PATH|unix.O_DIRECTORY)
		}
	}
	if err != nil {
		return -1, "", err
	}
	u.dir, u.dirFD = dir, fd
	return fd, base, nil
}

// mkdirs makes the folders of a path that are missing.
func (u *unpacker) mkdirs(dir string) error {
	for i := range len(dir) + 1 {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		up, base := path.Split(dir[:i])
		if base == "" || base == "." {
			continue
		}
		fd, err := u.openIn("./"+up, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		err = unix.Mkdirat(fd, base, 0o755)
		if err == nil {
			err = unix.Fchmodat(fd, base, 0o755, 0)
		}
		unix.Close(fd)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return nil
}

// cleanMember gives a member's path relative to the folder; .. ends at it.
func cleanMember(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (u *unpacker) member(h *tar.Header) error {
	if strings.IndexByte(h.Name, 0) >= 0 || strings.IndexByte(h.Linkname, 0) >= 0 || len(h.Name) >= dsec.MaxPathBytes {
		return dsec.Errorf(dsec.Invalid, "not a name for a file")
	}
	name := cleanMember(h.Name)
	if name == "" {
		return nil // the folder itself
	}
	dir, base, err := u.parent(name, true)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.folder(dir, base, name, h)
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.file(dir, base, h)
	case tar.TypeSymlink:
		if err := clearPath(dir, base); err != nil {
			return err
		}
		if err := unix.Symlinkat(h.Linkname, dir, base); err != nil {
			return err
		}
		u.chown(dir, base, h)
		setTime(dir, base, h.ModTime)
		return nil
	case tar.TypeLink:
		return u.link(dir, base, h)
	case tar.TypeFifo:
		if err := clearPath(dir, base); err != nil {
			return err
		}
		if err := unix.Mknodat(dir, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
		u.chown(dir, base, h)
		setTime(dir, base, h.ModTime)
		return unix.Fchmodat(dir, base, uint32(h.Mode)&0o7777, 0) // just made, so no symlink
	case tar.TypeChar, tar.TypeBlock:
		return dsec.Errorf(dsec.Unsupported, "a device node cannot be made in a sandbox")
	}
	return nil // global headers and what vendors added
}

// clearPath makes room for a member that is no folder.
func clearPath(dir int, base string) error {
	err := unix.Unlinkat(dir, base, 0)
	if isFolder(err) {
		if err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); errors.Is(err, unix.ENOTDIR) {
			err = unix.EPERM
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func (u *unpacker) folder(dir int, base, name string, h *tar.Header) error {
	err := unix.Mkdirat(dir, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			err = nil
		case unix.S_IFLNK: // as in an image where /lib leads to /usr/lib
			if fd, err := u.openIn("./"+name, unix.O_PATH|unix.O_DIRECTORY); err == nil {
				unix.Close(fd)
				return nil
			}
			fallthrough
		default:
			if err = unix.Unlinkat(dir, base, 0); err == nil {
				err = unix.Mkdirat(dir, base, 0o700)
			}
		}
	}
	if err != nil {
		return err
	}
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	u.chownFD(fd, h)
	setXattrs(fd, h)
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	if len(u.later) < maxLater {
		u.later = append(u.later, laterDir{name, h.ModTime})
	}
	return nil
}

func (u *unpacker) file(dir int, base string, h *tar.Header) error {
	if h.Size < 0 || h.Size > maxMember {
		return dsec.Errorf(dsec.Invalid, "its size of %d bytes is more than %d", h.Size, int64(maxMember))
	}
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(dir, base, flags, 0o600)
	if errors.Is(err, unix.EEXIST) {
		if err = clearPath(dir, base); err == nil {
			fd, err = unix.Openat(dir, base, flags, 0o600)
		}
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	w := &fdWriter{fd: fd, sparse: true}
	if err := u.copy(w); err != nil {
		return err
	}
	if err := w.finish(); err != nil {
		return err
	}
	u.chownFD(fd, h)
	setXattrs(fd, h)
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	ts := []unix.Timespec{unix.NsecToTimespec(h.ModTime.UnixNano()), unix.NsecToTimespec(h.ModTime.UnixNano())}
	unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH) //nolint:errcheck // a time is not worth failing for
	return nil
}

func (u *unpacker) copy(w io.Writer) error {
	buf := pumpBuffers.Get().(*[pumpBuffer]byte)
	defer pumpBuffers.Put(buf)
	for {
		n, err := u.tr.Read(buf[:])
		if _, werr := w.Write(buf[:n]); werr != nil {
			return werr
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return u.readError(err)
		}
		if u.ctx.Err() != nil {
			return context.Cause(u.ctx)
		}
	}
}

func (u *unpacker) link(dir int, base string, h *tar.Header) error {
	name := cleanMember(h.Linkname)
	if name == "" {
		return unix.EPERM
	}
	from, fromBase := path.Split(name)
	fd, err := u.openIn("./"+from, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var a, b unix.Stat_t
	if unix.Fstatat(fd, fromBase, &a, unix.AT_SYMLINK_NOFOLLOW) == nil && unix.Fstatat(dir, base, &b, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		a.Dev == b.Dev && a.Ino == b.Ino {
		return nil // it is that already; making room would remove it
	}
	if err := clearPath(dir, base); err != nil {
		return err
	}
	return unix.Linkat(fd, fromBase, dir, base, 0)
}

// chown gives a member to its owner; only root may, and not to ids that the
// sandbox has not.
func (u *unpacker) chown(dir int, base string, h *tar.Header) {
	if u.owner {
		unix.Fchownat(dir, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW) //nolint:errcheck // see above
	}
}

func (u *unpacker) chownFD(fd int, h *tar.Header) {
	if u.owner {
		unix.Fchown(fd, h.Uid, h.Gid) //nolint:errcheck // as in chown
	}
}

func setTime(dir int, base string, t time.Time) {
	ts := unix.NsecToTimespec(t.UnixNano())
	unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW) //nolint:errcheck // not worth failing for
}

func setXattrs(fd int, h *tar.Header) {
	for k, v := range h.PAXRecords {
		if name, ok := strings.CutPrefix(k, xattrRecord); ok && strings.HasPrefix(name, "user.") {
			unix.Fsetxattr(fd, name, []byte(v), 0) //nolint:errcheck // file systems without them are common
		}
	}
}

// moveAcross moves between file systems: the tree goes as an archive into a
// folder beside the destination, takes its name from there, and the original
// is removed. The caller has the rights of id.
func moveAcross(ctx context.Context, id identity, from, to string) error {
	src, base := path.Split(strings.TrimRight(from, "/"))
	fd, err := unix.Open(src, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	r := packStream(ctx, id, fd, base)
	defer r.Close()
	temp := tempName(strings.TrimRight(to, "/"))
	if err := unix.Mkdir(temp, 0o700); err != nil {
		return err
	}
	defer removeAll(context.WithoutCancel(ctx), temp) //nolint:errcheck // nothing better can be done
	if err := unpack(ctx, target{temp, id}, r); err != nil {
		return err
	}
	if err := unix.Rename(temp+"/"+base, strings.TrimRight(to, "/")); err != nil {
		return err
	}
	return removeAll(ctx, src+base)
}

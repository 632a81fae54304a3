package guest

import (
	"context"
	"errors"
	"iter"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// files is the agent as dsec.Files. Paths are never cleaned: what .. means
// behind a symlink is the kernel's to say.
type files struct{ a *Agent }

// target is a resolved FileOp.
type target struct {
	path string // absolute
	id   identity
}

func (f files) target(op dsec.FileOp) (target, error) {
	if err := dsec.CheckPath(op.Path); err != nil {
		return target{}, err
	}
	id, err := f.a.identity(op.User)
	if err != nil {
		return target{}, err
	}
	return target{f.absolute(op.Path), id}, nil
}

func (f files) absolute(p string) string {
	if p[0] == '/' {
		return p
	}
	if strings.HasSuffix(f.a.opt.Cwd, "/") {
		return f.a.opt.Cwd + p
	}
	return f.a.opt.Cwd + "/" + p
}

// fileError gives an error of a system call its kind.
func fileError(what, path string, err error) error {
	if err == nil {
		return nil
	}
	var de *dsec.Error
	if errors.As(err, &de) && de != errNotRegular {
		return err
	}
	kind := dsec.KindOf(err)
	var errno unix.Errno
	if errors.As(err, &errno) {
		kind, err = errnoKind(errno), errno
	}
	return dsec.Errorf(kind, "%s %q: %w", what, clip(path), err)
}

func errnoKind(e unix.Errno) dsec.ErrorKind {
	switch e {
	case unix.ENOENT:
		return dsec.NotFound
	case unix.EEXIST:
		return dsec.Exists
	case unix.EACCES, unix.EPERM, unix.EROFS:
		return dsec.Denied
	case unix.ENOTDIR, unix.EISDIR, unix.ENOTEMPTY, unix.EINVAL, unix.ELOOP, unix.ENAMETOOLONG, unix.EXDEV,
		unix.EFBIG, unix.EOVERFLOW, unix.ENXIO, unix.ESPIPE, unix.EILSEQ:
		return dsec.Invalid
	case unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EMLINK:
		return dsec.Exhausted
	case unix.EBUSY, unix.ETXTBSY:
		return dsec.Conflict
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return dsec.Unsupported
	}
	return dsec.Internal
}

// infoOf describes what a stat found.
func infoOf(p string, st *unix.Stat_t) dsec.FileInfo {
	i := dsec.FileInfo{
		Path:    p,
		Type:    dsec.TypeFile,
		Mode:    st.Mode & 0o7777,
		UID:     st.Uid,
		GID:     st.Gid,
		Size:    st.Size,
		ModTime: time.Unix(st.Mtim.Unix()).UTC(),
		Nlink:   uint64(st.Nlink), //nolint:unconvert // its type differs between machines
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		i.Type = dsec.TypeDir
	case unix.S_IFLNK:
		i.Type = dsec.TypeSymlink
	case unix.S_IFCHR, unix.S_IFBLK:
		i.Type = dsec.TypeDevice
	case unix.S_IFIFO:
		i.Type = dsec.TypePipe
	case unix.S_IFSOCK:
		i.Type = dsec.TypeSocket
	}
	return i
}

// statAt describes name in a folder without following it.
func statAt(dir int, name, full string) (dsec.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return dsec.FileInfo{}, err
	}
	i := infoOf(full, &st)
	if i.Type == dsec.TypeSymlink {
		t, err := readlinkAt(dir, name)
		if err != nil {
			return i, err
		}
		i.Target = t
	}
	return i, nil
}

func readlinkAt(dir int, name string) (string, error) {
	var b [dsec.MaxPathBytes]byte
	n, err := unix.Readlinkat(dir, name, b[:])
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

func (f files) Stat(_ context.Context, _ dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	t, err := f.target(op)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	var i dsec.FileInfo
	err = as(t.id, func() (err error) {
		i, err = statAt(unix.AT_FDCWD, t.path, t.path)
		return err
	})
	return i, fileError("stat", op.Path, err)
}

func (f files) List(ctx context.Context, _ dsec.Call, op dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	return func(yield func(dsec.FileInfo, error) bool) {
		t, err := f.target(op)
		if err == nil && depth < 1 {
			err = dsec.Errorf(dsec.Invalid, "depth %d is less than 1", depth)
		}
		if err == nil {
			base := strings.TrimRight(t.path, "/")
			_, err = list(ctx, t.id, base, t.path, depth, yield)
		}
		if err != nil {
			yield(dsec.FileInfo{}, fileError("list", op.Path, err))
		}
	}
}

// list yields a folder and what is below. more is false when yield wants no
// more. What vanishes meanwhile is left out, and so is what the user may not
// look into below the first folder.
func list(ctx context.Context, id identity, base, dir string, depth int, yield func(dsec.FileInfo, error) bool) (more bool, err error) {
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	var infos []dsec.FileInfo
	err = as(id, func() error {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		names, err := readNames(fd)
		if err != nil {
			return err
		}
		slices.Sort(names)
		infos = make([]dsec.FileInfo, 0, len(names))
		for _, name := range names {
			if i, err := statAt(fd, name, base+"/"+name); err == nil {
				infos = append(infos, i)
			}
		}
		return nil
	})
	if err != nil {
		return true, err
	}
	for k := range infos {
		if !yield(infos[k], nil) {
			return false, nil
		}
		if infos[k].Type == dsec.TypeDir && depth > 1 && len(infos[k].Path) < dsec.MaxPathBytes-1 {
			more, err := list(ctx, id, infos[k].Path, infos[k].Path, depth-1, yield)
			if ctx.Err() != nil {
				return false, context.Cause(ctx)
			}
			if !more && err == nil {
				return false, nil
			}
		}
	}
	return true, nil
}

// readNames gives the names in an open folder, in no order.
func readNames(fd int) ([]string, error) {
	var names []string
	buf := make([]byte, 16<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

func (f files) Mkdir(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	if mode == 0 {
		mode = 0o755
	}
	return f.change(ctx, on, "mkdir", op, f.a.steps.number("mode", int64(mode)), func(t target) error {
		if mode&^0o7777 != 0 {
			return dsec.Errorf(dsec.Invalid, "mode %#o is not within 07777", mode)
		}
		return mkdirAll(t.path, mode)
	})
}

// change carries out a call on one path with the rights of its user, once for
// a step.
func (f files) change(ctx context.Context, on dsec.Call, verb string, op dsec.FileOp, more field, do func(target) error) error {
	t, err := f.target(op)
	if err != nil {
		return err
	}
	fields := []field{f.a.steps.text("path", op.Path), f.a.steps.text("user", op.User), more}
	_, err = f.a.once(ctx, on.Step, verb, fields, func() (any, error) {
		return nil, as(t.id, func() error { return do(t) })
	})
	return fileError(verb, op.Path, err)
}

// mkdirAll makes a folder and its parents. Parents get mode 0755.
func mkdirAll(p string, mode uint32) error {
	p = strings.TrimRight(p, "/")
	if p == "" {
		return nil
	}
	err := unix.Mkdir(p, mode&0o777)
	if errors.Is(err, unix.ENOENT) {
		parent, _ := path.Split(p)
		if err := mkdirAll(parent, 0o755); err != nil {
			return err
		}
		err = unix.Mkdir(p, mode&0o777)
	}
	if err == nil {
		return unix.Chmod(p, mode) // whatever the umask
	}
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return nil
		}
	}
	return err
}

func (f files) Move(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	return f.change(ctx, on, "move", op, f.a.steps.text("destination", to), func(t target) error {
		if err := dsec.CheckPath(to); err != nil {
			return err
		}
		to := f.absolute(to)
		err := unix.Rename(t.path, to)
		if errors.Is(err, unix.EXDEV) {
			return moveAcross(ctx, t.id, t.path, to)
		}
		return err
	})
}

func (f files) Remove(ctx context.Context, on dsec.Call, op dsec.FileOp) error {
	return f.change(ctx, on, "remove", op, field{}, func(t target) error {
		if base := path.Base(t.path); path.Clean(t.path) == "/" || base == "." || base == ".." ||
			strings.HasSuffix(strings.TrimRight(t.path, "/"), "/.") || strings.HasSuffix(strings.TrimRight(t.path, "/"), "/..") {
			return dsec.Errorf(dsec.Invalid, "remove %q: not a name that can be removed", clip(op.Path))
		}
		return removeAll(ctx, strings.TrimRight(t.path, "/"))
	})
}

func (f files) Chmod(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return f.change(ctx, on, "chmod", op, f.a.steps.number("mode", int64(mode)), func(t target) error {
		if mode&^0o7777 != 0 {
			return dsec.Errorf(dsec.Invalid, "mode %#o is not within 07777", mode)
		}
		return unix.Chmod(t.path, mode)
	})
}

func (f files) Chown(ctx context.Context, on dsec.Call, op dsec.FileOp, owner string) error {
	name, group, hasGroup := strings.Cut(owner, ":")
	uid, gid := -1, -1
	if name != "" {
		id, err := f.a.accounts.lookup(name)
		if err != nil {
			return err
		}
		uid = int(id.uid)
	}
	if hasGroup && group != "" {
		g, err := resolveGroup(group, readAccounts(f.a.accounts.group))
		if err != nil {
			return err
		}
		gid = int(g)
	}
	if uid < 0 && gid < 0 {
		return dsec.Errorf(dsec.Invalid, "owner %q names nobody", clip(owner))
	}
	return f.change(ctx, on, "chown", op, f.a.steps.text("owner", owner), func(t target) error {
		return unix.Lchown(t.path, uid, gid)
	})
}

func (f files) Symlink(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	return f.change(ctx, on, "symlink", op, f.a.steps.text("target", to), func(t target) error {
		if err := dsec.CheckPath(to); err != nil {
			return err
		}
		return unix.Symlink(to, t.path)
	})
}

// removeAll deletes a file or a tree whose path does not end in a slash. It
// follows no symlink and copes with a tree that changes under it.
func removeAll(ctx context.Context, p string) error {
	dir, name := path.Split(p)
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EACCES) { // searching it may be allowed all the same
		fd, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Unlinkat(fd, name, 0); !isFolder(err) {
		return err
	}
	return removeTree(ctx, fd, name, 0)
}

// isFolder reports whether unlink refused because the name is a folder's.
func isFolder(err error) bool { return errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) }

// maxDepth is how deep removeTree goes with one descriptor for each level
// before it opens a level anew.
const maxDepth = 4096

// removeTree deletes the folder name in dir. What appears in it meanwhile is
// deleted too, within reason.
func removeTree(ctx context.Context, dir int, name string, depth int) error {
	var failure error
	for range 16 {
		err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
			if errors.Is(err, unix.ENOTDIR) { // it was replaced
				err = unix.Unlinkat(dir, name, 0)
			}
			if errors.Is(err, unix.ENOENT) && depth > 0 {
				return nil
			}
			if err != nil && failure != nil {
				return failure
			}
			return err
		}
		if failure != nil {
			return failure
		}
		if depth > maxDepth {
			return unix.ENAMETOOLONG
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			continue
		}
		if err != nil {
			return err
		}
		failure = removeIn(ctx, fd, depth)
		unix.Close(fd)
	}
	if failure == nil {
		failure = unix.ENOTEMPTY
	}
	return failure
}

// removeIn deletes what is in a folder. It goes on after an error, so that as
// much as can be is gone, and gives the first.
func removeIn(ctx context.Context, fd, depth int) error {
	var failure error
	names, err := readNames(fd)
	if err != nil {
		return err
	}
	for _, name := range names {
		err := unix.Unlinkat(fd, name, 0)
		if isFolder(err) {
			err = removeTree(ctx, fd, name, depth+1)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) && failure == nil {
			failure = err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return failure
}

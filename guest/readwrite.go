package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"hash/maphash"
	"io"
	"path"
	"strings"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// tempPrefix begins the names of files that are being written. A watch does
// not show them.
const tempPrefix = ".dsec-tmp-"

func (f files) Read(_ context.Context, _ dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	t, err := f.target(op)
	if err != nil {
		return nil, err
	}
	if r.Offset < 0 || r.Length < 0 {
		return nil, dsec.Errorf(dsec.Invalid, "offset %d or length %d is negative", r.Offset, r.Length)
	}
	fd := -1
	err = as(t.id, func() (err error) {
		fd, err = openForRead(t.path)
		return err
	})
	if err != nil {
		return nil, fileError("read", op.Path, err)
	}
	if r.Length == 0 {
		r.Length = 1<<63 - 1 - r.Offset
	}
	return &fileReader{fd: fd, path: op.Path, off: r.Offset, left: min(r.Length, 1<<63-1-r.Offset)}, nil
}

// openForRead opens a regular file and never waits: not for the other end of a
// pipe, nor for a device.
func openForRead(p string) (int, error) {
	fd, err := unix.Open(p, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := regular(fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// regular is nil for a regular file.
func regular(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return unix.EISDIR
	}
	return errNotRegular
}

// errNotRegular is what fileError completes with the path.
var errNotRegular = dsec.Errorf(dsec.Invalid, "not a regular file")

// fileReader reads a part of a file. Files of /proc have no size, so it goes by
// what comes.
type fileReader struct {
	fd   int
	path string
	off  int64
	left int64
}

func (r *fileReader) Read(p []byte) (int, error) {
	if r.left == 0 || len(p) == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), r.left)]
	for {
		n, err := unix.Pread(r.fd, p, r.off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, dsec.Errorf(dsec.Invalid, "read %q: it has nothing to read now", clip(r.path))
		case err != nil:
			return 0, fileError("read", r.path, err)
		case n == 0:
			return 0, io.EOF
		}
		r.off, r.left = r.off+int64(n), r.left-int64(n)
		return n, nil
	}
}

func (r *fileReader) Close() error {
	if r.fd < 0 {
		return nil
	}
	fd := r.fd
	r.fd, r.left = -1, 0
	return unix.Close(fd)
}

func (f files) Write(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	t, err := f.target(op)
	switch {
	case err != nil:
		return dsec.FileInfo{}, err
	case opt.Mode&^0o7777 != 0:
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "mode %#o is not within 07777", opt.Mode)
	case opt.At != nil && opt.Append:
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "a write is at an offset or at the end, not both")
	case opt.At != nil && *opt.At < 0:
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "offset %d is negative", *opt.At)
	case strings.HasSuffix(t.path, "/"):
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "write %q: the name of a folder", clip(op.Path))
	}
	if on.Step.IsZero() {
		i, err := f.write(t, opt, r)
		return i, fileError("write", op.Path, err)
	}
	s := &f.a.steps
	at := int64(-1)
	if opt.At != nil {
		at = *opt.At
	}
	flags := int64(0)
	if opt.Append {
		flags |= 1
	}
	if opt.Parents {
		flags |= 2
	}
	fields := []field{
		s.text("path", op.Path), s.text("user", op.User), s.number("mode", int64(opt.Mode)),
		s.number("offset", at), s.number("options", flags),
	}
	o, first, err := s.begin(ctx, on.Step, "write", fields)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	sum := &summed{r: r}
	sum.h.SetSeed(s.seed)
	if !first {
		if _, err := io.Copy(io.Discard, sum); err != nil {
			return dsec.FileInfo{}, err
		}
		if sum.h.Sum64() != o.content {
			return dsec.FileInfo{}, diverged(on.Step, "content")
		}
		return o.result.(dsec.FileInfo), nil
	}
	i, err := f.write(t, opt, sum)
	o.content = sum.h.Sum64()
	s.end(on.Step, o, i, err)
	return i, fileError("write", op.Path, err)
}

// summed digests what it reads.
type summed struct {
	r io.Reader
	h maphash.Hash
}

func (s *summed) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n]) //nolint:errcheck // never fails
	return n, err
}

func (f files) write(t target, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	if opt.Parents {
		dir, _ := path.Split(t.path)
		if err := as(t.id, func() error { return mkdirAll(dir, 0o755) }); err != nil {
			return dsec.FileInfo{}, err
		}
	}
	if opt.At != nil || opt.Append {
		return writeInPlace(t, opt, r)
	}
	return replace(t, opt, r)
}

// writeInPlace writes within or at the end of a file, which is made if there
// is none.
func writeInPlace(t target, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	off := int64(0)
	if opt.Append {
		flags |= unix.O_APPEND
	} else if opt.At != nil {
		off = *opt.At
	}
	mode := opt.Mode
	if mode == 0 {
		mode = 0o644
	}
	fd := -1
	err := as(t.id, func() (err error) {
		if fd, err = unix.Open(t.path, flags|unix.O_EXCL, 0o600); err == nil {
			return unix.Fchmod(fd, mode) // whatever the umask
		}
		if errors.Is(err, unix.EEXIST) {
			fd, err = unix.Open(t.path, flags, mode)
		}
		return err
	})
	if err == nil {
		err = regular(fd)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return dsec.FileInfo{}, err
	}
	defer unix.Close(fd)
	w := &fdWriter{fd: fd, off: off, append: opt.Append}
	if _, err := copyTo(w, r); err != nil {
		return dsec.FileInfo{}, err
	}
	return infoFd(t.path, fd)
}

func infoFd(p string, fd int) (dsec.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return dsec.FileInfo{}, err
	}
	return infoOf(p, &st), nil
}

// replace writes a new file beside the old one and renames it over it. Where
// that cannot be, because the folder takes no new files or the name is a mount
// point, an existing file that the user may write is written in place.
func replace(t target, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	var p, temp string
	var old *unix.Stat_t
	fd := -1
	err := as(t.id, func() (err error) {
		if p, old, err = finalTarget(t.path); err != nil {
			return err
		}
		if old != nil {
			if err := unix.Faccessat(unix.AT_FDCWD, p, unix.W_OK, unix.AT_EACCESS); err != nil {
				return err
			}
		}
		temp, fd, err = createTemp(p)
		if old != nil && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EPERM)) {
			temp = ""
			fd, err = unix.Open(p, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		}
		return err
	})
	if err != nil {
		return dsec.FileInfo{}, err
	}
	defer unix.Close(fd)
	renamed := false
	defer func() {
		if temp != "" && !renamed {
			as(t.id, func() error { return unix.Unlink(temp) }) //nolint:errcheck // nothing better can be done
		}
	}()
	w := &fdWriter{fd: fd, sparse: true}
	if _, err := copyTo(w, r); err != nil {
		return dsec.FileInfo{}, err
	}
	if err := w.finish(); err != nil {
		return dsec.FileInfo{}, err
	}
	if temp == "" {
		if opt.Mode != 0 {
			if err := as(t.id, func() error { return unix.Fchmod(fd, opt.Mode) }); err != nil {
				return dsec.FileInfo{}, err
			}
		}
		return infoFd(t.path, fd)
	}
	mode := opt.Mode
	if old != nil {
		if mode == 0 {
			mode = old.Mode & 0o7777
			if t.id.uid != 0 { // as the kernel does when somebody writes
				mode &^= 0o6000
			}
		}
		if old.Uid != t.id.uid || old.Gid != t.id.gid {
			// The owner stays, though the writer may be another who may write.
			// The agent does it, so no rights of the user are needed.
			if err := unix.Fchown(fd, int(old.Uid), int(old.Gid)); err != nil {
				return dsec.FileInfo{}, err
			}
			if old.Uid != t.id.uid && t.id.uid != 0 {
				mode &^= 0o6000
			}
		}
	}
	if mode == 0 {
		mode = 0o644
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return dsec.FileInfo{}, err
	}
	err = as(t.id, func() error { return unix.Rename(temp, p) })
	if errors.Is(err, unix.EBUSY) { // a mount point
		return overwrite(t, p, fd)
	}
	if err != nil {
		return dsec.FileInfo{}, err
	}
	renamed = true
	return infoFd(t.path, fd)
}

// overwrite copies what was written into the file that cannot be replaced.
func overwrite(t target, p string, from int) (dsec.FileInfo, error) {
	fd := -1
	err := as(t.id, func() (err error) {
		fd, err = unix.Open(p, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return dsec.FileInfo{}, err
	}
	defer unix.Close(fd)
	r := &fileReader{fd: from, path: p, left: 1<<63 - 1} // its owner closes it
	if _, err := copyTo(&fdWriter{fd: fd}, r); err != nil {
		return dsec.FileInfo{}, err
	}
	return infoFd(t.path, fd)
}

// finalTarget follows symlinks in the last component, to the file that a write
// is meant for. old is nil if there is none yet.
func finalTarget(p string) (final string, old *unix.Stat_t, err error) {
	for range 40 {
		var st unix.Stat_t
		err := unix.Lstat(p, &st)
		if errors.Is(err, unix.ENOENT) {
			return p, nil, nil
		}
		if err != nil {
			return p, nil, err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			return p, &st, nil
		case unix.S_IFDIR:
			return p, nil, unix.EISDIR
		case unix.S_IFLNK:
			to, err := readlinkAt(unix.AT_FDCWD, p)
			if err != nil {
				return p, nil, err
			}
			if to == "" || to[0] != '/' {
				dir, _ := path.Split(p)
				to = dir + to
			}
			p = to
		default:
			return p, nil, errNotRegular
		}
	}
	return p, nil, unix.ELOOP
}

// createTemp makes a file beside p.
func createTemp(p string) (string, int, error) {
	temp := tempName(p)
	fd, err := unix.Open(temp, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	return temp, fd, err
}

// tempName gives a name beside p that nothing has.
func tempName(p string) string {
	dir, _ := path.Split(p)
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	return dir + tempPrefix + hex.EncodeToString(b[:])
}

// copyTo is io.Copy with a buffer of the pool.
func copyTo(w io.Writer, r io.Reader) (int64, error) {
	buf := pumpBuffers.Get().(*[pumpBuffer]byte)
	defer pumpBuffers.Put(buf)
	return io.CopyBuffer(w, struct{ io.Reader }{r}, buf[:])
}

// fdWriter writes a file in order. With sparse it leaves holes for zeros.
type fdWriter struct {
	fd     int
	off    int64
	append bool
	sparse bool
}

const holeSize = 4096

var zeros [holeSize]byte

func (w *fdWriter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		q := p[done:]
		if w.sparse {
			if n := zeroRun(q, w.off); n > 0 {
				done, w.off = done+n, w.off+int64(n)
				continue
			}
			q = q[:dataRun(q, w.off)]
		}
		var n int
		var err error
		if w.append {
			n, err = unix.Write(w.fd, q)
		} else {
			n, err = unix.Pwrite(w.fd, q, w.off)
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		done, w.off = done+n, w.off+int64(n)
	}
	return done, nil
}

// zeroRun gives the length of the whole zero blocks that p begins with.
func zeroRun(p []byte, off int64) int {
	if off%holeSize != 0 {
		return 0
	}
	n := 0
	for len(p)-n >= holeSize && bytes.Equal(p[n:n+holeSize], zeros[:]) {
		n += holeSize
	}
	return n
}

// dataRun gives the length of what comes before the next whole zero block.
func dataRun(p []byte, off int64) int {
	n := min(len(p), int(holeSize-off%holeSize))
	for len(p)-n >= holeSize && !bytes.Equal(p[n:n+holeSize], zeros[:]) {
		n += holeSize
	}
	if len(p)-n < holeSize {
		n = len(p)
	}
	return n
}

// finish gives the file its size if it ends in a hole.
func (w *fdWriter) finish() error { return unix.Ftruncate(w.fd, w.off) }

package guest

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// Pack implements dsec.Files. Sockets are left out. A file that is hard-linked
// within the tree is packed once. Holes are packed as such in the PAX format
// that GNU tar, Python and Go read.
func (f files) Pack(ctx context.Context, _ dsec.Call, op dsec.FileOp) (io.ReadCloser, error) {
	t, err := f.target(op)
	if err != nil {
		return nil, err
	}
	p := strings.TrimRight(t.path, "/")
	if p == "" {
		p = "/"
	}
	fd := -1 // of the folder
	var st unix.Stat_t
	err = as(t.id, func() (err error) {
		if err = unix.Stat(p, &st); err != nil {
			return err
		}
		dir := p
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			dir, _ = path.Split(p)
		}
		fd, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fileError("pack", op.Path, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return packStream(ctx, t.id, fd, ""), nil
	}
	return packStream(ctx, t.id, fd, path.Base(t.path)), nil
}

// packStream gives the archive of one name in a folder, or with an empty name
// of all that is in it. It closes the descriptor at its end.
func packStream(ctx context.Context, id identity, dir int, name string) *packReader {
	pr, pw := io.Pipe()
	ctx, cancel := context.WithCancel(ctx)
	r := &packReader{PipeReader: pr, cancel: cancel, done: make(chan struct{})}
	go func() { // ends when the reader is closed at the latest
		defer close(r.done)
		defer unix.Close(dir)
		buf := bufio.NewWriterSize(pw, 64<<10)
		p := &packer{ctx: ctx, out: buf, tw: tar.NewWriter(buf), links: make(map[[2]uint64]string)}
		err := as(id, func() error {
			if name == "" {
				return p.dir(dir, "", 0)
			}
			return p.member(dir, name, name, 0)
		})
		if err == nil {
			err = p.tw.Close()
		}
		if err == nil {
			err = buf.Flush()
		}
		pw.CloseWithError(fileError("pack", name, err)) //nolint:errcheck // never fails
	}()
	return r
}

type packReader struct {
	*io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
}

func (r *packReader) Close() error {
	r.cancel()
	r.PipeReader.Close() //nolint:errcheck // never fails
	<-r.done
	return nil
}

type packer struct {
	ctx   context.Context // of the whole archive
	out   *bufio.Writer
	tw    *tar.Writer
	links map[[2]uint64]string // device and inode of files with several names
}

// maxPackDepth bounds descriptors: one is open for each level.
const maxPackDepth = 1000

func (p *packer) dir(fd int, prefix string, depth int) error {
	names, err := readNames(fd)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		if err := p.member(fd, n, prefix+n, depth); err != nil {
			return err
		}
	}
	return nil
}

// member packs one name of a folder. One that vanishes meanwhile is left out.
func (p *packer) member(dir int, name, full string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return fileError("stat", full, err)
	}
	h := &tar.Header{
		Name:    full,
		Mode:    int64(st.Mode & 0o7777),
		Uid:     int(st.Uid),
		Gid:     int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()),
		Format:  tar.FormatPAX,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return p.folder(dir, name, h, depth)
	case unix.S_IFLNK:
		to, err := readlinkAt(dir, name)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
			return nil
		}
		if err != nil {
			return fileError("read link", full, err)
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, to
	case unix.S_IFREG:
		if st.Nlink > 1 {
			key := [2]uint64{uint64(st.Dev), st.Ino} //nolint:unconvert // its type differs between machines
			if first, ok := p.links[key]; ok {
				h.Typeflag, h.Linkname = tar.TypeLink, first
				return p.header(h)
			}
			p.links[key] = full
		}
		return p.file(dir, name, h)
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(uint64(st.Rdev))), int64(unix.Minor(uint64(st.Rdev))) //nolint:unconvert // as above
	default:
		return nil
	}
	return p.header(h)
}

func (p *packer) header(h *tar.Header) error {
	if err := p.tw.WriteHeader(h); err != nil {
		return fileError("pack", h.Name, err)
	}
	return nil
}

func (p *packer) folder(dir int, name string, h *tar.Header, depth int) error {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil // it was replaced
	case err != nil:
		return fileError("open", h.Name, err)
	}
	defer unix.Close(fd)
	if depth >= maxPackDepth {
		return dsec.Errorf(dsec.Invalid, "pack %q: folders nest deeper than %d", clip(h.Name), maxPackDepth)
	}
	prefix := h.Name + "/"
	h.Typeflag, h.Name = tar.TypeDir, prefix
	if err := p.header(h); err != nil {
		return err
	}
	return p.dir(fd, prefix, depth+1)
}

func (p *packer) file(dir int, name string, h *tar.Header) error {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ELOOP):
		return nil
	case err != nil:
		return fileError("open", h.Name, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil // replaced
	}
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	for k, v := range userXattrs(fd) {
		if h.PAXRecords == nil {
			h.PAXRecords = make(map[string]string)
		}
		h.PAXRecords[xattrRecord+k] = v
	}
	if st.Blocks*512 < st.Size {
		if ext, err := extents(fd, st.Size); err == nil && sparseWorth(ext, st.Size) {
			return p.sparse(fd, h, ext)
		}
	}
	if err := p.header(h); err != nil {
		return err
	}
	return p.copy(p.tw, fd, extent{0, st.Size})
}

// copy writes exactly the bytes of e: a file that shrinks meanwhile goes on in
// zeros.
func (p *packer) copy(w io.Writer, fd int, e extent) error {
	buf := pumpBuffers.Get().(*[pumpBuffer]byte)
	defer pumpBuffers.Put(buf)
	for e.n > 0 {
		b := buf[:min(e.n, pumpBuffer)]
		n, err := unix.Pread(fd, b, e.off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			clear(b)
			n = len(b)
		}
		if _, err := w.Write(b[:n]); err != nil {
			return err
		}
		e.off, e.n = e.off+int64(n), e.n-int64(n)
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
	}
	return nil
}

// xattrRecord begins the PAX records that hold extended attributes.
const xattrRecord = "SCHILY.xattr."

// userXattrs gives the attributes of a file in the user namespace, which is the
// only one that an archive may carry.
func userXattrs(fd int) map[string]string {
	n, err := unix.Flistxattr(fd, nil)
	if err != nil || n == 0 {
		return nil
	}
	names := make([]byte, n)
	if n, err = unix.Flistxattr(fd, names); err != nil {
		return nil
	}
	var out map[string]string
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") || strings.Contains(name, "=") {
			continue
		}
		v := make([]byte, 64<<10)
		if n, err = unix.Fgetxattr(fd, name, v); err != nil {
			continue
		}
		if out == nil {
			out = make(map[string]string)
		}
		out[name] = string(v[:n])
	}
	return out
}

// extent is a run of data in a file.
type extent struct{ off, n int64 }

// maxExtents bounds the map of a sparse member; more scattered files are packed
// with their zeros.
const maxExtents = 16384

// extents finds the data of a sparse file.
func extents(fd int, size int64) ([]extent, error) {
	var out []extent
	for off := int64(0); off < size; {
		data, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, err
		}
		hole, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		hole = min(hole, size)
		if data >= hole {
			break
		}
		out = append(out, extent{data, hole - data})
		if off = hole; len(out) > maxExtents {
			return nil, unix.E2BIG
		}
	}
	return out, nil
}

func sparseWorth(ext []extent, size int64) bool {
	for _, e := range ext {
		size -= e.n
	}
	return size >= 64<<10
}

// sparse packs a file with its holes, in GNU's PAX format 1.0: the member's
// content begins with the map of extents. The library cannot write it, so the
// two headers are ours.
func (p *packer) sparse(fd int, h *tar.Header, ext []extent) error {
	var m []byte
	line := func(n int64) { m = append(strconv.AppendInt(m, n, 10), '\n') }
	line(int64(len(ext)) + 1)
	total := int64(0)
	for _, e := range ext {
		line(e.off)
		line(e.n)
		total += e.n
	}
	line(h.Size) // an empty extent at the end carries the size
	line(0)
	m = append(m, make([]byte, -len(m)&511)...)
	if err := p.tw.Flush(); err != nil {
		return err
	}
	rec := map[string]string{
		"GNU.sparse.major":    "1",
		"GNU.sparse.minor":    "0",
		"GNU.sparse.name":     h.Name,
		"GNU.sparse.realsize": strconv.FormatInt(h.Size, 10),
		"uid":                 strconv.Itoa(h.Uid),
		"gid":                 strconv.Itoa(h.Gid),
		"mtime":               paxTime(h.ModTime),
	}
	for k, v := range h.PAXRecords {
		rec[k] = v
	}
	// Readers take a size beside the real one in different ways, so there is none
	// unless the header cannot hold it.
	if stored := total + int64(len(m)); stored >= 1<<33 {
		rec["size"] = strconv.FormatInt(stored, 10)
	}
	var pax []byte
	for _, k := range slices.Sorted(keys(rec)) {
		pax = append(pax, paxRecord(k, rec[k])...)
	}
	p.out.Write(ustar("PaxHeaders.0/sparse", 'x', 0o644, int64(len(pax))))         //nolint:errcheck // the last write tells
	p.out.Write(pax)                                                               //nolint:errcheck
	p.out.Write(make([]byte, -len(pax)&511))                                       //nolint:errcheck
	p.out.Write(ustar("GNUSparseFile.0/sparse", '0', h.Mode, total+int64(len(m)))) //nolint:errcheck
	p.out.Write(m)                                                                 //nolint:errcheck
	for _, e := range ext {
		if err := p.copy(p.out, fd, e); err != nil {
			return err
		}
	}
	_, err := p.out.Write(make([]byte, -total&511))
	return err
}

func keys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func paxTime(t time.Time) string {
	s := strconv.FormatInt(t.Unix(), 10)
	if ns := t.Nanosecond(); ns != 0 && t.Unix() >= 0 {
		s += "." + strconv.Itoa(1e9 + ns)[1:]
	}
	return s
}

// paxRecord is "LENGTH key=value\n", where LENGTH counts itself.
func paxRecord(k, v string) string {
	n := len(k) + len(v) + 3
	size := n + len(strconv.Itoa(n))
	size = n + len(strconv.Itoa(size))
	return strconv.Itoa(size) + " " + k + "=" + v + "\n"
}

// ustar is a header block. What does not fit is in the records before it.
func ustar(name string, typ byte, mode, size int64) []byte {
	b := make([]byte, 512)
	copy(b, name)
	octal := func(field []byte, v int64) {
		s := strconv.FormatInt(v, 8)
		if len(s) >= len(field) {
			s = "0"
		}
		for i := range field[:len(field)-1] {
			field[i] = '0'
		}
		copy(field[len(field)-1-len(s):], s)
	}
	octal(b[100:108], mode)
	octal(b[108:116], 0)
	octal(b[116:124], 0)
	octal(b[124:136], size)
	octal(b[136:148], 0)
	b[156] = typ
	copy(b[257:], "ustar\x0000")
	copy(b[148:156], "        ")
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	octal(b[148:155], sum)
	return b
}

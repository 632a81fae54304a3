package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	folderFormat = "dsec blob folder 1\n"
	formatName   = "format"
	stagingName  = "staging"
	blobsName    = "sha256"
)

// Folder is a Store in a folder of any POSIX mount, local or shared by several nodes:
//
//	format            names the layout and its version
//	sha256/ab/<hex>   one file a blob, under the first two of its 64 digits
//	staging/<random>  blobs being written
//
// A blob is written to staging, synced, renamed and its folder synced. When only that last
// sync fails, Put fails and yet the blob stays visible: it is whole, and taking it away
// could rob another writer who was told that it is there. A repeated Put syncs again.
//
// A mount that other hosts share need not know hard links, flags of rename, locks or a sync
// of folders; what it must do, and how to mount it, is in docs/stores.md. There a reader that
// is open goes on after a Delete only as long as the mount lets it: NFS does for the host
// that deletes and not for the others.
//
// LocalPath gives the blob file itself.
type Folder struct {
	dir     string
	staging string

	// shared: other hosts may change what is here, and this host may remember otherwise.
	shared bool

	// fans tells which fan-out folders are known to be there and durable.
	fans [256]atomic.Bool

	clock  sync.Mutex    // guards the two below; held across a probe
	probed time.Time     // when the server's clock was last looked at
	ahead  time.Duration // by how much it was

	// fault is asked before every step that can fail; tests set it.
	fault func(op string) error
}

var (
	_ Store       = (*Folder)(nil)
	_ Stager      = (*Folder)(nil)
	_ LocalPather = (*Folder)(nil)
	_ Keeper      = (*Folder)(nil)
)

// OpenFolder opens the store in dir and creates it if it is not there. It removes what
// writers that are dead have left in staging. A Folder holds nothing open: there is no Close.
func OpenFolder(dir string) (*Folder, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open blob folder: %w", err)
	}
	f := &Folder{dir: dir, staging: filepath.Join(dir, stagingName)}
	if err := f.init(); err != nil {
		return nil, fmt.Errorf("open blob folder %s: %w", dir, err)
	}
	f.shared = !isLocal(dir)
	f.sweep()
	return f, nil
}

// init lays out a new folder, or what is missing of one: a bucket that a server shows as a
// folder has no empty folders. Nodes may do this at the same time: every step can be
// repeated, and the format file comes last. Where nothing may be written the rest is for
// reading.
func (f *Folder) init() error {
	format := filepath.Join(f.dir, formatName)
	known := false
	switch b, err := os.ReadFile(format); {
	case err == nil && string(b) == folderFormat:
		known = true
	case err == nil:
		return fmt.Errorf("unknown format %.40q", b)
	case !errors.Is(err, fs.ErrNotExist):
		return system(err)
	}
	if !known {
		if err := os.MkdirAll(f.dir, 0o700); err != nil {
			return system(err)
		}
	}
	for _, d := range []string{f.staging, filepath.Join(f.dir, blobsName)} {
		if err := mkdir(d); err != nil && !(known && errors.Is(system(err), ErrDenied)) {
			return system(err)
		}
	}
	if known {
		return nil
	}
	if err := f.writeFormat(format); err != nil {
		return system(err)
	}
	return nil
}

// away is ErrUnavailable if the folder is no store any more, as where its file
// system is not mounted: that says nothing of the blobs in it.
func (f *Folder) away() error {
	if _, err := os.Stat(filepath.Join(f.dir, formatName)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: the folder has no store now; is it mounted?", ErrUnavailable)
	}
	return nil
}

// IsFolder reports whether a folder has a store.
func IsFolder(dir string) bool { return (&Folder{dir: dir}).away() == nil }

func (f *Folder) writeFormat(format string) error {
	tmp, err := os.CreateTemp(f.staging, "format-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // gone after the rename
	_, err = tmp.WriteString(folderFormat)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	// A sweep of another node may take the file away between the two lines. Then that
	// node is past its own init, and the format is there.
	if err := os.Rename(tmp.Name(), format); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return syncDir(f.dir)
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// Stat implements Store.
func (f *Folder) Stat(ctx context.Context, d Digest) (Info, error) {
	if err := begin(ctx, d); err != nil {
		return Info{}, err
	}
	st, err := os.Stat(f.path(d))
	if err != nil && f.refresh(d, err) {
		st, err = os.Stat(f.path(d))
	}
	if err != nil {
		return Info{}, f.lookup("stat", d, err)
	}
	return Info{Digest: d, Size: st.Size()}, nil
}

// Get implements Store.
func (f *Folder) Get(ctx context.Context, d Digest, off, n int64) (io.ReadCloser, error) {
	if err := begin(ctx, d); err != nil {
		return nil, err
	}
	file, err := f.open(d)
	if err != nil {
		return nil, err
	}
	st, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, f.lookup("stat", d, err)
	}
	if n, err = span(d, st.Size(), off, n); err != nil {
		file.Close()
		return nil, err
	}
	return &fileRange{folder: f, ctx: ctx, d: d, file: file, off: off, left: n}, nil
}

// open opens the file of a blob.
func (f *Folder) open(d Digest) (*os.File, error) {
	file, err := os.Open(f.path(d))
	if err != nil && f.refresh(d, err) {
		file, err = os.Open(f.path(d))
	}
	if err != nil {
		return nil, f.lookup("open", d, err)
	}
	return file, nil
}

// refresh has this host ask the server about the folder of d when it did not find d, since
// it may remember an absence from before another host put it there. It reports whether
// looking again may help. Not every mount can be told; docs/stores.md says how to mount.
func (f *Folder) refresh(d Digest, err error) bool {
	if !f.shared || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESTALE) {
		return false
	}
	fan := filepath.Dir(f.path(d))
	var st unix.Statx_t
	for _, dir := range []string{filepath.Dir(fan), fan} {
		unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_FORCE_SYNC, unix.STATX_MTIME, &st) //nolint:errcheck // the second look tells
	}
	return true
}

// fileRange is a part of a blob file. On a shared mount the file may go stale below it when
// another host replaces it by its equal: it goes on in the new one.
type fileRange struct {
	folder *Folder
	ctx    context.Context // of the Get, which governs the reads
	d      Digest
	file   *os.File
	off    int64
	left   int64
	stale  bool // it was opened again and has given nothing since
}

func (r *fileRange) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > r.left {
		p = p[:r.left]
	}
	n, err := r.file.ReadAt(p, r.off)
	if n == 0 && errors.Is(err, unix.ESTALE) && !r.stale {
		file, oerr := r.folder.open(r.d)
		if oerr != nil {
			return 0, oerr
		}
		r.file.Close()
		r.file, r.stale = file, true
		n, err = r.file.ReadAt(p, r.off)
	}
	r.off += int64(n)
	r.left -= int64(n)
	if n > 0 {
		r.stale = false
	}
	switch {
	case n == len(p):
		return n, nil
	case err == io.EOF:
		err = io.ErrUnexpectedEOF // somebody shortened the file below us
	}
	return n, fmt.Errorf("read blob %s: %w", r.d, system(err))
}

func (r *fileRange) Close() error { return r.file.Close() }

// Put implements Store.
func (f *Folder) Put(ctx context.Context, d Digest, r io.Reader) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	if _, err := os.Stat(f.path(d)); err == nil {
		// Whoever wrote it may not have come to the sync yet, and our nil promises it.
		if err := f.syncDir(d); err != nil {
			return fmt.Errorf("sync folder of blob %s: %w", d, system(err))
		}
		return nil
	}
	s, err := f.stage()
	if err != nil {
		return fmt.Errorf("stage blob %s: %w", d, system(err))
	}
	defer s.Abort() //nolint:errcheck // nothing to do about it
	if _, err := io.CopyBuffer(struct{ io.Writer }{s}, ctxReader{ctx, r}, make([]byte, 256<<10)); err != nil {
		return fmt.Errorf("put blob %s: %w", d, err)
	}
	if got := FromHash(s.hash); got != d {
		return corrupt(d, got)
	}
	_, err = s.Commit(ctx)
	return err
}

// Delete implements Store. It is not synced: a blob that comes back after a power cut is
// one that the next garbage collection finds again.
func (f *Folder) Delete(ctx context.Context, d Digest) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	if err := os.Remove(f.path(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete blob %s: %w", d, system(err))
	}
	return nil
}

// List implements Store. Files with other names, such as NFS leaves, are passed over.
func (f *Folder) List(ctx context.Context) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		for i := range 256 {
			if !f.listOne(ctx, fmt.Sprintf("%02x", i), yield) {
				return
			}
		}
	}
}

func (f *Folder) listOne(ctx context.Context, fan string, yield func(Info, error) bool) bool {
	dir, err := os.Open(filepath.Join(f.dir, blobsName, fan))
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	if err != nil {
		yield(Info{}, fmt.Errorf("list blobs: %w", system(err)))
		return false
	}
	defer dir.Close()
	for {
		if ctx.Err() != nil {
			yield(Info{}, fmt.Errorf("list blobs: %w", context.Cause(ctx)))
			return false
		}
		entries, err := dir.ReadDir(512)
		for _, e := range entries {
			d := Digest(digestPrefix + e.Name())
			if d.Check() != nil || e.Name()[:2] != fan || !e.Type().IsRegular() {
				continue
			}
			st, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue // deleted meanwhile
			}
			if err != nil {
				yield(Info{}, fmt.Errorf("list blobs: %w", system(err)))
				return false
			}
			if !yield(Info{Digest: d, Size: st.Size()}, nil) {
				return false
			}
		}
		if err == io.EOF {
			return true
		}
		if err != nil {
			yield(Info{}, fmt.Errorf("list blobs: %w", system(err)))
			return false
		}
	}
}

// LocalPath implements LocalPather.
func (f *Folder) LocalPath(ctx context.Context, d Digest) (string, error) {
	if _, err := f.Stat(ctx, d); err != nil {
		return "", err
	}
	return f.path(d), nil
}

// Busy reports whether anybody on this host has the file of d open: a reader, a mounted
// layer. It is asked by taking a lease, which the kernel refuses then. Where a lease cannot be
// had for another reason the answer is no, and a file that is deleted stays for who has it.
func (f *Folder) Busy(d Digest) bool {
	if d.Check() != nil {
		return false
	}
	file, err := os.Open(f.path(d))
	if err != nil {
		return false
	}
	defer file.Close() // gives the lease back
	_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return errors.Is(err, unix.EAGAIN)
}

func (f *Folder) path(d Digest) string {
	h := d.Hex()
	return filepath.Join(f.dir, blobsName, h[:2], h)
}

// makeFan makes the fan-out folder of d, or finds it there, and makes sure that it is
// durable. Another node may have made it and not have synced it yet.
func (f *Folder) makeFan(d Digest) error {
	fan := &f.fans[d.Sum()[0]]
	if fan.Load() {
		return nil
	}
	dir := filepath.Dir(f.path(d))
	if err := mkdir(dir); err != nil {
		return err
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return err
	}
	fan.Store(true)
	return nil
}

// syncDir makes the name of d durable.
func (f *Folder) syncDir(d Digest) error {
	if err := f.step("syncdir"); err != nil {
		return err
	}
	if err := f.makeFan(d); err != nil {
		return err
	}
	return syncDir(filepath.Dir(f.path(d)))
}

func (f *Folder) step(op string) error {
	if f.fault == nil {
		return nil
	}
	return f.fault(op)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	// Some network and FUSE mounts cannot sync a folder; there the server orders the rename.
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return err
}

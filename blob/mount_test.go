package blob_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
)

// mount is a file system with the manners of those that clusters share: it knows no flags of
// rename, no hard links and no sync of folders, takes data for good only when a file is
// closed, and can lose its server.
type mount struct {
	dir   string // where it is mounted
	below string // where its server keeps it
	links bool

	mu     sync.Mutex
	errs   map[string]syscall.Errno // by operation; 0: none
	once   map[string]bool
	open   map[string]bool // files open for writing, by path
	reads  int
	misuse []string
}

func newMount(t *testing.T) *mount {
	t.Helper()
	m := &mount{dir: t.TempDir(), below: t.TempDir(), errs: map[string]syscall.Errno{}, once: map[string]bool{}, open: map[string]bool{}}
	root, err := fs.NewLoopbackRoot(m.below)
	if err != nil {
		t.Fatal(err)
	}
	zero := time.Duration(0)
	server, err := fs.Mount(m.dir, &mountNode{root.(*fs.LoopbackNode), m}, &fs.Options{
		EntryTimeout: &zero, AttrTimeout: &zero,
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "blob-test", Name: "blobtest"},
	})
	if err != nil {
		t.Skipf("feature FUSE (needs root and /dev/fuse): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(m.dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
		server.Wait()
		if len(m.misuse) > 0 {
			t.Errorf("misuse: %v", m.misuse)
		}
	})
	return m
}

// fail makes an operation fail; with 0 it works again.
func (m *mount) fail(op string, errno syscall.Errno) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.errs[op] = errno
}

// failOnce makes an operation fail the next time.
func (m *mount) failOnce(op string, errno syscall.Errno) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.errs[op], m.once[op] = errno, true
}

func (m *mount) reach(op string) syscall.Errno {
	m.mu.Lock()
	defer m.mu.Unlock()
	errno := m.errs[op]
	if m.once[op] {
		delete(m.errs, op)
		delete(m.once, op)
	}
	if op == "read" {
		m.reads++
	}
	return errno
}

type mountNode struct {
	*fs.LoopbackNode
	m *mount
}

func (n *mountNode) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &mountNode{ops.(*fs.LoopbackNode), n.m}
}

func (n *mountNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if errno := n.m.reach("lookup"); errno != 0 {
		return nil, errno
	}
	return n.LoopbackNode.Lookup(ctx, name, out)
}

func (n *mountNode) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, to string, flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL
	}
	n.m.mu.Lock()
	if path := filepath.Join(n.Path(nil), name); n.m.open[path] {
		n.m.misuse = append(n.m.misuse, "rename of "+path+" while it is open for writing")
	}
	n.m.mu.Unlock()
	if errno := n.m.reach("rename"); errno != 0 {
		return errno
	}
	return n.LoopbackNode.Rename(ctx, name, parent.(*mountNode).LoopbackNode, to, flags)
}

func (n *mountNode) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if !n.m.links {
		return nil, syscall.ENOTSUP
	}
	return n.LoopbackNode.Link(ctx, target.(*mountNode).LoopbackNode, name, out)
}

func (n *mountNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	if n.IsDir() {
		return syscall.EINVAL
	}
	return n.m.reach("fsync")
}

func (n *mountNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	inode, fh, ff, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno != 0 {
		return inode, fh, ff, errno
	}
	path := filepath.Join(n.Path(nil), name)
	n.m.mu.Lock()
	n.m.open[path] = true
	n.m.mu.Unlock()
	return inode, &mountFile{n.m, path, fh.(*fs.LoopbackFile)}, fuse.FOPEN_DIRECT_IO, 0
}

func (n *mountNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	fh, ff, errno := n.LoopbackNode.Open(ctx, flags)
	if errno != 0 {
		return fh, ff, errno
	}
	return &mountFile{n.m, "", fh.(*fs.LoopbackFile)}, ff | fuse.FOPEN_DIRECT_IO, 0
}

// mountFile hides what a LoopbackFile can do beyond this.
type mountFile struct {
	m    *mount
	path string // if it is open for writing
	f    *fs.LoopbackFile
}

func (f *mountFile) Read(ctx context.Context, b []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if errno := f.m.reach("read"); errno != 0 {
		return nil, errno
	}
	return f.f.Read(ctx, b, off)
}

func (f *mountFile) Write(ctx context.Context, b []byte, off int64) (uint32, syscall.Errno) {
	if errno := f.m.reach("write"); errno != 0 {
		return 0, errno
	}
	return f.f.Write(ctx, b, off)
}

func (f *mountFile) Flush(ctx context.Context) syscall.Errno {
	if f.path != "" {
		f.m.mu.Lock()
		delete(f.m.open, f.path)
		f.m.mu.Unlock()
		if errno := f.m.reach("close"); errno != 0 {
			return errno
		}
	}
	return f.f.Flush(ctx)
}

func (f *mountFile) Release(ctx context.Context) syscall.Errno { return f.f.Release(ctx) }

func (f *mountFile) Getattr(ctx context.Context, out *fuse.AttrOut) syscall.Errno {
	return f.f.Getattr(ctx, out)
}

func (m *mount) store(t *testing.T) *blob.Folder {
	t.Helper()
	f, err := blob.OpenFolder(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestMountConformance(t *testing.T) {
	for name, links := range map[string]bool{"Bare": false, "Links": true} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(t *testing.T) blob.Store {
				m := newMount(t)
				m.links = links
				return m.store(t)
			})
		})
	}
}

func TestMountFaults(t *testing.T) {
	blobtest.RunFaults(t, func(t *testing.T) blobtest.Faults {
		m := newMount(t)
		return blobtest.Faults{
			Store: blob.NewRetrying(m.store(t), blob.Retry{For: 200 * time.Millisecond, First: 5 * time.Millisecond}),
			Damage: func(t *testing.T, d blob.Digest, change func([]byte) []byte) {
				damage(t, m.below, d, change)
			},
		}
	})
}

// damage changes a file of a folder store.
func damage(t *testing.T, dir string, d blob.Digest, change func([]byte) []byte) {
	t.Helper()
	path := filepath.Join(dir, "sha256", d.Hex()[:2], d.Hex())
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, change(b), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Where a write fails on such a mount, and as what, down to the close.
func TestMountWriteErrors(t *testing.T) {
	m := newMount(t)
	s := m.store(t)
	for i, op := range []string{"write", "fsync", "close", "rename"} {
		for errno, want := range map[syscall.Errno]error{
			syscall.ENOSPC: blob.ErrFull, syscall.EDQUOT: blob.ErrFull, syscall.EACCES: blob.ErrDenied,
			syscall.EIO: blob.ErrUnavailable, syscall.ENOTCONN: blob.ErrUnavailable,
		} {
			data := blobtest.Data(uint64(i), 100_000+int(errno))
			m.fail(op, errno)
			if _, err := blob.PutBytes(t.Context(), s, data); !errors.Is(err, want) || !errors.Is(err, errno) {
				t.Errorf("%s %v: %v, want %v", op, errno, err, want)
			}
			m.fail(op, 0)
			if _, err := s.Stat(t.Context(), blob.Of(data)); !errors.Is(err, blob.ErrNotFound) {
				t.Errorf("%s %v: then stat: %v", op, errno, err)
			}
			if _, err := blob.PutBytes(t.Context(), s, data); err != nil {
				t.Errorf("%s %v: then put: %v", op, errno, err)
			}
		}
	}
	if names := staged(t, m.below); len(names) != 0 {
		t.Errorf("left in staging: %v", names)
	}
}

// A file that went stale is opened again, where the read stood; a server that is away is
// waited for; an absence that is only remembered is looked into.
func TestMountReadErrors(t *testing.T) {
	m := newMount(t)
	folder := m.store(t)
	data := blobtest.Data(9, 2<<20)
	d, err := blob.PutBytes(t.Context(), folder, data)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []blob.Store{folder, blob.NewRetrying(folder, blob.Retry{First: time.Millisecond})} {
		r, err := s.Get(t.Context(), d, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 1<<20)
		if _, err := io.ReadFull(r, got); err != nil {
			t.Fatal(err)
		}
		m.failOnce("read", syscall.ESTALE)
		rest, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(append(got, rest...), data) {
			t.Errorf("after ESTALE: %d bytes, %v", len(rest), err)
		}
		r.Close()
	}
	patient := blob.NewRetrying(folder, blob.Retry{First: time.Millisecond})
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOTCONN, syscall.ETIMEDOUT} {
		for _, op := range []string{"read", "lookup"} {
			m.failOnce(op, errno)
			if got, err := blob.ReadAll(t.Context(), patient, d); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s %v: %d bytes, %v", op, errno, len(got), err)
			}
		}
	}
	for _, errno := range []syscall.Errno{syscall.ENOENT, syscall.ESTALE} {
		m.failOnce("lookup", errno)
		if _, err := folder.Stat(t.Context(), d); err != nil {
			t.Errorf("lookup %v: %v", errno, err)
		}
	}
	m.fail("read", syscall.EIO)
	hasty := blob.NewRetrying(folder, blob.Retry{For: 50 * time.Millisecond, First: time.Millisecond})
	if _, err := blob.ReadAll(t.Context(), hasty, d); !errors.Is(err, blob.ErrUnavailable) || !errors.Is(err, syscall.EIO) {
		t.Errorf("a server that is gone: %v, want ErrUnavailable", err)
	}
}

// What is old by the server's clock is swept, whatever ours says.
func TestMountSweep(t *testing.T) {
	m := newMount(t)
	m.store(t)
	old, young := filepath.Join(m.below, "staging/old"), filepath.Join(m.below, "staging/young")
	for _, path := range []string{old, young} {
		if err := os.WriteFile(path, []byte("half"), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-25 * time.Hour)
	if err := os.Chtimes(old, past, past); err != nil {
		t.Fatal(err)
	}
	m.store(t)
	if names := staged(t, m.below); len(names) != 1 || names[0] != "young" {
		t.Errorf("staging has %v, want the young file", names)
	}
}

package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// FS is what a journal asks of a file system. Tests put one in between that fails or that
// loses power: see journaltest.
type FS interface {
	// MkdirAll makes a folder, and it survives a power cut.
	MkdirAll(dir string) error
	// ReadDir returns the names in a folder.
	ReadDir(dir string) ([]string, error)
	// Create makes an empty file for reading and writing, in the place of one that is there.
	Create(name string) (File, error)
	// Open opens a file for reading and writing. One that is absent is fs.ErrNotExist.
	Open(name string) (File, error)
	Remove(name string) error
	Rename(from, to string) error
	// SyncDir makes the names in a folder durable.
	SyncDir(dir string) error
	// Lock takes a lock that ends with the process or Close. One taken is ErrLocked.
	Lock(name string) (io.Closer, error)
}

// File is an open file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	// Sync makes content and size durable.
	Sync() error
	Size() (int64, error)
}

// HostFS is the file system of the host.
var HostFS FS = hostFS{}

type hostFS struct{}

func (hostFS) MkdirAll(dir string) error {
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return nil
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := (hostFS{}).MkdirAll(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return hostFS{}.SyncDir(parent)
}

func (hostFS) ReadDir(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

func (hostFS) Create(name string) (File, error) {
	return openHost(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
}

func (hostFS) Open(name string) (File, error) { return openHost(name, os.O_RDWR) }

func openHost(name string, flag int) (File, error) {
	f, err := os.OpenFile(name, flag, 0o600)
	if err != nil {
		return nil, err // not f: a nil *os.File in the interface would not be nil
	}
	return hostFile{f}, nil
}

func (hostFS) Remove(name string) error { return os.Remove(name) }

func (hostFS) Rename(from, to string) error { return os.Rename(from, to) }

func (hostFS) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (hostFS) Lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			err = ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return f, nil
}

type hostFile struct{ *os.File }

// Sync leaves out times, which nobody reads.
func (f hostFile) Sync() error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); err != unix.EINTR {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}

func (f hostFile) Size() (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

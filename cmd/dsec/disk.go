package main

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/fullvm"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/rootfs"
)

// diskFile is the one file of a layer whose role is disk.
const diskFile = "disk"

// roots is edge.Roots and edge.FileRoots. What a sandbox uses is in the edge's
// table before it asks here, and that is what keeps it from a collection.
type roots struct {
	*rootfs.Layers
	images *images
	disks  *disks
}

// AcquireFiles gives the files of layers.
func (r roots) AcquireFiles(ctx context.Context, digests []string) ([]driver.LayerFiles, func(), error) {
	out := make([]driver.LayerFiles, len(digests))
	for i, d := range digests {
		l, err := r.images.files(ctx, d, depot.Files)
		if err != nil {
			return nil, nil, fmt.Errorf("layer %s: %w", d, err)
		}
		out[i] = driver.LayerFiles{Digest: d, Meta: l.Meta, Data: l.Data}
	}
	return out, func() {}, nil
}

// AcquireDisk gives the copy of a disk image.
func (r roots) AcquireDisk(ctx context.Context, digest string) (string, func(), error) {
	path, err := r.disks.get(ctx, digest)
	return path, func() {}, err
}

// disks keeps disk images as plain files, which outlive this process: a paused
// machine opens its image again by the path.
type disks struct {
	dir    string
	layers *rootfs.Layers

	mu sync.Mutex // held while one is made: they are large
}

func (d *disks) path(digest string) string {
	return filepath.Join(d.dir, strings.TrimPrefix(digest, "sha256:")+".img")
}

func (d *disks) get(ctx context.Context, digest string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	path := d.path(digest)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	mounts, release, err := d.layers.Acquire(ctx, []string{digest})
	if err != nil {
		return "", err
	}
	defer release()
	fd, err := unix.Openat(int(mounts[0].Fd()), diskFile, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", fmt.Errorf("open disk image: %w", err)
	}
	in := os.NewFile(uintptr(fd), diskFile)
	defer in.Close()
	if err := os.MkdirAll(d.dir, 0o711); err != nil {
		return "", err
	}
	out, err := os.CreateTemp(d.dir, "new-")
	if err != nil {
		return "", err
	}
	defer out.Close()
	err = copyDisk(ctx, out, in)
	if err == nil {
		err = out.Chmod(0o444)
	}
	if err == nil {
		err = os.Rename(out.Name(), path)
	}
	if err != nil {
		os.Remove(out.Name())
		return "", fmt.Errorf("copy disk image: %w", err)
	}
	return path, nil
}

// copyDisk copies a file and leaves out runs of zeros.
func copyDisk(ctx context.Context, out, in *os.File) error {
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(fi.Size()); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for at := int64(0); at < fi.Size(); {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := in.ReadAt(buf, at)
		if err != nil && err != io.EOF {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		if len(bytes.TrimLeft(buf[:n], "\x00")) > 0 {
			if _, err := out.WriteAt(buf[:n], at); err != nil {
				return err
			}
		}
		at += int64(n)
	}
	return nil
}

// forget deletes the copies of images that no sandbox uses, and what a crash
// left of others.
func (d *disks) forget(used map[string]int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	entries, _ := os.ReadDir(d.dir) //nolint:errcheck // not there until the first is made
	for _, e := range entries {
		if used["sha256:"+strings.TrimSuffix(e.Name(), ".img")] == 0 {
			os.Remove(filepath.Join(d.dir, e.Name())) //nolint:errcheck // the next collection tries again
		}
	}
}

// checkDisk is Invalid unless a layer is one file that is a disk image and
// stands for itself.
func (s *images) checkDisk(ctx context.Context, l image.Layer) error {
	files, err := s.library.Open(ctx, l.Digest)
	if err != nil {
		return err
	}
	m, err := rootfs.MountLayer(rootfs.Layer{Digest: string(l.Digest), Meta: files.Meta, Data: files.Data})
	if err != nil {
		return err
	}
	defer m.Close()
	names, err := func() ([]string, error) {
		fd, err := unix.Openat(int(m.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		d := os.NewFile(uintptr(fd), ".")
		defer d.Close()
		return d.Readdirnames(3)
	}()
	if err != nil && err != io.EOF {
		return fmt.Errorf("look at disk image: %w", err)
	}
	if len(names) != 1 || names[0] != diskFile {
		return dsec.Errorf(dsec.Invalid, "an image with role disk is one file called %q, this has %d entries", diskFile, l.Manifest.Entries)
	}
	fd, err := unix.Openat(int(m.Fd()), diskFile, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return dsec.Errorf(dsec.Invalid, "the disk image: %w", err)
	}
	f := os.NewFile(uintptr(fd), diskFile)
	defer f.Close()
	_, err = fullvm.Probe(f)
	return err
}

// cleanTemp removes states of sandboxes that a process which died had in hand.
func cleanTemp(dir string) error {
	for _, pattern := range []string{"save-*", "restore-*"} {
		old, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return err
		}
		for _, p := range old {
			if err := os.RemoveAll(p); err != nil {
				return fmt.Errorf("clean temporary folder: %w", err)
			}
		}
	}
	return nil
}

// packDisk gives a disk image as the archive in which it is uploaded.
func packDisk(src io.ReadCloser) (io.ReadCloser, error) {
	f, ok := src.(*os.File)
	if !ok {
		return nil, dsec.Errorf(dsec.Invalid, "with --as disk the source is the file of a disk image")
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open source: %w", err)
	}
	r, w := io.Pipe()
	go func() {
		defer f.Close()
		t := tar.NewWriter(w)
		err := t.WriteHeader(&tar.Header{Name: diskFile, Typeflag: tar.TypeReg, Mode: 0o444, Size: fi.Size()})
		if err == nil {
			_, err = io.Copy(t, f)
		}
		if err == nil {
			err = t.Close()
		}
		w.CloseWithError(err)
	}()
	return r, nil
}

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// disk is a file system of its own on a loop device.
type disk struct {
	file, dir string
}

// makeDisk makes one of size bytes, of which only what is used takes room.
func makeDisk(path string, size int64) (*disk, error) {
	d := &disk{file: path + ".ext4", dir: path}
	f, err := os.Create(d.file)
	if err != nil {
		return nil, err
	}
	err = f.Truncate(size)
	f.Close()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return nil, err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,nodiscard", d.file).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("feature mkfs.ext4: %w: %s", err, out)
	}
	// The device is freed with the last user of the file system, not before.
	out, err := exec.Command("mount", "-o", "loop", d.file, d.dir).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("feature loop devices: %w: %s", err, out)
	}
	return d, nil
}

func newDisk(t *testing.T, size int64) *disk {
	t.Helper()
	d, err := makeDisk(t.TempDir()+"/disk", size)
	must(t, err)
	t.Cleanup(func() {
		if err := d.end(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// end unmounts it and finds out whether something still holds it.
func (d *disk) end() error {
	if !until(func() bool { return !errors.Is(unix.Unmount(d.dir, 0), unix.EBUSY) }) {
		return errors.Join(fmt.Errorf("%s is busy", d.dir), unix.Unmount(d.dir, unix.MNT_DETACH))
	}
	if !until(func() bool { return !loopOf(d.file) }) {
		return fmt.Errorf("a mount or an open file holds the file system that was at %s", d.dir)
	}
	return nil
}

// loopOf reports whether a loop device uses the file.
func loopOf(file string) bool {
	out, err := exec.Command("losetup", "--noheadings", "--output", "NAME", "--associated", file).Output()
	return err == nil && len(out) > 0
}

// spoil makes every further use of the file system an I/O error.
func (d *disk) spoil() error {
	const shutdown = 0x8004587d // FS_IOC_SHUTDOWN of ext4 and xfs
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.IoctlSetPointerInt(int(f.Fd()), shutdown, 2) // without flushing the log
}

// tmpfs mounts a small file system in memory over a folder, for the test.
func tmpfs(t *testing.T, dir string, size string) {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o700))
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=700,size="+size))
	t.Cleanup(func() {
		if !until(func() bool { return unix.Unmount(dir, 0) == nil }) {
			unix.Unmount(dir, unix.MNT_DETACH)
			t.Errorf("%s is busy", dir)
		}
	})
}

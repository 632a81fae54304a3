package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/vm"
)

// Folders in which a root is put together, in the agent's own mount namespace.
// The root covers them, and what hangs there with them.
const (
	lowersDir = "/lower"
	upperDir  = "/upper"
	outputDir = "/output"
)

// undo is a list of steps back, the last first.
type undo []func()

func (u *undo) add(f func()) { *u = append(*u, f) }

func (u *undo) run() {
	for i := len(*u) - 1; i >= 0; i-- {
		(*u)[i]()
	}
	*u = nil
}

// root is a mounted root.
type root struct {
	upper  *os.File // folder of the writable file system
	output *os.File // folder of recorded output; nil for memory
	undo   undo     // takes it all apart
}

// mountRoot mounts the root that s asks for at jail.SoloRoot.
func mountRoot(disks disks, s *vm.Setup) (r *root, err error) {
	r = &root{}
	defer func() {
		if err != nil {
			r.undo.run()
			r = nil
		}
	}()
	var lowers []string
	for i, l := range s.Layers {
		dev, err := r.part(disks, l, i)
		if err != nil {
			return r, fmt.Errorf("layer %d: %w", i, err)
		}
		at := filepath.Join(lowersDir, strconv.Itoa(i))
		options := ""
		if l.DAX {
			options = "dax=always"
		}
		if err := r.mount(dev, at, "erofs", unix.MS_RDONLY, options); err != nil {
			return r, dsec.Errorf(dsec.Invalid, "layer %d: %w", i, err)
		}
		lowers = append([]string{strconv.Itoa(i)}, lowers...) // the topmost first
	}
	if err := r.mountUpper(disks, s.Upper); err != nil {
		return r, err
	}
	if s.Output != "" {
		if err := r.mountOutput(disks, s.Output); err != nil {
			return r, err
		}
	}
	if len(lowers) == 0 {
		return r, r.mount(filepath.Join(upperDir, "data"), jail.SoloRoot, "", unix.MS_BIND, "")
	}
	return r, r.overlay(lowers)
}

// overlay mounts the root of the lowers and the upper. Names are relative, since
// the kernel takes a page of options.
func (r *root) overlay(lowers []string) error {
	if err := unix.Chdir(lowersDir); err != nil {
		return err
	}
	defer unix.Chdir("/") //nolint:errcheck // there is one
	options := "lowerdir=" + strings.Join(lowers, ":") + ",upperdir=" + upperDir + "/data,workdir=" + upperDir + "/work,volatile"
	return r.mount("dsec", jail.SoloRoot, "overlay", 0, options)
}

func (r *root) mountUpper(disks disks, serial string) error {
	var err error
	if serial == "" {
		err = r.mount("tmpfs", upperDir, "tmpfs", 0, "size=64m")
	} else {
		err = r.mountDisk(disks, serial, upperDir)
	}
	if err != nil {
		return err
	}
	// What a volatile overlay leaves in its work folder keeps it from being
	// mounted again, and is worth nothing.
	if err := os.RemoveAll(upperDir + "/work"); err != nil {
		return fmt.Errorf("clear work folder: %w", err)
	}
	for _, d := range []string{"/data", "/work"} {
		if err := os.Mkdir(upperDir+d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if r.upper, err = os.Open(upperDir); err != nil {
		return err
	}
	r.undo.add(func() { r.upper.Close() })
	return nil
}

func (r *root) mountOutput(disks disks, serial string) error {
	if err := r.mountDisk(disks, serial, outputDir); err != nil {
		return err
	}
	f, err := os.Open(outputDir)
	if err != nil {
		return err
	}
	r.output = f
	r.undo.add(func() { f.Close() })
	return nil
}

// mountDisk mounts a writable disk. Its file system is in order, since only a
// stopped host leaves one that is not: the journal is replayed then.
// Nothing is read ahead of need, which a thread of the kernel's would do.
func (r *root) mountDisk(disks disks, serial, at string) error {
	dev, err := openedDisk(disks, serial)
	if err != nil {
		return err
	}
	if err := r.mount(dev, at, "ext4", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, "nobarrier,noinit_itable,no_prefetch_block_bitmaps"); err != nil {
		return dsec.Errorf(dsec.Invalid, "disk %s: %w", serial, err)
	}
	// A root needs devices and set-uid programs: the overlay's mount says.
	return nil
}

// mount mounts something, and notes how to undo it.
func (r *root) mount(source, at, fstype string, flags uintptr, options string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, at, fstype, flags, options); err != nil {
		return fmt.Errorf("mount %s as %s: %w", filepath.Base(source), fstype, err)
	}
	r.undo.add(func() {
		if unix.Unmount(at, 0) != nil {
			unix.Unmount(at, unix.MNT_DETACH) //nolint:errcheck // all that can be done
		}
	})
	return nil
}

// disks are block devices by serial number.
type disks map[string]string

// hold reports whether all that s names are known.
func (d disks) hold(s *vm.Setup) bool {
	for _, l := range s.Layers {
		if d[l.Disk] == "" {
			return false
		}
	}
	return (s.Upper == "" || d[s.Upper] != "") && (s.Output == "" || d[s.Output] != "")
}

// findDisks gives the machine's block devices by serial number; those of
// persistent memory, which have none, by name.
func findDisks() (disks, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	out := disks{}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "pmem") {
			out[e.Name()] = e.Name()
			continue
		}
		if b, err := os.ReadFile(filepath.Join("/sys/block", e.Name(), "serial")); err == nil {
			if s := strings.TrimSpace(string(b)); s != "" {
				out[s] = e.Name()
			}
		}
	}
	return out, nil
}

// openedDisk gives the device of a disk, with nothing in the kernel's cache of
// what it held before: the host may have put another one in its place.
func openedDisk(disks disks, serial string) (string, error) {
	name := disks[serial]
	if name == "" {
		return "", dsec.Errorf(dsec.Invalid, "the machine has no disk %q", serial)
	}
	dev := filepath.Join("/dev", name)
	f, err := os.Open(dev)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0); err != nil {
		return "", fmt.Errorf("drop the cache of disk %s: %w", serial, err)
	}
	return dev, nil
}

// struct blkpg_ioctl_arg and blkpg_partition of linux/blkpg.h.
type blkpgArg struct {
	op      int32
	flags   int32
	datalen int32
	_       int32
	data    *blkpgPartition
}

type blkpgPartition struct {
	start, length int64
	pno           int32
	_             [64 + 64]byte // names that nobody reads
	_             [4]byte
}

const (
	blkpgAdd    = 1
	blkpgDelete = 2
)

// maxParts is the kernel's limit of partitions of a disk.
const maxParts = 255

// part gives the device of a layer: the whole disk, or a partition that is made
// for it. The disk needs no table.
func (r *root) part(disks disks, l vm.Extent, i int) (string, error) {
	dev, err := openedDisk(disks, l.Disk)
	if err != nil || l.Offset == 0 && l.Size == 0 {
		return dev, err
	}
	const align = 4096
	if l.Offset < 0 || l.Size <= 0 || l.Offset%align != 0 || l.Size%align != 0 || i >= maxParts {
		return "", dsec.Errorf(dsec.Invalid, "disk %s has no part of %d bytes at %d, number %d", l.Disk, l.Size, l.Offset, i)
	}
	p := blkpgPartition{start: l.Offset, length: l.Size, pno: int32(i + 1)}
	blkpg(dev, blkpgDelete, &p) //nolint:errcheck // none is left as a rule
	if err := blkpg(dev, blkpgAdd, &p); err != nil {
		return "", dsec.Errorf(dsec.Invalid, "make a part of disk %s, %d bytes at %d: %w", l.Disk, l.Size, l.Offset, err)
	}
	r.undo.add(func() { blkpg(dev, blkpgDelete, &p) }) //nolint:errcheck // as above
	n := strconv.Itoa(i + 1)
	if c := dev[len(dev)-1]; c >= '0' && c <= '9' {
		n = "p" + n
	}
	return dev + n, nil
}

func blkpg(dev string, op int32, p *blkpgPartition) error {
	f, err := os.Open(dev)
	if err != nil {
		return err
	}
	defer f.Close()
	arg := blkpgArg{op: op, datalen: int32(unsafe.Sizeof(*p)), data: p}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg))); e != 0 {
		return e
	}
	return nil
}

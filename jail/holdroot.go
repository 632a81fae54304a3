package jail

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// IDRange is how many uids and gids a box has.
const IDRange = 1 << 16

// Folders of the holder's root, and so of a shell before Receive. A shell
// assembles its root's parts under them and moves each into place.
const (
	stage      = "/m"
	stageRoot  = stage + "/root"
	stageDev   = stage + "/dev"
	stageProc  = stage + "/proc"
	stageOwn   = stage + "/own" // procfs of the shell's own pid namespace
	stageSys   = stage + "/sys"
	stageFiles = stage + "/files" // tmpfs of the box
	stageMask  = stage + "/mask"  // empty and read-only, the holder's

	programs     = "/bin" // of the holder's root; see holdPrograms
	guestProgram = programs + "/dsec-guest"

	// NullProgram is a program that does nothing, for warming up before Enter.
	NullProgram = programs + "/null"
)

// deviceNodes are the host devices that every box has.
var deviceNodes = []string{"null", "zero", "full", "random", "urandom", "tty"}

// null is a program that exits at once: an ELF header, one program header, and
// exit(0). A shell warms up with it.
const null = "\x7fELF\x02\x01\x01\x00" + zeros8 + // 64 bits, little-endian
	"\x02\x00\x3e\x00\x01\x00\x00\x00" + "\x78\x00\x40\x00\x00\x00\x00\x00" + // executable, x86-64; entry
	"\x40\x00\x00\x00\x00\x00\x00\x00" + zeros8 + // program headers at 64, no sections
	"\x00\x00\x00\x00\x40\x00\x38\x00" + "\x01\x00\x00\x00\x00\x00\x00\x00" + // sizes; one program header:
	"\x01\x00\x00\x00\x05\x00\x00\x00" + zeros8 + // load, to read and execute, from 0
	"\x00\x00\x40\x00\x00\x00\x00\x00" + "\x00\x00\x40\x00\x00\x00\x00\x00" + // at 0x400000
	"\x81\x00\x00\x00\x00\x00\x00\x00" + "\x81\x00\x00\x00\x00\x00\x00\x00" + // 129 bytes
	"\x00\x10\x00\x00\x00\x00\x00\x00" + // alignment
	"\x31\xff\xb8\x3c\x00\x00\x00\x0f\x05" // xor edi,edi; mov eax,60; syscall

const zeros8 = "\x00\x00\x00\x00\x00\x00\x00\x00"

// holdPrograms puts the programs that a shell executes on a file system of huge
// pages: a page of a program costs a new process its first touch, and there are
// fewer. The copy of the guest is also the one that shells to come run while
// the file on disk is replaced. Read-only for all, and the guest not readable:
// the kernel then lets nobody in a box look into it.
func holdPrograms(at string, guest int) error {
	dir := at + programs
	if err := unix.Mount("programs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "huge=always,size=64m,mode=755"); err != nil {
		if err = unix.Mount("programs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64m,mode=755"); err != nil {
			return fmt.Errorf("mount programs: %w", err)
		}
	}
	if err := os.WriteFile(at+NullProgram, []byte(null), 0o555); err != nil {
		return err
	}
	dst, err := os.OpenFile(at+guestProgram, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o111)
	if err != nil {
		return err
	}
	src := os.NewFile(uintptr(guest), "guest")
	_, err = io.Copy(dst, src)
	src.Close()
	if err = errors.Join(err, dst.Close()); err != nil {
		return fmt.Errorf("copy guest: %w", err)
	}
	return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, "")
}

// holdRoot gives the calling thread a mount namespace whose root holds only
// what a shell needs: a fully visible /proc and /sys (the kernel asks for them
// before it lets a user namespace mount its own), device nodes, and the empty
// folders of the stage. Every shell copies this namespace; nothing of the
// host's own mounts is in it.
func holdRoot(guest int) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	const at = "/proc" // any folder that every host has; covered, then left
	if err := unix.Mount("dsec-hold", at, "tmpfs", unix.MS_NOSUID, "size=1m,mode=755"); err != nil {
		return fmt.Errorf("mount holder root: %w", err)
	}
	for _, d := range []string{"/proc", "/sys", "/dev", programs, stage, stageRoot, stageDev, stageProc, stageOwn, stageSys, stageFiles, stageMask} {
		if err := os.Mkdir(at+d, 0o755); err != nil {
			return err
		}
	}
	for _, n := range deviceNodes {
		if err := os.WriteFile(at+"/dev/"+n, nil, 0o666); err != nil {
			return err
		}
		if err := unix.Mount("/dev/"+n, at+"/dev/"+n, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind /dev/%s: %w", n, err)
		}
	}
	if err := unix.Mount("proc", at+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Mount("sysfs", at+"/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount sysfs: %w", err)
	}
	if err := holdPrograms(at, guest); err != nil {
		return err
	}
	if err := unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("make holder root read-only: %w", err)
	}
	return pivot(at)
}

// pivot makes dir, a mount point, the root of the mount namespace and lets the
// old root go.
func pivot(dir string) error {
	if err := unix.Chdir(dir); err != nil {
		return fmt.Errorf("enter %s: %w", dir, err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot to %s: %w", dir, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach old root: %w", err)
	}
	return unix.Chdir("/")
}

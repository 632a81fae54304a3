package jail

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// IDRange is how many uids and gids a box has.
const IDRange = 1 << 16

// Folders of the holder's root, and so of a shell before Receive. A shell
// assembles its root's parts under them and moves each into place.
const (
	stage     = "/m"
	stageRoot = stage + "/root"
	stageDev  = stage + "/dev"
	stageProc = stage + "/proc"
	stageOwn  = stage + "/own" // procfs of the shell's own pid namespace
	stageSys  = stage + "/sys"
	stageEtc  = stage + "/etc"
	stageMask = stage + "/mask"
)

// deviceNodes are the host devices that every box has.
var deviceNodes = []string{"null", "zero", "full", "random", "urandom", "tty"}

// holdRoot gives the calling thread a mount namespace whose root holds only
// what a shell needs: a fully visible /proc and /sys (the kernel asks for them
// before it lets a user namespace mount its own), device nodes, and the empty
// folders of the stage. Every shell copies this namespace; nothing of the
// host's own mounts is in it.
func holdRoot() error {
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
	for _, d := range []string{"/proc", "/sys", "/dev", stage, stageRoot, stageDev, stageProc, stageOwn, stageSys, stageEtc, stageMask} {
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

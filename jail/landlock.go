package jail

import (
	"errors"
	"fmt"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The workload lives in a Landlock domain of its own, where the kernel has that.
// It is a second barrier, of other code, behind what namespaces, capabilities
// and the seccomp filter already refuse, for the day that one of those has a
// hole. In a domain nothing of the mount table can be changed, whatever
// capability somebody came by; nobody outside can be traced, nor be sent signals
// or abstract sockets where the kernel can hold those back; and no block device
// can be made. The domain allows every other use of files: what a path may do
// is decided by the mounts.
//
// It is entered with CAP_SYS_ADMIN in the box's user namespace, as the filter
// is, and not with no_new_privs, which would break sudo, su and file
// capabilities.

// landlockNeeded is the first version of use: before it nothing in a domain can
// be renamed or linked from one folder to another.
const landlockNeeded = 2

// landlockScoped is the first version that holds back signals and sockets.
const landlockScoped = 6

// landlockVersion asks for the kernel's; 0 when there is none.
func landlockVersion() (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch errno {
	case 0:
		return int(n), nil
	case unix.ENOSYS:
		return 0, errors.New("not built into the kernel")
	case unix.EOPNOTSUPP:
		return 0, errors.New("not switched on: lsm= on the kernel's command line lacks landlock")
	default:
		return 0, errno
	}
}

// landlock puts the calling thread, and what it forks from now on, into a
// domain whose files are those below root. Without Landlock it does nothing.
// Requires: CAP_SYS_ADMIN in the user namespace.
func landlock(root int) error {
	version, _ := landlockVersion()
	if version < landlockNeeded {
		return nil
	}
	// Handled is what needs a rule. Moving files between folders is refused in
	// every domain that has none for it.
	attr := struct{ fs, net, scoped uint64 }{fs: unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK}
	size := unsafe.Sizeof(attr.fs)
	if version >= landlockScoped {
		attr.scoped = unix.LANDLOCK_SCOPE_SIGNAL | unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
		size = unsafe.Sizeof(attr)
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return fmt.Errorf("make landlock ruleset: %w", errno)
	}
	defer unix.Close(int(fd))
	var rule [12]byte // struct landlock_path_beneath_attr, which is packed
	*(*uint64)(unsafe.Pointer(&rule)) = unix.LANDLOCK_ACCESS_FS_REFER
	*(*int32)(unsafe.Pointer(&rule[8])) = int32(root)
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, fd, unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("add landlock rule: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return fmt.Errorf("enter landlock domain: %w", errno)
	}
	return nil
}

func probeLandlock() (string, error) {
	version, err := landlockVersion()
	if err == nil && version < landlockNeeded {
		err = fmt.Errorf("version %d, which cannot rename between folders", version)
	}
	detail := "version " + strconv.Itoa(version) + ": sandboxes cannot change mounts or trace what is outside"
	if version >= landlockScoped {
		detail += ", or send it signals"
	}
	return detail, err
}

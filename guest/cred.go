package guest

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// as calls f with the file rights of a user. Credentials are the thread's, so
// the goroutine is tied to its thread meanwhile, and f must not hand work to
// other goroutines. For root there is nothing to do.
//
// Setting the file system uid also drops, and restores, the capabilities that
// override permissions. A thread that cannot be set back ends the agent:
// better none than one that works with the wrong rights.
func as(id identity, f func() error) error {
	if id.uid == 0 && id.gid == 0 {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, err := unix.Getgroups()
	if err != nil {
		return os.NewSyscallError("getgroups", err)
	}
	before := make([]uint32, len(old))
	for i, g := range old {
		before[i] = uint32(g)
	}
	if err := setGroups(id.groups); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	defer func() {
		if !setFS(0, 0) || setGroups(before) != nil {
			panic("guest: cannot give up the rights of a user")
		}
	}()
	if !setFS(id.uid, id.gid) { // ids outside the user namespace cannot be set
		return os.NewSyscallError("setfsuid", unix.EPERM)
	}
	return f()
}

// setFS sets the file system ids of the thread. The calls tell no errors, but
// with an impossible value they give the one in force.
func setFS(uid, gid uint32) bool {
	unix.SetfsgidRetGid(int(gid)) //nolint:errcheck // read back below
	unix.SetfsuidRetUid(int(uid)) //nolint:errcheck
	g, _ := unix.SetfsgidRetGid(-1)
	u, _ := unix.SetfsuidRetUid(-1)
	return u == int(uid) && g == int(gid)
}

// setGroups is for the thread alone, unlike the function of the library.
func setGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0); e != 0 {
		return e
	}
	return nil
}

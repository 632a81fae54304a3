package jail

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What the reaper's child code uses lives in package variables, filled in
// before the fork: the child may not allocate, grow its stack or call into the
// runtime, since it is a copy of one thread of a Go program.
var (
	reaperProcFS   = [...]byte{'p', 'r', 'o', 'c', 0}
	reaperProcPath = [...]byte{'/', 'm', '/', 'p', 'r', 'o', 'c', 0} // stageProc
	reaperName     = [...]byte{'i', 'n', 'i', 't', 0}
	reaperResult   [4]byte
	reaperChld     uint64 // signal set of SIGCHLD alone
)

// startReaper forks pid 1 of the pid namespace that the calling thread has
// unshared. It mounts the namespace's procfs on stageProc, then collects
// orphans for ever. All its signals are blocked, and as pid 1 it cannot be
// killed from inside. It ends with the shell's own pid namespace, and shares its
// root, so that it follows Shell.enter.
//
// Requires: the OS thread is locked, and has unshared CLONE_NEWPID and not
// forked since.
func startReaper() error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	defer unix.Close(p[0])
	reaperChld = 1 << (uint(unix.SIGCHLD) - 1)

	// The child must not run a Go signal handler: block everything around the
	// fork. It keeps the mask.
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		unix.Close(p[1])
		return err
	}
	_, errno := forkReaper(uintptr(p[1]))
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); err != nil {
		unix.Close(p[1])
		return err
	}
	unix.Close(p[1])
	if errno != 0 {
		return fmt.Errorf("fork reaper: %w", errno)
	}
	var b [4]byte
	if n, err := unix.Read(p[0], b[:]); err != nil || n != 4 {
		return fmt.Errorf("reaper ended at once (%d bytes, %v)", n, err)
	}
	if e := *(*uint32)(unsafe.Pointer(&b)); e != 0 {
		return fmt.Errorf("mount proc of the box: %w", syscall.Errno(e))
	}
	return nil
}

// forkReaper returns in the parent only.
//
//go:norace
//go:nosplit
func forkReaper(result uintptr) (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD)|syscall.CLONE_FS, 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&reaperName)), 0)
	syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
	_, _, errno = syscall.RawSyscall6(syscall.SYS_MOUNT,
		uintptr(unsafe.Pointer(&reaperProcFS)), uintptr(unsafe.Pointer(&reaperProcPath)), uintptr(unsafe.Pointer(&reaperProcFS)),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0, 0)
	*(*uint32)(unsafe.Pointer(&reaperResult)) = uint32(errno)
	syscall.RawSyscall(syscall.SYS_WRITE, result, uintptr(unsafe.Pointer(&reaperResult)), 4)
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, ^uintptr(0)>>32, 0)
	for {
		pid, _, _ := syscall.RawSyscall6(syscall.SYS_WAIT4, ^uintptr(0), 0, unix.WNOHANG|unix.WALL, 0, 0, 0)
		if pid == 0 || int(pid) < 0 {
			syscall.RawSyscall6(syscall.SYS_RT_SIGTIMEDWAIT, uintptr(unsafe.Pointer(&reaperChld)), 0, 0, 8, 0, 0)
		}
	}
}

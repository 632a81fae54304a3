package jail

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaperWork is the memory that the reaper uses; the assembly knows its layout.
type reaperWork struct {
	chld   uint64   // 0: signal set of SIGCHLD alone
	result int32    // 8: descriptor
	_      int32    // 12: errno of the mount, written to result
	name   [16]byte // 16
	fs     [8]byte  // 32
	path   [16]byte // 40: stageProc
}

// theReaper is never freed: the reaper reads it as long as the shell lives.
var theReaper reaperWork

// reaperStack is the child's stack pointer. Its code uses none, but a signal
// frame would be put there; all its signals are blocked.
var reaperStack [1024]byte

// reaperPid is what the shell calls the reaper.
var reaperPid int

// startReaper gives what the calling thread forks from now on a pid namespace of
// its own, and starts pid 1 of it. It mounts the namespace's procfs on stageProc, then collects
// orphans for ever. It shares the shell's memory, of which it touches nothing
// but theReaper, so it costs a task and no page; and its root, so that it
// follows Shell.enter. All its signals are blocked, and as pid 1 it cannot be
// killed from inside. It ends with the shell's own pid namespace.
//
// Requires: the OS thread is locked for ever.
func startReaper() error {
	if err := unix.Unshare(unix.CLONE_NEWPID); err != nil {
		return fmt.Errorf("unshare pid namespace: %w", err)
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	defer unix.Close(p[0])
	theReaper.chld = 1 << (uint(unix.SIGCHLD) - 1)
	theReaper.result = int32(p[1])
	copy(theReaper.name[:], "init")
	copy(theReaper.fs[:], "proc")
	copy(theReaper.path[:], stageProc)
	args := cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_FS,
		exitSignal: uint64(unix.SIGCHLD),
		stack:      uint64(uintptr(unsafe.Pointer(&reaperStack))),
		stackSize:  uint64(len(reaperStack)),
	}
	pid := 0
	var errno uintptr
	err := signalsBlocked(func() { pid, errno = cloneReaper(&args, unsafe.Sizeof(args), &theReaper) })
	unix.Close(p[1])
	if err == nil && errno != 0 {
		err = syscall.Errno(errno)
	}
	if err != nil {
		return fmt.Errorf("clone reaper: %w", err)
	}
	var b [4]byte
	if n, err := unix.Read(p[0], b[:]); err != nil || n != len(b) {
		return fmt.Errorf("reaper %d ended at once (%d bytes, %v)", pid, n, err)
	}
	if e := binary.NativeEndian.Uint32(b[:]); e != 0 {
		return fmt.Errorf("mount proc of the box: %w", syscall.Errno(e))
	}
	reaperPid = pid
	return nil
}

// signalsBlocked calls f with all signals of the calling thread blocked: what f
// clones must not run a signal handler of the Go runtime's.
func signalsBlocked(f func()) error {
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		return err
	}
	f()
	return unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil)
}

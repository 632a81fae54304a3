package jail

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// spawner forks guests. All that the child needs lies in it, prepared before
// the fork: the child may not allocate.
type spawner struct {
	path [32]byte // of the guest binary in the holder's root
	nice uintptr
	argv [3]*byte
	envp [3]*byte
	tid  int32 // of the child, written by the kernel before it runs
	go_  [1]byte
	mask uint64 // no signal blocked
}

var (
	guestArg0 = append([]byte("dsec-guest"), 0)
	guestArg1 = append([]byte("init"), 0)
	// A guest works for one sandbox that mostly waits: more than one thread of
	// Go code costs memory and wake-ups.
	guestEnv0 = append([]byte("GOMAXPROCS=1"), 0)
	guestEnv1 = append([]byte("GOGC=25"), 0) // a small heap is worth more than a fast one
)

// guestSlack, in nanoseconds, is how much later than asked for a timer of the
// guest may fire. The Go runtime's monitor thread sleeps in steps of 20
// microseconds while a program starts, which is a tenth of what a shell costs;
// a command's timeout can wait. The forge goes back to workloadSlack, the
// kernel's default, which is what commands inherit.
const (
	guestSlack    = 1_000_000
	workloadSlack = 50_000
)

func newSpawner() *spawner {
	s := &spawner{}
	copy(s.path[:], guestProgram)
	s.argv = [3]*byte{&guestArg0[0], &guestArg1[0], nil}
	s.envp = [3]*byte{&guestEnv0[0], &guestEnv1[0], nil}
	return s
}

// shellNamespaces are what a shell gets of its own. Its cgroup namespace comes
// with its cgroups.
const shellNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
	unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// fork makes a guest process. A plain fork would copy the caller's page tables
// and make every later write of it a fault, so the child borrows its memory
// until it executes, as vfork has it. The caller therefore stands still and
// cannot write the child's id maps; whoever holds the other end of sync does,
// see Holder.Spawn: the child sends its pid and waits for one byte.
//
// listener becomes the child's descriptor 3; it and sync must have numbers
// above. cgroup is negative for none. It returns an error also when the child
// gave up, which is then collected.
func (s *spawner) fork(listener, sync, cgroup int, p Priority) (pid int, pidfd *os.File, err error) {
	s.nice = 0
	if p == Spare {
		s.nice = 19
	}
	fd := int32(-1)
	args := &cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD | unix.CLONE_PARENT_SETTID | shellNamespaces,
		pidfd:      uint64(uintptr(unsafe.Pointer(&fd))),
		parentTID:  uint64(uintptr(unsafe.Pointer(&s.tid))),
		exitSignal: uint64(unix.SIGCHLD),
	}
	if cgroup >= 0 {
		args.flags |= unix.CLONE_INTO_CGROUP
		args.cgroup = uint64(cgroup)
	}
	var errno syscall.Errno
	err = signalsBlocked(func() { pid, errno = s.vfork(args, uintptr(listener), uintptr(sync)) })
	runtime.KeepAlive(&fd)
	if errno != 0 {
		err = errno
	}
	if err != nil {
		return 0, nil, fmt.Errorf("fork guest: %w", err)
	}
	pidfd = os.NewFile(uintptr(fd), "pidfd")
	var info unix.Siginfo
	if e := unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOHANG, nil); e == nil && info.Signo != 0 {
		pidfd.Close()
		return 0, nil, fmt.Errorf("fork guest: the child could not execute it")
	}
	return pid, pidfd, nil
}

// vfork forks, and in the child never returns.
//
//go:norace
//go:nosplit
func (s *spawner) vfork(args *cloneArgs, listener, sync uintptr) (int, syscall.Errno) {
	pid, errno := vforkClone3(args, unsafe.Sizeof(*args), 0, 0)
	if errno != 0 || pid != 0 {
		return pid, syscall.Errno(errno)
	}
	// The child. Its pid here is 1; the kernel has written the real one.
	syscall.RawSyscall(syscall.SYS_WRITE, sync, uintptr(unsafe.Pointer(&s.tid)), 4)
	if n, _, _ := syscall.RawSyscall(syscall.SYS_READ, sync, uintptr(unsafe.Pointer(&s.go_)), 1); n == 1 {
		syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
		syscall.RawSyscall(syscall.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, s.nice)
		syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_TIMERSLACK, guestSlack, 0)
		syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0)
		syscall.RawSyscall(syscall.SYS_SETRESGID, 0, 0, 0)
		_, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, 0, 0, 0)
		if e == 0 {
			_, _, e = syscall.RawSyscall(syscall.SYS_DUP3, listener, 3, 0)
		}
		if e == 0 {
			syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&s.mask)), 0, 8, 0, 0)
			syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(&s.path)), uintptr(unsafe.Pointer(&s.argv)), uintptr(unsafe.Pointer(&s.envp)))
		}
	}
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 253, 0, 0)
	}
}

// writeIDMaps gives a process in a new user namespace the ids from base.
func writeIDMaps(pid int, base uint32) error {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	line := fmt.Sprintf("0 %d %d\n", base, IDRange)
	for _, f := range []string{"uid_map", "gid_map"} {
		if err := writeFile(dir+f, line); err != nil {
			return fmt.Errorf("write %s: %w", f, err)
		}
	}
	return nil
}

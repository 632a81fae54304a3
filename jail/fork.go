package jail

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forkKey is what a call of clone3 must carry, in registers that the kernel
// does not look at, to pass a box's filter. On v2 only clone3 forks into a
// command's group, and a filter cannot look at its flags, so the workload must
// be refused it: it gets another answer than the forge, which wears the same
// filter, because it cannot know the key. That is random and a box's own; the
// one who holds it, the guest, cannot be traced or read from the box, nor can
// a child of the forge before it has executed something.
type forkKey [2]uint64

func newForkKey() (forkKey, error) {
	var b [16]byte
	if _, err := unix.Getrandom(b[:], 0); err != nil {
		return forkKey{}, fmt.Errorf("get random numbers: %w", err)
	}
	return *(*forkKey)(unsafe.Pointer(&b)), nil
}

// admit puts the rule for k before a seccomp program.
func (k forkKey) admit(program []byte) []byte {
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		args   = 16 // of struct seccomp_data
		checks = 6
	)
	at := [checks]uint32{0, 4, args + 2*8, args + 2*8 + 4, args + 3*8, args + 3*8 + 4}
	want := [checks]uint32{unix.SYS_CLONE3, unix.AUDIT_ARCH_X86_64,
		uint32(k[0]), uint32(k[0] >> 32), uint32(k[1]), uint32(k[1] >> 32)}
	var rule []unix.SockFilter
	for i := range checks {
		rest := uint8(2*(checks-i-1) + 1) // instructions to the end of the rule
		rule = append(rule, unix.SockFilter{Code: load, K: at[i]}, unix.SockFilter{Code: equal, K: want[i], Jf: rest})
	}
	rule = append(rule, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	head := unsafe.Slice((*byte)(unsafe.Pointer(&rule[0])), len(rule)*int(unsafe.Sizeof(rule[0])))
	return append(append([]byte(nil), head...), program...)
}

// launch is all that a forked child needs to become a process: prepared before
// the fork, since the child may not allocate.
type launch struct {
	path, dir  *byte
	argv, envp **byte
	uid, gid   uintptr
	groups     *uint32
	ngroups    uintptr
	files      [3]int // numbers above 2, closed on exec
	tty        bool
	yields     bool      // the forge does, and the child shall not
	priority   int32     // a struct sched_param
	action     [4]uint64 // a struct sigaction of the default
	ignored    uint64    // signals that the guest ignores, the first in bit 0
	mask       uint64    // no signal blocked
	errno      syscall.Errno
	pid        uintptr // of the child as itself sees it
}

func newLaunch(p Process) (*launch, error) {
	l := &launch{ignored: ignoredSignals(), yields: yields, uid: uintptr(p.UID), gid: uintptr(p.GID), ngroups: uintptr(len(p.Groups)), tty: p.TTY}
	if len(p.Groups) > 0 {
		l.groups = &p.Groups[0]
	}
	var err error
	pointer := func(s string) (b *byte) {
		if err == nil {
			b, err = unix.BytePtrFromString(s)
		}
		return b
	}
	list := func(ss []string) **byte {
		out := make([]*byte, 0, len(ss)+1)
		for _, s := range ss {
			out = append(out, pointer(s))
		}
		out = append(out, nil)
		return &out[0]
	}
	l.path, l.argv, l.envp = pointer(p.Path), list(p.Argv), list(p.Env)
	if p.Dir != "" {
		l.dir = pointer(p.Dir)
	}
	if err != nil {
		return nil, err
	}
	for i, f := range []*os.File{p.Stdin, p.Stdout, p.Stderr} {
		if l.files[i], err = dupUp(int(f.Fd())); err != nil {
			l.close()
			return nil, err
		}
	}
	return l, nil
}

func (l *launch) close() {
	for _, fd := range l.files {
		if fd > 0 {
			unix.Close(fd)
		}
	}
}

// ignoredSignals are those that a child would go on ignoring; the kernel resets
// the others.
var ignoredSignals = sync.OnceValue(func() (set uint64) {
	var action [4]uintptr
	for s := uintptr(1); s <= 64; s++ {
		_, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, s, 0, uintptr(unsafe.Pointer(&action)), 8, 0, 0)
		if e == 0 && action[0] == sigIgn {
			set |= 1 << (s - 1)
		}
	}
	return set
})

const sigIgn = 1 // SIG_IGN

// forked is a child that runs its program.
type forked struct {
	pid   int // as the guest counts
	inner int // as the child itself does; 0 if that is not known
	pidfd int // negative if there is none yet
}

// forkInto runs p in a cgroup, as syscall.ForkExec would, but for the key. It
// runs on the forge.
func forkInto(p Process, cgroup int, k forkKey) (c forked, err error) {
	l, err := newLaunch(p)
	if err != nil {
		return c, err
	}
	defer l.close()
	fd := int32(-1)
	args := &cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD | unix.CLONE_INTO_CGROUP | unix.CLONE_CLEAR_SIGHAND,
		pidfd:      uint64(uintptr(unsafe.Pointer(&fd))),
		exitSignal: uint64(unix.SIGCHLD),
		cgroup:     uint64(cgroup),
	}
	var pid int
	var errno syscall.Errno
	err = signalsBlocked(func() { pid, errno = l.fork(args, k) })
	runtime.KeepAlive(&fd)
	runtime.KeepAlive(p.Groups)
	if errno != 0 {
		return c, errno
	}
	if err == nil && l.errno != 0 {
		err = l.errno
	}
	if err != nil {
		unix.Close(int(fd))
		unix.Kill(pid, unix.SIGKILL) //nolint:errcheck // our own child, most likely gone
		unix.Wait4(pid, nil, 0, nil) //nolint:errcheck
		return c, err
	}
	return forked{pid, int(l.pid), int(fd)}, nil
}

// fork forks, and in the child never returns. The Go runtime's handlers, which a
// signal must not enter on the memory that it shares, are not the child's.
//
//go:norace
//go:nosplit
func (l *launch) fork(args *cloneArgs, k forkKey) (int, syscall.Errno) {
	pid, errno := vforkClone3(args, unsafe.Sizeof(*args), k[0], k[1])
	if errno != 0 || pid != 0 {
		return pid, syscall.Errno(errno)
	}
	l.pid, _, _ = syscall.RawSyscall(syscall.SYS_GETPID, 0, 0, 0)
	for s := uintptr(0); s < 64; s++ {
		if l.ignored&(1<<s) != 0 {
			syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, s+1, uintptr(unsafe.Pointer(&l.action)), 0, 8, 0, 0)
		}
	}
	if l.yields {
		syscall.RawSyscall(syscall.SYS_SCHED_SETSCHEDULER, 0, unix.SCHED_NORMAL, uintptr(unsafe.Pointer(&l.priority)))
	}
	l.errno = l.become()
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 253, 0, 0)
	}
}

// become is the child's way to its program; it returns only when that fails.
//
//go:norace
//go:nosplit
func (l *launch) become() syscall.Errno {
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, l.ngroups, uintptr(unsafe.Pointer(l.groups)), 0); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGID, l.gid, 0, 0); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETUID, l.uid, 0, 0); e != 0 {
		return e
	}
	if l.dir != nil {
		if _, _, e := syscall.RawSyscall(syscall.SYS_CHDIR, uintptr(unsafe.Pointer(l.dir)), 0, 0); e != 0 {
			return e
		}
	}
	for i := 0; i < len(l.files); i++ {
		if _, _, e := syscall.RawSyscall(syscall.SYS_DUP3, uintptr(l.files[i]), uintptr(i), 0); e != 0 {
			return e
		}
	}
	if l.tty {
		if _, _, e := syscall.RawSyscall(syscall.SYS_IOCTL, 0, unix.TIOCSCTTY, 1); e != 0 {
			return e
		}
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&l.mask)), 0, 8, 0, 0)
	_, _, e := syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(l.path)), uintptr(unsafe.Pointer(l.argv)), uintptr(unsafe.Pointer(l.envp)))
	return e
}

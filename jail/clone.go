package jail

// cloneArgs is struct clone_args of clone3(2), all of it that Linux 5.7 knows.
type cloneArgs struct {
	flags      uint64
	pidfd      uint64 // *int32
	_          uint64 // child_tid
	parentTID  uint64 // *int32
	exitSignal uint64
	stack      uint64
	stackSize  uint64
	_          [3]uint64 // tls, set_tid, set_tid_size
	cgroup     uint64
}

// vforkClone3 calls clone3 with CLONE_VM and CLONE_VFORK. The child comes back
// with pid 0 and runs on the parent's stack while the parent stands still: it
// may only make raw system calls until it executes something or exits. The keys
// are two more arguments, which the kernel does not look at; see forkKey.
//
//go:noescape
func vforkClone3(args *cloneArgs, size uintptr, key0, key1 uint64) (pid int, errno uintptr)

// cloneReaper calls clone3 with CLONE_VM. It returns in the parent only; the
// child mounts procfs, tells how that went, and reaps for ever.
//
//go:noescape
func cloneReaper(args *cloneArgs, size uintptr, r *reaperWork) (pid int, errno uintptr)

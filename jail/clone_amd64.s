#include "textflag.h"

// func vforkClone3(args *cloneArgs, size uintptr, key0, key1 uint64) (pid int, errno uintptr)
//
// As a call to clone3 with CLONE_VM and CLONE_VFORK: it returns in the child
// first, on the same stack, and in the parent once the child has executed
// something or ended. The return address is kept in a register meanwhile,
// since the child's calls overwrite its place on the stack.
TEXT ·vforkClone3(SB),NOSPLIT|NOFRAME,$0-48
	MOVQ	args+0(FP), DI
	MOVQ	size+8(FP), SI
	MOVQ	key0+16(FP), DX
	MOVQ	key1+24(FP), R10
	MOVQ	$435, AX // clone3
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	CMPQ	AX, $0xfffffffffffff001
	JLS	ok
	MOVQ	$-1, pid+32(FP)
	NEGQ	AX
	MOVQ	AX, errno+40(FP)
	RET
ok:
	MOVQ	AX, pid+32(FP)
	MOVQ	$0, errno+40(FP)
	RET

// func cloneReaper(args *cloneArgs, size uintptr, r *reaperWork) (pid int, errno uintptr)
//
// Calls clone3 with CLONE_VM and a stack of the child's own, which it never
// uses: the child is the loop below and nothing else. It is no thread of the
// Go runtime's and touches no memory but r.
TEXT ·cloneReaper(SB),NOSPLIT|NOFRAME,$0-40
	MOVQ	args+0(FP), DI
	MOVQ	size+8(FP), SI
	MOVQ	r+16(FP), R13
	MOVQ	$435, AX // clone3
	SYSCALL
	TESTQ	AX, AX
	JZ	child
	CMPQ	AX, $0xfffffffffffff001
	JLS	ok
	MOVQ	$-1, pid+24(FP)
	NEGQ	AX
	MOVQ	AX, errno+32(FP)
	RET
ok:
	MOVQ	AX, pid+24(FP)
	MOVQ	$0, errno+32(FP)
	RET

child:
	// prctl(PR_SET_NAME, r.name)
	MOVQ	$15, DI
	LEAQ	16(R13), SI
	MOVQ	$157, AX
	SYSCALL
	// setsid()
	MOVQ	$112, AX
	SYSCALL
	// mount(r.fs, r.path, r.fs, NOSUID|NODEV|NOEXEC, 0)
	LEAQ	32(R13), DI
	LEAQ	40(R13), SI
	LEAQ	32(R13), DX
	MOVQ	$14, R10
	MOVQ	$0, R8
	MOVQ	$165, AX
	SYSCALL
	NEGQ	AX
	MOVL	AX, 12(R13)
	// write(r.result, &r.errno, 4)
	MOVL	8(R13), DI
	LEAQ	12(R13), SI
	MOVQ	$4, DX
	MOVQ	$1, AX
	SYSCALL
	// close_range(0, all, 0)
	MOVQ	$0, DI
	MOVL	$0xffffffff, SI
	MOVQ	$0, DX
	MOVQ	$436, AX
	SYSCALL
reap:
	// wait4(-1, 0, WNOHANG|__WALL, 0)
	MOVQ	$-1, DI
	MOVQ	$0, SI
	MOVL	$0x40000001, DX
	MOVQ	$0, R10
	MOVQ	$61, AX
	SYSCALL
	CMPQ	AX, $0
	JGT	reap
	// rt_sigtimedwait(&r.chld, 0, 0, 8)
	MOVQ	R13, DI
	MOVQ	$0, SI
	MOVQ	$0, DX
	MOVQ	$8, R10
	MOVQ	$128, AX
	SYSCALL
	JMP	reap

package jail

import (
	"encoding/binary"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestForkKey puts on a filter that refuses clone3 and looks who passes.
func TestForkKey(t *testing.T) {
	key, err := newForkKey()
	if err != nil {
		t.Fatal(err)
	}
	instruction := func(b []byte, code uint16, jt, jf uint8, k uint32) []byte {
		b = append(binary.NativeEndian.AppendUint16(b, code), jt, jf)
		return binary.NativeEndian.AppendUint32(b, k)
	}
	var refuse []byte
	refuse = instruction(refuse, unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, 0, 0, 0)
	refuse = instruction(refuse, unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, 0, 1, unix.SYS_CLONE3)
	refuse = instruction(refuse, unix.BPF_RET|unix.BPF_K, 0, 0, unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS))
	refuse = instruction(refuse, unix.BPF_RET|unix.BPF_K, 0, 0, unix.SECCOMP_RET_ALLOW)

	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the filter ends with the thread
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			t.Error(err)
			return
		}
		if err := installFilter(key.admit(refuse)); err != nil {
			t.Error(err)
			return
		}
		// No clone_args are that small: whoever gets to the kernel is told so.
		ask := func(k0, k1 uint64) syscall.Errno {
			var args cloneArgs
			_, _, e := syscall.RawSyscall6(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), 1, uintptr(k0), uintptr(k1), 0, 0)
			return e
		}
		if e := ask(key[0], key[1]); e != unix.EINVAL {
			t.Errorf("with the key: %v", e)
		}
		for _, k := range []forkKey{{}, {key[0], 0}, {0, key[1]}, {key[1], key[0]}, {key[0] ^ 1, key[1]}, {key[0], key[1] ^ 1<<63}, {key[0] ^ 1<<32, key[1]}} {
			if e := ask(k[0], k[1]); e != unix.ENOSYS {
				t.Errorf("with %x in place of %x: %v", k, key, e)
			}
		}
		if _, _, e := syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0); e != 0 {
			t.Errorf("another call: %v", e)
		}
	}()
	<-done
}

package rootfs

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// The tests' main goroutine stays on the main thread.
func init() { runtime.LockOSThread() }

var fromMain = struct{ asked, ran int }{}

func TestMain(m *testing.M) {
	fromMain.asked = unix.Gettid()
	onOwnThread(func() { fromMain.ran = unix.Gettid() })
	os.Exit(m.Run())
}

// TestMainThreadIsLeftAlone: /proc/self/mountinfo is that of the main thread, so the layers' own
// namespace must never be its. It was, now and then, and the process found no control groups.
func TestMainThreadIsLeftAlone(t *testing.T) {
	if pid := os.Getpid(); fromMain.asked != pid || fromMain.ran == pid || fromMain.ran == 0 {
		t.Errorf("asked on thread %d, ran on %d, the process is %d", fromMain.asked, fromMain.ran, pid)
	}
	for range 20 {
		ran := make(chan int)
		go onOwnThread(func() { ran <- unix.Gettid() })
		if tid := <-ran; tid == os.Getpid() {
			t.Error("ran on the main thread")
		}
	}
}

package guest_test

import (
	"os/exec"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// BenchmarkRun compares a short command through wire and guest with the bare
// system calls.
func BenchmarkRun(b *testing.B) {
	path, err := exec.LookPath("true")
	if err != nil {
		b.Fatal(err)
	}
	b.Run("floor", func(b *testing.B) {
		for b.Loop() {
			pid, err := syscall.ForkExec(path, []string{"true"}, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}})
			if err != nil {
				b.Fatal(err)
			}
			var ws unix.WaitStatus
			if _, err := unix.Wait4(pid, &ws, 0, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("wire", func(b *testing.B) {
		x := newBox(b)
		cmd := dsec.Command{Argv: []string{path}}
		x.run(cmd, "")
		for b.Loop() {
			x.run(cmd, "")
		}
	})
	b.Run("stat", func(b *testing.B) { // a call without a process
		x := newBox(b)
		for b.Loop() {
			if _, err := x.Files().Stat(b.Context(), nobody, dsec.FileOp{Path: "/"}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

package e2e_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// rescue is a disk image that nobody answers in: the shell of a boot loader, of
// Debian's package grub-rescue-pc.
const rescue = "/usr/lib/grub-rescue/grub-rescue-cdrom.iso"

// TestMachineDies ends the process of a sandbox of each kind as a fault would:
// whoever asks is told within a second that the sandbox has failed, and why.
func TestMachineDies(t *testing.T) {
	n := unstarted(t)
	kernels, err := filepath.Abs("../bin/vm")
	must(t, err)
	must(t, os.Symlink(kernels, filepath.Join(n.dir, "vm")))
	n.flags = []string{"--warm", "container=0,microvm=0"} // so that every process is a sandbox's
	must(t, n.start())
	n.importBusybox(t)
	n.dsec(t, "image", "import", rescue, "--name", "rescue", "--as", "disk")
	for _, kind := range dsec.Kinds {
		spec := plain()
		if spec.Kind = kind; kind == dsec.FullVM {
			spec.Environment.Base = "rescue"
		}
		const within, tries = time.Second, 3 // the host may be busy otherwise
		var took time.Duration
		for i := range tries {
			// An image in which nobody answers is waited for.
			c, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			sb, err := n.Sandboxes.Create(c, spec, dsec.CreateOptions{})
			cancel()
			must(t, err)
			pid := n.machine(t, kind)
			must(t, syscall.Kill(pid, syscall.SIGKILL))
			begin := time.Now()
			if !until(func() bool { sb, err = n.Sandboxes.Get(t.Context(), sb.ID); return err != nil || sb.State.Ended() }) {
				t.Fatalf("%s: the end of process %d is not noticed", kind, pid)
			}
			took = time.Since(begin)
			if err != nil || sb.State != dsec.Failed || sb.Cause != dsec.CauseGuestDied || sb.Detail == "" {
				t.Errorf("%s: it is %s, %s, %q, %v", kind, sb.State, sb.Cause, sb.Detail, err)
			}
			if took < within || i == tries-1 {
				break
			}
		}
		if took >= within {
			t.Errorf("%s: the end was told after %v", kind, took)
		}
	}
}

// machine gives the process that is the only sandbox's machine: QEMU, which the
// driver's folder names, or the agent of a container.
func (n *node) machine(t *testing.T, kind dsec.Kind) int {
	t.Helper()
	if kind == dsec.MicroVM || kind == dsec.FullVM {
		records, err := filepath.Glob(filepath.Join(n.data, string(kind), "[0-9]*", "qemu"))
		if err != nil || len(records) != 1 {
			t.Fatalf("%s: records %v, %v", kind, records, err)
		}
		b, err := os.ReadFile(records[0])
		must(t, err)
		var record struct{ Pid int }
		must(t, json.Unmarshal(b, &record))
		return record.Pid
	}
	found := n.guests()
	if len(found) != 1 {
		t.Fatalf("%s: agents %v", kind, found)
	}
	return found[0]
}

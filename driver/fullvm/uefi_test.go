//go:build uefi

package fullvm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/fullvm"
)

// uefiDebian gives a copy of the Debian image that only UEFI firmware boots: the
// old-style boot program is gone, and its first partition is a system partition.
func uefiDebian(t *testing.T) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "uefi.img")
	if out, err := exec.Command("cp", "--sparse=always", "--reflink=auto", debian, image).CombinedOutput(); err != nil {
		t.Fatalf("copy the image (make vm makes it): %v %s", err, out)
	}
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(make([]byte, 440), 0); err != nil {
		t.Fatal(err)
	}
	const kind, system = 446 + 4, 0xef // of the first partition
	if _, err := f.WriteAt([]byte{system}, kind); err != nil {
		t.Fatal(err)
	}
	return image
}

// TestUEFI boots Debian by UEFI firmware, and saves and resumes it with the
// firmware's settings.
func TestUEFI(t *testing.T) {
	c := debianConfig(t)
	c.Dir, c.Name, c.Warm = "", "", -1
	d := open(t, c)
	m := start(t, d, config(t, uefiDebian(t)))
	if a := fullvm.KeptAgent(m); a != fullvm.DsecGuest {
		t.Fatalf("the agent is %q", a)
	}
	const what = "test -d /sys/firmware/efi/efivars && echo by UEFI; hostname"
	if got := sh(t, m, what); got != "by UEFI\nbox" {
		t.Errorf("it says %q", got)
	}
	p := m.(driver.Pauser)
	if err := p.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, m, what); got != "by UEFI\nbox" {
		t.Errorf("after a pause it says %q", got)
	}
}

package qemu_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec/qemu"
)

// guestCode is testdata/guest.s.
const guestCode = "" +
	"31c08ed88ec08ed0bc007cfbbe717cb442b281cd137211be007eb91000ace84b00e2fab00ae84400b401cd16741e30e4cd16" +
	"50b40ebb0700cd1058e82e003c5074123c51741e3c467405ebdcf4ebbde81a00ebfbbe817cace8110084c075f8b0fee664f4" +
	"ba0406b80020eff4baf803eec310000100007e000000000000000000000a4b65726e656c2070616e6963202d206e6f742073" +
	"796e63696e673a20746573740a0000"

// uid is whom the tests' machines run as.
const uid = 64123

// machine is a QEMU that runs the guest, and what it is made of.
type machine struct {
	*qemu.Process
	dir string
}

// hello is what is on the second disk, in two files.
const hello = "hello, my disk.\n"

// command gives the arguments of the guest's machine with new descriptors.
func command(t *testing.T, dir string) qemu.Config {
	t.Helper()
	sector, err := hex.DecodeString(guestCode)
	if err != nil {
		t.Fatal(err)
	}
	sector = append(sector, make([]byte, 510-len(sector))...)
	boot := filepath.Join(t.TempDir(), "boot")
	write(t, boot, append(sector, 0x55, 0xaa))
	if err := os.Truncate(boot, 1<<20); err != nil { // firmware boots from no disk of one sector
		t.Fatal(err)
	}
	f := &qemu.Files{}
	disk, err := qemu.ConcatFile(parts(t, hello, f.Set))
	if err != nil {
		t.Fatal(err)
	}
	return qemu.Config{Dir: dir, Files: f, UID: uid, GID: uid, Args: []string{
		"-machine", "pc", "-m", "16M", "-vga", "std", "-device", "qemu-xhci", "-device", "usb-tablet",
		"-serial", "chardev:console",
		"-blockdev", "driver=raw,node-name=boot,read-only=on,file.driver=file,file.filename=" + f.SetPath(boot, os.O_RDONLY),
		"-device", "virtio-blk-pci,drive=boot,bootindex=0",
		"-blockdev", "driver=vmdk,node-name=second.0,read-only=on,file.driver=file,file.filename=" + f.Set(disk),
		"-blockdev", "driver=raw,node-name=second,read-only=on,file=second.0",
		"-device", "virtio-blk-pci,drive=second,bootindex=1",
	}}
}

// parts makes the extents of a disk of 1 GiB that begins with text: a sector of
// half of it, the other half in the middle of another file, and room.
func parts(t *testing.T, text string, set func(*os.File) string) []qemu.Extent {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a"), pad([]byte(text)))
	write(t, filepath.Join(dir, "b"), append(make([]byte, qemu.Sector), pad([]byte("second sector"))...))
	write(t, filepath.Join(dir, "room"), nil)
	const size = 1 << 30
	if err := os.Truncate(filepath.Join(dir, "room"), size); err != nil {
		t.Fatal(err)
	}
	open := func(name string) string {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return set(f)
	}
	return []qemu.Extent{
		{File: open("a"), Size: qemu.Sector},
		{File: open("b"), Offset: qemu.Sector, Size: qemu.Sector},
		{File: open("room"), Size: size - 2*qemu.Sector},
	}
}

func pad(b []byte) []byte { return append(b, make([]byte, qemu.Sector-len(b))...) }

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// start boots the guest.
func start(t *testing.T) machine {
	t.Helper()
	dir := t.TempDir()
	return run(t, command(t, dir))
}

func run(t *testing.T, c qemu.Config) machine {
	t.Helper()
	p, err := qemu.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return machine{p, c.Dir}
}

// until waits for a condition.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came to this: %s", what)
		}
	}
}

// booted waits until the guest has read its second disk.
func (m machine) booted(t *testing.T) {
	t.Helper()
	until(t, "the guest reads its disk", func() bool { return m.said(hello) })
}

func (m machine) said(s string) bool { return strings.Contains(m.Console(), s) }

// ended waits for the end.
func (m machine) ended(t *testing.T) qemu.Exit {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the machine does not end")
	}
	return m.Exit()
}

// picture is the display's content.
func (m machine) picture(t *testing.T) []byte {
	t.Helper()
	b, err := m.Screenshot(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(b, []byte("\x89PNG")) {
		t.Fatalf("a screenshot begins with %q", b[:8])
	}
	return b
}

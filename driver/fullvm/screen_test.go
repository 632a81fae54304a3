package fullvm_test

import (
	"bytes"
	"encoding/binary"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/fullvm"
)

// rescue is a bootable image of Debian's package grub-rescue-pc: the shell of a
// boot loader. No agent is in it, nor could be.
const rescue = "/usr/lib/grub-rescue/grub-rescue-cdrom.iso"

func TestAMachineWithoutAnAgentIsDrivenByScreenAndKeys(t *testing.T) {
	d := open(t, fullvm.Config{AgentWait: 2 * time.Second})
	c := config(t, rescue)
	c.Resources.Memory = 64 << 20
	m, err := d.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop(t.Context()) //nolint:errcheck // checked below
	s, ok := m.(driver.Screen)
	if !ok {
		t.Fatal("the machine has no screen")
	}
	// It tries what is not there, shows a menu, and from there its shell.
	toMenu(t, s)
	type1(t, s, dsec.InputEvent{Key: "c"})
	waitText(t, s, "grub>")
	type1(t, s, dsec.InputEvent{Text: "echo Sum-of-a-screen 40 2\n"})
	waitText(t, s, "Sum-of-a-screen 40 2\ngrub>")

	// A key's effect is seen, and a second picture of the same is the same.
	before := picture(t, s)
	type1(t, s, dsec.InputEvent{Key: "l"}, dsec.InputEvent{Key: "s"})
	waitText(t, s, "grub> ls")
	if equal(before, picture(t, s)) {
		t.Error("the picture did not change")
	}

	// Whatever else is asked is refused at once, and says why.
	_, err = m.Guest().Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{"true"}}, nil)
	if dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "screen and a keyboard only") {
		t.Errorf("a command: %v", err)
	}
	if _, err := m.Guest().Files().Read(t.Context(), dsec.Call{}, dsec.FileOp{Path: "/x"}, dsec.ReadRange{}); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("a file: %v", err)
	}
	if _, err := m.Guest().Ports().Dial(t.Context(), dsec.Call{}, 80); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("a port: %v", err)
	}
	if a, err := m.Guest().Activity(t.Context()); err != nil || a.Running != 0 {
		t.Errorf("activity %+v, %v", a, err)
	}

	// It can be paused, and saved, as any.
	shown := picture(t, s)
	p := m.(driver.Pauser)
	if err := p.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !same(text(shown), text(picture(t, s))) {
		t.Error("after a pause the screen shows something else")
	}
	// It may be gone before the last key has come up.
	if err := s.Input(t.Context(), []dsec.InputEvent{{Text: "\nhalt\n"}}); err != nil && dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("halt: %v", err)
	}
	select {
	case <-m.Done():
		if e := m.Exit(); e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, "powered off") {
			t.Errorf("it ended with %+v", e)
		}
	case <-time.After(30 * time.Second):
		t.Error("the machine did not power off")
	}
}

func type1(t *testing.T, s driver.Screen, events ...dsec.InputEvent) {
	t.Helper()
	if err := s.Input(t.Context(), events); err != nil {
		t.Fatal(err)
	}
}

func picture(t *testing.T, s driver.Screen) image.Image {
	t.Helper()
	b, err := s.Screenshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func equal(a, b image.Image) bool {
	if a.Bounds() != b.Bounds() {
		return false
	}
	for y := range a.Bounds().Dy() {
		for x := range a.Bounds().Dx() {
			if a.At(x, y) != b.At(x, y) {
				return false
			}
		}
	}
	return true
}

func same(a, b []string) bool { return strings.Join(a, "\n") == strings.Join(b, "\n") }

// waitText waits until the screen shows text, whose lines end where those of
// the screen do.
func waitText(t *testing.T, s driver.Screen, want string) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		shown := strings.Join(text(picture(t, s)), "\n")
		if strings.Contains(shown, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the screen never showed %q; it shows:\n%s", want, shown)
		}
	}
}

// toMenu presses on until the boot loader shows its menu. What it tries before waits for a key
// or for some time, as it counts time on an emulated machine.
func toMenu(t *testing.T, s driver.Screen) {
	t.Helper()
	last := ""
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		shown := strings.Join(text(picture(t, s)), "\n")
		switch {
		case strings.Contains(shown, "Microsoft Windows"):
			return
		case strings.Contains(shown, "Press any key") && shown != last: // once for each
			type1(t, s, dsec.InputEvent{Key: "ret"})
			last = shown
		case time.Now().After(end):
			t.Fatalf("the screen never showed the menu; it shows:\n%s", shown)
		}
	}
}

func TestAnImageForUEFIGetsItsFirmware(t *testing.T) {
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa
	copy(disk[512:], "EFI PART")
	binary.LittleEndian.PutUint64(disk[584:], 2)   // where the partitions are told
	binary.LittleEndian.PutUint32(disk[592:], 128) // how many
	binary.LittleEndian.PutUint32(disk[596:], 128) // bytes of each
	copy(disk[1024:], []byte{0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b})
	path := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(path, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	d := open(t, fullvm.Config{AgentWait: time.Millisecond})
	c := config(t, path)
	c.Resources.Memory = 128 << 20
	m, err := d.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop(t.Context()) //nolint:errcheck // looked at by open
	// The older firmware stays in the text mode, whose pictures are 720 wide.
	s := m.(driver.Screen)
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		if size := picture(t, s).Bounds().Size(); size.X >= 800 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("no firmware set a graphics mode")
		}
	}
}

package qemu_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/qemu"
)

func TestARefusedCommandLineSaysWhy(t *testing.T) {
	_, err := qemu.Start(t.Context(), qemu.Config{Dir: t.TempDir(), Args: []string{"-device", "no-such-device"}})
	if err == nil || !strings.Contains(err.Error(), "no-such-device") {
		t.Errorf("error is %v", err)
	}
	_, err = qemu.Start(t.Context(), qemu.Config{Dir: t.TempDir(), Program: "qemu-system-none"})
	if dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("without the program the error is %v", err)
	}
}

func TestDisk(t *testing.T) {
	m := start(t)
	m.booted(t)

	var owner syscall.Stat_t
	if err := syscall.Stat(fmt.Sprintf("/proc/%d", m.Pid()), &owner); err != nil || owner.Uid != uid {
		t.Errorf("QEMU runs as %d, %v", owner.Uid, err)
	}
	// Two times, since names of what is below are given anew each time.
	for _, text := range []string{"another disk...\n", "and a third one\n"} {
		var paths []string
		extents := parts(t, text, func(f *os.File) string {
			defer f.Close()
			path, err := m.AddFile(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			paths = append(paths, path)
			return path
		})
		disk, err := qemu.ConcatFile(extents)
		if err != nil {
			t.Fatal(err)
		}
		path, err := m.AddFile(t.Context(), disk)
		disk.Close()
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Swap(t.Context(), "second", map[string]any{
			"driver": "vmdk", "read-only": true, "file": map[string]any{"driver": "file", "filename": path, "read-only": true},
		}); err != nil {
			t.Fatal(err)
		}
		until(t, "the guest reads "+text, func() bool { return m.said(text) })
	}
	err := m.Swap(t.Context(), "second", map[string]any{
		"driver": "vmdk", "read-only": true, "file": map[string]any{"driver": "file", "filename": "/nonexistent"},
	})
	var refused *qemu.CommandError
	if !errors.As(err, &refused) {
		t.Errorf("a disk of no file: %v", err)
	}
}

func TestConcatRefuses(t *testing.T) {
	for name, e := range map[string]qemu.Extent{
		"half a sector": {File: "a", Size: 100},
		"nothing":       {File: "a"},
		"odd offset":    {File: "a", Offset: 1, Size: 512},
		"quote":         {File: "a\"", Size: 512},
		"line":          {File: "a\nRW 1 FLAT \"/etc/shadow\" 0", Size: 512},
		"long":          {File: strings.Repeat("a", 512), Size: 512},
	} {
		if _, err := qemu.Concat([]qemu.Extent{e}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeysAndScreen(t *testing.T) {
	m := start(t)
	m.booted(t)
	before := m.picture(t)
	const text = "Hello, {World} = 42% \\ ~ok?"
	if err := m.Input(t.Context(), []dsec.InputEvent{{Text: text}}); err != nil {
		t.Fatal(err)
	}
	until(t, "the guest has read the keys", func() bool {
		// Lines of the disk come between.
		return strings.Contains(strings.ReplaceAll(m.Console(), hello+"\n", ""), text)
	})
	if bytes.Equal(before, m.picture(t)) {
		t.Error("the picture is the same after typing")
	}
	img, err := png.Decode(bytes.NewReader(before))
	if err != nil || img.Bounds().Dx() < 320 || img.Bounds().Dy() < 200 {
		t.Errorf("the picture is %v, %v", img.Bounds(), err)
	}
	size := img.Bounds().Size()
	if err := m.Input(t.Context(), []dsec.InputEvent{{Move: &dsec.Point{X: size.X - 1, Y: 0}}, {Button: "left"}, {Key: "ctrl-alt-f1"}}); err != nil {
		t.Error(err)
	}
	for name, e := range map[string]dsec.InputEvent{
		"no such key":    {Key: "any"},
		"no such button": {Button: "up"},
		"nothing":        {},
		"two":            {Key: "a", Text: "a"},
		"foreign":        {Text: "ß"},
		"outside":        {Move: &dsec.Point{X: size.X, Y: 0}},
	} {
		if err := m.Input(t.Context(), []dsec.InputEvent{{Text: "P"}, e}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if m.said("panic") {
		t.Error("an event before a wrong one was played")
	}
}

func TestEnds(t *testing.T) {
	for _, c := range []struct {
		name   string
		do     func(m machine) error
		reason qemu.Reason
		detail string
	}{
		{"panic", typing("P"), qemu.Panicked, "Kernel panic - not syncing: test"},
		{"power off", typing("Q"), qemu.PoweredOff, ""},
		{"kill", func(m machine) error { return syscall.Kill(m.Pid(), syscall.SIGKILL) }, qemu.Killed, ""},
		{"quit", func(m machine) error { return m.Execute(context.Background(), "quit", nil, nil) }, qemu.Quit, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := start(t)
			m.booted(t)
			if err := c.do(m); err != nil && !errors.Is(err, qemu.ErrClosed) {
				t.Fatal(err)
			}
			e := m.ended(t)
			if e.Reason != c.reason || e.Detail != c.detail {
				t.Errorf("it ended with %v, %q", e.Reason, e.Detail)
			}
			if _, err := m.Status(t.Context()); dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("a call on a machine that is gone: %v", err)
			}
		})
	}
}

// typing presses keys, the last of which may end the machine before it is let go.
func typing(s string) func(machine) error {
	return func(m machine) error {
		err := m.Input(context.Background(), []dsec.InputEvent{{Text: s}})
		if strings.ContainsAny(s, "PQ") {
			return nil
		}
		return err
	}
}

func TestConsoleIsBounded(t *testing.T) {
	m := start(t)
	m.booted(t)
	if err := typing("F")(m); err != nil {
		t.Fatal(err)
	}
	until(t, "the console is full", func() bool { return len(m.Console()) > qemu.ConsoleSize-64 })
	if _, err := m.Status(t.Context()); err != nil {
		t.Error(err)
	}
	if n := len(m.Console()); n > qemu.ConsoleSize {
		t.Errorf("the console holds %d bytes", n)
	}
}

func TestSaveAndLoad(t *testing.T) {
	m := start(t)
	m.booted(t)
	if err := typing("remember")(m); err != nil {
		t.Fatal(err)
	}
	until(t, "the guest has read the keys", func() bool {
		return strings.Contains(strings.ReplaceAll(m.Console(), hello+"\n", ""), "remember")
	})
	room, restore := rebind(t, m)
	room()
	file, err := os.Create(filepath.Join(t.TempDir(), "saved"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := m.Save(t.Context(), file, qemu.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	want := m.picture(t)
	restore()

	// It runs on.
	if err := m.Cont(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := len(m.Console())
	until(t, "the saved machine runs on", func() bool { return len(m.Console()) > n })
	m.Kill()

	c := command(t, m.dir)
	c.Incoming = true
	r := run(t, c)
	if _, err := file.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	if err := r.Load(t.Context(), file, qemu.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, r.picture(t)) {
		t.Error("the loaded machine shows another picture")
	}
	if err := r.Cont(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.booted(t)
}

// rebind gives what puts an empty disk under the second one, since QEMU saves no
// machine that has one put together, and what puts hello there again.
func rebind(t *testing.T, m machine) (room, restore func()) {
	t.Helper()
	swap := func(driver string, f *os.File) {
		t.Helper()
		path, err := m.AddFile(t.Context(), f)
		f.Close()
		if err == nil {
			err = m.Swap(t.Context(), "second", map[string]any{
				"driver": driver, "read-only": true, "file": map[string]any{"driver": "file", "filename": path, "read-only": true},
			})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(f *os.File) string {
		defer f.Close()
		path, err := m.AddFile(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	room = func() {
		if err := m.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "empty")
		write(t, path, nil)
		if err := os.Truncate(path, 1<<30); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		swap("raw", f)
	}
	restore = func() {
		disk, err := qemu.ConcatFile(parts(t, hello, add))
		if err != nil {
			t.Fatal(err)
		}
		swap("vmdk", disk)
	}
	return room, restore
}

func TestADamagedStateIsInvalid(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "noise": strings.Repeat("noise", 1000)} {
		c := command(t, t.TempDir())
		c.Incoming = true
		m := run(t, c)
		file, err := os.Create(filepath.Join(t.TempDir(), "saved"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteString(content); err != nil {
			t.Fatal(err)
		}
		file.Seek(0, 0) //nolint:errcheck // a fresh file
		if err := m.Load(t.Context(), file, qemu.SaveOptions{}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
		file.Close()
	}
}

func TestASaveThatFindsNoRoomIsExhausted(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH) //nolint:errcheck // the test's own
	m := start(t)
	m.booted(t)
	room, restore := rebind(t, m)
	room()
	file, err := os.Create(filepath.Join(dir, "saved"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := m.Save(t.Context(), file, qemu.SaveOptions{}); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("error is %v", err)
	}
	restore()
	if err := m.Cont(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := len(m.Console())
	until(t, "the machine runs on", func() bool { return len(m.Console()) > n })
}

func TestAttach(t *testing.T) {
	m := start(t)
	m.booted(t)
	m.Release()
	again, err := qemu.Attach(t.Context(), m.dir, nil)
	if err != nil || again == nil {
		t.Fatalf("attached to %v, %v", again, err)
	}
	a := machine{again, m.dir}
	if !a.said(hello) || a.Pid() != m.Pid() {
		t.Errorf("process %d of %d said %q", a.Pid(), m.Pid(), a.Console())
	}
	if err := typing("P")(a); err != nil {
		t.Fatal(err)
	}
	if e := a.ended(t); e.Reason != qemu.Panicked {
		t.Errorf("it ended with %v", e)
	}
	if gone, err := qemu.Attach(t.Context(), m.dir, nil); gone != nil || err != nil {
		t.Errorf("attached to what is gone: %v, %v", gone, err)
	}
	if none, err := qemu.Attach(t.Context(), t.TempDir(), nil); none != nil || err != nil {
		t.Errorf("attached to nothing: %v, %v", none, err)
	}
}

func TestItIsBornInItsGroups(t *testing.T) {
	cgroups, err := jail.OpenCgroups(fmt.Sprintf("qemu-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer cgroups.Remove() //nolint:errcheck // the group's own removal is checked
	g, err := cgroups.Make("m", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Limit(dsec.Resources{CPU: 1, Memory: 256 << 20, Pids: 64}); err != nil {
		t.Fatal(err)
	}
	c := command(t, t.TempDir())
	c.Group = g
	m := run(t, c)
	m.booted(t)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("/qemu-test-%d/m", os.Getpid())
	for _, controller := range []string{":memory:", ":cpu", ":pids:"} {
		ok := cgroups.V2() && strings.Contains(string(b), want)
		for _, line := range strings.Split(string(b), "\n") {
			ok = ok || strings.Contains(line, controller) && strings.HasSuffix(line, want)
		}
		if !ok {
			t.Errorf("its group of %s is not %s:\n%s", controller, want, b)
		}
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", m.Pid())); err != nil || strings.TrimSpace(string(b)) != fmt.Sprint(qemu.OOMScore) {
		t.Errorf("a host without memory thinks of it as %q, %v", b, err)
	}
	u, err := g.Usage()
	if err != nil || u.Memory < 4<<20 {
		t.Errorf("the group uses %d bytes, %v", u.Memory, err)
	}
	m.Kill()
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

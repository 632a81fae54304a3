package microvm_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/driver/microvm"
)

type inside interface {
	Pid() int
	Dir() string
	KillGuest() error
}

// file makes a layer of one file.
func file(t testing.TB, name string, content []byte) driver.LayerFiles {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return drivertest.TarFiles(t, b.Bytes())
}

// TestLateBinding looks from inside at disks that were put under machines after
// they had been saved, or had mounted another: each sees its own, and all of it.
func TestLateBinding(t *testing.T) {
	c := config()
	c.Low, c.High = 1, 1 // the first is a pool's, which has mounted another disk
	d := open(t, c)
	if err := d.Prepare(t.Context(), resources); err != nil {
		t.Fatal(err)
	}
	base := drivertest.RootFiles(t)
	machine, random := map[string]bool{}, map[string]bool{}
	for i := range 2 {
		content := bytes.Repeat([]byte(fmt.Sprintf("machine %d\n", i)), 200_000)
		m := start(t, d, base, file(t, "one", content), file(t, "two", []byte("top\n")))
		out := strings.Fields(sh(t, m, "sha256sum < /one; cat /two; cat /etc/machine-id; head -c 16 /dev/urandom | sha256sum; date +%s; cat /proc/sys/kernel/random/boot_id"))
		if want := fmt.Sprintf("%x", sha256.Sum256(content)); out[0] != want || out[2] != "top" {
			t.Errorf("machine %d reads %q", i, out)
		}
		machine[out[3]], random[out[4]] = true, true
		machine[out[7]] = true
		if sec, _ := strconv.ParseInt(out[6], 10, 64); time.Since(time.Unix(sec, 0)).Abs() > 20*time.Second {
			t.Errorf("its clock shows %s", out[6])
		}
	}
	if len(machine) != 4 || len(random) != 2 {
		t.Errorf("machines share what should be their own: %v, %v", machine, random)
	}
}

// TestTemplates counts boots: none for a second start, none for the next
// process, and one where a saved guest is damaged.
func TestTemplates(t *testing.T) {
	c := config()
	c.Dir = filepath.Join(t.TempDir(), "m")
	id := func() string {
		t.Helper()
		d := open(t, c)
		if err := d.Prepare(t.Context(), resources); err != nil {
			t.Fatal(err)
		}
		all := d.TemplateMemory()
		if len(all) != 1 {
			t.Fatalf("saved guests: %v", all)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		return d.TemplateID(all[0]) + all[0]
	}
	first := id()
	if again := id(); again != first {
		t.Errorf("it was booted again: %s, then %s", first, again)
	}
	path := first[strings.LastIndex(first, "}")+1:]
	f, err := os.OpenFile(strings.TrimSpace(path), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("damage"), 5<<20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if again := id(); again == first {
		t.Error("a damaged guest was used")
	}
}

// TestIdleTemplate waits until a saved guest that nobody uses has given its memory
// back: not while a machine maps it, and the next start has it again.
func TestIdleTemplate(t *testing.T) {
	c := config()
	c.TemplateIdle = 100 * time.Millisecond
	d, base := open(t, c), drivertest.RootFiles(t)
	m := start(t, d, base)
	first := d.LoadedTemplates()
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if now := d.LoadedTemplates(); len(first) != 1 || !slices.Equal(now, first) {
			t.Fatalf("in use: %v, then %v", first, now)
		}
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); len(d.LoadedTemplates()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it keeps its memory")
		}
	}
	m = start(t, d, base)
	if again := d.LoadedTemplates(); !slices.Equal(again, first) {
		t.Errorf("it was %v, and is %v", first, again)
	}
	sh(t, m, "true")
}

// TestPool watches the marks: it is filled to the high one, and again once it
// is below the low one. What a crash leaves of it is removed.
func TestPool(t *testing.T) {
	c := config()
	c.Low, c.High = 1, 2
	before := residue(t, shared)
	d, err := microvm.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Adopt(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Prepare(t.Context(), resources); err != nil {
		t.Fatal(err)
	}
	if n := d.Ready(); n != 2 {
		t.Fatalf("%d are ready, want 2", n)
	}
	layer := drivertest.RootFiles(t)
	config := func() driver.Config {
		return driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Files: []driver.LayerFiles{layer}}, Resources: resources, Hostname: "box"}
	}
	a, err := d.Start(t.Context(), config())
	if err != nil {
		t.Fatal(err)
	}
	if n := d.Ready(); n != 1 {
		t.Errorf("%d are ready after one was taken, want 1", n)
	}
	b, err := d.Start(t.Context(), config())
	if err != nil {
		t.Fatal(err)
	}
	for d.Ready() < 2 {
		select {
		case <-t.Context().Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
	for _, m := range []driver.Machine{a, b} {
		if err := m.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	d.Crash()
	d = open(t, c)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if after := residue(t, shared); !slices.Equal(before, after) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
}

// TestDeath ends machines in ways that they do not survive.
func TestDeath(t *testing.T) {
	d := open(t, config())
	layer := drivertest.RootFiles(t)
	for name, c := range map[string]struct {
		kill func(m driver.Machine)
		want string
	}{
		"killed":   {func(m driver.Machine) { m.(inside).KillGuest() }, "killed by SIGKILL"}, //nolint:errcheck // it cannot fail
		"panicked": {func(m driver.Machine) { crash(m) }, "panic"},
	} {
		t.Run(name, func(t *testing.T) {
			m := start(t, d, layer)
			c.kill(m)
			select {
			case <-m.Done():
			case <-time.After(time.Minute):
				t.Fatal("it lives")
			}
			if e := m.Exit(); e.Cause != dsec.CauseGuestDied || !strings.Contains(e.Detail, c.want) {
				t.Errorf("it ended as %+v", e)
			}
		})
	}
}

// TestFirstOfItsSize writes most of a machine's memory, the first time in the life of its template:
// it is the machine's to use, although the kernel counts some of it twice then.
func TestFirstOfItsSize(t *testing.T) {
	c := config()
	c.Dir = t.TempDir()
	d := open(t, c)
	r := resources
	r.Memory, r.Disk = 768<<20, 2<<30
	m, err := d.Start(t.Context(), driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Files: []driver.LayerFiles{drivertest.RootFiles(t)}}, Resources: r, Hostname: "box"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop(context.WithoutCancel(t.Context())) //nolint:errcheck // the test has its result
	if out := sh(t, m, "dd if=/dev/zero of=/big bs=1M count=900 2>/dev/null; echo $?"); strings.TrimSpace(out) != "0" {
		t.Errorf("it says %q", out)
	}
	select {
	case <-m.Done():
		t.Errorf("it ended: %+v", m.Exit())
	default:
	}
}

// TestDamagedPause: a paused machine whose memory is not what it was does not go on.
func TestDamagedPause(t *testing.T) {
	d := open(t, config())
	m := start(t, d, drivertest.RootFiles(t))
	sh(t, m, "echo before > /file")
	p := m.(driver.Pauser)
	if err := p.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"pages", "device"} {
		path := filepath.Join(m.(inside).Dir(), "saved", name)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(t.Context()); dsec.KindOf(err) != dsec.Lost || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is damaged: %v", name, err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// The memory below, where it is not a template's any more.
	d.DropTemplates()
	base := filepath.Join(m.(inside).Dir(), "saved", "base")
	b, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, damaged := range []bool{true, false} {
		if err := os.Remove(base); err != nil {
			t.Fatal(err)
		}
		at := bytes.IndexFunc(b, func(r rune) bool { return r != 0 })
		if damaged {
			b[at] ^= 1
			if err := p.Resume(t.Context()); dsec.KindOf(err) != dsec.Lost || !strings.Contains(err.Error(), "base") {
				t.Errorf("base is gone: %v", err)
			}
		}
		if err := os.WriteFile(base, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if damaged {
			b[at] ^= 1
			if err := p.Resume(t.Context()); dsec.KindOf(err) != dsec.Lost || !strings.Contains(err.Error(), "base") {
				t.Errorf("base is damaged: %v", err)
			}
		}
	}
	if err := p.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := sh(t, m, "cat /file"); out != "before\n" {
		t.Errorf("after it was mended: %q", out)
	}
}

// crash makes a guest's kernel panic.
func crash(m driver.Machine) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m.Guest().Commands().Run(ctx, dsec.Call{}, dsec.Command{Shell: "mount -t proc p /tmp; echo c > /proc/sysrq-trigger; echo c > /tmp/sysrq-trigger"}, nil) //nolint:errcheck // it never comes back
}

// TestSilentGuest starts a guest that has no time to answer.
func TestSilentGuest(t *testing.T) {
	c := config()
	c.Answer = time.Millisecond
	before := residue(t, shared)
	d, err := microvm.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Adopt(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = d.Start(t.Context(), driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Files: []driver.LayerFiles{drivertest.RootFiles(t)}}, Resources: resources, Hostname: "box"})
	if dsec.KindOf(err) != dsec.Timeout {
		t.Errorf("a silent guest: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if after := residue(t, shared); !slices.Equal(before, after) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
}

// TestRefused asks for what cannot be.
func TestRefused(t *testing.T) {
	d := open(t, config())
	layer := drivertest.RootFiles(t)
	bad := file(t, "x", []byte("x"))
	if err := os.WriteFile(bad.Meta, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	huge := resources
	huge.Memory = 512 << 30
	for name, c := range map[string]struct {
		root driver.Root
		r    dsec.Resources
		want dsec.ErrorKind
	}{
		"no root":        {driver.Root{}, resources, dsec.Invalid},
		"folder":         {driver.Root{Dir: t.TempDir()}, resources, dsec.Invalid},
		"missing layer":  {driver.Root{Files: []driver.LayerFiles{{Digest: "x", Meta: "/nowhere"}}}, resources, dsec.Invalid},
		"no file system": {driver.Root{Files: []driver.LayerFiles{layer, bad}}, resources, dsec.Invalid},
		"more than all":  {driver.Root{Files: []driver.LayerFiles{layer}}, huge, dsec.Exhausted},
	} {
		m, err := d.Start(t.Context(), driver.Config{ID: keys.New(dsec.Place{}), Root: c.root, Resources: c.r, Hostname: "box"})
		if dsec.KindOf(err) != c.want {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
		if err == nil {
			m.Stop(t.Context()) //nolint:errcheck // the test has failed
		}
	}
}

// TestSharing looks at what machines cost that were copied from one, and from
// each other.
func TestSharing(t *testing.T) {
	d := open(t, config())
	layer := drivertest.RootFiles(t)
	m := start(t, d, layer)
	sh(t, m, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=20 2>/dev/null || dd if=/dev/urandom of=/tmp/x bs=1M count=20")
	if own := private(t, m); own > resources.Memory/2 {
		t.Errorf("a copy has %d MiB of its own", own>>20)
	}
	var cs []driver.Config
	for range 2 {
		cs = append(cs, driver.Config{ID: keys.New(dsec.Place{}), Root: driver.Root{Files: []driver.LayerFiles{layer}}, Resources: resources, Hostname: "child"})
	}
	ms, err := m.(driver.Forker).Fork(t.Context(), cs)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range ms {
		defer c.Stop(t.Context()) //nolint:errcheck // another test's business
		if own := private(t, c); own > 48<<20 {
			t.Errorf("a child has %d MiB of its own", own>>20)
		}
	}
}

// private is what of a guest's memory is not shared.
func private(t *testing.T, m driver.Machine) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", m.(inside).Pid()))
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	mine := false
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case strings.Contains(f[0], "-") && len(f) >= 5:
			mine = strings.Contains(line, "memfd:dsec-memory-")
		case mine && f[0] == "Private_Dirty:":
			kb, _ := strconv.ParseInt(f[1], 10, 64)
			total += kb << 10
		}
	}
	return total
}

// TestSnapshotFull saves into a file system that is too small: the machine runs
// on, and can be saved elsewhere.
func TestSnapshotFull(t *testing.T) {
	d := open(t, config())
	m := start(t, d, drivertest.RootFiles(t))
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(small, unix.MNT_DETACH) //nolint:errcheck // the folder's removal tells
	if _, err := m.(driver.Snapshotter).Snapshot(t.Context(), small); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("a full disk: %v", err)
	}
	if got := sh(t, m, "echo on"); got != "on\n" {
		t.Errorf("after it: %q", got)
	}
}

// TestDAX maps a layer into two machines, which keep no copy of it, and pauses
// one.
func TestDAX(t *testing.T) {
	c := config()
	c.Variant = microvm.DAX
	d := open(t, c)
	if err := d.Prepare(t.Context(), resources); err != nil {
		t.Fatal(err)
	}
	content := bytes.Repeat([]byte("0123456789abcdef"), 2<<20)
	big := file(t, "big", content)
	layers := []driver.LayerFiles{big, drivertest.RootFiles(t)} // the second comes on the disk
	for range 2 {
		m := start(t, d, layers...)
		read := func() []string {
			return strings.Fields(sh(t, m, "grep ^Cached: /proc/meminfo; sha256sum < /big; grep ^Cached: /proc/meminfo"))
		}
		out := read()
		before, _ := strconv.Atoi(out[1])
		after, _ := strconv.Atoi(out[6])
		if want := fmt.Sprintf("%x", sha256.Sum256(content)); out[3] != want {
			t.Errorf("it reads %s", out[3])
		}
		if after-before > 8<<10 {
			t.Errorf("the guest's page cache grew by %d KiB while it read %d", after-before, len(content)>>10)
		}
		p := m.(driver.Pauser)
		if err := p.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if again := read(); again[3] != out[3] {
			t.Error("after a pause it reads something else")
		}
	}
}

// TestFlood lets something that is no guest fill the channel: whoever asks gets
// an error in time, and nothing piles up.
func TestFlood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "port")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(c, endless{}) //nolint:errcheck // until it is closed
		}
	}()
	for _, ask := range microvm.Askers(path) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if err := ask(ctx); err == nil {
			t.Error("a flood is an answer")
		}
		cancel()
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(i * 7)
	}
	return len(b), nil
}

func FuzzReadPages(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(append([]byte{0, 16, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0}, make([]byte, 4096)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		const size = 1 << 16
		end := int64(0)
		microvm.ReadPages(bytes.NewReader(b), size, func(p []byte, off int64) error { //nolint:errcheck // any is right
			if off < end || off+int64(len(p)) > size {
				t.Fatalf("a run of %d bytes at %d behind %d", len(p), off, end)
			}
			end = off + int64(len(p))
			return nil
		})
	})
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"format":"dsec-microvm","version":1,"shape":{"ram":268435456,"cpus":1,"variant":"block"}}`))
	f.Add([]byte(`{"format":"dsec-microvm","version":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := microvm.ParseManifest(b); err != nil && dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%v", err)
		}
	})
}

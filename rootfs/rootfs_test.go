package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFeaturesAreThere asks for all that the running kernel is new enough for.
func TestFeaturesAreThere(t *testing.T) {
	since := map[string][2]int{"EROFS on files": {6, 12}, "overlay on descriptors": {6, 15}}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range Features(t.TempDir()) {
		seen[f.Name] = true
		v := since[f.Name]
		old := major < v[0] || major == v[0] && minor < v[1]
		if !f.OK && !old && f.Name != "disk quota" {
			t.Errorf("feature %s: %s", f.Name, f.Detail)
		}
		if f.OK && old {
			t.Errorf("feature %s is there in Linux %d.%d", f.Name, major, minor)
		}
	}
	if !seen["idmapped mounts"] {
		t.Errorf("looked at %v only", seen)
	}
}

// counted is a Source that counts what it is asked for.
type counted struct {
	mu    sync.Mutex
	layer Layer
	err   error
	calls int
}

func (c *counted) Layer(context.Context, string) (Layer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.layer, c.err
}

func newCounted(t *testing.T) *counted {
	t.Helper()
	l, err := tinyLayer(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return &counted{layer: l}
}

func readProbe(t *testing.T, m *os.File) {
	t.Helper()
	fd, err := unix.Openat(int(m.Fd()), "probe", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "probe")
	defer f.Close()
	b := make([]byte, 16)
	n, err := f.Read(b)
	if string(b[:n]) != "probe\n" {
		t.Fatalf("layer holds %q (%v)", b[:n], err)
	}
}

func TestLayersAreSharedAndCounted(t *testing.T) {
	c := newCounted(t)
	l := NewLayers(c)
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[*os.File]bool{}
	for range 50 {
		wg.Go(func() {
			m, release, err := l.Acquire(context.Background(), []string{"a"})
			if err != nil {
				t.Error(err)
				return
			}
			readProbe(t, m[0])
			mu.Lock()
			seen[m[0]] = true
			mu.Unlock()
			release()
			release() // harmless
		})
	}
	wg.Wait()
	if len(seen) != 1 || c.calls != 1 {
		t.Errorf("%d mounts after %d look-ups, want one of each", len(seen), c.calls)
	}
	if got := l.InUse(); len(got) != 1 {
		t.Errorf("an idle layer is kept: in use %v", got)
	}
	l.Forget()
	if got := l.InUse(); len(got) != 0 {
		t.Errorf("in use after Forget: %v", got)
	}
}

func TestIdleLayerIsUsedAgainAndNotForgottenInUse(t *testing.T) {
	c := newCounted(t)
	l := NewLayers(c)
	_, release, err := l.Acquire(context.Background(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	release()
	m, release, err := l.Acquire(context.Background(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	l.Forget()
	readProbe(t, m[0])
	if c.calls != 1 {
		t.Errorf("%d look-ups, want 1", c.calls)
	}
	release()
	l.Forget()
}

func TestIdleLayersAreBounded(t *testing.T) {
	c := newCounted(t)
	l := NewLayers(c)
	for i := range IdleLayers + 10 {
		_, release, err := l.Acquire(context.Background(), []string{strconv.Itoa(i)})
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	if n := len(l.InUse()); n != IdleLayers {
		t.Errorf("%d idle layers mounted, want %d", n, IdleLayers)
	}
	l.Forget()
}

func TestFailedLayerIsTriedAgain(t *testing.T) {
	c := newCounted(t)
	c.err = errors.New("store is away")
	l := NewLayers(c)
	if _, _, err := l.Acquire(context.Background(), []string{"a"}); !errors.Is(err, c.err) {
		t.Fatalf("error %v", err)
	}
	c.err = nil
	_, release, err := l.Acquire(context.Background(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	release()
	l.Forget()
}

func TestDamagedMetadataIsRefused(t *testing.T) {
	c := newCounted(t)
	if err := os.WriteFile(c.layer.Meta, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	if m, err := MountLayer(c.layer); err == nil {
		m.Close()
		t.Fatal("a file of zeros was mounted")
	}
}

func TestFallbacks(t *testing.T) {
	c := newCounted(t)
	m, err := mountErofsLoop(c.layer)
	if err != nil {
		t.Fatal("EROFS on loop devices:", err)
	}
	defer func() {
		if err := Unmount(m); err != nil {
			t.Error(err)
		}
	}()
	readProbe(t, m)
	dir := t.TempDir()
	o := Overlay{Lowers: []*os.File{m}, Upper: filepath.Join(dir, "u"), Work: filepath.Join(dir, "w")}
	for _, d := range []string{o.Upper, o.Work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r, err := o.mountByPath()
	if err != nil {
		t.Fatal("overlay by path:", err)
	}
	defer r.Close()
	readProbe(t, r)
}

package swap_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/swap"
)

// devices lists all swap of the host, and the compressed devices.
func devices(t *testing.T) []string {
	t.Helper()
	all, err := swap.Devices()
	if err != nil {
		t.Fatal(err)
	}
	zram, err := filepath.Glob("/sys/block/zram*")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		zram = append(zram, d.Path)
	}
	return zram
}

func TestMakeAndRemove(t *testing.T) {
	before := devices(t)
	dir := filepath.Join(t.TempDir(), "a b", "swap")
	t.Cleanup(func() { swap.Remove(dir) }) // before its folder is
	for range 2 {
		if err := swap.Make(dir, 64<<20); err != nil {
			t.Fatal(err)
		}
	}
	if on, err := swap.Active(dir); err != nil || !on {
		t.Errorf("active %v, %v", on, err)
	}
	all, err := swap.Devices()
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, d := range all {
		if !slices.Contains(before, d.Path) {
			size += d.Size
		}
	}
	if size < 63<<20 || size > 64<<20 {
		t.Errorf("%d bytes of swap were made of %d: %v", size, 64<<20, all)
	}
	if _, _, err := swap.Compressed(dir); err != nil {
		t.Error(err)
	}
	if f := swap.Feature(); !f.OK {
		t.Errorf("feature %+v", f)
	}
	for range 2 {
		if err := swap.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	if after := devices(t); !slices.Equal(after, before) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

func TestMakeFails(t *testing.T) {
	before := devices(t)
	dir := filepath.Join(t.TempDir(), "swap")
	t.Cleanup(func() { swap.Remove(dir) })
	if err := swap.Make(dir, 1000); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("a thousand bytes: %v", err)
	}
	if err := swap.Make(dir, 1<<60); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("more than the disk: %v", err)
	}
	// A file system that cannot hold swap files.
	shm := "/dev/shm/dsec-swap-test"
	t.Cleanup(func() { swap.Remove(shm) })
	if err := swap.Make(shm, 16<<20); err == nil {
		t.Error("a file in memory became swap")
	}
	for _, d := range []string{dir, shm} {
		if _, err := os.Stat(d); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", d, err)
		}
	}
	if after := devices(t); !slices.Equal(after, before) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
}

// TestAfterReboot finds the state of an earlier life of the kernel, and half of
// a state: the device it names is another's now.
func TestAfterReboot(t *testing.T) {
	before := devices(t)
	for name, text := range map[string]string{"earlier": `{"Boot":"another","Zram":0}`, "torn": `{"Bo`} {
		dir := filepath.Join(t.TempDir(), name)
		t.Cleanup(func() { swap.Remove(dir) })
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{"state": text, "file": "old"} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := swap.Make(dir, 16<<20); err != nil {
			t.Fatal(name, err)
		}
		if err := swap.Remove(dir); err != nil {
			t.Fatal(name, err)
		}
	}
	if after := devices(t); !slices.Equal(after, before) {
		t.Errorf("left behind: %v, before %v", after, before)
	}
}

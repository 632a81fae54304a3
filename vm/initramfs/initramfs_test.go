package initramfs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/vm/initramfs"
)

var index = initramfs.Index{
	{Name: "virtio_ring"},
	{Name: "virtio_blk", Needs: []string{"virtio_ring"}},
	{Name: "libcrc32c"},
	{Name: "erofs", Needs: []string{"libcrc32c"}, Aliases: []string{"fs_erofs"}},
	{Name: "squashfs", Aliases: []string{"fs_squashfs", "other"}},
}

// fake makes a kernel without a kernel in it.
func fake(t *testing.T) (initramfs.Kernel, string) {
	t.Helper()
	dir := t.TempDir()
	k := initramfs.At(dir, "6.12")
	put := func(name, content string) {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put(k.Image, "kernel")
	put(filepath.Join(k.Modules, initramfs.IndexFile), string(index.Append(nil)))
	for _, m := range index {
		put(filepath.Join(k.Modules, m.Name+".ko"), "module "+m.Name)
	}
	guest := filepath.Join(dir, "guest")
	put(guest, "program")
	return k, guest
}

type entry struct {
	mode int
	data string
}

// unpack reads a cpio archive as the kernel does.
func unpack(t *testing.T, b []byte) map[string]entry {
	t.Helper()
	out := map[string]entry{}
	for at := 0; ; {
		if at%4 != 0 || at+110 > len(b) || string(b[at:at+6]) != "070701" {
			t.Fatalf("no header at %d of %d", at, len(b))
		}
		field := func(i int) int {
			n, err := strconv.ParseInt(string(b[at+6+8*i:at+14+8*i]), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
		up := func(n int) int { return (n + 3) &^ 3 }
		mode, size, length := field(1), field(6), field(11)
		name := string(b[at+110 : at+110+length-1])
		if b[at+110+length-1] != 0 {
			t.Fatalf("the name %q does not end", name)
		}
		start := up(at + 110 + length)
		if name == "TRAILER!!!" {
			return out
		}
		if parent := filepath.Dir(name); parent != "." && out[parent].mode&0o040000 == 0 {
			t.Errorf("%s comes before its folder", name)
		}
		out[name] = entry{mode, string(b[start : start+size])}
		at = up(start + size)
	}
}

func TestWrite(t *testing.T) {
	k, guest := fake(t)
	for _, all := range []initramfs.Modules{initramfs.EveryModule, initramfs.BootModules} {
		var first, second bytes.Buffer
		for _, w := range []*bytes.Buffer{&first, &second} {
			if err := initramfs.Write(w, initramfs.Options{Guest: guest, Kernel: k, Modules: all}); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(first.Bytes(), second.Bytes()) {
			t.Error("the same input gives other bytes")
		}
		files := unpack(t, first.Bytes())
		if f := files["init"]; f.mode != 0o100111 || f.data != "program" {
			t.Errorf("init is %+v", f)
		}
		if f := files["sbin/modprobe"]; f.mode != 0o120777 || f.data != "/init" {
			t.Errorf("modprobe is %+v", f)
		}
		if got, want := files["modules/boot"].data, "virtio_ring\nvirtio_blk\nlibcrc32c\nerofs\n"; got != want {
			t.Errorf("loads %q, want %q", got, want)
		}
		if f := files["modules/erofs.ko"]; f.data != "module erofs" {
			t.Errorf("erofs is %+v", f)
		}
		if _, ok := files["modules/squashfs.ko"]; ok != (all == initramfs.EveryModule) {
			t.Errorf("a module that is not needed at once: %v", ok)
		}
	}
	path := filepath.Join(t.TempDir(), "initramfs")
	if err := initramfs.WriteFile(path, initramfs.Options{Guest: guest + "x", Kernel: k}); err == nil {
		t.Error("a guest that is not there")
	}
	if es, _ := os.ReadDir(filepath.Dir(path)); len(es) != 0 {
		t.Errorf("a failure left %v", es)
	}
	if err := initramfs.WriteFile(path, initramfs.Options{Guest: guest, Kernel: k}); err != nil {
		t.Error(err)
	}
}

func TestFind(t *testing.T) {
	k, _ := fake(t)
	got, err := initramfs.Find("6.12", t.TempDir(), filepath.Dir(k.Image))
	if err != nil || got != k {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := initramfs.Find("5.10", filepath.Dir(k.Image)); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("a kernel that is not there: %v", err)
	}
}

func TestIndex(t *testing.T) {
	got, err := initramfs.ParseIndex(bytes.NewReader(index.Append(nil)))
	if err != nil || !reflect.DeepEqual(got, index) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"a\n", "a b\n", "../a - -\n", "a b -\nb - -\n", "a  - -\n"} {
		if x, err := initramfs.ParseIndex(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is %+v", bad, x)
		}
	}
}

func FuzzParseIndex(f *testing.F) {
	f.Add(index.Append(nil))
	f.Add([]byte("a - -\nb a c,d\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := initramfs.ParseIndex(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := initramfs.ParseIndex(bytes.NewReader(x.Append(nil)))
		if err != nil || len(again) != len(x) {
			t.Errorf("%+v, %v", again, err)
		}
	})
}

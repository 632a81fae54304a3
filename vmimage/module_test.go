package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/dsec-go/dsec/vm/initramfs"
)

// TestModules reads what a real kernel's modules say of themselves, and checks
// the index that was made of it.
func TestModules(t *testing.T) {
	k, err := initramfs.Find(initramfs.DefaultVersion, "../bin/vm")
	if err != nil {
		t.Skip("feature guest kernel: ", err)
	}
	b, err := os.ReadFile(filepath.Join(k.Modules, "erofs.ko"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := parseModule("erofs", b)
	if err != nil || !slices.Contains(m.Needs, "libcrc32c") || !slices.Contains(m.Aliases, "fs_erofs") {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := parseModule("none", b[:1000]); err == nil {
		t.Error("half a module was read")
	}
	index, err := k.Index()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"virtio_mmio", "virtio_blk", "virtio_pmem", "nd_pmem", "erofs", "overlay", "virtio_balloon", "virtio_rng", "vmw_vsock_virtio_transport"} {
		if !slices.ContainsFunc(index, func(m initramfs.Module) bool { return m.Name == name }) {
			t.Errorf("the kernel has no module %s, which machines need", name)
		}
	}
}

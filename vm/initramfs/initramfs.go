// Package initramfs makes the first file system of a microVM: the guest program
// as /init, the kernel modules that the machine needs, and nothing else. It
// also says where a kernel and its modules lie on the host, as cmd vmimage left
// them.
//
// A node makes it from its own guest program, so that host and guest are always
// of one version, and package vm's names hold on both sides. The result depends
// on the input alone: same files, same bytes.
//
// It is not compressed: under emulation unpacking costs more than reading.
//
// Read next: package vm, which has the guest's side.
package initramfs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/vm"
)

// DefaultVersion is the kernel that machines boot unless told otherwise.
const DefaultVersion = "6.12"

// IndexFile is the name of the index in a folder of modules.
const IndexFile = "index"

// Boot are the modules that a machine loads at once, in this order; a kernel
// may lack some, or have them built in.
var Boot = []string{
	"virtio_mmio", "virtio_pci", "virtio_console", "virtio_blk", "virtio_balloon", "virtio_rng", "virtio_net",
	"ext4", "erofs", "overlay", "fuse",
	"virtio_pmem", "nd_pmem", "vmw_vsock_virtio_transport", "vsock_loopback",
}

// Kernel is a kernel on this host.
type Kernel struct {
	Version string // major and minor
	Image   string // a file that QEMU boots
	Modules string // folder of decompressed modules and their index
}

// At says where a kernel of a version is in a folder, there or not.
func At(dir, version string) Kernel {
	return Kernel{Version: version, Image: filepath.Join(dir, "vmlinuz-"+version), Modules: filepath.Join(dir, "modules-"+version)}
}

// Find gives a kernel of a version in the first of the folders that has it. It
// is Unsupported when none has.
func Find(version string, dirs ...string) (Kernel, error) {
	for _, dir := range dirs {
		k := At(dir, version)
		if _, err := os.Stat(k.Image); err == nil {
			if _, err := os.Stat(filepath.Join(k.Modules, IndexFile)); err == nil {
				return k, nil
			}
		}
	}
	return Kernel{}, dsec.Errorf(dsec.Unsupported, "no guest kernel %s in %s: make kernel fetches it", version, strings.Join(dirs, ", "))
}

// Module is one line of an index.
type Module struct {
	Name    string
	Needs   []string // modules to load before it
	Aliases []string // by which the kernel asks for it
}

// Index is what a folder of modules holds, each module behind those it needs.
type Index []Module

// Append writes an index as text: a module a line, fields parted by spaces.
func (x Index) Append(b []byte) []byte {
	for _, m := range x {
		b = fmt.Appendf(b, "%s %s %s\n", m.Name, orDash(m.Needs), orDash(m.Aliases))
	}
	return b
}

func orDash(s []string) string {
	if len(s) == 0 {
		return "-"
	}
	return strings.Join(s, ",")
}

// ParseIndex reads what Append wrote.
func ParseIndex(r io.Reader) (Index, error) {
	list := func(s string) []string {
		if s == "-" {
			return nil
		}
		return strings.Split(s, ",")
	}
	var x Index
	seen := map[string]bool{}
	for s := bufio.NewScanner(r); ; {
		if !s.Scan() {
			return x, s.Err()
		}
		f := strings.Split(s.Text(), " ")
		if len(f) != 3 || f[0] == "" || strings.Contains(f[0], "/") {
			return nil, fmt.Errorf("index of modules: line %d is none", len(x)+1)
		}
		m := Module{Name: f[0], Needs: list(f[1]), Aliases: list(f[2])}
		for _, n := range m.Needs {
			if !seen[n] {
				return nil, fmt.Errorf("index of modules: %s comes before %s, which it needs", m.Name, n)
			}
		}
		seen[m.Name] = true
		x = append(x, m)
	}
}

// Index reads the index of the kernel's modules.
func (k Kernel) Index() (Index, error) {
	f, err := os.Open(filepath.Join(k.Modules, IndexFile))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ParseIndex(f)
}

// Closure gives the named modules with all they need, in the order of x.
func (x Index) Closure(names []string) Index {
	want := map[string]bool{}
	for _, n := range names {
		want[n] = true
	}
	for i := len(x) - 1; i >= 0; i-- { // needs come earlier
		if want[x[i].Name] {
			for _, n := range x[i].Needs {
				want[n] = true
			}
		}
	}
	var out Index
	for _, m := range x {
		if want[m.Name] {
			out = append(out, m)
		}
	}
	return out
}

// Options say what goes into an initramfs. Guest and Kernel are required.
type Options struct {
	Guest  string // path of the guest program, which must be static
	Kernel Kernel

	Modules Modules
}

// Modules chooses modules.
type Modules int

// The choices of modules: every one of the kernel's folder, so that the kernel
// finds what a workload makes it ask for, or those of Boot alone.
const (
	EveryModule Modules = iota
	BootModules
)

// Write writes an initramfs.
func Write(w io.Writer, o Options) error {
	index, err := o.Kernel.Index()
	if err != nil {
		return fmt.Errorf("read modules: %w", err)
	}
	boot := index.Closure(Boot)
	if o.Modules == BootModules {
		index = boot
	}
	a := NewArchive(w)
	for _, d := range vm.Folders {
		a.Folder(strings.TrimPrefix(d, "/"))
	}
	a.Link("sbin/modprobe", vm.InitProgram)
	a.Device("dev/console", 0o600, 5, 1)
	a.Device("dev/null", 0o666, 1, 3)
	var order []byte
	for _, m := range boot {
		order = append(order, m.Name+"\n"...)
	}
	at := strings.TrimPrefix(vm.ModulesDir, "/") + "/"
	a.File(at+vm.BootList, 0o444, order)
	a.File(at+IndexFile, 0o444, index.Append(nil))
	for _, m := range index {
		b, err := os.ReadFile(filepath.Join(o.Kernel.Modules, m.Name+".ko"))
		if err != nil {
			return err
		}
		a.File(at+m.Name+".ko", 0o444, b)
	}
	guest, err := os.ReadFile(o.Guest)
	if err != nil {
		return fmt.Errorf("read guest program: %w", err)
	}
	// Executable and not readable: nobody who is not root looks into it.
	a.File(strings.TrimPrefix(vm.InitProgram, "/"), 0o111, guest)
	return a.Close()
}

// WriteFile makes an initramfs at path, which appears whole or not at all.
func WriteFile(path string, o Options) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".initramfs-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // renamed when all went well
	w := bufio.NewWriterSize(f, 1<<20)
	err = Write(w, o)
	if err = errors.Join(err, w.Flush(), f.Chmod(0o644), f.Close()); err != nil {
		return fmt.Errorf("make initramfs: %w", err)
	}
	return os.Rename(f.Name(), path)
}

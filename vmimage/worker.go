package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dsec-go/dsec/vm/initramfs"
)

// workerModules are what a node in a virtual machine needs of its kernel.
var workerModules = []string{
	"virtio_pci", "virtio_blk", "virtio_net", "ext4", "loop", "erofs", "overlay", "fuse", "virtiofs",
	"zram", "lzo_rle", // the compression that zram begins with, until 6.12
}

// workerFolders are the folders of a worker's root, those before what is in them.
var workerFolders = []string{
	"dev", "proc", "sys", "run", "tmp", "root", "data", "share", "etc", "var", "var/lib", "lib", "lib/modules",
	"bin", "sbin", "usr", "usr/bin", "usr/sbin",
}

// workerFiles are its files that hold a few lines.
var workerFiles = map[string]string{
	"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
	"etc/group":  "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
	"etc/hosts":  "127.0.0.1\tlocalhost worker\n",
	"etc/udhcpc": "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\nip route add default via $router\n",
}

const busybox = "/bin/busybox" // Debian's static one

// additions are more programs for the image: where they go, and where they come
// from.
type additions map[string]string

// String gives nothing: there is no default to tell.
func (additions) String() string { return "" }

// Set takes PATH=SOURCE.
func (a additions) Set(s string) error {
	to, from, ok := strings.Cut(s, "=")
	if !ok {
		return fmt.Errorf("%q is not PATH=SOURCE", s)
	}
	a[strings.TrimPrefix(path.Clean("/"+to), "/")] = from
	return nil
}

// worker makes the image of a worker VM: an initramfs that holds the program
// worker, a node's two programs, busybox, and the modules of one kernel. It is
// read into memory as a whole at boot.
func (t tool) worker(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("vmimage worker", flag.ContinueOnError)
	version := f.String("kernel", initramfs.DefaultVersion, "`version` of the kernel, 6.12 or 6.1")
	out := f.String("o", "", "`file` to write (default worker-VERSION.cpio beside the kernel)")
	bin := f.String("bin", "bin", "`folder` of dsec, dsec-guest and worker")
	add := additions{}
	f.Var(add, "add", "one more program, as `PATH=SOURCE`; may be given again")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *out == "" {
		*out = filepath.Join(t.out, "worker-"+*version+".cpio")
	}
	if err := t.kernel(ctx, *version); err != nil {
		return fmt.Errorf("kernel %s: %w", *version, err)
	}
	add["init"], add["bin/busybox"] = filepath.Join(*bin, "worker"), busybox
	for _, p := range []string{"dsec", "dsec-guest"} {
		add["bin/"+p] = filepath.Join(*bin, p)
	}
	applets, err := command(ctx, ".", busybox, "--list-full")
	if err != nil {
		return fmt.Errorf("%w: the make targets install busybox-static", err)
	}
	part, err := os.CreateTemp(filepath.Dir(*out), ".worker-")
	if err != nil {
		return err
	}
	defer os.Remove(part.Name()) //nolint:errcheck // renamed when all went well
	w := bufio.NewWriterSize(part, 1<<20)
	err = writeWorker(w, initramfs.At(t.out, *version), add, strings.Fields(string(applets)))
	if err = errors.Join(err, w.Flush(), part.Chmod(0o644), part.Close()); err != nil {
		return fmt.Errorf("make worker image: %w", err)
	}
	return os.Rename(part.Name(), *out)
}

func writeWorker(w io.Writer, k initramfs.Kernel, programs additions, applets []string) error {
	a := initramfs.NewArchive(w)
	folders := map[string]bool{}
	for _, d := range workerFolders {
		folders[d] = true
		a.Folder(d)
	}
	a.Device("dev/console", 0o600, 5, 1)
	a.Device("dev/null", 0o666, 1, 3)
	for name, text := range workerFiles {
		a.File(name, 0o755, []byte(text))
	}
	if err := writeWorkerModules(a, k); err != nil {
		return err
	}
	for to, from := range programs {
		b, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if d := path.Dir(to); d != "." && !folders[d] {
			folders[d] = true
			a.Folder(d)
		}
		a.File(to, 0o755, b)
	}
	for _, l := range applets {
		if programs[l] == "" {
			a.Link(l, busybox)
		}
	}
	return a.Close()
}

// writeWorkerModules puts modules into an image, and the list by which package
// main of worker loads them.
func writeWorkerModules(a *initramfs.Archive, k initramfs.Kernel) error {
	index, err := k.Index()
	if err != nil {
		return fmt.Errorf("read modules: %w", err)
	}
	want := map[string]bool{}
	for _, n := range workerModules {
		want[n] = true
	}
	var order []string
	for _, m := range slices.Backward(index) { // what a module needs comes before it
		if !want[m.Name] {
			continue
		}
		for _, n := range m.Needs {
			want[n] = true
		}
		b, err := os.ReadFile(filepath.Join(k.Modules, m.Name+".ko"))
		if err != nil {
			return err
		}
		name := "lib/modules/" + m.Name + ".ko"
		a.File(name, 0o644, b)
		order = append(order, "/"+name+"\n")
	}
	slices.Reverse(order)
	a.File("lib/modules/order", 0o644, []byte(strings.Join(order, "")))
	return nil
}

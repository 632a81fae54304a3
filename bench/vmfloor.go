package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/microvm"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm/initramfs"
)

//go:embed vmfloor.c
var vmFloorSource []byte

// vmFloor is bare QEMU with an agent in C: the least that a microVM costs. It
// boots a guest once, saves it by QEMU's own means, and loads it for each
// machine, whose disks are bound late.
type vmFloor struct {
	dir    string
	kernel initramfs.Kernel
	accel  string
	serial int
}

// Sizes of the floor's machines.
const (
	vmFloorRAM  = 256 << 20
	vmFloorDisk = 64 << 30
)

// vmFloorModules are what its guest loads, in order; one that the kernel has
// built in is not there.
var vmFloorModules = []string{"virtio_mmio", "virtio_blk", "libcrc32c", "erofs", "overlay"}

// buildVMFloor compiles the agent, boots a guest with it, and saves it.
func buildVMFloor(ctx context.Context, dir string, k initramfs.Kernel) (*vmFloor, error) {
	f := &vmFloor{dir: dir, kernel: k}
	v, err := qemu.Accelerator(ctx, k.Image, dir)
	if err != nil {
		return nil, err
	}
	f.accel = v.Accel
	agent := filepath.Join(dir, "vmfloor")
	if err := os.WriteFile(agent+".c", vmFloorSource, 0o644); err != nil {
		return nil, err
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "the floor is a C program and this host has no compiler: install gcc and libc6-dev")
	}
	if out, err := exec.CommandContext(ctx, cc, "-Os", "-static", "-s", "-o", agent, agent+".c").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the floor: %w: %s", err, bytes.TrimSpace(out))
	}
	if err := f.initramfs(agent); err != nil {
		return nil, err
	}
	if err := f.template(ctx); err != nil {
		return nil, fmt.Errorf("save the floor's guest: %w", err)
	}
	return f, nil
}

func (f *vmFloor) path(name string) string { return filepath.Join(f.dir, name) }

func (f *vmFloor) initramfs(agent string) error {
	program, err := os.ReadFile(agent)
	if err != nil {
		return err
	}
	out, err := os.Create(f.path("vmfloor.img"))
	if err != nil {
		return err
	}
	defer out.Close()
	a := initramfs.NewArchive(out)
	a.Folder("dev")
	a.Folder("proc")
	a.Folder("modules")
	a.Device("dev/console", 0o600, 5, 1)
	a.File("init", 0o755, program)
	for i, m := range vmFloorModules {
		b, err := os.ReadFile(filepath.Join(f.kernel.Modules, m+".ko"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		a.File(fmt.Sprintf("modules/%02d-%s.ko", i, m), 0o644, b)
	}
	return errors.Join(a.Close(), out.Close())
}

// vmBox is one machine of the floor's.
type vmBox struct {
	dir  string
	proc *qemu.Process
	conn net.Conn
	r    *bufio.Reader
}

// start starts a process; shared is for the one that is saved.
func (f *vmFloor) start(ctx context.Context, incoming bool) (*vmBox, error) {
	f.serial++
	b := &vmBox{dir: f.path("vm" + strconv.Itoa(f.serial))}
	if err := os.Mkdir(b.dir, 0o711); err != nil {
		return nil, err
	}
	files := &qemu.Files{}
	share := "on"
	if incoming {
		share = "off"
	}
	args := []string{
		"-machine", "microvm,memory-backend=mem,rtc=on", "-cpu", "max", "-smp", "1", "-m", "256M", "-serial", "chardev:console",
		"-object", "memory-backend-file,id=mem,size=256M,share=" + share + ",mem-path=" + files.OpenPath(f.path("memory"), os.O_RDWR),
		"-kernel", files.OpenPath(f.kernel.Image, os.O_RDONLY), "-initrd", files.OpenPath(f.path("vmfloor.img"), os.O_RDONLY),
		"-append", microvm.KernelLine(f.accel),
		"-device", "virtio-serial-device", "-chardev", "socket,server=on,wait=off,id=port,fd=" + files.Listen(filepath.Join(b.dir, "port")),
		"-device", "virtserialport,chardev=port,name=floor",
	}
	for _, d := range []struct{ name, ro string }{{"root", "on"}, {"upper", "off"}} {
		args = append(args,
			"-blockdev", fmt.Sprintf("driver=null-co,node-name=%s.0,size=%d,read-zeroes=on,read-only=%s", d.name, int64(vmFloorDisk), d.ro),
			"-blockdev", fmt.Sprintf("driver=raw,node-name=%s,file=%s.0,read-only=%s", d.name, d.name, d.ro),
			"-device", "virtio-blk-device,drive="+d.name)
	}
	var err error
	if b.proc, err = qemu.Start(ctx, qemu.Config{Dir: b.dir, Args: args, Files: files, Accel: f.accel, Incoming: incoming}); err != nil {
		return nil, err
	}
	if b.conn, err = net.Dial("unix", filepath.Join(b.dir, "port")); err != nil {
		b.end()
		return nil, err
	}
	b.r = bufio.NewReader(b.conn)
	return b, nil
}

// template boots the guest and saves it.
func (f *vmFloor) template(ctx context.Context) error {
	mem, err := os.Create(f.path("memory"))
	if err != nil {
		return err
	}
	if err := errors.Join(mem.Truncate(vmFloorRAM), mem.Close()); err != nil {
		return err
	}
	b, err := f.start(ctx, false)
	if err != nil {
		return err
	}
	defer b.end()
	if err := b.say(ctx, "ping", "ok"); err != nil {
		return err
	}
	state, err := os.Create(f.path("state"))
	if err != nil {
		return err
	}
	defer state.Close()
	return b.proc.Save(ctx, state, qemu.SaveOptions{IgnoreShared: true})
}

// load gives a copy of the guest that stands still.
func (f *vmFloor) load(ctx context.Context) (*vmBox, error) {
	b, err := f.start(ctx, true)
	if err != nil {
		return nil, err
	}
	state, err := os.Open(f.path("state"))
	if err == nil {
		err = b.proc.Load(ctx, state, qemu.SaveOptions{IgnoreShared: true})
		state.Close()
	}
	if err != nil {
		b.end()
		return nil, err
	}
	return b, nil
}

// say sends a line and compares the answer, unless want is empty.
func (b *vmBox) say(ctx context.Context, line, want string) error {
	stop := context.AfterFunc(ctx, func() { b.conn.Close() })
	defer stop()
	if _, err := b.conn.Write([]byte(line + "\n")); err != nil {
		return err
	}
	got, err := b.r.ReadString('\n')
	if err != nil {
		return fmt.Errorf("%s: %w", line, errors.Join(err, ctx.Err()))
	}
	if got = strings.TrimSpace(got); want != "" && got != want {
		return fmt.Errorf("the floor's agent answers %q to %q", got, line)
	}
	return nil
}

func (b *vmBox) end() {
	if b.conn != nil {
		b.conn.Close()
	}
	b.proc.Kill()
	os.RemoveAll(b.dir) //nolint:errcheck // the run's folder goes too
}

// bind puts disks under a machine: layers as META,DATA end to end, and a copy
// of an empty file system. It gives where the layers lie.
func (f *vmFloor) bind(ctx context.Context, b *vmBox, layers []string) (string, error) {
	var extents []qemu.Extent
	var line string
	at := int64(0)
	for _, l := range layers {
		begin := at
		for _, path := range strings.Split(l, ",") {
			file, err := os.Open(path)
			if err != nil {
				return "", err
			}
			fi, err := file.Stat()
			var name string
			if err == nil {
				name, err = b.proc.AddFile(ctx, file)
			}
			file.Close()
			if err != nil {
				return "", err
			}
			size := (fi.Size() + 4095) &^ 4095
			extents = append(extents, qemu.Extent{File: name, Size: size})
			at += size
		}
		line += fmt.Sprintf(" %d:%d", begin/512, (at-begin)/512)
	}
	desc, err := qemu.ConcatFile(extents)
	if err != nil {
		return "", err
	}
	defer desc.Close()
	name, err := b.proc.AddFile(ctx, desc)
	if err != nil {
		return "", err
	}
	if err := b.proc.Swap(ctx, "root", map[string]any{"driver": "vmdk", "read-only": true, "file": map[string]any{"driver": "file", "filename": name, "read-only": true}}); err != nil {
		return "", err
	}
	upper := filepath.Join(b.dir, "upper")
	if err := copyHoles(upper, f.path("blank")); err != nil {
		return "", err
	}
	file, err := os.OpenFile(upper, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if name, err = b.proc.AddFile(ctx, file); err != nil {
		return "", err
	}
	return line, b.proc.Swap(ctx, "upper", map[string]any{"driver": "file", "filename": name})
}

// blank makes the empty file system that machines get copies of.
func (f *vmFloor) blank(ctx context.Context, size int64) error {
	out, err := os.Create(f.path("blank"))
	if err != nil {
		return err
	}
	if err := errors.Join(out.Truncate(size), out.Close()); err != nil {
		return err
	}
	mkfs := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode", "-E", "nodiscard,lazy_itable_init=1", f.path("blank"))
	mkfs.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := mkfs.CombinedOutput(); err != nil {
		return fmt.Errorf("make file system: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// warm does what a member of a pool has done.
func (f *vmFloor) warm(ctx context.Context, b *vmBox, layers []string) error {
	if err := f.enter(ctx, b, layers); err != nil {
		return err
	}
	return errors.Join(b.say(ctx, "unmount", "ok"), b.proc.Stop(ctx))
}

// enter times a machine from its disks to the end of its first program.
func (f *vmFloor) enter(ctx context.Context, b *vmBox, layers []string) error {
	at, err := f.bind(ctx, b, layers)
	if err != nil {
		return err
	}
	if err := b.proc.Cont(ctx); err != nil {
		return err
	}
	return errors.Join(b.say(ctx, "mount"+at, "ok"), b.say(ctx, "exec "+binTrue, "0"))
}

// execs times programs in a machine.
func (b *vmBox) execs(ctx context.Context, n int, to *Sample) error {
	for range n {
		begin := time.Now()
		if err := b.say(ctx, "exec "+binTrue, "0"); err != nil {
			return err
		}
		to.Took(time.Since(begin))
	}
	return nil
}

// copyHoles copies a file but for its holes.
func copyHoles(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(fi.Size()); err != nil {
		return err
	}
	for off := int64(0); ; {
		begin, err := unix.Seek(int(in.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		if off, err = unix.Seek(int(in.Fd()), begin, unix.SEEK_HOLE); err != nil {
			return err
		}
		b := make([]byte, off-begin)
		if _, err := in.ReadAt(b, begin); err != nil {
			return err
		}
		if _, err := out.WriteAt(b, begin); err != nil {
			return err
		}
	}
}

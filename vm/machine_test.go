package vm_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/vm/initramfs"
	"github.com/dsec-go/dsec/wire"
)

// guestWait is how long a machine may take to boot on a busy host.
const guestWait = 2 * time.Minute

// madeDir is the folder of made's files; empty if no test needed any.
var madeDir string

// made are the files that all tests boot from.
var made = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "vm-test-")
	if err != nil {
		return "", err
	}
	madeDir = dir
	guest := filepath.Join(dir, "dsec-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", guest, "../cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the guest: %w\n%s", err, out)
	}
	k, err := initramfs.Find(initramfs.DefaultVersion, "../bin/vm")
	if err != nil {
		return dir, err
	}
	return dir, initramfs.WriteFile(filepath.Join(dir, "initramfs"), initramfs.Options{Guest: guest, Kernel: k, Modules: initramfs.EveryModule})
})

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(madeDir)
	os.Exit(code)
}

// instance is a machine of this test.
type instance struct {
	t       *testing.T
	dir     string
	cmd     *exec.Cmd
	console *lockedBuffer
	dead    chan struct{}
	control *vm.Client
	guest   *wire.Client
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// disk is a drive of a machine.
type disk struct {
	serial string
	file   string
	ro     bool
}

type config struct {
	memory int    // MiB
	initrd string // default one made of the guest
	disks  []disk
	args   []string
	bus    string // device, or pci for a machine of that kind
	ram    string // file of the machine's memory
}

// boot starts a machine and does not wait for it.
func boot(t *testing.T, c config) *instance {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("feature qemu: ", err)
	}
	files, err := made()
	if dsec.KindOf(err) == dsec.Unsupported {
		t.Skip("feature guest kernel: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	k, _ := initramfs.Find(initramfs.DefaultVersion, "../bin/vm")
	v := &instance{t: t, dir: t.TempDir(), console: &lockedBuffer{}, dead: make(chan struct{})}
	if c.memory == 0 {
		c.memory = 256
	}
	machine, memory := "q35", fmt.Sprintf("%d,maxmem=4G", c.memory)
	if c.bus == "" {
		c.bus, machine, memory = "device", "microvm", fmt.Sprint(c.memory)
	}
	if c.ram != "" {
		machine += ",memory-backend=ram"
		c.args = append(c.args, "-object", fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=%s", c.memory, c.ram))
	}
	if c.initrd == "" {
		c.initrd = filepath.Join(files, "initramfs")
	}
	args := []string{
		"-M", machine, "-accel", "tcg", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-m", memory, "-kernel", k.Image, "-initrd", c.initrd,
		"-append", "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable tsc_early_khz=" + khz(t),
		"-serial", "stdio",
		"-qmp", "unix:" + filepath.Join(v.dir, "qmp") + ",server=on,wait=off",
		"-device", "virtio-serial-" + c.bus,
	}
	for _, name := range []string{vm.ControlPort, vm.WirePort} {
		args = append(args, "-chardev", "socket,id="+name+",server=on,wait=off,path="+filepath.Join(v.dir, name),
			"-device", "virtserialport,chardev="+name+",name="+name)
	}
	for _, d := range c.disks {
		args = append(args, "-blockdev", fmt.Sprintf("raw,node-name=%s,read-only=%v,file.driver=file,file.node-name=%s-file,file.filename=%s", d.serial, onOff(d.ro), d.serial, d.file),
			"-device", fmt.Sprintf("virtio-blk-%s,drive=%s,serial=%s", c.bus, d.serial, d.serial))
	}
	v.cmd = exec.Command("qemu-system-x86_64", append(args, c.args...)...)
	v.cmd.Stdout, v.cmd.Stderr = v.console, v.console
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		v.cmd.Wait() //nolint:errcheck // its end is all that counts
		close(v.dead)
	}()
	t.Cleanup(func() {
		v.control.Close()
		v.guest.Close()
		v.cmd.Process.Kill() //nolint:errcheck // gone is as good
		<-v.dead
		if t.Failed() {
			t.Logf("console:\n%s", v.console)
		}
	})
	v.control = vm.NewClient(v.dial(vm.ControlPort))
	v.guest = v.newGuest()
	return v
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// dial gives the function that connects to a port.
func (v *instance) dial(name string) func(context.Context) (io.ReadWriteCloser, error) {
	return func(ctx context.Context) (io.ReadWriteCloser, error) {
		for {
			c, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(v.dir, name))
			if err == nil {
				return c, nil
			}
			select {
			case <-v.dead:
				return nil, dsec.Errorf(dsec.Conflict, "the machine is gone: %s", v.console)
			case <-ctx.Done():
				return nil, err
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
}

func (v *instance) newGuest() *wire.Client {
	dial := v.dial(vm.WirePort)
	return wire.NewClient(wire.Options{Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
		raw, err := dial(ctx)
		if err != nil {
			return nil, err
		}
		return vm.Dial(ctx, raw)
	}})
}

// ctx bounds a step of the test.
func (v *instance) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), guestWait)
	v.t.Cleanup(cancel)
	return ctx
}

// ready waits until the guest answers.
func (v *instance) ready() vm.Info {
	v.t.Helper()
	done := make(chan struct{})
	go func() {
		select {
		case <-v.dead:
			v.control.Close()
		case <-done:
		}
	}()
	defer close(done)
	i, err := v.control.Ping(v.ctx())
	if err != nil {
		v.t.Fatalf("the guest does not answer: %v", err)
	}
	return i
}

// run runs a shell line in the sandbox.
func (v *instance) run(line string) dsec.Result {
	v.t.Helper()
	r, err := v.guest.Commands().Run(v.ctx(), dsec.Call{}, dsec.Command{Shell: line}, nil)
	if err != nil {
		v.t.Fatalf("run %q: %v", line, err)
	}
	return r
}

// want runs a shell line that prints something.
func (v *instance) want(line, out string) {
	v.t.Helper()
	r := v.run(line)
	if got := strings.TrimSpace(string(r.Out)); got != out || r.Code != 0 {
		v.t.Errorf("%s: printed %q, status %d, %s; want %q\n%s", line, got, r.Code, r.Detail, out, r.Err)
	}
}

// qmp sends one command to QEMU and waits for its answer.
func (v *instance) qmp(cmd string, args map[string]any) (result map[string]any) {
	v.t.Helper()
	c, err := net.Dial("unix", filepath.Join(v.dir, "qmp"))
	if err != nil {
		v.t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(guestWait)) //nolint:errcheck
	d := json.NewDecoder(c)
	if args == nil {
		args = map[string]any{}
	}
	for _, m := range []map[string]any{{"execute": "qmp_capabilities"}, {"execute": cmd, "arguments": args}} {
		if err := json.NewEncoder(c).Encode(m); err != nil {
			v.t.Fatal(err)
		}
		for {
			var r map[string]any
			if err := d.Decode(&r); err != nil {
				v.t.Fatal(err)
			}
			if r["error"] != nil {
				v.t.Fatalf("qmp %s: %v", cmd, r["error"])
			}
			if a, ok := r["return"]; ok {
				result, _ = a.(map[string]any)
				break
			}
		}
	}
	return result
}

// flat lays a layer end to end in w and gives its place.
func flat(t *testing.T, w *os.File, name string, archive []byte) vm.Extent {
	t.Helper()
	l := drivertest.TarFiles(t, archive)
	at, err := w.Seek(0, io.SeekEnd)
	if err != nil {
		t.Fatal(err)
	}
	e := vm.Extent{Disk: name, Offset: at}
	for _, f := range append([]string{l.Meta}, l.Data...) {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		w.Write(b) //nolint:errcheck // Close tells
		e.Size += int64(len(b))
	}
	if pad := -e.Size & 4095; pad > 0 {
		w.Write(make([]byte, pad)) //nolint:errcheck
		e.Size += pad
	}
	return e
}

const diskSize = 1 << 30

// disks makes a root disk of the layers, and writable disks.
func disks(t *testing.T, layers ...[]byte) ([]disk, vm.Setup) {
	t.Helper()
	dir := t.TempDir()
	s := vm.Setup{Upper: "upper", Output: "output", Hostname: "sandbox", Hosts: "127.0.0.1\tlocalhost\n", Resolv: "nameserver 127.0.0.1\n",
		Machine: "0123456789abcdef0123456789abcdef", Env: []string{"PATH=/bin", "COLOUR=blue"}, Cwd: "/tmp"}
	f, err := os.Create(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, l := range layers {
		s.Layers = append(s.Layers, flat(t, f, "root", l))
	}
	if err := f.Truncate(diskSize); err != nil {
		t.Fatal(err)
	}
	ds := []disk{{"root", f.Name(), true}}
	for _, d := range []struct {
		name string
		mib  int64
	}{{"upper", 64}, {"output", 64}} {
		file := filepath.Join(dir, d.name)
		if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, d.mib<<20)); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^resize_inode", "-E", "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0", file).CombinedOutput(); err != nil {
			t.Fatalf("mke2fs: %v\n%s", err, out)
		}
		ds = append(ds, disk{d.name, file, false})
	}
	return ds, s
}

func seed() []byte {
	b := make([]byte, 64)
	rand.Read(b) //nolint:errcheck // never fails
	return b
}

// khz is the frequency of this host's processor, which an emulated one counts
// with too and cannot find out in a machine without timers to compare with.
func khz(t *testing.T) string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "cpu MHz")
	_, rest, _ = strings.Cut(rest, ":")
	value, _, _ := strings.Cut(rest, "\n")
	mhz, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(int(mhz * 1000))
}

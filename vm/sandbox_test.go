package vm_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/vm"
)

// tarOf makes a tar of one file.
func tarOf(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))})
	if _, werr := io.WriteString(w, content); errors.Join(err, werr, w.Close()) != nil {
		t.Fatal(err, werr)
	}
	return b.Bytes()
}

// TestMachine boots one machine, makes it a sandbox, and lets the workload and
// the host do their worst.
func TestMachine(t *testing.T) {
	old, first := disks(t, tarOf(t, "old", "what was there before"))
	now, setup := disks(t, drivertest.BusyboxTar(t), tarOf(t, "etc/layer", "two"))
	v := boot(t, config{disks: []disk{old[0], now[1], now[2]}})
	if i := v.ready(); i.Entered || i.Version != dsec.Version || !strings.HasPrefix(i.Kernel, "6.12") || i.Boot <= 0 {
		t.Errorf("the guest says %+v", i)
	}
	first.Upper = ""
	began := time.Now()
	for range 2 {
		if err := v.control.Warm(v.ctx(), first); err != nil {
			t.Fatalf("warm: %v", err)
		}
		t.Logf("warmed after %v", time.Since(began))
	}
	bad := setup
	bad.Layers = []vm.Extent{{Disk: "root", Offset: 512 << 20, Size: 4096}}
	for _, bad := range []vm.Setup{bad, {Upper: "none"}, {Upper: "root"}, {Layers: []vm.Extent{{Disk: "root", Offset: 1, Size: 4096}}}} {
		if err := v.control.Enter(v.ctx(), bad); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("enter %+v: %v", bad, err)
		}
	}
	// Another disk in the same slot: nothing of the first may be read.
	v.qmp("blockdev-add", map[string]any{"driver": "file", "node-name": "other", "filename": now[0].file, "read-only": true})
	v.qmp("blockdev-reopen", map[string]any{"options": []any{map[string]any{"driver": "raw", "node-name": "root", "read-only": true, "file": "other"}}})

	if _, err := v.control.Restored(v.ctx(), vm.Restored{Now: time.Now(), Seed: seed()}); err != nil {
		t.Fatalf("restored: %v", err)
	}
	setup.Limits = vm.Limits{Memory: 64 << 20, Pids: 200, CPU: 1}
	began = time.Now()
	if err := v.control.Enter(v.ctx(), setup); err != nil {
		t.Fatalf("enter: %v", err)
	}
	t.Logf("entered in %v", time.Since(began))
	for range 3 {
		began = time.Now()
		v.run("true")
		t.Logf("true in %v", time.Since(began))
	}
	if err := v.control.Enter(v.ctx(), setup); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("a second enter: %v", err)
	}
	v.want("cat /proc/sys/kernel/random/uuid >/dev/null; ls / | grep old; cat /etc/layer", "two")
	v.want("hostname; cat /etc/hostname; echo $COLOUR; pwd; id -u", "sandbox\nsandbox\nblue\n/tmp\n0")
	v.want("cat /etc/machine-id /etc/resolv.conf /etc/hosts", setup.Machine+"\nnameserver 127.0.0.1\n127.0.0.1\tlocalhost")
	t.Run("Walls", v.testWalls)
	t.Run("RootIsRoot", v.testRootIsRoot)
	t.Run("Tree", v.testTree)
	t.Run("OOM", v.testOOM)
	t.Run("ForkBomb", v.testForkBomb)
	t.Run("DiskFull", v.testDiskFull)
	t.Run("Freeze", v.testFreeze)
	t.Run("Reconnect", v.testReconnect)
	t.Run("Restored", v.testRestored)
	t.Run("Usage", v.testUsage)
	t.Run("Vsock", v.testVsock)
	t.Run("Reboot", v.testReboot) // the last
}

// testWalls looks for the agent and what it has from inside.
func (v *instance) testWalls(t *testing.T) {
	v.want("cat /proc/mounts | grep -e ^/dev -e initramfs -e output; set -- /proc/[0-9]*; echo $#; ls /dev | grep -e vport -e vd; true", "2")
	v.want("cat /proc/1/comm", "init")
	v.want("cat /proc/self/cgroup | grep -c ^0::/c; cat /sys/fs/cgroup/memory.max", "1\n67108864")
	v.want("ls /init /modules /bin/null 2>&1 | grep -c 'No such'", "3")
	v.want("ls /proc/self/fd | wc -l", "4") // and that of ls's own
}

// testRootIsRoot does what needs a kernel of one's own.
func (v *instance) testRootIsRoot(t *testing.T) {
	v.want("mkdir -p /mnt/a && mount -t tmpfs none /mnt/a && echo x >/mnt/a/f && umount /mnt/a && echo ok", "ok")
	v.want("mknod /tmp/null c 1 3 && echo x >/tmp/null && echo ok", "ok")
	v.want("mount -t squashfs /dev/loop0 /mnt 2>/dev/null; grep -c squashfs /proc/filesystems", "1") // the kernel asked for the module
	v.want("sysctl -w kernel.msgmax=9000", "kernel.msgmax = 9000")
	v.want("ifconfig lo | grep -c 'inet addr:127.0.0.1'", "1")
	v.want("mkdir /sys/fs/cgroup/mine && cat /sys/fs/cgroup/mine/cgroup.controllers | grep -c memory; rmdir /sys/fs/cgroup/mine", "1")
	// A file written through the host's calls lands where the workload mounts.
	v.want("mkdir /m2 && mount -t tmpfs none /m2 && echo ok", "ok")
	if _, err := v.guest.Files().Write(v.ctx(), dsec.Call{}, dsec.FileOp{Path: "/m2/f"}, dsec.WriteOptions{}, strings.NewReader("there")); err != nil {
		v.t.Fatal(err)
	}
	v.want("cat /m2/f; umount /m2; ls /m2", "there")
}

// testTree kills a command whose children try to get away.
func (v *instance) testTree(*testing.T) {
	r, err := v.guest.Commands().Run(v.ctx(), dsec.Call{}, dsec.Command{Shell: "setsid sleep 1000 & (setsid sleep 1001 &) ; sleep 1002", Timeout: 300 * time.Millisecond}, nil)
	if err != nil || r.Outcome != dsec.TimedOut {
		v.t.Errorf("%+v, %v", r, err)
	}
	v.want("ps | grep -c '[s]leep 100[0-9]'; true", "0")
}

func (v *instance) testOOM(*testing.T) {
	r := v.run("x=y; while true; do x=$x$x; done")
	if r.Outcome != dsec.OutOfMemory {
		v.t.Errorf("%+v", r.CommandStatus)
	}
	v.want("echo alive", "alive")
}

func (v *instance) testForkBomb(*testing.T) {
	r, err := v.guest.Commands().Run(v.ctx(), dsec.Call{}, dsec.Command{Shell: "b() { b | b & }; b; sleep 100", Timeout: 2 * time.Second}, nil)
	if err != nil || r.Outcome != dsec.TimedOut {
		v.t.Errorf("%+v, %v", r.CommandStatus, err)
	}
	v.want("echo alive", "alive")
}

func (v *instance) testDiskFull(*testing.T) {
	r := v.run("dd if=/dev/zero of=/full bs=64k 2>&1")
	if r.Code == 0 || !strings.Contains(string(r.Out), "No space") {
		v.t.Errorf("%+v %s", r.CommandStatus, r.Out)
	}
	// What commands print is kept elsewhere.
	r = v.run("dd if=/dev/zero bs=64k count=80 2>/dev/null")
	if r.Stdout.Total != 80*64<<10 || r.Stdout.Kept != r.Stdout.Total {
		v.t.Errorf("%+v", r.CommandStatus)
	}
	v.want("rm /full && sync && echo x >/tmp/y && cat /tmp/y", "x")
}

// testFreeze holds back a write, and lets it go on.
func (v *instance) testFreeze(*testing.T) {
	v.run("sync")
	for range 2 { // the second is nothing new
		if err := v.control.Freeze(v.ctx()); err != nil {
			v.t.Fatal(err)
		}
	}
	s, err := v.guest.Commands().Start(v.ctx(), dsec.Call{}, dsec.Command{Shell: "echo $$; echo x >/frozen; echo done"})
	if err != nil {
		v.t.Fatal(err)
	}
	for {
		out, err := v.guest.Commands().Read(v.ctx(), dsec.Call{}, s.ID, dsec.Stdout, 0, 100)
		if err != nil {
			v.t.Fatal(err)
		}
		if len(out) > 0 {
			if strings.Contains(string(out), "done") {
				v.t.Error("a frozen file system was written to")
			}
			break
		}
	}
	for range 2 {
		if err := v.control.Thaw(v.ctx()); err != nil {
			v.t.Fatal(err)
		}
	}
	if s, err = v.guest.Commands().Wait(v.ctx(), dsec.Call{}, s.ID); err != nil || s.Code != 0 {
		v.t.Errorf("%+v, %v", s, err)
	}
	v.want("cat /frozen", "x")
}

// testReconnect breaks connections off in the middle of things, as the death of
// an edge does.
func (v *instance) testReconnect(*testing.T) {
	s, err := v.guest.Commands().Start(v.ctx(), dsec.Call{}, dsec.Command{Shell: "read x; echo got $x", Stdin: dsec.StdinPipe})
	if err != nil {
		v.t.Fatal(err)
	}
	for i := range 5 {
		ctx, cancel := context.WithCancel(context.Background())
		// An upload and a download under way.
		go v.guest.Files().Write(ctx, dsec.Call{}, dsec.FileOp{Path: "/tmp/up"}, dsec.WriteOptions{}, endless{}) //nolint:errcheck
		go func() {
			r, err := v.guest.Files().Read(ctx, dsec.Call{}, dsec.FileOp{Path: "/bin/busybox"}, dsec.ReadRange{})
			if err == nil {
				io.Copy(io.Discard, r) //nolint:errcheck // it is broken off
				r.Close()
			}
		}()
		time.Sleep(time.Duration(20*i) * time.Millisecond) // anywhere in it: no condition to wait for
		v.guest.Close()
		cancel()
		v.guest = v.newGuest()
		v.want("echo alive", "alive")
		v.control.Disconnect() //nolint:errcheck // it is made again
		if i, err := v.control.Ping(v.ctx()); err != nil || !i.Entered {
			v.t.Errorf("%+v, %v", i, err)
		}
	}
	if _, err := v.guest.Commands().Write(v.ctx(), dsec.Call{}, s.ID, dsec.StdinWrite{Data: []byte("this\n"), Close: true}); err != nil {
		v.t.Fatal(err)
	}
	if s, err = v.guest.Commands().Wait(v.ctx(), dsec.Call{}, s.ID); err != nil || s.Code != 0 {
		v.t.Errorf("a command did not outlive its edge: %+v, %v", s, err)
	}
	v.run("rm -f /tmp/up")
}

// endless is bytes of which one in three begins a mark.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = []byte{0xf5, 1, byte(i)}[i%3]
	}
	return len(p), nil
}

func (v *instance) testRestored(*testing.T) {
	boot := string(v.run("cat /proc/sys/kernel/random/boot_id").Out)
	then := time.Now().Add(1000 * time.Hour)
	k, err := v.control.Restored(v.ctx(), vm.Restored{Now: then, Seed: seed(), Hostname: "second", Hosts: "127.0.1.1\tsecond\n", Machine: strings.Repeat("ab", 16)})
	if err != nil {
		v.t.Fatal(err)
	}
	if off := k.Now.Sub(then); off < 0 || off > 10*time.Second {
		v.t.Errorf("the clock is %v off", off)
	}
	if k.Source != "tsc" {
		v.t.Errorf("the clock source is %q\n%s", k.Source, v.run("cat /sys/devices/system/clocksource/clocksource0/*; cat /proc/cmdline; dmesg | grep -i -e tsc -e clocksource").Out)
	}
	v.want("hostname; cat /etc/hostname /etc/hosts /etc/machine-id", "second\nsecond\n127.0.1.1\tsecond\n"+strings.Repeat("ab", 16))
	v.want(fmt.Sprintf("[ $(($(date +%%s) - %d)) -lt 60 ] && echo near", then.Unix()), "near")
	if got := string(v.run("cat /proc/sys/kernel/random/boot_id").Out); got == boot || len(got) != 37 {
		v.t.Errorf("boot_id was %q and is %q", boot, got)
	}
	if _, err := v.control.Restored(v.ctx(), vm.Restored{Seed: []byte("short")}); dsec.KindOf(err) != dsec.Invalid {
		v.t.Errorf("a short seed: %v", err)
	}
}

func (v *instance) testUsage(*testing.T) {
	v.run("dd if=/dev/zero of=/tmp/big bs=1M count=8; sync")
	u, err := v.control.Usage(v.ctx())
	if err != nil || u.CPU <= 0 || u.Memory <= 0 || u.MemoryPeak < 40<<20 || u.OOMKills != 1 || u.Disk < 8<<20 || u.Disk > 16<<20 {
		v.t.Errorf("%+v, %v", u, err)
	}
}

// testReboot ends the sandbox from inside, which ends the machine.
func (v *instance) testReboot(*testing.T) {
	v.guest.Commands().Start(v.ctx(), dsec.Call{}, dsec.Command{Shell: "reboot -f"}) //nolint:errcheck // it may not be answered
	select {
	case <-v.dead:
	case <-v.ctx().Done():
		v.t.Error("the machine lives on")
	}
}

// TestDAX mounts a root from persistent memory, without a page cache.
func TestDAX(t *testing.T) {
	ds, setup := disks(t, drivertest.BusyboxTar(t))
	setup.Layers[0].Disk, setup.Layers[0].DAX = "pmem0", true
	setup.Layers[0].Offset, setup.Layers[0].Size = 0, 0 // all of it
	v := boot(t, config{bus: "pci", disks: ds[1:], args: []string{
		"-object", fmt.Sprintf("memory-backend-file,id=pmem,share=on,readonly=on,mem-path=%s,size=%d", ds[0].file, diskSize),
		"-device", "virtio-pmem-pci,memdev=pmem",
	}})
	v.ready()
	if err := v.control.Warm(v.ctx(), setup); err != nil {
		t.Fatal(err)
	}
	if err := v.control.Enter(v.ctx(), setup); err != nil {
		t.Fatal(err)
	}
	before := v.run("grep ^Cached: /proc/meminfo | tr -dc 0-9").Out
	v.want("cat /bin/* >/dev/null; echo read", "read")
	after := v.run("grep ^Cached: /proc/meminfo | tr -dc 0-9").Out
	var b, a int
	fmt.Sscan(string(before), &b) //nolint:errcheck // 0 shows below
	fmt.Sscan(string(after), &a)  //nolint:errcheck
	if b == 0 || a > b+1024 {
		t.Errorf("the page cache went from %d to %d KiB", b, a)
	}
}

package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/vm/initramfs"
)

// someOS is the init of a guest operating system of a few lines, which starts
// the agent as a service with a control group of its own.
const someOS = `#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for m in $(cat /modules/boot); do
	insmod /modules/$m.ko $(tr ' ' '\n' </proc/cmdline | sed -n "s/^$m\.//p") 2>/dev/null
done
mount -t cgroup2 none /sys/fs/cgroup
echo "+memory +cpu +pids" >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/service
ifconfig lo 127.0.0.1 up
while true; do
	sh -c 'echo $$ >/sys/fs/cgroup/service/cgroup.procs; exec /usr/sbin/dsec-guest agent'
done
`

// makeOS makes an initramfs that is an operating system with the agent in it.
func makeOS(t *testing.T) string {
	t.Helper()
	files, err := made()
	if dsec.KindOf(err) == dsec.Unsupported {
		t.Skip("feature guest kernel: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) []byte {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	k, _ := initramfs.Find(initramfs.DefaultVersion, "../bin/vm")
	index, err := k.Index()
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "os")
	f, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a := initramfs.NewArchive(f)
	for _, d := range []string{"bin", "dev", "proc", "sys", "tmp", "etc", "root", "usr", "usr/sbin", "var", "var/lib", "modules"} {
		a.Folder(d)
	}
	a.Device("dev/console", 0o600, 5, 1)
	a.File("bin/busybox", 0o755, read(drivertest.Busybox))
	applets, err := exec.Command(drivertest.Busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(applets)) {
		if name != "busybox" {
			a.Link("bin/"+name, "busybox")
		}
	}
	a.File("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/tmp:/bin/sh\n"))
	a.File("etc/group", 0o644, []byte("root:x:0:\nalice:x:1000:\n"))
	a.File("usr/sbin/dsec-guest", 0o755, read(filepath.Join(files, "dsec-guest")))
	boot := ""
	for _, m := range index.Closure([]string{"virtio_mmio", "virtio_console", "virtio_blk"}) {
		a.File("modules/"+m.Name+".ko", 0o644, read(filepath.Join(k.Modules, m.Name+".ko")))
		boot += m.Name + "\n"
	}
	a.File("modules/boot", 0o644, []byte(boot))
	a.File("init", 0o755, []byte(someOS))
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestService runs the agent inside an operating system that knows nothing of it.
func TestService(t *testing.T) {
	v := boot(t, config{initrd: makeOS(t)})
	began := time.Now()
	lap := func(what string) {
		t.Logf("%s: %v", what, time.Since(began))
		began = time.Now()
	}
	if i := v.ready(); i.Entered || i.Version != dsec.Version {
		t.Errorf("the guest says %+v", i)
	}
	lap("ready")
	setup := vm.Setup{Hostname: "whole", Hosts: "127.0.0.1\tlocalhost\n", Env: []string{"PATH=/bin", "A=b"}, Cwd: "/tmp", User: "alice",
		Limits: vm.Limits{Memory: 64 << 20, Pids: 100}}
	if err := v.control.Warm(v.ctx(), setup); err != nil {
		t.Fatal(err)
	}
	if err := v.control.Enter(v.ctx(), setup); err != nil {
		t.Fatal(err)
	}
	v.want("hostname; cat /etc/hostname /etc/hosts; echo $A; pwd; id -un", "whole\nwhole\n127.0.0.1\tlocalhost\nb\n/tmp\nalice")
	v.want("cat /proc/1/comm", "init") // the system's own namespaces

	r, err := v.guest.Commands().Run(v.ctx(), dsec.Call{}, dsec.Command{Shell: "setsid sleep 1000 & (setsid sleep 1001 &) ; sleep 1002", Timeout: 300 * time.Millisecond}, nil)
	if err != nil || r.Outcome != dsec.TimedOut {
		t.Errorf("%+v, %v", r.CommandStatus, err)
	}
	v.want("ps | grep -c '[s]leep 100[0-9]'; true", "0")
	if r := v.run("x=y; while true; do x=$x$x; done"); r.Outcome != dsec.OutOfMemory {
		t.Errorf("%+v", r.CommandStatus)
	}
	if u, err := v.control.Usage(v.ctx()); err != nil || u.OOMKills != 1 || u.CPU <= 0 {
		t.Errorf("%+v, %v", u, err)
	}
	then := time.Now().Add(-1000 * time.Hour)
	k, err := v.control.Restored(v.ctx(), vm.Restored{Now: then, Seed: seed(), Hostname: "copy", Machine: strings.Repeat("cd", 16)})
	if off := k.Now.Sub(then); err != nil || off < 0 || off > 10*time.Second {
		t.Errorf("the clock is %v off, %v", off, err)
	}
	v.want("hostname; cat /etc/machine-id", "copy\n"+strings.Repeat("cd", 16))

	lap("commands")
	// An agent that is started again knows nothing, and can be entered again.
	r, err = v.guest.Commands().Run(v.ctx(), dsec.Call{}, dsec.Command{Shell: "kill -9 $(pidof dsec-guest)", User: "root"}, nil)
	if err == nil {
		t.Errorf("the agent's death was answered: %+v", r.CommandStatus)
	}
	lap("killed")
	v.control.Disconnect() //nolint:errcheck // it is made again
	if i := v.ready(); i.Entered {
		t.Errorf("the second agent says %+v", i)
	}
	if err := v.control.Enter(v.ctx(), setup); err != nil {
		t.Fatal(err)
	}
	v.guest.Close()
	v.guest = v.newGuest()
	lap("entered again")
	v.want("echo again", "again")
	v.control.PowerOff(v.ctx()) //nolint:errcheck // the answer may be lost
}

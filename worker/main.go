// Command worker is the first process of a worker VM: a virtual machine whose
// only work is to be a DSec node. It mounts what a node needs, with every
// control group controller in the unified hierarchy, loads modules, sets up a
// network address, runs one command, usually "dsec up", and powers the machine
// off when that ends.
//
// What it is told comes on the kernel's command line. Words after "--" are the
// command; of those before, it knows
//
//	worker.data=DEVICE      the disk for /data, ext4; default none: /data is in memory
//	worker.address=IP/BITS  of the first network card, or dhcp; default none
//	worker.gateway=IP       of the default route
//	worker.share=TAG        a virtiofs file system, mounted on /share
//
// It does not restart anything and keeps nothing of its own: the image is read
// into memory at boot, and what lasts is on /data.
//
// Read next: docs/worker-vm.md; vmimage/worker.go, which makes the image.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "worker is the first process of a worker VM, see docs/worker-vm.md")
		os.Exit(2)
	}
	// Without this program the kernel would stop with a panic, so whatever
	// happens ends in powering off.
	if err := boot(os.Args[1:]); err != nil {
		fmt.Println("worker:", err)
	}
	powerOff()
}

func boot(command []string) error {
	if err := mountAll(); err != nil {
		return err
	}
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	s := parseSettings(string(line))
	if err := loadModules("/lib/modules/order"); err != nil {
		return err
	}
	if err := s.mountData(); err != nil {
		return err
	}
	if err := s.network(); err != nil {
		return err
	}
	if len(command) == 0 {
		command = []string{"/bin/sh"}
	}
	return run(command)
}

// settings are what the kernel's command line says.
type settings struct{ data, address, gateway, share string }

func parseSettings(line string) settings {
	var s settings
	for _, w := range strings.Fields(line) {
		if w == "--" {
			break
		}
		k, v, _ := strings.Cut(w, "=")
		switch k {
		case "worker.data":
			s.data = v
		case "worker.address":
			s.address = v
		case "worker.gateway":
			s.gateway = v
		case "worker.share":
			s.share = v
		}
	}
	return s
}

// mountAll mounts what every node expects. The root is mounted once more over
// itself: that of an initramfs can be neither left nor pivoted from.
func mountAll() error {
	if err := unix.Mount("/", "/root", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount root: %w", err)
	}
	if err := unix.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		kind, at, options string
		flags             uintptr
	}{
		{"proc", "/proc", "", safe},
		{"sysfs", "/sys", "", safe},
		{"devtmpfs", "/dev", "", unix.MS_NOSUID},
		{"devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666", unix.MS_NOSUID | unix.MS_NOEXEC},
		{"tmpfs", "/dev/shm", "", safe},
		{"securityfs", "/sys/kernel/security", "", safe},
		{"cgroup2", "/sys/fs/cgroup", "nsdelegate", safe},
		{"tmpfs", "/tmp", "", unix.MS_NOSUID | unix.MS_NODEV},
		{"tmpfs", "/run", "mode=755", unix.MS_NOSUID | unix.MS_NODEV},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, m.flags, m.options); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	for _, l := range [][2]string{{"/proc/self/fd", "fd"}, {"fd/0", "stdin"}, {"fd/1", "stdout"}, {"fd/2", "stderr"}} {
		if err := os.Symlink(l[0], "/dev/"+l[1]); err != nil {
			return err
		}
	}
	os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
	os.Setenv("HOME", "/data")
	return unix.Sethostname([]byte("worker"))
}

// loadModules loads the files that a list names, in its order.
func loadModules(list string) error {
	b, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	for _, path := range strings.Fields(string(b)) {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	return nil
}

func (s settings) mountData() error {
	if err := os.MkdirAll("/data", 0o755); err != nil {
		return err
	}
	if s.data != "" {
		if err := waitFor(s.data); err != nil {
			return err
		}
		if err := unix.Mount(s.data, "/data", "ext4", unix.MS_NOATIME, ""); err != nil {
			return fmt.Errorf("mount %s: %w", s.data, err)
		}
	}
	if s.share != "" {
		if err := os.MkdirAll("/share", 0o755); err != nil {
			return err
		}
		if err := unix.Mount(s.share, "/share", "virtiofs", 0, ""); err != nil {
			return fmt.Errorf("mount share %s: %w", s.share, err)
		}
	}
	return nil
}

// waitFor waits for a device to appear: drivers look for theirs by themselves.
func waitFor(device string) error {
	for range 1000 {
		if _, err := os.Stat(device); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("there is no %s", device)
}

func (s settings) network() error {
	lines := []string{"ip link set lo up"}
	switch s.address {
	case "":
	case "dhcp":
		lines = append(lines, "ip link set eth0 up", "udhcpc -q -n -i eth0 -s /etc/udhcpc")
	default:
		lines = append(lines, "ip addr add "+s.address+" dev eth0", "ip link set eth0 up")
	}
	if s.gateway != "" {
		lines = append(lines, "ip route add default via "+s.gateway)
	}
	for _, l := range lines {
		if out, err := exec.Command("/bin/busybox", strings.Fields(l)...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", l, err, out)
		}
	}
	return nil
}

// run runs the command to its end, and collects orphans meanwhile. Two signals
// that QEMU's and a user's ways to end a machine come down to reach it.
func run(command []string) error {
	c := exec.Command(command[0], command[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	if err := c.Start(); err != nil {
		return err
	}
	go func() {
		for s := range signals {
			c.Process.Signal(s) //nolint:errcheck // it may be gone
		}
	}()
	for {
		var st unix.WaitStatus
		pid, err := unix.Wait4(-1, &st, 0, nil)
		if pid == c.Process.Pid {
			fmt.Printf("worker: %s ended with status %d\n", command[0], st.ExitStatus())
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func powerOff() {
	unix.Sync()
	unix.Unmount("/data", 0)                     //nolint:errcheck // synced all the same
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) //nolint:errcheck // there is nothing else to do
	select {}
}

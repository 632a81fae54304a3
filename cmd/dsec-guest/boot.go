package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/vm"
)

// cgroupRoot is where a microVM's control groups are mounted before its agent
// has a root.
const cgroupRoot = "/cgroup"

// agentOfVM is the mode of the program that boot starts.
const agentOfVM = "agent-of-vm"

// boot is pid 1 of a microVM. It makes the machine usable, starts the agent in
// namespaces of its own and waits for its end, which is the machine's: pid 1
// that ends is a panic, and that the host sees.
//
// It is not the agent itself because its root is the kernel's: what the kernel
// starts, such as a loader of modules, finds the initramfs there.
func boot() error {
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"sysfs", "/sys", "sysfs"}, {"devtmpfs", "/dev", "devtmpfs"}} {
		if err := unix.Mount(m[0], m[1], m[2], unix.MS_NOSUID|unix.MS_NOEXEC, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if err := loadBoot(); err != nil {
		return err
	}
	if err := os.MkdirAll(cgroupRoot, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("cgroup2", cgroupRoot, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount %s: %w", cgroupRoot, err)
	}
	for {
		groups, err := jail.MakeSoloGroups(cgroupRoot)
		if err != nil {
			return err
		}
		again, err := runAgent(groups)
		if err != nil {
			return err
		}
		if !again {
			break
		}
		if err := groups.Remove(); err != nil {
			return err
		}
	}
	unix.Sync()
	return unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
}

// statusAgain is what an agent ends with that wants another one started.
const statusAgain = 75

// agentSlack, in nanoseconds, is how much later than asked for a timer of the
// agent may fire. The Go runtime's monitor sleeps in steps of 20 microseconds
// while a program is busy: dozens of wake-ups for each command, which under
// emulation cost as much as the command. Commands get the kernel's default.
const agentSlack = 4_000_000

// runAgent starts the agent and returns when it has ended, with an error unless
// it was asked to.
func runAgent(groups jail.SoloGroups) (again bool, err error) {
	work, err := os.Open(groups.Work())
	if err != nil {
		return false, err
	}
	defer work.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, agentSlack, 0, 0, 0); err != nil {
		return false, fmt.Errorf("set timer slack: %w", err)
	}
	if line, err := os.ReadFile("/proc/cmdline"); err == nil && slices.Contains(strings.Fields(string(line)), vm.YieldWord) {
		if err := jail.Yield(); err != nil {
			return false, err
		}
	}
	pid, err := syscall.ForkExec(vm.InitProgram, []string{vm.InitProgram, agentOfVM}, &syscall.ProcAttr{
		Dir: "/",
		// As in a container: one thread of Go code, and a small heap. And no
		// signals from one thread to another because a system call takes long.
		Env:   []string{"GOMAXPROCS=1", "GOGC=25", "GODEBUG=asyncpreemptoff=1"},
		Files: []uintptr{0, 1, 2},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
			UseCgroupFD: true, CgroupFD: int(work.Fd()),
			Setsid: true,
		},
	})
	if err != nil {
		return false, fmt.Errorf("start the agent: %w", err)
	}
	for {
		var ws unix.WaitStatus
		got, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return false, fmt.Errorf("wait for the agent: %w", err)
		case got != pid: // an orphan of the kernel's
		case ws.Exited() && (ws.ExitStatus() == 0 || ws.ExitStatus() == statusAgain):
			return ws.ExitStatus() == statusAgain, nil
		case ws.Signaled():
			return false, fmt.Errorf("the agent was killed by %v", ws.Signal())
		default:
			return false, fmt.Errorf("the agent ended with status %d", ws.ExitStatus())
		}
	}
}

// loadBoot loads the modules that a machine needs at once. One whose hardware is
// missing does no harm.
func loadBoot() error {
	list, err := os.Open(filepath.Join(vm.ModulesDir, vm.BootList))
	if err != nil {
		return err
	}
	defer list.Close()
	for s := bufio.NewScanner(list); s.Scan(); {
		if err := loadModule(s.Text()); err != nil {
			fmt.Fprintln(os.Stderr, "dsec-guest:", err)
		}
		os.Remove(moduleFile(s.Text())) //nolint:errcheck // it only takes memory
	}
	return nil
}

func moduleFile(name string) string { return filepath.Join(vm.ModulesDir, name+".ko") }

// loadModule loads one module with its parameters on the kernel's command line,
// as modprobe does.
func loadModule(name string) error {
	f, err := os.Open(moduleFile(name))
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), moduleParams(name), 0)
	if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("load module %s: %w", name, err)
	}
	return nil
}

// moduleParams gives the parameters that the kernel's command line has for a
// module that was not there yet.
func moduleParams(name string) string {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ""
	}
	var out []string
	for _, f := range strings.Fields(string(line)) {
		module, param, ok := strings.Cut(f, ".")
		if ok && strings.ReplaceAll(module, "-", "_") == name {
			out = append(out, param)
		}
	}
	return strings.Join(out, " ")
}

// modprobe is what the kernel starts when a workload needs a module: it loads
// the named one, or the one with that alias, and what that needs.
func modprobe(args []string) error {
	if len(args) == 0 {
		return errors.New("modprobe: no name")
	}
	name := strings.ReplaceAll(args[len(args)-1], "-", "_")
	b, err := os.ReadFile(filepath.Join(vm.ModulesDir, "index"))
	if err != nil {
		return err
	}
	needs := map[string]string{}
	found := ""
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) != 3 {
			return io.ErrUnexpectedEOF
		}
		needs[f[0]] = f[1]
		if f[0] == name || strings.Contains(","+f[2]+",", ","+name+",") {
			found = f[0]
		}
	}
	if found == "" {
		return fmt.Errorf("modprobe: no module %s", name)
	}
	return loadWith(found, needs)
}

func loadWith(name string, needs map[string]string) error {
	if _, err := os.Stat("/sys/module/" + name); err == nil {
		return nil
	}
	for _, n := range strings.Split(needs[name], ",") {
		if n != "-" {
			if err := loadWith(n, needs); err != nil {
				return err
			}
		}
	}
	return loadModule(name)
}

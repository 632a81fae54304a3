package jail

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Features probes what this package needs of the host. What is not OK without
// a fallback makes OpenCgroups or a first start fail with Unsupported.
func Features() []dsec.FeatureStatus {
	return []dsec.FeatureStatus{
		feature("root", func() (string, error) {
			if os.Geteuid() != 0 {
				return "", fmt.Errorf("running as uid %d", os.Geteuid())
			}
			return "running as root", nil
		}, "no sandbox can be made"),
		feature("cgroups", probeCgroups, "no limits and no reliable kill: no sandbox can be made"),
		feature("user namespaces", func() (string, error) {
			n, err := sysctl("user/max_user_namespaces")
			if err == nil && n == 0 {
				err = errors.New("user.max_user_namespaces is 0")
			}
			return fmt.Sprintf("%d allowed", n), err
		}, "no sandbox can be made"),
		feature("seccomp filter", func() (string, error) {
			_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, 0)
			if errno != unix.EFAULT { // it looked at the program, which is none
				return "", errno
			}
			return "installed by the guest", nil
		}, "no sandbox can be made"),
		feature("landlock", probeLandlock, "sandboxes are held by namespaces, capabilities and the seccomp filter alone"),
		feature("pidfd", func() (string, error) {
			fd, err := unix.PidfdOpen(os.Getpid(), 0)
			if err == nil {
				unix.Close(fd)
			}
			return "Linux 5.3 or newer", err
		}, "no sandbox can be made"),
		feature("pid numbers", func() (string, error) {
			n, err := sysctl("kernel/pid_max")
			if err == nil && n < wantPids {
				err = fmt.Errorf("kernel.pid_max is %d", n)
			}
			return fmt.Sprintf("kernel.pid_max is %d", n), err
		}, fmt.Sprintf("about ten are used by an idle sandbox; dsec up raises it to %d", wantPids)),
		feature("swap accounting", probeSwap, "a sandbox may swap beyond its memory limit when the host has swap"),
	}
}

const wantPids = 4 << 20 // the kernel's own maximum on 64 bits

// RaisePids sets kernel.pid_max to the kernel's maximum, if it is lower.
func RaisePids() error {
	n, err := sysctl("kernel/pid_max")
	if err != nil || n >= wantPids {
		return err
	}
	return os.WriteFile("/proc/sys/kernel/pid_max", []byte(strconv.Itoa(wantPids)), 0)
}

func feature(name string, probe func() (string, error), cost string) dsec.FeatureStatus {
	detail, err := probe()
	if err != nil {
		return dsec.FeatureStatus{Name: name, Detail: err.Error(), Cost: cost}
	}
	return dsec.FeatureStatus{Name: name, OK: true, Detail: detail}
}

func sysctl(name string) (int64, error) {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

func probeCgroups() (string, error) {
	m, err := cgroupMounts("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	if root := m[""]; root != "" && hasControllers(root) {
		return "version 2", nil
	}
	for _, k := range controllers {
		if m[k] == "" {
			return "", fmt.Errorf("neither version 2 with memory, cpu and pids, nor version 1 with %s", k)
		}
	}
	return "version 1", nil
}

func probeSwap() (string, error) {
	m, err := cgroupMounts("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	if hasControllers(m[""]) {
		return "by cgroup version 2", nil
	}
	if _, err := os.Stat(m["memory"] + "/memory.memsw.limit_in_bytes"); err != nil {
		return "", errors.New("memory.memsw.limit_in_bytes is absent")
	}
	return "by cgroup version 1", nil
}

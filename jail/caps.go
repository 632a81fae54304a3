package jail

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Capabilities is the set that root has in a box: Docker's default. They count
// in the box's user namespace only.
var Capabilities = []int{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FSETID, unix.CAP_FOWNER, unix.CAP_MKNOD, unix.CAP_NET_RAW,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_SETFCAP, unix.CAP_SETPCAP, unix.CAP_NET_BIND_SERVICE,
	unix.CAP_SYS_CHROOT, unix.CAP_KILL, unix.CAP_AUDIT_WRITE,
}

func capabilityMask() uint64 {
	var m uint64
	for _, c := range Capabilities {
		m |= 1 << c
	}
	return m
}

// dropBounding takes every other capability from the thread's bounding set, so
// that no set-uid program brings one back.
func dropBounding() error {
	mask := capabilityMask()
	for c := 0; c < 64; c++ {
		if mask&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			if err == unix.EINVAL { // the last one that this kernel knows was c-1
				return nil
			}
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	return nil
}

// dropCapabilities leaves the thread Capabilities and those of more as permitted
// and effective, and nothing inheritable. What it executes has none of more: the
// bounding set has not.
func dropCapabilities(more ...int) error {
	mask := capabilityMask()
	for _, c := range more {
		mask |= 1 << c
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(mask), Permitted: uint32(mask)},
		{Effective: uint32(mask >> 32), Permitted: uint32(mask >> 32)},
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

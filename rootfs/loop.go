package rootfs

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mountErofsLoop serves kernels before 6.12, whose EROFS mounts block devices
// only: each file gets a read-only loop device that the kernel frees with the
// mount.
func mountErofsLoop(l Layer) (*os.File, error) {
	var devices []*os.File
	defer func() {
		for _, d := range devices {
			d.Close() // autoclear: the mount holds the device now, or nobody
		}
	}()
	var paths []string
	for _, p := range append([]string{l.Meta}, l.Data...) {
		d, err := loopDevice(p)
		if err != nil {
			return nil, fmt.Errorf("make loop device of %s: %w", p, err)
		}
		devices = append(devices, d)
		paths = append(paths, d.Name())
	}
	return mountErofs(paths[0], paths[1:])
}

func loopDevice(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer ctl.Close()
	for range 64 { // another process may take the number between the two calls
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDONLY, 0)
		if err != nil {
			return nil, err
		}
		cfg := unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg); err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
	}
	return nil, unix.EBUSY
}

package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// serialWait is when the pauses of OpenPort have grown so long that a
// virtio-serial port would be there.
const serialWait = 30 * time.Millisecond

// Folders of the guest's kernel.
const (
	portsDir = "/sys/class/virtio-ports"
	devDir   = "/dev"
)

// OpenPort opens the port of a name inside a guest: the virtio-serial port, or,
// in a machine that has vsock and no such port, its vsock number. It waits for
// the port to show up: the host names it a moment after the driver is there.
func OpenPort(ctx context.Context, name string) (Device, error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		dev, err := findPort(name)
		if err == nil {
			return openDevice(filepath.Join(devDir, dev))
		}
		if number, ok := vsockOf(name); ok && wait > serialWait && hasVsock() {
			return ListenVsock(number)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func findPort(name string) (string, error) {
	found, err := filepath.Glob(filepath.Join(portsDir, "*", "name"))
	if err != nil {
		return "", err
	}
	for _, f := range found {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
			return filepath.Base(filepath.Dir(f)), nil
		}
	}
	return "", fmt.Errorf("the machine has no port %s among %d: %w", name, len(found), os.ErrNotExist)
}

func openDevice(path string) (Device, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if _, err := f.SyscallConn(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return device{f}, nil
}

// device is a virtio-serial port.
type device struct{ *os.File }

// WaitHost waits in the poller until a host is connected: the kernel tells that
// it went by POLLHUP, and wakes writers when it comes.
func (d device) WaitHost() error {
	raw, err := d.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Write(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, err := unix.Poll(p, 0)
		return err == nil && p[0].Revents&unix.POLLHUP == 0 || errors.Is(err, unix.EBADF)
	})
}

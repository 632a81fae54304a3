package fuse

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fsType tells our mounts from others.
const fsType = "fuse.dsec"

// Mount mounts a folder that is still to be served at dir, read-only, for all users: who may
// go there, the folder above decides. The file is the connection to the kernel. When its last
// descriptor is closed, all that is and was asked of the mount fails with ENOTCONN.
func Mount(dir string) (dev *os.File, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/fuse: %w", err)
	}
	dev = os.NewFile(uintptr(fd), "/dev/fuse")
	options := fmt.Sprintf("fd=%d,rootmode=40555,user_id=%d,group_id=%d,allow_other", fd, os.Geteuid(), os.Getegid())
	if err := unix.Mount("dsec", dir, fsType, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOATIME, options); err != nil {
		dev.Close()
		return nil, fmt.Errorf("mount FUSE at %s: %w", dir, err)
	}
	return dev, nil
}

// Unmount takes away what is mounted at dir. Files that are open there stay as they are.
// Nothing mounted is no error.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// Mounted reports whether a FUSE mount of Mount is at dir, which is absolute and clean. It asks
// no server, so it does not wait for one.
func Mounted(dir string) (bool, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, fmt.Errorf("look for FUSE mount: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		head, tail, _ := strings.Cut(line, " - ")
		if f := strings.Fields(head); len(f) > 4 && unescape(f[4]) == dir && strings.HasPrefix(tail, fsType+" ") {
			return true, nil
		}
	}
	return false, nil
}

// unescape reads a path of mountinfo, where spaces and the like are octal.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

package jail

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ViaFolder calls f with another name of path, through a descriptor of its folder,
// which is good until f returns. Unix socket addresses hold 107 bytes; so both ends
// name sockets by it, and data folders may be deep.
func ViaFolder(path string, f func(short string) error) error {
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return f("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path))
}

// ListenPath makes a listening Unix socket of the given type at path, which
// must not exist. Nobody but root can connect.
func ListenPath(path string, sockType int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, sockType|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	err = ViaFolder(path, func(short string) error {
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: short}); err != nil {
			return err
		}
		return unix.Chmod(short, 0o600)
	})
	if err == nil {
		err = unix.Listen(fd, 128)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// DialPath connects to a Unix stream socket at path. Reads and writes of the
// file park their goroutine, not a thread.
func DialPath(path string) (*os.File, error) {
	fd, err := dial(path, unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func dialSeqpacket(path string) (int, error) { return dial(path, unix.SOCK_SEQPACKET) }

func dial(path string, sockType int) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, sockType|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = ViaFolder(path, func(short string) error {
		return unix.Connect(fd, &unix.SockaddrUnix{Name: short})
	})
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect to %s: %w", path, err)
	}
	return fd, nil
}

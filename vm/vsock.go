package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Vsock numbers of the two ports, for hosts that reach their machines by vsock
// instead of virtio-serial. The words are the same, so that Dial and Port work
// over either.
const (
	ControlVsock = 7071
	WireVsock    = 7072
)

// vsockOf gives the vsock number of a port.
func vsockOf(name string) (uint32, bool) {
	switch name {
	case ControlPort:
		return ControlVsock, true
	case WirePort:
		return WireVsock, true
	}
	return 0, false
}

// DialVsock connects from the host to a port of the machine with a context ID.
// What it returns is for Dial.
func DialVsock(ctx context.Context, cid, port uint32) (io.ReadWriteCloser, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make vsock: %w", err)
	}
	f := os.NewFile(uintptr(fd), "vsock")
	if err := connectVsock(ctx, f, &unix.SockaddrVM{CID: cid, Port: port}); err != nil {
		f.Close()
		return nil, fmt.Errorf("connect to vsock %d:%d: %w", cid, port, err)
	}
	return f, nil
}

// connectVsock connects in the poller.
func connectVsock(ctx context.Context, f *os.File, to unix.Sockaddr) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) }) //nolint:errcheck // a socket has deadlines
	begun := false
	var result error
	err = raw.Write(func(fd uintptr) bool {
		if !begun {
			begun = true
			result = unix.Connect(int(fd), to)
			return !errors.Is(result, unix.EINPROGRESS)
		}
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			err = unix.Errno(code)
		}
		result = err
		return true
	})
	if !stop() {
		return context.Cause(ctx)
	}
	return errors.Join(err, result)
}

// vsockDevice makes a port of connections to a vsock number, one at a time.
type vsockDevice struct {
	l *os.File

	mu     sync.Mutex
	cond   sync.Cond
	conn   *os.File // nil while no host is connected
	closed bool
}

// ListenVsock gives the guest's end of a port by vsock.
func ListenVsock(port uint32) (Device, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make vsock: %w", err)
	}
	if err = unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err == nil {
		err = unix.Listen(fd, 8)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on vsock %d: %w", port, err)
	}
	d := &vsockDevice{l: os.NewFile(uintptr(fd), "vsock")}
	d.cond.L = &d.mu
	return d, nil
}

// current gives the connection, nil without.
func (d *vsockDevice) current() *os.File {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.conn
}

func (d *vsockDevice) set(c *os.File) {
	d.mu.Lock()
	old := d.conn
	d.conn = c
	closed := d.closed
	d.cond.Broadcast()
	d.mu.Unlock()
	if old != nil {
		old.Close()
	}
	if closed && c != nil {
		c.Close()
	}
}

// Read is io.EOF whenever the connection ends, however.
func (d *vsockDevice) Read(b []byte) (int, error) {
	c := d.current()
	if c == nil {
		return 0, io.EOF
	}
	n, err := c.Read(b)
	if n > 0 || err == nil {
		return n, nil
	}
	d.set(nil)
	return 0, io.EOF
}

// Write waits for a host, and drops what one did not take.
func (d *vsockDevice) Write(b []byte) (int, error) {
	d.mu.Lock()
	for d.conn == nil && !d.closed {
		d.cond.Wait()
	}
	c, closed := d.conn, d.closed
	d.mu.Unlock()
	if closed {
		return 0, os.ErrClosed
	}
	c.Write(b) //nolint:errcheck // the reader sees the end of the connection
	return len(b), nil
}

// WaitHost accepts the next connection.
func (d *vsockDevice) WaitHost() error {
	raw, err := d.l.SyscallConn()
	if err != nil {
		return err
	}
	fd := -1
	var acceptErr error
	err = raw.Read(func(l uintptr) bool {
		fd, _, acceptErr = unix.Accept4(int(l), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		return !errors.Is(acceptErr, unix.EAGAIN) && !errors.Is(acceptErr, unix.EINTR) && !errors.Is(acceptErr, unix.ECONNABORTED)
	})
	if err = errors.Join(err, acceptErr); err != nil {
		return err
	}
	d.set(os.NewFile(uintptr(fd), "vsock"))
	return nil
}

// Close ends the port.
func (d *vsockDevice) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.set(nil)
	return d.l.Close()
}

// hasVsock reports whether the machine has a vsock device, through which a host
// can reach it.
func hasVsock() bool {
	fd, err := unix.Open("/dev/vsock", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	cid, err := unix.IoctlGetUint32(fd, unix.IOCTL_VM_SOCKETS_GET_LOCAL_CID)
	return err == nil && cid > unix.VMADDR_CID_HOST && cid != unix.VMADDR_CID_ANY
}

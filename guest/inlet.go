package guest

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// inlet is a port of the loopback whose connections go to the host. The agent
// takes none before the host asks for it, so that they wait in the kernel's
// queue, of bounded length, while the host is away, and cost the agent nothing.
type inlet struct {
	l    *net.TCPListener
	turn chan struct{} // held by the one Accept that waits
	next *net.TCPConn  // one that could not be handed over; guarded by turn
}

// inletQueue is how many connections may wait for the host; more wait in
// connect.
const inletQueue = 128

// Listen opens a port of the loopback for Accept.
func (a *Agent) Listen(_ context.Context, port int) error {
	if port < 1 || port > 65535 {
		return dsec.Errorf(dsec.Invalid, "port %d is not between 1 and 65535", port)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.closed:
		return dsec.Errorf(dsec.Conflict, "the sandbox is ending")
	case a.inlets[port] != nil:
		return nil
	}
	l, err := listenLoopback(port)
	if errors.Is(err, unix.EADDRINUSE) {
		return dsec.Errorf(dsec.Conflict, "port %d of the loopback is in use", port)
	}
	if errors.Is(err, unix.EACCES) {
		return dsec.Errorf(dsec.Invalid, "port %d of the loopback cannot be opened", port)
	}
	if err != nil {
		return dsec.Errorf(dsec.Unavailable, "listen on port %d: %w", port, err)
	}
	if a.inlets == nil {
		a.inlets = map[int]*inlet{}
	}
	a.inlets[port] = &inlet{l: l, turn: make(chan struct{}, 1)}
	return nil
}

// listenLoopback is net.Listen with a short queue.
func listenLoopback(port int) (*net.TCPListener, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "loopback")
	defer f.Close()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return nil, err
	}
	if err := unix.Listen(fd, inletQueue); err != nil {
		return nil, err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// Accept hands the next connection to a port of Listen to take. Several that wait
// take turns.
func (a *Agent) Accept(ctx context.Context, port int, take func(dsec.PortConn) error) error {
	a.mu.Lock()
	in := a.inlets[port]
	a.mu.Unlock()
	if in == nil {
		return dsec.Errorf(dsec.NotFound, "port %d of the loopback is not the host's", port)
	}
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	c := in.next
	if in.next = nil; c == nil {
		var err error
		if c, err = in.accept(ctx, port); err != nil {
			return err
		}
	}
	err := take(c)
	if err != nil {
		in.next = c
	}
	return err
}

// accept takes a connection from the kernel's queue.
func (in *inlet) accept(ctx context.Context, port int) (*net.TCPConn, error) {
	for {
		in.l.SetDeadline(time.Time{})                                                //nolint:errcheck // then Accept fails
		stop := context.AfterFunc(ctx, func() { in.l.SetDeadline(time.Unix(1, 0)) }) //nolint:errcheck
		c, err := in.l.AcceptTCP()
		stop()
		switch {
		case err == nil:
			return c, nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(err, os.ErrDeadlineExceeded): // of the one before
		case isShort(err):
			time.Sleep(10 * time.Millisecond) // out of descriptors or memory for now
		default:
			return nil, dsec.Errorf(dsec.Conflict, "accept on port %d: %w", port, err)
		}
	}
}

// close ends the port.
func (in *inlet) close() {
	in.l.Close()
	in.turn <- struct{}{} // whoever waits has been told
	if in.next != nil {
		in.next.Close()
	}
	<-in.turn
}

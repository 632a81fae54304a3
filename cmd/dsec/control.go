package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// The words of the control socket: dsec down says askDown, the node answers
// sayDown once its sandboxes are gone, or sayFault and why.
const (
	askDown  = "down\n"
	sayDown  = "ok\n"
	sayFault = "fault "
)

// controlLimit bounds how long a caller may take to say what it wants.
const controlLimit = 5 * time.Second

// control is the socket through which dsec down ends a node. It lies in the
// data folder, which only the node's account may enter: whoever answers there
// is the node of that folder, so no process is ever signalled by a number that
// a file remembers.
type control struct {
	listener net.Listener
	asked    chan *downRequest
	done     chan struct{}
}

// downRequest is one caller of dsec down that waits for an answer.
type downRequest struct{ conn net.Conn }

// answer tells the caller how it went.
func (r *downRequest) answer(err error) {
	text := sayDown
	if err != nil {
		text = sayFault + strings.ReplaceAll(err.Error(), "\n", "; ") + "\n"
	}
	r.conn.SetWriteDeadline(time.Now().Add(controlLimit))
	fmt.Fprint(r.conn, text) // a caller that went away needs no answer
	r.conn.Close()
}

// listenControl opens the socket in dir. The caller holds the folder's lock, so
// a socket that is there is a dead one.
func listenControl(dir string) (*control, error) {
	if err := os.Remove(filepath.Join(dir, controlSocket)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	var l net.Listener
	err := withShortPath(dir, func(path string) (err error) {
		l, err = net.Listen("unix", path)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // it would unlink the short path
	c := &control{listener: l, asked: make(chan *downRequest), done: make(chan struct{})}
	go c.serve()
	return c, nil
}

// serve takes one caller after the other until the socket is closed.
func (c *control) serve() {
	for {
		conn, err := c.listener.Accept()
		if err != nil {
			return
		}
		conn.SetReadDeadline(time.Now().Add(controlLimit))
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || line != askDown {
			conn.Close()
			continue
		}
		select {
		case c.asked <- &downRequest{conn}:
		case <-c.done:
			conn.Close()
			return
		}
	}
}

// close ends the socket. A request that was taken is still answered.
func (c *control) close() {
	close(c.done)
	c.listener.Close()
}

// errNoNode says that nothing answers at a control socket.
var errNoNode = errors.New("no node answers")

// askForDown asks the node of dir to end itself and its sandboxes, and waits.
func askForDown(ctx context.Context, dir string) error {
	var conn net.Conn
	err := withShortPath(dir, func(path string) (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, "unix", path)
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errNoNode, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if _, err := fmt.Fprint(conn, askDown); err != nil {
		return fmt.Errorf("ask node: %w", err)
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("%w: %w", errNoNode, err)
	case line == sayDown:
		return nil
	}
	return errors.New(strings.TrimSpace(strings.TrimPrefix(line, sayFault)))
}

// withShortPath calls f with a path of the control socket that fits into a
// socket address, however deep dir lies.
func withShortPath(dir string, f func(path string) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), controlSocket))
}

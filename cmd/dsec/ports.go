package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/fncall"
)

// portsCmd forwards local ports.
type portsCmd struct {
	Sandbox string   `arg:"" help:"Sandbox ID."`
	Ports   []string `arg:"" name:"ports" help:"[ADDRESS:]LOCAL:REMOTE, or one number for both. LOCAL 0 takes a free port. ADDRESS is 127.0.0.1 unless given."`
}

// forward is one local listener and the port it leads to.
type forward struct {
	listen string
	port   int
}

func parseForward(s string) (forward, error) {
	bad := dsec.Errorf(dsec.Invalid, "port %q is not [ADDRESS:]LOCAL:REMOTE", s)
	address, local, remote := "127.0.0.1", s, s
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		local, remote = s[:i], s[i+1:]
		if i := strings.LastIndexByte(local, ':'); i >= 0 {
			address, local = strings.Trim(local[:i], "[]"), local[i+1:]
		}
	}
	l, err := strconv.ParseUint(local, 10, 16)
	if err != nil {
		return forward{}, bad
	}
	r, err := strconv.ParseUint(remote, 10, 16)
	if err != nil || r == 0 {
		return forward{}, bad
	}
	return forward{net.JoinHostPort(address, strconv.FormatUint(l, 10)), int(r)}, nil
}

// Run serves until it is interrupted or the sandbox has ended. Each line it prints is a port that is
// open.
func (c *portsCmd) Run(ctx context.Context, a *app) error {
	var forwards []forward
	for _, p := range c.Ports {
		f, err := parseForward(p)
		if err != nil {
			return err
		}
		forwards = append(forwards, f)
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Ports == nil {
		return lacking("ports")
	}
	on := dsec.Call{Sandbox: dsec.SandboxID(c.Sandbox)}
	sb, err := s.Sandboxes.Get(ctx, on.Sandbox)
	if err != nil {
		return err
	}
	if sb.State.Ended() {
		return endedError(sb)
	}
	if sb.Spec.Kind == dsec.FnCall {
		return fncall.ErrPorts()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM)
	defer unnotify()

	var wg sync.WaitGroup
	defer wg.Wait()
	for _, f := range forwards {
		l, err := net.Listen("tcp", f.listen)
		if err != nil {
			cancel()
			return fmt.Errorf("listen: %w", err)
		}
		context.AfterFunc(ctx, func() { l.Close() })
		fmt.Fprintf(a.Stdout, "%s -> %d\n", l.Addr(), f.port)
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return // closed
				}
				wg.Go(func() {
					if err := relay(ctx, conn, s.Ports, on, f.port); err != nil && ctx.Err() == nil {
						a.warn(err)
					}
				})
			}
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- awaitEnd(ctx, s.Sandboxes, on.Sandbox) }()
	select {
	case <-signals:
	case err = <-ended:
	case <-ctx.Done():
	}
	cancel()
	return err
}

// awaitEnd returns when the sandbox has ended, with the cause as an error, or
// when that cannot be told any more. A server that does not answer is asked
// again: it may be restarting.
func awaitEnd(ctx context.Context, s dsec.Sandboxes, id dsec.SandboxID) error {
	for {
		sb, err := s.Wait(ctx, id)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			return endedError(sb)
		case dsec.KindOf(err) != dsec.Unavailable && dsec.KindOf(err) != dsec.Timeout:
			return err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// endedError says that a sandbox has ended, and why.
func endedError(sb dsec.Sandbox) error {
	text := fmt.Sprintf("sandbox %s has ended: %s (%s)", sb.ID, sb.State, sb.Cause)
	if sb.Detail != "" {
		text += ": " + printable(sb.Detail)
	}
	return dsec.Errorf(dsec.Conflict, "%s", text)
}

// relay joins conn with a port of the sandbox until both directions have
// ended. An end of one direction is passed on and leaves the other open.
func relay(ctx context.Context, conn net.Conn, ports dsec.Ports, on dsec.Call, port int) error {
	defer conn.Close()
	far, err := ports.Dial(ctx, on, port)
	if err != nil {
		return err
	}
	defer far.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close(); far.Close() })
	defer stop()
	there := make(chan error, 1)
	go func() {
		_, err := io.Copy(far, conn)
		there <- errors.Join(err, far.CloseWrite())
	}()
	_, err = io.Copy(conn, far)
	if half, ok := conn.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite() // the other side may have gone already
	}
	if err != nil {
		conn.Close() // ends the copy of the other direction
	}
	<-there
	return err
}

package wire_test

import (
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
)

// deaf is the host's end of a connection whose guest can be kept from
// answering.
type deaf struct {
	net.Conn
	quiet *atomic.Bool
}

// Read gives nothing while the guest is quiet.
func (d deaf) Read(p []byte) (int, error) {
	for d.quiet.Load() {
		d.Conn.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := d.Conn.Read(nil); err != nil && !strings.Contains(err.Error(), "timeout") {
			return 0, err
		}
		time.Sleep(time.Millisecond)
	}
	d.Conn.SetReadDeadline(time.Time{})
	return d.Conn.Read(p)
}

// quietly is a client of f whose guest can be silenced, and the switches.
func quietly(t *testing.T, f *fake, silence time.Duration) (c *wire.Client, quiet, standing *atomic.Bool) {
	quiet, standing = new(atomic.Bool), new(atomic.Bool)
	c = wire.NewClient(wire.Options{Silence: silence, Standing: standing.Load, Dial: func(context.Context) (io.ReadWriteCloser, error) {
		a, b := net.Pipe()
		go wire.Serve(b, handler{f})
		return deaf{a, quiet}, nil
	}})
	t.Cleanup(func() { quiet.Store(false); c.Close() })
	return c, quiet, standing
}

// run runs a command that waits for release.
func run(t *testing.T, c *wire.Client) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "x"}, nil)
		done <- err
	}()
	return done
}

func TestSilence(t *testing.T) {
	release := make(chan struct{}, 9)
	f := &fake{run: func(dsec.Command, []byte) (dsec.Result, error) {
		<-release
		return dsec.Result{}, nil
	}}
	t.Cleanup(func() { close(release) })
	isSilent := func(t *testing.T, err error) {
		t.Helper()
		if dsec.KindOf(err) != dsec.Unavailable || !strings.Contains(err.Error(), "has not answered for 200ms") {
			t.Errorf("%v, want Unavailable for its silence", err)
		}
	}
	t.Run("a slow call is no silence", func(t *testing.T) {
		c, _, _ := quietly(t, f, 2*time.Second)
		done := run(t, c)
		select {
		case err := <-done:
			t.Fatal(err)
		case <-time.After(5 * time.Second):
		}
		release <- struct{}{}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a call in hand", func(t *testing.T) {
		c, quiet, _ := quietly(t, f, 200*time.Millisecond)
		if _, err := c.Activity(t.Context()); err != nil {
			t.Fatal(err)
		}
		quiet.Store(true)
		isSilent(t, <-run(t, c))
		quiet.Store(false)
		if _, err := c.Activity(t.Context()); err != nil {
			t.Errorf("when it answers again: %v", err)
		}
		release <- struct{}{}
	})
	t.Run("a new connection", func(t *testing.T) {
		c, quiet, _ := quietly(t, f, 200*time.Millisecond)
		quiet.Store(true)
		begin := time.Now()
		var all []chan error
		for range 20 {
			all = append(all, run(t, c))
		}
		for _, done := range all {
			isSilent(t, <-done)
		}
		if took := time.Since(begin); took > 15*time.Second {
			t.Errorf("20 callers waited for %v, one after the other", took)
		}
	})
	t.Run("one that stands still", func(t *testing.T) {
		c, quiet, standing := quietly(t, f, 200*time.Millisecond)
		if _, err := c.Activity(t.Context()); err != nil {
			t.Fatal(err)
		}
		standing.Store(true)
		quiet.Store(true)
		done := run(t, c)
		select {
		case err := <-done:
			t.Fatal(err)
		case <-time.After(time.Second):
		}
		quiet.Store(false)
		standing.Store(false)
		release <- struct{}{}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

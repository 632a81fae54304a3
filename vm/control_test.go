package vm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/vm"
)

// fakeGuest notes what it is asked.
type fakeGuest struct {
	setup    vm.Setup
	restored vm.Restored
	err      error
	frozen   int
	hold     chan struct{} // Sync waits for it
}

func (g *fakeGuest) Ping(context.Context) (vm.Info, error) {
	return vm.Info{Version: "1", Kernel: "6.12", Entered: true, Boot: time.Second}, g.err
}
func (g *fakeGuest) Warm(_ context.Context, s vm.Setup) error  { g.setup = s; return g.err }
func (g *fakeGuest) Enter(_ context.Context, s vm.Setup) error { g.setup = s; return g.err }
func (g *fakeGuest) Restored(_ context.Context, r vm.Restored) (vm.Clock, error) {
	g.restored = r
	return vm.Clock{Now: r.Now, Source: "tsc"}, g.err
}
func (g *fakeGuest) Freeze(context.Context) error { g.frozen++; return g.err }
func (g *fakeGuest) Thaw(context.Context) error   { g.frozen--; return g.err }
func (g *fakeGuest) Usage(context.Context) (dsec.Usage, error) {
	return dsec.Usage{CPU: time.Second, Memory: 1, MemoryPeak: 2, Disk: 3, Pids: 4, OOMKills: 6}, g.err
}
func (g *fakeGuest) Sync(context.Context) error {
	if g.hold != nil {
		<-g.hold
	}
	return g.err
}
func (g *fakeGuest) Again(context.Context) error    { return g.err }
func (g *fakeGuest) PowerOff(context.Context) error { return g.err }

// serve serves the handler on a port and gives a client of it.
func serve(t *testing.T, h vm.Handler) (*vm.Client, *fakePort) {
	p := newFakePort(t)
	port := vm.NewPort(p)
	go func() {
		for {
			c, err := port.Accept()
			if err != nil {
				return
			}
			go vm.Serve(c, h) //nolint:errcheck // the host sees the same end
		}
	}()
	c := vm.NewClient(p.dial)
	t.Cleanup(func() { c.Close() })
	return c, p
}

func TestControl(t *testing.T) {
	g := &fakeGuest{}
	c, _ := serve(t, g)
	ctx := context.Background()
	if i, err := c.Ping(ctx); err != nil || i != (vm.Info{Version: "1", Kernel: "6.12", Entered: true, Boot: time.Second}) {
		t.Errorf("ping: %+v, %v", i, err)
	}
	s := vm.Setup{
		Layers: []vm.Extent{{Disk: "root", Offset: 4096, Size: 1 << 40}, {Disk: "pmem0", DAX: true}},
		Upper:  "upper", Output: "output", Hostname: "h", Hosts: "hosts\n", Resolv: "r", Machine: "m", Env: []string{"A=1", ""}, Cwd: "/w", User: "u",
		Limits: vm.Limits{Memory: 1 << 30, CPU: 1.5, Pids: 7},
	}
	if err := c.Enter(ctx, s); err != nil || !reflect.DeepEqual(g.setup, s) {
		t.Errorf("enter: %+v, %v", g.setup, err)
	}
	if err := c.Warm(ctx, vm.Setup{}); err != nil || !reflect.DeepEqual(g.setup, vm.Setup{}) {
		t.Errorf("warm: %+v, %v", g.setup, err)
	}
	r := vm.Restored{Now: time.Unix(1, 2).UTC(), Seed: []byte("seed"), Hostname: "h", Hosts: "x", Machine: "m"}
	if k, err := c.Restored(ctx, r); err != nil || !reflect.DeepEqual(g.restored, r) || !k.Now.Equal(r.Now) || k.Source != "tsc" {
		t.Errorf("restored: %+v, %+v, %v", g.restored, k, err)
	}
	if err := errors.Join(c.Freeze(ctx), c.Freeze(ctx), c.Thaw(ctx), c.Sync(ctx), c.PowerOff(ctx)); err != nil || g.frozen != 1 {
		t.Errorf("frozen %d, %v", g.frozen, err)
	}
	if u, err := c.Usage(ctx); err != nil || u != (dsec.Usage{CPU: time.Second, Memory: 1, MemoryPeak: 2, Disk: 3, Pids: 4, OOMKills: 6}) {
		t.Errorf("usage: %+v, %v", u, err)
	}
	g.err = dsec.Errorf(dsec.Exhausted, "no room %s", strings.Repeat("x", 10_000))
	if err := c.Enter(ctx, s); dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), "no room") || len(err.Error()) > 5000 {
		t.Errorf("a typed error came as %v: %d bytes", dsec.KindOf(err), len(err.Error()))
	}
	g.err = nil
	s.Env = []string{strings.Repeat("x", 5<<20)}
	if err := c.Enter(ctx, s); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("a message that is too long: %v", err)
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// TestControlReconnects breaks calls off, by their end and by the port's.
func TestControlReconnects(t *testing.T) {
	g := &fakeGuest{hold: make(chan struct{})}
	c, p := serve(t, g)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- c.Sync(ctx) }()
	for {
		p.mu.Lock()
		busy := p.host != nil
		p.mu.Unlock()
		if busy {
			break
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; dsec.KindOf(err) != dsec.Canceled {
		t.Errorf("a call that was given up: %v", err)
	}
	close(g.hold)
	if _, err := c.Ping(context.Background()); err != nil {
		t.Errorf("the next call: %v", err)
	}
	c.Disconnect()
	if _, err := c.Ping(context.Background()); err != nil {
		t.Errorf("after Disconnect: %v", err)
	}
	c.Close()
	if _, err := c.Ping(context.Background()); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("after Close: %v", err)
	}
}

// conversation is a connection that says b and keeps what it is told.
type conversation struct {
	io.Reader
	said bytes.Buffer
}

func (c *conversation) Write(b []byte) (int, error) { return c.said.Write(b) }
func (c *conversation) Close() error                { return nil }

func message(b ...byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
}

func TestOtherVersion(t *testing.T) {
	c := &conversation{Reader: bytes.NewReader(message(1, vm.Version+1, 1))}
	if err := vm.Serve(c, &fakeGuest{}); err != nil || !strings.Contains(c.said.String(), "version") {
		t.Errorf("answered %q, %v", c.said.String(), err)
	}
}

// FuzzServe has a host say anything to a guest.
func FuzzServe(f *testing.F) {
	for call := range byte(12) {
		f.Add(message(1, vm.Version, call))
	}
	f.Add(message(1, vm.Version, 3, 1, 4, 'r', 'o', 'o', 't', 0, 0, 0))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &conversation{Reader: bytes.NewReader(b)}
		vm.Serve(c, &fakeGuest{}) //nolint:errcheck // any will do
		if c.said.Len() > 100*(len(b)+1) {
			t.Errorf("%d bytes were answered by %d", len(b), c.said.Len())
		}
	})
}

// answering is a port whose guest answers a hello as it should and then says b.
type answering struct {
	b    []byte
	in   chan []byte
	rest []byte
	once sync.Once
}

func (a *answering) Write(p []byte) (int, error) {
	if len(p) == 18 && p[0] == 0xf5 && p[1] == 1 {
		a.once.Do(func() {
			a.in <- append(append([]byte{0xf5, 2}, p[2:]...), a.b...)
			close(a.in)
		})
	}
	return len(p), nil
}

func (a *answering) Read(p []byte) (int, error) {
	if len(a.rest) == 0 {
		b, ok := <-a.in
		if !ok {
			return 0, io.EOF
		}
		a.rest = b
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

func (a *answering) Close() error { return nil }

// FuzzClient has a guest answer calls with anything.
func FuzzClient(f *testing.F) {
	f.Add(message(1, 0, 0, 1, 'v', 1, 'k', 0, 2))
	f.Add(message(1, 3, 'b', 'a', 'd', 0))
	f.Add([]byte{0xff, 0xff, 0xff, 0x7f})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := vm.NewClient(func(context.Context) (io.ReadWriteCloser, error) {
			return &answering{b: b, in: make(chan []byte, 1)}, nil
		})
		defer c.Close()
		c.Ping(context.Background()) //nolint:errcheck // any will do
	})
}

package vm_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec/vm"
)

// fakePort is a port whose two directions keep what nobody took, whoever comes
// and goes at the host's end.
type fakePort struct {
	mu      sync.Mutex
	cond    sync.Cond
	toGuest []byte
	toHost  []byte
	host    *fakeHost // nil when nobody is connected
	closed  bool
	quick   bool // the guest never sees that a host went
}

func newFakePort(t testing.TB) *fakePort {
	p := &fakePort{}
	p.cond.L = &p.mu
	t.Cleanup(func() { p.Close() })
	return p
}

// fakeRoom is what a direction holds.
const fakeRoom = 128 << 10

type fakeHost struct {
	p    *fakePort
	gone bool
}

// dial connects a host.
func (p *fakePort) dial(context.Context) (io.ReadWriteCloser, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, io.ErrClosedPipe
	}
	h := &fakeHost{p: p}
	p.host = h
	p.cond.Broadcast()
	return h, nil
}

func (h *fakeHost) Read(b []byte) (int, error) {
	p := h.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.toHost) == 0 && !h.gone && !p.closed {
		p.cond.Wait()
	}
	if h.gone {
		return 0, io.ErrClosedPipe
	}
	if len(p.toHost) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.toHost)
	p.toHost = p.toHost[n:]
	p.cond.Broadcast()
	return n, nil
}

func (h *fakeHost) Write(b []byte) (int, error) {
	p := h.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.toGuest) > fakeRoom && !h.gone && !p.closed {
		p.cond.Wait()
	}
	if h.gone || p.closed {
		return 0, io.ErrClosedPipe
	}
	p.toGuest = append(p.toGuest, b...)
	p.cond.Broadcast()
	return len(b), nil
}

func (h *fakeHost) Close() error {
	h.p.mu.Lock()
	defer h.p.mu.Unlock()
	h.gone = true
	if h.p.host == h && !h.p.quick {
		h.p.host = nil
	}
	h.p.cond.Broadcast()
	return nil
}

func (p *fakePort) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.toGuest) == 0 && p.host != nil && !p.closed {
		p.cond.Wait()
	}
	if p.closed {
		return 0, io.ErrClosedPipe
	}
	if len(p.toGuest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.toGuest)
	p.toGuest = p.toGuest[n:]
	p.cond.Broadcast()
	return n, nil
}

func (p *fakePort) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for (p.host == nil || len(p.toHost) > fakeRoom) && !p.closed {
		p.cond.Wait()
	}
	if p.closed {
		return 0, io.ErrClosedPipe
	}
	p.toHost = append(p.toHost, b...)
	p.cond.Broadcast()
	return len(b), nil
}

func (p *fakePort) WaitHost() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.host == nil && !p.closed {
		p.cond.Wait()
	}
	if p.closed {
		return io.ErrClosedPipe
	}
	return nil
}

func (p *fakePort) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.cond.Broadcast()
	return nil
}

// echo serves a port by sending back what arrives.
func echo(t testing.TB, p *fakePort) {
	var wg sync.WaitGroup
	port := vm.NewPort(p)
	wg.Go(func() {
		for {
			c, err := port.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				io.Copy(c, c) //nolint:errcheck // the host sees the same end
				c.Close()
			})
		}
	})
	t.Cleanup(func() {
		p.Close()
		wg.Wait()
	})
}

func dial(t testing.TB, p *fakePort) io.ReadWriteCloser {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	raw, err := p.dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c, err := vm.Dial(ctx, raw)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// talk checks that a connection carries b both ways.
func talk(t testing.TB, c io.ReadWriter, b []byte) {
	t.Helper()
	go c.Write(b) //nolint:errcheck // what does not arrive is seen below
	got := make([]byte, len(b))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b) {
		i := 0
		for got[i] == b[i] {
			i++
		}
		t.Fatalf("byte %d of %d came back as %#x, not %#x", i, len(b), got[i], b[i])
	}
}

// everyByte has every byte, and runs of the one that begins marks.
func everyByte() []byte {
	b := []byte{0xf5, 0xf5, 0xf5, 0, 1, 0xf5, 1, 0xf5, 2}
	for i := range 256 {
		b = append(b, byte(i), byte(i))
	}
	return append(b, 0xf5)
}

func TestPortCarriesAnything(t *testing.T) {
	p := newFakePort(t)
	echo(t, p)
	c := dial(t, p)
	defer c.Close()
	talk(t, c, everyByte())
	big := make([]byte, 1<<20)
	for i := range big {
		big[i] = byte(rand.Uint32())
	}
	talk(t, c, big)
	talk(t, c, bytes.Repeat([]byte{0xf5}, 300_000))
}

// TestStaleBytes connects to ports that hold what was meant for others, cut
// anywhere, with and without the guest knowing that the host was away.
func TestStaleBytes(t *testing.T) {
	mark := append([]byte{0xf5, 1}, bytes.Repeat([]byte{7}, 16)...)
	var stale [][]byte
	for i := range mark {
		stale = append(stale, mark[:i+1], append(everyByte(), mark[:i+1]...))
	}
	stale = append(stale, nil, []byte{0xf5}, []byte{0xf5, 0xf5}, []byte{0xf5, 99}, everyByte(), append(append([]byte{}, mark...), "old"...))
	for _, quick := range []bool{false, true} {
		p := newFakePort(t)
		p.quick = quick
		echo(t, p)
		for i, s := range stale {
			// Of the past: what the guest has not read, and what no host took.
			p.mu.Lock()
			p.toGuest = append(p.toGuest, s...)
			p.toHost = append(p.toHost, s...)
			p.mu.Unlock()
			c := dial(t, p)
			talk(t, c, everyByte())
			// The host goes in the middle of things, half of its words unread.
			c.Write(everyByte()[:1+i%100]) //nolint:errcheck
			c.Close()
		}
	}
}

// TestQuickSuccessor connects while an earlier connection still is one: the
// earlier host's end is not told, but the guest's is over.
func TestQuickSuccessor(t *testing.T) {
	p := newFakePort(t)
	port := vm.NewPort(p)
	first := dial(t, p)
	old, err := port.Accept()
	if err != nil {
		t.Fatal(err)
	}
	next := dial(t, p)
	defer next.Close()
	if _, err := old.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the earlier connection reads %v", err)
	}
	if _, err := old.Write([]byte("late")); err == nil {
		t.Error("the earlier connection can be written to")
	}
	old.Close()
	first.Close()
	c, err := port.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2)
	if _, err := io.ReadFull(next, b); err != nil || string(b) != "hi" {
		t.Errorf("%q, %v", b, err)
	}
	// The guest's end of it is seen.
	c.Close()
	if _, err := next.Read(b); !errors.Is(err, io.EOF) {
		t.Errorf("after the guest closed: %v", err)
	}
}

func TestDialGivesUp(t *testing.T) {
	p := newFakePort(t) // nobody serves it
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	raw, _ := p.dial(ctx)
	if _, err := vm.Dial(ctx, raw); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	// A guest that comes later answers the next.
	echo(t, p)
	c := dial(t, p)
	defer c.Close()
	talk(t, c, []byte("late"))
}

// FuzzStale leaves any bytes in both directions before a connection.
func FuzzStale(f *testing.F) {
	f.Add(everyByte(), []byte{0xf5})
	f.Add([]byte{0xf5, 2}, append([]byte{0xf5, 2}, make([]byte, 40)...))
	f.Fuzz(func(t *testing.T, toGuest, toHost []byte) {
		p := newFakePort(t)
		p.toGuest, p.toHost = append(p.toGuest, toGuest...), append(p.toHost, toHost...)
		echo(t, p)
		c := dial(t, p)
		defer c.Close()
		talk(t, c, everyByte())
	})
}

// loop is a raw connection whose peer has said all it will.
type loop struct{ io.Reader }

func (loop) Write(b []byte) (int, error) { return len(b), nil }
func (loop) Close() error                { return nil }

// FuzzHostileGuest has a guest say anything: the host's end gives an error and
// no more bytes than came.
func FuzzHostileGuest(f *testing.F) {
	f.Add(everyByte())
	f.Add(append([]byte{0xf5, 2}, make([]byte, 40)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := vm.Dial(context.Background(), loop{bytes.NewReader(b)}); err == nil {
			t.Errorf("a connection began without its word: %v", c)
		}
	})
}

// TestNewPort begins anew at the guest's end of a port: the host's connection to
// the earlier one is over.
func TestNewPort(t *testing.T) {
	p := newFakePort(t)
	echo(t, p)
	c := dial(t, p)
	defer c.Close()
	talk(t, c, []byte("first"))
	vm.NewPort(p)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
}

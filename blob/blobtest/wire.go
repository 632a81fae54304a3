package blobtest

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Wire is the network between a store and its server: a forwarder on loopback that a test
// can cut, hold and slow down.
type Wire struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond
	conns   map[net.Conn]bool
	left    int64 // bytes until the cut; negative: no cut
	cut     bool
	refuse  int // connections to refuse before the wire heals by itself; negative: all
	held    bool
	rate    int64 // bytes a second; 0: as fast as it goes
	cuts    int
	closed  bool
}

// NewWire returns a wire to the server at target. It ends with the test.
func NewWire(t testing.TB, target string) *Wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &Wire{listener: l, target: target, conns: map[net.Conn]bool{}, left: -1}
	w.changed = sync.NewCond(&w.mu)
	w.wg.Go(w.run)
	t.Cleanup(func() {
		l.Close()
		w.mu.Lock()
		w.closed, w.held = true, false
		w.breakAll()
		w.mu.Unlock()
		w.wg.Wait()
	})
	return w
}

// Addr is where the store finds the server.
func (w *Wire) Addr() string { return w.listener.Addr().String() }

// CutAfter lets n more bytes pass, in both directions together, and then breaks all
// connections. New ones are refused, until so many were or, if refuse is negative, until Heal.
func (w *Wire) CutAfter(n int64, refuse int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left, w.refuse = n, refuse
}

// HoldAfter lets n more bytes pass and then nothing, with all connections standing, until Heal.
func (w *Wire) HoldAfter(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.left, w.held = n, true
}

// Pace lets so many bytes pass a second.
func (w *Wire) Pace(bytesPerSecond int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rate = bytesPerSecond
}

// Heal ends whatever is wrong with the wire.
func (w *Wire) Heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heal()
	w.rate = 0
}

// Cuts returns how often the wire was cut.
func (w *Wire) Cuts() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cuts
}

// Requires: w.mu held.
func (w *Wire) heal() {
	w.left, w.cut, w.held = -1, false, false
	w.changed.Broadcast()
}

// Requires: w.mu held.
func (w *Wire) breakAll() {
	for c := range w.conns {
		c.Close()
	}
	w.changed.Broadcast()
}

func (w *Wire) run() {
	for {
		in, err := w.listener.Accept()
		if err != nil {
			return
		}
		w.mu.Lock()
		refuse := w.cut
		if refuse && w.refuse >= 0 {
			if w.refuse--; w.refuse < 0 {
				w.heal()
				refuse = false
			}
		}
		w.mu.Unlock()
		if refuse {
			in.Close()
			continue
		}
		out, err := net.Dial("tcp", w.target)
		if err != nil {
			in.Close()
			continue
		}
		w.mu.Lock()
		w.conns[in], w.conns[out] = true, true
		if w.closed {
			w.breakAll()
		}
		w.mu.Unlock()
		w.wg.Go(func() { w.pump(out, in) })
		w.wg.Go(func() { w.pump(in, out) })
	}
}

func (w *Wire) pump(to, from net.Conn) {
	defer func() {
		to.Close()
		from.Close()
		w.mu.Lock()
		delete(w.conns, to)
		delete(w.conns, from)
		w.mu.Unlock()
	}()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		if n, wait := w.pass(n); n > 0 {
			time.Sleep(wait) // a slow line is what is asked for
			if _, werr := to.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err == io.EOF {
			if half, ok := to.(*net.TCPConn); ok {
				half.CloseWrite() //nolint:errcheck // the other direction goes on
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass returns how many of n bytes may go on, and how long they take.
func (w *Wire) pass(n int) (int, time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.held && w.left >= 0 && w.left < int64(n) && !w.closed {
		w.changed.Wait()
	}
	var wait time.Duration
	if w.rate > 0 {
		wait = time.Duration(n) * time.Second / time.Duration(w.rate)
	}
	if w.left < 0 {
		return n, wait
	}
	if w.left > int64(n) || w.held {
		w.left -= int64(n)
		return n, wait
	}
	n = int(w.left)
	w.left, w.cut = -1, true
	w.cuts++
	w.breakAll()
	return n, wait
}

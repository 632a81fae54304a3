package guest_test

import (
	"context"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
)

// freePort gives a port of the loopback that nobody has.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func call(t *testing.T, port int) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// upper serves what connects: it answers what it read to the end in capitals.
func upper(ctx context.Context, c *wire.Client, port int) error {
	for {
		conn, err := c.Accept(ctx, port)
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			b, err := io.ReadAll(conn)
			if err == nil {
				conn.Write([]byte(strings.ToUpper(string(b)))) //nolint:errcheck // the caller sees it
				conn.CloseWrite()                              //nolint:errcheck
				io.Copy(io.Discard, conn)                      //nolint:errcheck
			}
		}()
	}
}

func talk(t *testing.T, c *net.TCPConn, text string) {
	t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Error(err)
	}
	c.CloseWrite()
	b, err := io.ReadAll(c)
	if err != nil || string(b) != strings.ToUpper(text) {
		t.Errorf("%.20q was answered with %.20q, %v", text, b, err)
	}
}

func TestInlet(t *testing.T) {
	b := newBox(t)
	x, cut := newCut(t, b, wire.Options{})
	port := freePort(t)
	if _, err := x.Accept(t.Context(), port); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("accept before listen: %v", err)
	}
	for range 2 {
		if err := x.Listen(t.Context(), port); err != nil {
			t.Fatal(err)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if err := x.Listen(t.Context(), taken.Addr().(*net.TCPAddr).Port); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("a port that is taken: %v", err)
	}
	for _, p := range []int{0, -1, 65536} {
		if err := x.Listen(t.Context(), p); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("port %d: %v", p, err)
		}
	}

	// What calls before anybody listens waits.
	early := make([]*net.TCPConn, 5)
	for i := range early {
		early[i] = call(t, port)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- upper(ctx, x.Client, port) }()
	for i, c := range early {
		talk(t, c, strings.Repeat("early ", i*100_000))
	}
	// The connection to the guest breaks, also while nobody calls.
	for range 20 {
		cut.cut()
		talk(t, call(t, port), "later")
	}
	cancel()
	if err := <-served; ctx.Err() == nil || err == nil {
		t.Errorf("accept ended with %v", err)
	}

	// A caller that goes away leaves the queue to the next one: another host's.
	waiting := call(t, port)
	y := b.client()
	defer y.Close()
	go upper(t.Context(), y, port) //nolint:errcheck // ends with the client
	talk(t, waiting, "another process")
}

// A workload that calls without an end is held back by the queue, and takes
// nothing of the agent's as long as the host does not ask for more.
func TestInletFlood(t *testing.T) {
	b := newBox(t)
	port := freePort(t)
	if err := b.Listen(t.Context(), port); err != nil {
		t.Fatal(err)
	}
	flood := func() (in int) {
		for {
			c, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), 50*time.Millisecond)
			if err != nil {
				return in
			}
			t.Cleanup(func() { c.Close() })
			in++
		}
	}
	if n := flood(); n < 100 || n > 300 {
		t.Errorf("%d connections were let in, want about 128", n)
	}
	if st := b.run(sh("echo alive"), ""); string(st.Out) != "alive\n" {
		t.Errorf("the guest answers %q", st.Out)
	}
	for range 20 {
		c, err := b.Accept(t.Context(), port)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if n := flood(); n < 10 || n > 40 {
		t.Errorf("%d more were let in, want about 20", n)
	}
}

package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
	"golang.org/x/sys/unix"
)

// cutter dials a box and can break the connections it made.
type cutter struct {
	path string

	mu    sync.Mutex
	conns []net.Conn
	dials int
	down  error // what Dial says now
}

func (c *cutter) dial(ctx context.Context) (io.ReadWriteCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down != nil {
		return nil, c.down
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.path)
	if err == nil {
		c.conns = append(c.conns, conn)
		c.dials++
	}
	return conn, err
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

func (c *cutter) set(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = err
}

func newCut(t *testing.T, b *box, o wire.Options) (*box, *cutter) {
	c := &cutter{path: b.path}
	o.Dial = c.dial
	x := *b
	x.Client = wire.NewClient(o)
	t.Cleanup(func() { x.Client.Close() })
	return &x, c
}

func TestReconnect(t *testing.T) {
	b := newBox(t)
	x, cut := newCut(t, b, wire.Options{})
	st := x.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})

	// Attach goes on where it was, Wait waits on.
	var wg sync.WaitGroup
	got := make(chan string, 1000)
	wg.Go(func() { got <- x.attach(st.ID, 0).out })
	wg.Go(func() {
		if st := x.wait(st.ID); st.Outcome != dsec.Exited {
			t.Errorf("%+v", st)
		}
	})
	want := ""
	for i := range 20 {
		piece := fmt.Sprintf("piece %d\n", i)
		x.write(st.ID, int64(len(want)), piece, false)
		want += piece
		cut.cut()
	}
	x.write(st.ID, int64(len(want)), "", true)
	wg.Wait()
	if s := <-got; s != want {
		t.Fatalf("attached %q", s)
	}

	// In flight: without a step nobody knows, with one it is the same command.
	fifo := b.dir + "/fifo"
	unix.Mkfifo(fifo, 0o600)
	hang := sh("echo x >> " + b.dir + "/ran; read x < " + fifo + "; echo $x")
	ran := func(n int) func() bool {
		return func() bool { p, _ := os.ReadFile(b.dir + "/ran"); return len(p) == 2*n }
	}
	done := make(chan error, 1)
	go func() { _, err := x.Commands().Run(x.Context(), nobody, hang, nil); done <- err }()
	eventually(t, "it runs", ran(1))
	cut.cut()
	wantKind(t, <-done, dsec.Unavailable, "not known")
	os.WriteFile(fifo, []byte("a\n"), 0)

	results := make(chan dsec.Result, 1)
	go func() {
		r, err := x.Commands().Run(x.Context(), step(1), hang, nil)
		if err != nil {
			t.Error(err)
		}
		results <- r
	}()
	eventually(t, "it runs", ran(2))
	cut.cut()
	os.WriteFile(fifo, []byte("b\n"), 0)
	if r := <-results; string(r.Out) != "b\n" || !r.Replayed {
		t.Fatalf("%+v %q", r.CommandStatus, r.Out)
	}
	if !ran(2)() {
		t.Fatal("it ran again")
	}

	// A broken upload is unknown, and leaves no half file.
	pr, pw := io.Pipe()
	go func() {
		_, err := x.Files().Write(x.Context(), nobody, x.op("up"), dsec.WriteOptions{}, pr)
		done <- err
	}()
	pw.Write(make([]byte, 200<<10))
	cut.cut()
	go pw.Write(make([]byte, 1<<20))
	wantKind(t, <-done, dsec.Unavailable)
	pr.Close()
	if _, err := os.Stat(b.dir + "/up"); err == nil {
		t.Fatal("there is half a file")
	}

	// A guest that cannot be reached is Unavailable, one that is gone Conflict.
	cut.set(errors.New("no route"))
	cut.cut()
	_, err := x.Commands().List(x.Context(), nobody)
	wantKind(t, err, dsec.Unavailable, "no route")
	cut.set(dsec.Errorf(dsec.Conflict, "it has ended"))
	_, err = x.Commands().List(x.Context(), nobody)
	wantKind(t, err, dsec.Conflict, "it has ended")
	cut.set(nil)
	if _, err = x.Commands().List(x.Context(), nobody); err != nil {
		t.Fatal(err)
	}

	// The other client never noticed.
	if l, err := b.Commands().List(b.Context(), nobody); err != nil || len(l) != 3 {
		t.Fatalf("%d %v", len(l), err)
	}
}

func TestClose(t *testing.T) {
	b := newBox(t)
	x, _ := newCut(t, b, wire.Options{})
	st := x.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	errs := make(chan error, 3)
	go func() { _, err := x.Commands().Wait(x.Context(), nobody, st.ID); errs <- err }()
	go func() {
		for _, err := range x.Commands().Attach(x.Context(), nobody, st.ID, 0) {
			errs <- err
		}
	}()
	go func() {
		_, err := first(x.Files().Watch(x.Context(), nobody, x.op(""), dsec.WatchOptions{}))
		if err == nil {
			for _, e := range x.Files().Watch(x.Context(), nobody, x.op(""), dsec.WatchOptions{}) {
				err = e
			}
		}
		errs <- err
	}()
	x.write(st.ID, 0, "x", false)
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	x.Close()
	x.Close()
	for range 3 {
		wantKind(t, <-errs, dsec.Conflict)
	}
	_, err := x.Commands().Start(x.Context(), nobody, sh("true"))
	wantKind(t, err, dsec.Conflict)
	b.write(st.ID, 0, "x", true)
	if st := b.wait(st.ID); st.Code != 0 {
		t.Fatalf("the command was harmed: %+v", st)
	}
}

func TestContext(t *testing.T) {
	b := newBox(t)
	st := b.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	before := leftovers()
	ctx, cancel := context.WithTimeout(b.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := b.Commands().Wait(ctx, nobody, st.ID)
	wantKind(t, err, dsec.Timeout)
	for range 200 {
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error)
		go func() { _, err := b.Commands().Wait(ctx, nobody, st.ID); done <- err }()
		cancel()
		wantKind(t, <-done, dsec.Canceled)
	}
	if err := settled(before); err != nil {
		t.Fatal(err)
	}
	// Run's caller goes away, the command runs on.
	ctx, cancel = context.WithCancel(b.Context())
	f := b.dir + "/f"
	unix.Mkfifo(f, 0o600)
	done := make(chan error)
	go func() {
		_, err := b.Commands().Run(ctx, step(9), sh("echo up > "+f+"; read x < "+f+"; exit 5"), nil)
		done <- err
	}()
	os.ReadFile(f)
	cancel()
	wantKind(t, <-done, dsec.Canceled)
	os.WriteFile(f, []byte("\n"), 0)
	r, err := b.Commands().Run(b.Context(), step(9), sh("echo up > "+f+"; read x < "+f+"; exit 5"), nil)
	if err != nil || !r.Replayed || r.Code != 5 {
		t.Fatalf("%+v %v", r, err)
	}
	b.write(st.ID, 0, "", true)
	b.wait(st.ID)
}

func TestIdleClient(t *testing.T) {
	b := newBox(t)
	x, cut := newCut(t, b, wire.Options{IdleAfter: time.Millisecond})
	before := leftovers()
	for i := range 5 {
		if _, err := x.Activity(x.Context()); err != nil {
			t.Fatal(err)
		}
		if err := settled(before); err != nil { // neither goroutine nor descriptor
			t.Fatal(err)
		}
		if cut.dials != i+1 {
			t.Fatalf("%d connections", cut.dials)
		}
	}
	st := x.start(sh("sleep 0.3"))
	x.wait(st.ID) // longer than the idle time
}

func TestSubscribeAgain(t *testing.T) {
	b := newBox(t)
	x, cut := newCut(t, b, wire.Options{})
	seen := make(chan dsec.Activity, 10_000)
	x.Subscribe(func(a dsec.Activity) { seen <- a })
	<-seen
	for range 5 {
		cut.cut()
		<-seen // after each reconnection
	}
	for range 200 {
		x.run(dsec.Command{Argv: []string{"true"}}, "")
	}
	last := dsec.Activity{}
	eventually(t, "the last end", func() bool {
		select {
		case last = <-seen:
		default:
		}
		a, err := b.Activity(b.Context())
		return err == nil && a == last
	})
}

func TestPorts(t *testing.T) {
	b := newBox(t)
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Skip("needs loopback:", err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { // answers after the end of the question
					defer c.Close()
					p, _ := io.ReadAll(c)
					c.Write(bytes.ToUpper(p))
				}()
			}
		}()
		port := l.Addr().(*net.TCPAddr).Port
		for _, n := range []int{0, 5, 3 << 20} {
			c, err := b.Ports().Dial(b.Context(), nobody, port)
			if err != nil {
				t.Fatal(err)
			}
			msg := strings.Repeat("a", n)
			if _, err := io.WriteString(c, msg); err != nil {
				t.Fatal(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if p, err := io.ReadAll(c); err != nil || string(p) != strings.ToUpper(msg) {
				t.Fatalf("%d bytes, %v", len(p), err)
			}
			c.Close()
			c.Close()
		}
		// Closed early.
		c, err := b.Ports().Dial(b.Context(), nobody, port)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Fatal("read of a closed connection")
		}
		l.Close()
		_, err = b.Ports().Dial(b.Context(), nobody, port)
		wantKind(t, err, dsec.Unavailable, "refused")
	}
	_, err := b.Ports().Dial(b.Context(), nobody, 0)
	wantKind(t, err, dsec.Invalid)
}

// A reader that stops does not stop the others of its connection.
func TestStalledStream(t *testing.T) {
	b := newBox(t)
	os.WriteFile(b.dir+"/big", make([]byte, 20<<20), 0o644)
	r, err := b.Files().Read(b.Context(), nobody, b.op("big"), dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		b.run(dsec.Command{Argv: []string{"true"}}, "")
	}
	if n, err := io.Copy(io.Discard, r); n != 20<<20 || err != nil {
		t.Fatalf("%d %v", n, err)
	}
	r.Close()
}

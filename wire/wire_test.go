package wire_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
)

func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(code) // the fuzzer has goroutines of its own
	}
	for end := time.Now().Add(5 * time.Second); code == 0 && runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(end) {
			b := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "goroutines left:\n%s\n", b[:runtime.Stack(b, true)])
			code = 1
		}
	}
	os.Exit(code)
}

// fake is a guest that answers in its own way. What it has not is nil.
type fake struct {
	run    func(dsec.Command, []byte) (dsec.Result, error)
	read   func() io.ReadCloser
	write  func(io.Reader) error
	forgot []dsec.Step
	still  bool
	inside chan dsec.PortConn
}

type fakeCommands struct {
	dsec.Commands
	f *fake
}

func (f fakeCommands) Run(_ context.Context, _ dsec.Call, c dsec.Command, in []byte) (dsec.Result, error) {
	return f.f.run(c, in)
}

type fakeFiles struct {
	dsec.Files
	f *fake
}

func (f fakeFiles) Read(context.Context, dsec.Call, dsec.FileOp, dsec.ReadRange) (io.ReadCloser, error) {
	return f.f.read(), nil
}

func (f fakeFiles) Write(_ context.Context, _ dsec.Call, _ dsec.FileOp, _ dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	return dsec.FileInfo{}, f.f.write(r)
}

// handler is a fake as wire.Handler.
type handler struct{ f *fake }

func (h handler) Commands() dsec.Commands { return fakeCommands{f: h.f} }
func (h handler) Files() dsec.Files       { return fakeFiles{f: h.f} }
func (h handler) Ports() dsec.Ports       { return nil }
func (h handler) Activity(context.Context) (dsec.Activity, error) {
	return dsec.Activity{Running: 7}, nil
}
func (h handler) Activities(ctx context.Context) iter.Seq[dsec.Activity] {
	return func(yield func(dsec.Activity) bool) { // more than the credit of a stream
		for i := range 20_000 {
			if !yield(dsec.Activity{Running: i}) {
				return
			}
		}
		<-ctx.Done()
	}
}
func (h handler) Forget(_ context.Context, s []dsec.Step) error { h.f.forgot = s; return nil }
func (h handler) Listen(_ context.Context, port int) error {
	if port != 7070 {
		return dsec.Errorf(dsec.Conflict, "port %d is taken", port)
	}
	return nil
}
func (h handler) Accept(ctx context.Context, _ int, take func(dsec.PortConn) error) error {
	select {
	case c := <-h.f.inside:
		return take(c)
	case <-ctx.Done():
		return ctx.Err()
	}
}
func (h handler) StopClocks(context.Context) error  { h.f.still = true; return nil }
func (h handler) StartClocks(context.Context) error { h.f.still = false; return nil }

// plain is a stream without deadlines or vectored writes, like a serial port.
type plain struct{ io.ReadWriteCloser }

func connect(t testing.TB, f *fake, wrap func(net.Conn) io.ReadWriteCloser) *wire.Client {
	c := wire.NewClient(wire.Options{Dial: func(context.Context) (io.ReadWriteCloser, error) {
		a, b := net.Pipe()
		go wire.Serve(wrap(b), handler{f})
		return wrap(a), nil
	}})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestMessages(t *testing.T) {
	for name, wrap := range map[string]func(net.Conn) io.ReadWriteCloser{
		"socket": func(c net.Conn) io.ReadWriteCloser { return c },
		"serial": func(c net.Conn) io.ReadWriteCloser { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{}
			c := connect(t, f, wrap)
			// Requests and answers of all sizes around those of a frame.
			f.run = func(c dsec.Command, in []byte) (dsec.Result, error) {
				return dsec.Result{Out: in, Err: []byte(c.Argv[0])}, nil
			}
			for _, n := range []int{1, 240, 4096, 256<<10 - 20, 256 << 10, 600_000, 1 << 20} {
				arg, in := strings.Repeat("a", n), bytes.Repeat([]byte("b"), n)
				r, err := c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Argv: []string{arg}}, in)
				if err != nil || string(r.Err) != arg || !bytes.Equal(r.Out, in) {
					t.Fatalf("%d: %d %d %v", n, len(r.Err), len(r.Out), err)
				}
			}
			// More than an answer may have.
			f.run = func(dsec.Command, []byte) (dsec.Result, error) { return dsec.Result{Out: make([]byte, 11<<20)}, nil }
			_, err := c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{}, nil)
			if dsec.KindOf(err) != dsec.Unavailable {
				t.Fatal(err)
			}
			// Errors keep their kind and text.
			f.run = func(dsec.Command, []byte) (dsec.Result, error) {
				return dsec.Result{}, fmt.Errorf("outer: %w", dsec.Errorf(dsec.Exhausted, "full"))
			}
			_, err = c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{}, nil)
			if dsec.KindOf(err) != dsec.Exhausted || err.Error() != "outer: full" {
				t.Fatal(err)
			}
			if a, err := c.Activity(t.Context()); err != nil || a.Running != 7 {
				t.Fatalf("%+v %v", a, err)
			}
			steps := []dsec.Step{{Session: "x", Number: 3}, {Session: "y", Number: 1}}
			if err := c.Forget(t.Context(), steps); err != nil || !slices.Equal(f.forgot, steps) {
				t.Fatalf("%+v %v", f.forgot, err)
			}
			if err := c.StopClocks(t.Context()); err != nil || !f.still {
				t.Fatal(err)
			}
			if err := c.StartClocks(t.Context()); err != nil || f.still {
				t.Fatal(err)
			}
			done := make(chan struct{})
			last := -1
			c.Subscribe(func(a dsec.Activity) {
				if a.Running != last+1 {
					t.Errorf("%d after %d", a.Running, last)
				}
				if last = a.Running; last == 19_999 {
					close(done)
				}
			})
			<-done
		})
	}
}

// endless gives bytes until it is closed.
type endless struct {
	given  chan int
	closed chan struct{}
}

func (e *endless) Read(p []byte) (int, error) {
	select {
	case e.given <- len(p):
	default:
	}
	return len(p), nil
}
func (e *endless) Close() error { close(e.closed); return nil }

// A reader that stops bounds what is sent, and its Close ends the sender.
func TestCredit(t *testing.T) {
	e := &endless{given: make(chan int, 1000), closed: make(chan struct{})}
	stop := make(chan struct{})
	read := make(chan struct{})
	f := &fake{
		read: func() io.ReadCloser { return e },
		write: func(r io.Reader) error {
			r.Read(make([]byte, 10))
			close(read)
			<-stop
			return dsec.Errorf(dsec.Exhausted, "full")
		},
		run: func(dsec.Command, []byte) (dsec.Result, error) { return dsec.Result{}, nil },
	}
	c := connect(t, f, func(c net.Conn) io.ReadWriteCloser { return c })
	r, err := c.Files().Read(t.Context(), dsec.Call{}, dsec.FileOp{}, dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	src := &endless{given: make(chan int, 1000), closed: make(chan struct{})}
	werr := make(chan error, 1)
	go func() {
		_, err := c.Files().Write(t.Context(), dsec.Call{}, dsec.FileOp{}, dsec.WriteOptions{}, src)
		werr <- err
	}()
	<-read
	for range 100 { // others go on
		if _, err := c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range []*endless{e, src} {
		if n := len(e.given); n > 6 { // chunks of 64 KiB in a window of 256
			t.Errorf("%d chunks are under way", n)
		}
	}
	close(stop)
	if err := <-werr; dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("the refusal became %v", err)
	}
	if n, err := io.CopyN(io.Discard, r, 10<<20); err != nil {
		t.Fatalf("%d %v", n, err)
	}
	r.Close()
	<-e.closed
}

// A connection that ends in the middle of an upload is not the upload's end.
func TestBrokenUpload(t *testing.T) {
	got := make(chan error, 1)
	f := &fake{write: func(r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		got <- err
		return err
	}}
	for range 50 {
		a, b := net.Pipe()
		done := make(chan error, 1)
		go func() { done <- wire.Serve(b, handler{f}) }()
		go io.Copy(io.Discard, a)
		a.Write(hello(wire.Version))
		a.Write(frame(2, 0, 1, "\x0d\x08\x00\x00\x00\x00\x00\x00\x00\x00data"))
		a.Close()
		if err := <-got; err == nil {
			t.Fatal("half a content was taken for the whole")
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func hello(version uint16) []byte {
	b := []byte{11, 0, 0, 0, 1, 0, 0, 0, 0, 0}
	return binary.LittleEndian.AppendUint16(append(b, "dsec-wire"...), version)
}

// scripted is a client of a guest that says what it is told and takes
// everything.
func scripted(t testing.TB, says []byte) *wire.Client {
	c := wire.NewClient(wire.Options{Dial: func(context.Context) (io.ReadWriteCloser, error) {
		a, b := net.Pipe()
		go io.Copy(io.Discard, b)
		go func() {
			b.Write(says)
			b.Close()
		}()
		return a, nil
	}})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestHandshake(t *testing.T) {
	for name, x := range map[string]struct {
		says []byte
		kind dsec.ErrorKind
	}{
		"version": {hello(wire.Version + 1), dsec.Unsupported},
		"noise":   {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), dsec.Unavailable},
		"nothing": {nil, dsec.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := scripted(t, x.says).Activity(t.Context())
			if dsec.KindOf(err) != x.kind {
				t.Fatal(err)
			}
		})
	}
	// A guest that says nothing does not hold up its caller.
	c := wire.NewClient(wire.Options{Dial: func(context.Context) (io.ReadWriteCloser, error) {
		a, _ := net.Pipe()
		return a, nil
	}})
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := c.Activity(ctx); dsec.KindOf(err) != dsec.Timeout {
		t.Fatal(err)
	}
	// And the guest's end refuses a strange host.
	a, b := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- wire.Serve(b, handler{&fake{}}) }()
	go io.Copy(io.Discard, a)
	a.Write(hello(99))
	if err := <-done; dsec.KindOf(err) != dsec.Unsupported {
		t.Fatal(err)
	}
	a.Close()
}

func frame(typ, flags byte, stream uint32, payload string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	b = append(b, typ, flags)
	return append(binary.LittleEndian.AppendUint32(b, stream), payload...)
}

// A guest that breaks the rules loses its connection, and memory stays bounded.
func TestHostileGuest(t *testing.T) {
	big := strings.Repeat("x", 64<<10)
	flood := bytes.Repeat(frame(4, 0, 1, big), 10)
	for name, says := range map[string][]byte{
		"unknown stream":   frame(3, 0, 9, "\x00"),
		"huge frame":       {0xff, 0xff, 0xff, 0xff, 4, 0, 1, 0, 0, 0},
		"type":             frame(9, 0, 1, ""),
		"request":          frame(2, 0, 1, "x"),
		"no credit":        flood,
		"tiny flood":       bytes.Repeat(frame(4, 0, 1, ""), 10_000),
		"credit":           bytes.Repeat(frame(6, 0, 1, "\xff\xff\xff\xff"), 2),
		"endless response": bytes.Repeat(frame(3, 1, 1, big), 400),
		"empty response":   frame(3, 0, 1, ""),
		"half frame":       frame(4, 0, 1, big)[:100],
		"stream zero":      frame(4, 0, 0, "x"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := scripted(t, append(hello(wire.Version), says...))
			_, err := c.Commands().Run(t.Context(), dsec.Call{}, dsec.Command{Shell: "x"}, nil)
			if dsec.KindOf(err) != dsec.Unavailable {
				t.Fatal(err)
			}
		})
	}
}

func FuzzGuest(f *testing.F) {
	f.Add(frame(3, 0, 1, "\x00"), byte(0))
	f.Add(append(frame(4, 0, 1, "abc"), frame(3, 0, 1, "\x01nope")...), byte(1))
	f.Add(append(frame(3, 1, 1, "\x00"), frame(3, 0, 1, "abc")...), byte(2))
	f.Add(append(frame(4, 2, 1, ""), frame(6, 0, 1, "\x01\x00\x00\x00")...), byte(3))
	f.Add(frame(4, 0, 1, "\x05\x00\x00\x00\x00\x00"), byte(4))
	f.Fuzz(func(t *testing.T, says []byte, which byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		first := true
		c := wire.NewClient(wire.Options{Dial: func(context.Context) (io.ReadWriteCloser, error) {
			if !first {
				return nil, dsec.Errorf(dsec.Conflict, "once is enough")
			}
			first = false
			a, b := net.Pipe()
			go io.Copy(io.Discard, b)
			go func() {
				b.Write(append(hello(wire.Version), says...))
				b.Close()
			}()
			return a, nil
		}})
		defer c.Close()
		switch which % 7 {
		case 0:
			c.Commands().Run(ctx, dsec.Call{}, dsec.Command{}, nil)
		case 1:
			c.Commands().List(ctx, dsec.Call{})
		case 2:
			for _, err := range c.Commands().Attach(ctx, dsec.Call{}, "c", 0) {
				_ = err
			}
		case 3:
			if r, err := c.Files().Read(ctx, dsec.Call{}, dsec.FileOp{}, dsec.ReadRange{}); err == nil {
				io.Copy(io.Discard, r)
				r.Close()
			}
		case 4:
			for _, err := range c.Files().List(ctx, dsec.Call{}, dsec.FileOp{}, 1) {
				_ = err
			}
		case 5:
			c.Files().Write(ctx, dsec.Call{}, dsec.FileOp{}, dsec.WriteOptions{}, strings.NewReader(strings.Repeat("x", 1<<20)))
		case 6:
			if p, err := c.Ports().Dial(ctx, dsec.Call{}, 1); err == nil {
				p.Write([]byte("x"))
				io.Copy(io.Discard, p)
				p.Close()
			}
		}
		if ctx.Err() != nil {
			t.Fatal("it hangs")
		}
	})
}

func FuzzHost(f *testing.F) {
	f.Add(frame(2, 2, 1, "\x18\x00"))
	f.Add(append(frame(2, 1, 1, "\x18"), frame(2, 2, 1, "\x00")...))
	f.Add(append(frame(2, 0, 1, "\x0d\x00abc"), frame(5, 0, 1, "")...))
	f.Add(append(frame(2, 2, 2, "\x18\x00"), frame(2, 2, 1, "\x18\x00")...))
	f.Fuzz(func(t *testing.T, says []byte) {
		a, b := net.Pipe()
		done := make(chan error, 1)
		x := &fake{
			run:   func(dsec.Command, []byte) (dsec.Result, error) { return dsec.Result{}, nil },
			read:  func() io.ReadCloser { return io.NopCloser(strings.NewReader("x")) },
			write: func(r io.Reader) error { _, err := io.Copy(io.Discard, r); return err },
		}
		go func() { done <- wire.Serve(b, quiet{handler{x}}) }()
		go io.Copy(io.Discard, a)
		a.Write(append(hello(wire.Version), says...))
		a.Close()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatal("it hangs")
		}
	})
}

// quiet answers everything, with errors where fake has nothing.
type quiet struct{ handler }

func (q quiet) Commands() dsec.Commands { return nothing{} }
func (q quiet) Files() dsec.Files       { return fakeFiles{nothingFiles{}, q.f} }
func (q quiet) Ports() dsec.Ports       { return nothingPorts{} }

var errNothing = errors.New("nothing here")

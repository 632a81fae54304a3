package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// cutter is a proxy that cuts every connection after some bytes have come from
// the server.
type cutter struct {
	target string
	mu     sync.Mutex
	after  int // bytes; none are cut when negative
	cuts   int
	busy   sync.WaitGroup
}

func cut(t *testing.T, url string, after int) (*cutter, string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{target: strings.TrimPrefix(url, "http://"), after: after}
	c.busy.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			c.busy.Go(func() { c.relay(conn) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		c.busy.Wait()
	})
	return c, "http://" + l.Addr().String()
}

func (c *cutter) relay(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", c.target)
	if err != nil {
		return
	}
	defer out.Close()
	c.mu.Lock()
	after := c.after
	c.mu.Unlock()
	c.busy.Go(func() {
		defer out.Close()
		_, _ = io.Copy(out, in)
	})
	if after < 0 {
		_, _ = io.Copy(in, out)
		return
	}
	if n, _ := io.CopyN(in, out, int64(after)); n == int64(after) {
		c.mu.Lock()
		c.cuts++
		c.mu.Unlock()
		_ = in.(*net.TCPConn).SetLinger(0) // a reset, not an end
	}
}

// through gives a client whose connections are cut.
func (n node) through(t *testing.T, after int) (*cutter, dsec.Services) {
	c, url := cut(t, n.URL, after)
	tr := client.NewTransport()
	s := open(t, client.Config{URL: url, Transport: tr})
	t.Cleanup(tr.CloseIdleConnections)
	return c, s
}

// TestAttachSurvivesCuts reads output in all sizes of piece over connections
// that break, and expects every byte once and one end.
func TestAttachSurvivesCuts(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	for _, c := range []struct{ total, piece, after int }{
		{2000, 1, 3000}, {2000, 7, 700}, {300_000, 1000, 50_000}, {3 << 20, 64 << 10, 1 << 20}, {300_000, 4097, 77_777},
	} {
		st, err := n.Commands.Start(t.Context(), on, dsec.Command{Argv: []string{"pieces", strconv.Itoa(c.total), strconv.Itoa(c.piece)}})
		if err != nil {
			t.Fatal(err)
		}
		proxy, s := n.through(t, c.after)
		var got []byte
		ends := 0
		for o, err := range s.Commands.Attach(t.Context(), on, st.ID, 0) {
			if err != nil {
				t.Fatalf("%+v: after %d bytes: %v", c, len(got), err)
			}
			if ends > 0 || o.Offset != int64(len(got)) {
				t.Fatalf("%+v: event at %d after %d bytes and %d ends", c, o.Offset, len(got), ends)
			}
			got = append(got, o.Data...)
			if o.Status != nil {
				ends++
			}
		}
		if !bytes.Equal(got, rpctest.Pattern(c.total)) || ends != 1 {
			t.Errorf("%+v: %d bytes and %d ends", c, len(got), ends)
		}
		proxy.mu.Lock()
		if proxy.cuts == 0 {
			t.Errorf("%+v: the proxy cut nothing", c)
		}
		proxy.mu.Unlock()
	}
}

// TestCutStreamIsNoEnd cuts a download and an upload in the middle.
func TestCutStreamIsNoEnd(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	big := bytes.Repeat([]byte("x"), 3<<20)
	f := dsec.FileOp{Path: "/big"}
	if _, err := n.Files.Write(t.Context(), on, f, dsec.WriteOptions{}, bytes.NewReader(big)); err != nil {
		t.Fatal(err)
	}
	_, s := n.through(t, 1<<20)
	rc, err := s.Files.Read(t.Context(), on, f, dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(rc)
	rc.Close()
	if dsec.KindOf(err) != dsec.Unavailable || err == nil || len(got) >= len(big) {
		t.Errorf("a cut download gave %d bytes and %v, want Unavailable", len(got), err)
	}

	// The reader breaks: the file stays as it was.
	broken := errors.New("disk on fire")
	_, err = n.Files.Write(t.Context(), on, f, dsec.WriteOptions{}, io.MultiReader(bytes.NewReader(big[:1<<20]), failing{broken}))
	if !errors.Is(err, broken) {
		t.Errorf("Write from a broken reader: %v, want its error", err)
	}
	// The caller goes away.
	ctx, cancel := context.WithCancel(t.Context())
	_, err = n.Files.Write(ctx, on, f, dsec.WriteOptions{}, io.MultiReader(bytes.NewReader(big[:1<<20]), doing{cancel}, zeros{}))
	if dsec.KindOf(err) != dsec.Canceled || err == nil {
		t.Errorf("Write that is cancelled: %v, want Canceled", err)
	}
	if i, err := n.Files.Stat(t.Context(), on, f); err != nil || i.Size != int64(len(big)) {
		t.Errorf("after broken writes the file has %d bytes (%v), want %d", i.Size, err, len(big))
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

type doing struct{ f func() }

func (d doing) Read([]byte) (int, error) { d.f(); return 0, io.EOF }

// TestRetries counts how often a call reaches the server when its first answers
// are lost.
func TestRetries(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	stepped := on
	stepped.Step = dsec.Step{Session: "s", Number: 1}
	cmd := dsec.Command{Shell: "true"}
	for _, c := range []struct {
		op    string
		calls int
		call  func(s dsec.Services) error
	}{
		{"Commands.Run", 3, func(s dsec.Services) error { _, err := s.Commands.Run(t.Context(), stepped, cmd, nil); return err }},
		{"Commands.Run", 1, func(s dsec.Services) error { _, err := s.Commands.Run(t.Context(), on, cmd, nil); return err }},
		{"Sandboxes.Create", 3, func(s dsec.Services) error {
			_, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
			return err
		}},
		{"Sandboxes.Get", 3, func(s dsec.Services) error { _, err := s.Sandboxes.Get(t.Context(), on.Sandbox); return err }},
		{"Sandboxes.Commit", 1, func(s dsec.Services) error { _, err := s.Sandboxes.Commit(t.Context(), on.Sandbox, "x@1"); return err }},
		{"Files.Move", 1, func(s dsec.Services) error { return s.Files.Move(t.Context(), on, dsec.FileOp{Path: "/a"}, "/b") }},
		{"Files.Mkdir", 3, func(s dsec.Services) error { return s.Files.Mkdir(t.Context(), on, dsec.FileOp{Path: "/a"}, 0) }},
		{"Files.List", 3, func(s dsec.Services) error { return last(s.Files.List(t.Context(), on, dsec.FileOp{Path: "/"}, 1)) }},
		{"Images.Pull", 1, func(s dsec.Services) error { return last(s.Images.Pull(t.Context(), "d", dsec.ImportOptions{})) }},
		{"Tokens.Issue", 1, func(s dsec.Services) error { _, err := s.Tokens.Issue(t.Context(), dsec.Token{Name: "t"}); return err }},
	} {
		before := n.Calls(c.op)
		n.SetFail(func(_ context.Context, op string) error {
			if op == c.op && n.Calls(op) < before+3 {
				panic(http.ErrAbortHandler) // the connection breaks, the call may have been done
			}
			return nil
		})
		tr := client.NewTransport()
		err := c.call(open(t, client.Config{URL: n.URL, Transport: tr}))
		tr.CloseIdleConnections()
		if got := n.Calls(c.op) - before; got != c.calls {
			t.Errorf("%s reached the server %d times, want %d (%v)", c.op, got, c.calls, err)
		}
		if c.calls == 3 && err != nil {
			t.Errorf("%s: %v, want success in the end", c.op, err)
		}
		if c.calls == 1 && dsec.KindOf(err) != dsec.Unavailable {
			t.Errorf("%s: %v, want Unavailable", c.op, err)
		}
	}
	n.SetFail(nil)
	if l, err := n.Sandboxes.List(t.Context(), dsec.Filter{}); err != nil || len(l) != 2 {
		t.Errorf("%d sandboxes, want the two asked for (%v)", len(l), err)
	}
	// Patience ends.
	n.SetFail(func(context.Context, string) error { return dsec.Errorf(dsec.Unavailable, "not now") })
	s := open(t, client.Config{URL: n.URL, Transport: transport(t, "h1"), Retry: 100 * time.Millisecond})
	if _, err := s.Sandboxes.Get(t.Context(), on.Sandbox); dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("Get without end: %v, want Unavailable", err)
	}
	if k := n.Calls("Sandboxes.Get"); k < 5 {
		t.Errorf("asked %d times in all, want some more", k)
	}
}

// TestQuietWaitsOutliveARestart breaks calls that were under way without an
// answer yet for longer than a plain call is repeated.
func TestQuietWaitsOutliveARestart(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	st, err := n.Commands.Start(t.Context(), on, dsec.Command{Shell: "true"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Sandboxes.Stop(t.Context(), on.Sandbox); err != nil {
		t.Fatal(err)
	}
	const retry = 50 * time.Millisecond
	s := open(t, client.Config{URL: n.URL, Transport: transport(t, "h1"), Retry: retry})
	for op, call := range map[string]func() error{
		"Commands.Wait":   func() error { _, err := s.Commands.Wait(t.Context(), on, st.ID); return err },
		"Commands.Attach": func() error { return last(s.Commands.Attach(t.Context(), on, st.ID, 0)) },
		"Sandboxes.Wait":  func() error { _, err := s.Sandboxes.Wait(t.Context(), on.Sandbox); return err },
	} {
		down := time.Now().Add(5 * retry)
		n.SetFail(func(_ context.Context, called string) error {
			if called == op && time.Now().Before(down) {
				panic(http.ErrAbortHandler)
			}
			return nil
		})
		err := call()
		if k := dsec.KindOf(err); err != nil && k != dsec.Conflict { // the fake's sandbox has ended
			t.Errorf("%s: %v", op, err)
		}
	}
}

// TestErrorInTheMiddle ends streams with an error after some data.
func TestErrorInTheMiddle(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		on := n.create(t)
		for _, name := range []string{"/d/a", "/d/b", "/d/c"} {
			if _, err := n.Files.Write(t.Context(), on, dsec.FileOp{Path: name}, dsec.WriteOptions{}, strings.NewReader(strings.Repeat("x", 100_000))); err != nil {
				t.Fatal(err)
			}
		}
		st, err := n.Commands.Start(t.Context(), on, dsec.Command{Shell: "pieces 100 10"})
		if err != nil {
			t.Fatal(err)
		}
		n.SetFail(func(_ context.Context, op string) error {
			if strings.HasSuffix(op, ".next") && n.Calls(op)%4 == 3 {
				return dsec.Errorf(dsec.Lost, "the node is gone")
			}
			return nil
		})
		files := 0
		for _, e := range n.Files.List(t.Context(), on, dsec.FileOp{Path: "/d"}, 1) {
			if err = e; e == nil {
				files++
			}
		}
		if dsec.KindOf(err) != dsec.Lost || files != 3 {
			t.Errorf("List: %d files, %v, want 3 and Lost", files, err)
		}
		rc, err := n.Files.Read(t.Context(), on, dsec.FileOp{Path: "/d/a"}, dsec.ReadRange{})
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(rc)
		rc.Close()
		if dsec.KindOf(err) != dsec.Lost || len(b) == 0 {
			t.Errorf("Read: %d bytes, %v, want some and Lost", len(b), err)
		}
		size := 0
		err = nil
		for o, e := range n.Commands.Attach(t.Context(), on, st.ID, 0) {
			size += len(o.Data)
			err = e
		}
		if dsec.KindOf(err) != dsec.Lost || size != 30 {
			t.Errorf("Attach: %d bytes, %v, want 30 and Lost", size, err)
		}
	})
}

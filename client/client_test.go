package client_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// TestMain fails when a goroutine or a descriptor is left behind.
func TestMain(m *testing.M) {
	before := descriptors()
	code := m.Run()
	if code == 0 {
		code = leaks(before)
	}
	os.Exit(code)
}

func descriptors() int {
	d, _ := os.ReadDir("/proc/self/fd")
	return len(d)
}

func leaks(fds int) int {
	deadline := time.Now().Add(5 * time.Second)
	for {
		buf := make([]byte, 1<<20)
		n := 0
		all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		for _, g := range all[1:] { // the first is this one
			if strings.Contains(g, "dsec-go/") || strings.Contains(g, "net/http.") {
				n++
			}
		}
		if n == 0 && descriptors() <= fds+2 { // the poller's own
			return 0
		}
		if time.Now().After(deadline) {
			fmt.Println("left behind:", descriptors()-fds, "descriptors,", n, "goroutines\n", strings.Join(all, "\n\n"))
			return 1
		}
		<-time.After(10 * time.Millisecond)
	}
}

// node is a fake node behind a server, and a client of it.
type node struct {
	*rpctest.Fake
	dsec.Services
	URL string
}

// protos are the ways of HTTP that everything is tested over.
var protos = []string{"h1", "h2c"}

// transport gives a transport of its own, closed with the test.
func transport(t *testing.T, proto string) *http.Transport {
	tr := client.NewTransport()
	if proto == "h2c" {
		tr.Protocols = new(http.Protocols)
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

// serve serves h on loopback over HTTP/1.1 and HTTP/2.
func serve(t *testing.T, h http.Handler) string {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

func open(t *testing.T, c client.Config) dsec.Services {
	t.Helper()
	s, err := client.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func start(t *testing.T, proto string) node {
	t.Helper()
	f := rpctest.New()
	url := serve(t, rpc.Handler(f.Services(), rpc.Options{}))
	return node{f, open(t, client.Config{URL: url, Transport: transport(t, proto)}), url}
}

// each runs do over every way of HTTP.
func each(t *testing.T, do func(t *testing.T, n node)) {
	for _, p := range protos {
		t.Run(p, func(t *testing.T) { do(t, start(t, p)) })
	}
}

var spec = dsec.Spec{Environment: dsec.Environment{Base: "debian"}}

func (n node) create(t *testing.T) dsec.Call {
	t.Helper()
	b, err := n.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return dsec.Call{Sandbox: b.ID}
}

func TestOpenRefusesURL(t *testing.T) {
	for _, u := range []string{"", "127.0.0.1:7070", "ftp://x", "http://", "http://%zz"} {
		if _, err := client.Open(client.Config{URL: u}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("Open(%q): %v, want Invalid", u, err)
		}
	}
}

func TestNoServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	s := open(t, client.Config{URL: "http://" + l.Addr().String(), Transport: transport(t, "h1"), Retry: 50 * time.Millisecond})
	_, err = s.Sandboxes.Get(t.Context(), "sbx")
	if dsec.KindOf(err) != dsec.Unavailable || !rpc.NotSent(err) {
		t.Errorf("Get without a server: %v, want Unavailable and not sent", err)
	}
}

func TestNotADSecServer(t *testing.T) {
	url := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) }))
	s := open(t, client.Config{URL: url, Transport: transport(t, "h1")})
	if _, err := s.Nodes.Nodes(t.Context()); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("Nodes of another server: %v, want Unsupported", err)
	}
	if _, err := s.Files.Read(t.Context(), dsec.Call{Sandbox: "sbx"}, dsec.FileOp{Path: "/x"}, dsec.ReadRange{}); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("Read of another server: %v, want Unsupported", err)
	}
}

func TestToken(t *testing.T) {
	got := make(chan string, 1)
	f := rpctest.New()
	h := rpc.Handler(f.Services(), rpc.Options{})
	url := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("Authorization")
		h.ServeHTTP(w, r)
	}))
	s := open(t, client.Config{URL: url, Token: "geheim", Transport: transport(t, "h1")})
	if _, err := s.Nodes.Nodes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h := <-got; h != "Bearer geheim" {
		t.Errorf("authorization %q, want the bearer token", h)
	}
}

func TestDeadlineReachesServer(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		on := n.create(t)
		seen := make(chan bool, 1)
		n.SetFail(func(ctx context.Context, op string) error {
			if op == "Commands.Run" {
				_, ok := ctx.Deadline()
				seen <- ok
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := n.Commands.Run(ctx, on, dsec.Command{Argv: []string{"hold"}}, nil)
		if dsec.KindOf(err) != dsec.Timeout {
			t.Errorf("Run past the deadline: %v, want Timeout", err)
		}
		if !<-seen {
			t.Error("the server saw no deadline")
		}
	})
}

func TestCancelIsPrompt(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		on := n.create(t)
		st, err := n.Commands.Start(t.Context(), on, dsec.Command{Argv: []string{"hold"}})
		if err != nil {
			t.Fatal(err)
		}
		calls := map[string]func(ctx context.Context) error{
			"Wait": func(ctx context.Context) error { _, err := n.Commands.Wait(ctx, on, st.ID); return err },
			"Run": func(ctx context.Context) error {
				_, err := n.Commands.Run(ctx, on, dsec.Command{Shell: "hold"}, nil)
				return err
			},
			"SandboxWait": func(ctx context.Context) error { _, err := n.Sandboxes.Wait(ctx, on.Sandbox); return err },
			"Attach":      func(ctx context.Context) error { return last(n.Commands.Attach(ctx, on, st.ID, 0)) },
			"Watch": func(ctx context.Context) error {
				return last(n.Files.Watch(ctx, on, dsec.FileOp{Path: "/"}, dsec.WatchOptions{}))
			},
		}
		for name, call := range calls {
			ctx, cancel := context.WithCancel(t.Context())
			n.SetFail(func(_ context.Context, op string) error { // once the server is in the call
				if !strings.HasSuffix(op, ".Get") {
					time.AfterFunc(5*time.Millisecond, cancel)
				}
				return nil
			})
			if err := call(ctx); dsec.KindOf(err) != dsec.Canceled || err == nil {
				t.Errorf("%s: %v, want Canceled", name, err)
			}
			cancel()
		}
	})
}

// last gives the last error of a sequence.
func last[T any](seq func(func(T, error) bool)) (err error) {
	for _, e := range seq {
		err = e
	}
	return err
}

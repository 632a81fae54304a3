package api_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// TestRevokedTokenEndsItsCalls revokes a token while each kind of call that
// lasts is under way, on a node in this process and on one behind a connection.
func TestRevokedTokenEndsItsCalls(t *testing.T) {
	for _, where := range []string{"fake", "fake2"} {
		for _, h2c := range []bool{false, true} {
			name := where + "/http1"
			if h2c {
				name = where + "/h2c"
			}
			t.Run(name, func(t *testing.T) { revoke(t, where, h2c) })
		}
	}
}

func revoke(t *testing.T, where string, h2c bool) {
	var mu sync.Mutex
	revoked := false
	d := build(t, func(c *api.Config) {
		c.Recheck = 5 * time.Millisecond
		c.Auth = api.AuthFunc(func(ctx context.Context, secret string) (dsec.Token, error) {
			mu.Lock()
			defer mu.Unlock()
			if revoked && secret == "a" {
				return dsec.Token{}, dsec.Errorf(dsec.Unauthenticated, "the token is not known")
			}
			return auth(ctx, secret)
		})
	})
	node := d.local
	if where == "fake2" {
		full(d.local)
		node = d.remote
	}
	ctx, s := t.Context(), open(t, d.url, "a", h2c)
	box, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	on := dsec.Call{Sandbox: box.ID}
	hold, err := s.Commands.Start(ctx, on, dsec.Command{Argv: []string{"hold"}})
	if err != nil {
		t.Fatal(err)
	}
	port, err := s.Ports.Dial(ctx, on, 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Files.Write(ctx, on, dsec.FileOp{Path: "/big"}, dsec.WriteOptions{}, bytes.NewReader(make([]byte, 24<<20))); err != nil {
		t.Fatal(err)
	}
	// Each begins, and from then on waits for what never comes.
	never, stop := io.Pipe()
	defer stop.Close()
	calls := map[string]func() error{
		"Commands.Attach": func() (err error) {
			for _, err = range s.Commands.Attach(ctx, on, hold.ID, 0) {
			}
			return err
		},
		"Commands.Wait":  func() error { _, err := s.Commands.Wait(ctx, on, hold.ID); return err },
		"Commands.Run":   func() error { _, err := s.Commands.Run(ctx, on, dsec.Command{Argv: []string{"hold"}}, nil); return err },
		"Sandboxes.Wait": func() error { _, err := s.Sandboxes.Wait(ctx, box.ID); return err },
		"Files.Watch": func() (err error) {
			for _, err = range s.Files.Watch(ctx, on, dsec.FileOp{Path: "/d"}, dsec.WatchOptions{}) {
			}
			return err
		},
		"Files.Write.first": func() error {
			_, err := s.Files.Write(ctx, on, dsec.FileOp{Path: "/cut"}, dsec.WriteOptions{}, io.MultiReader(strings.NewReader("begin"), never))
			return err
		},
		"Ports.Dial": func() error { _, err := port.Read(make([]byte, 1)); return err },
	}
	type end struct {
		name string
		err  error
	}
	ends := make(chan end, len(calls))
	for name, call := range calls {
		go func() { ends <- end{name, call()} }()
	}
	slow, err := s.Files.Read(ctx, on, dsec.FileOp{Path: "/big"}, dsec.ReadRange{}) // and nobody reads
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	for name := range calls {
		await(t, name+" to begin", func() bool { return node.Calls(name) > 0 })
	}
	mu.Lock()
	revoked = true
	mu.Unlock()
	limit := time.After(30 * time.Second)
	for range calls {
		select {
		case e := <-ends:
			// Where the caller was sending, or a node of another process, it may see no more than a break.
			k := dsec.KindOf(e.err)
			if e.err == nil || k != dsec.Unauthenticated && (k != dsec.Unavailable || where == "fake" && e.name != "Files.Write.first") {
				t.Errorf("%s ended with %v, want Unauthenticated", e.name, e.err)
			}
			delete(calls, e.name)
		case <-limit:
			t.Fatalf("calls outlive their token: %v", calls)
		}
		if _, open := calls["Files.Write.first"]; open && len(calls) == 1 {
			stop.CloseWithError(io.ErrUnexpectedEOF)
		}
	}
	if n, err := io.Copy(io.Discard, slow); err == nil {
		t.Errorf("a file of %d bytes was read to its end with a revoked token", n)
	}
	admin := open(t, d.url, "admin", false)
	if _, err := admin.Files.Stat(ctx, on, dsec.FileOp{Path: "/cut"}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("the cut upload: %v, want NotFound", err)
	}
	if st, err := admin.Commands.List(ctx, on); err != nil || len(st) != 2 || st[0].Outcome != dsec.StillRunning {
		t.Errorf("commands of the revoked token: %+v, %v, want both running", st, err)
	}
}

// await waits for what others bring about.
func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	limit := time.After(30 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestUnknownCalls asks for what is not in the schema, with and without the
// right for what the name looks like.
func TestUnknownCalls(t *testing.T) {
	d := build(t, nil)
	box, err := open(t, d.url, "a", false).Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{
		"/": 404, "/x": 404, "/dsec.v1.Nothing/Get": 404, "/dsec.v2.Commands/Run": 404, "/dsec.v1.Commands": 501,
		"/dsec.v1.Commands/Nothing": 501, "/dsec.v1.Sandboxes/Nothing": 501, "/dsec.v1.Files/read": 501,
		"/dsec.v1.Tokens/Steal": 501, "/dsec.v1.Commands/Run/": 501, "/dsec.v1.Commands/Run": 400,
	} {
		for _, token := range []string{"a", "admin", ""} {
			for _, id := range []string{"", string(box.ID)} {
				req, _ := http.NewRequest("POST", d.url+path, strings.NewReader("{}"))
				req.Header.Set("Content-Type", "application/json")
				if token != "" {
					req.Header.Set("Authorization", "Bearer "+token)
				}
				if id != "" {
					req.Header.Set("Dsec-Sandbox", id)
				}
				res, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				b, _ := io.ReadAll(res.Body)
				res.Body.Close()
				want := want
				if token == "" {
					want = 401
				}
				if res.StatusCode != want || want == 501 && !bytes.Contains(b, []byte(`"unimplemented"`)) || res.Header.Get("Dsec-Request") == "" {
					t.Errorf("%s by %q for %q: %s %s, want %d", path, token, id, res.Status, b, want)
				}
			}
		}
	}
}

// TestAccessKnowsHowStreamsEnd looks at what is told of calls that fail, most of
// them after their status was sent.
func TestAccessKnowsHowStreamsEnd(t *testing.T) {
	for _, where := range []string{"fake", "fake2"} {
		t.Run(where, func(t *testing.T) {
			d := build(t, nil)
			node := d.local
			if where == "fake2" {
				full(d.local)
				node = d.remote
			}
			ctx, s := t.Context(), open(t, d.url, "a", false)
			box, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			on, f := dsec.Call{Sandbox: box.ID}, dsec.FileOp{Path: "/f"}
			if _, err := s.Files.Write(ctx, on, f, dsec.WriteOptions{}, bytes.NewReader(make([]byte, 1<<20))); err != nil {
				t.Fatal(err)
			}
			d.ended(t, "/dsec.v1.Files/Write", "ok 200")
			read := func() error {
				rc, err := s.Files.Read(ctx, on, f, dsec.ReadRange{})
				if err == nil {
					_, err = io.Copy(io.Discard, rc)
					rc.Close()
				}
				return err
			}
			if err := read(); err != nil {
				t.Error(err)
			}
			d.ended(t, "/dsec.v1.Files/Read", "ok 200")
			node.SetFail(func(_ context.Context, op string) error {
				if op == "Files.Read.next" {
					return dsec.Errorf(dsec.Lost, "gone")
				}
				return nil
			})
			if err := read(); dsec.KindOf(err) != dsec.Lost {
				t.Errorf("read: %v, want Lost", err)
			}
			d.ended(t, "/dsec.v1.Files/Read", "lost 200")
			node.SetFail(func(_ context.Context, op string) error {
				if op == "Files.Read.next" {
					panic(http.ErrAbortHandler)
				}
				return nil
			})
			if err := read(); err == nil {
				t.Error("a broken stream is read to its end")
			}
			d.ended(t, "/dsec.v1.Files/Read", "unavailable 200", "unavailable 0", "unavailable 502", "unavailable 503")
			node.SetFail(nil)
			if err := s.Files.Mkdir(ctx, on, dsec.FileOp{Path: "/m"}, 0o755); err != nil { // whose answer is empty
				t.Error(err)
			}
			d.ended(t, "/dsec.v1.Files/Mkdir", "ok 200")
			_, _ = s.Files.Stat(ctx, on, dsec.FileOp{Path: "/none"})
			d.ended(t, "/dsec.v1.Files/Stat", "not_found 404")
			_, _ = s.Commands.Start(ctx, on, dsec.Command{})
			d.ended(t, "/dsec.v1.Commands/Start", "invalid 400")
			_, _ = s.Commands.Start(ctx, dsec.Call{Sandbox: box.ID, Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{Argv: []string{"a"}})
			d.ended(t, "/dsec.v1.Commands/Start", "ok 200")
			_, _ = s.Commands.Start(ctx, dsec.Call{Sandbox: box.ID, Step: dsec.Step{Session: "s", Number: 1}}, dsec.Command{Argv: []string{"b"}})
			d.ended(t, "/dsec.v1.Commands/Start", "diverged 409")
			cut, cancel := context.WithCancel(ctx)
			for o, err := range s.Files.Watch(cut, on, dsec.FileOp{Path: "/d"}, dsec.WatchOptions{}) {
				if err == nil && o.Op == dsec.OpReady {
					cancel()
				}
			}
			cancel()
			d.ended(t, "/dsec.v1.Files/Watch", "canceled 200")

			for kind, opt := range map[string]connecthttp.Option{"grpc": connecthttp.WithGRPC(), "grpc-web": connecthttp.WithGRPCWeb()} {
				tr := &http.Transport{Protocols: new(http.Protocols)}
				tr.Protocols.SetUnencryptedHTTP2(true)
				files := dsecv1.NewFilesClient(connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: tr}, d.url, opt)))
				for path, want := range map[string]string{"/f": "ok 200", "/none": "not_found 200"} {
					ctx, info := connect.NewClientContext(ctx)
					info.RequestHeader().Set("Authorization", "Bearer a")
					info.RequestHeader().Set("Dsec-Sandbox", string(box.ID))
					_, err := files.Stat(ctx, &dsecv1.FilesStatRequest{File: &dsecv1.File{Path: path}})
					if (err == nil) != (path == "/f") {
						t.Errorf("%s: %s: %v", kind, path, err)
					}
					d.ended(t, "/dsec.v1.Files/Stat", want)
				}
				tr.CloseIdleConnections()
			}
		})
	}
}

// ended waits for the next call to be told, and compares how it ended.
func (d *door) ended(t *testing.T, procedure string, want ...string) {
	t.Helper()
	var last api.Access
	await(t, procedure, func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for i, a := range d.log {
			if a.Procedure == procedure {
				last = a
				d.log = append(d.log[:i:i], d.log[i+1:]...)
				return true
			}
		}
		return false
	})
	got := fmt.Sprintf("%s %d", map[bool]string{false: "ok", true: last.Kind.String()}[last.Failed], last.Status)
	if !slices.Contains(want, got) {
		t.Errorf("%s ended as %q, want %q", procedure, got, want)
	}
}

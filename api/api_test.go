package api_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// tokens are the secrets that the tests use.
var tokens = map[string]dsec.Token{
	"a":     {Name: "ta", Project: "pa", Rights: []dsec.Right{dsec.RightSandboxes}},
	"b":     {Name: "tb", Project: "pb", Rights: []dsec.Right{dsec.RightSandboxes}},
	"img":   {Name: "ti", Project: "pa", Rights: []dsec.Right{dsec.RightImages}},
	"both":  {Name: "tab", Project: "pa", Rights: []dsec.Right{dsec.RightImages, dsec.RightSandboxes}},
	"none":  {Name: "tn", Project: "pa"},
	"admin": {Name: "tadm", Project: "pz", Rights: []dsec.Right{dsec.RightAdmin}},
}

var auth = api.AuthFunc(func(_ context.Context, secret string) (dsec.Token, error) {
	t, ok := tokens[secret]
	if !ok {
		return t, dsec.Errorf(dsec.Unauthenticated, "the token is not known")
	}
	return t, nil
})

func listen(t *testing.T, h http.Handler) string {
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

func open(t *testing.T, url, token string, h2c bool) dsec.Services {
	t.Helper()
	tr := client.NewTransport()
	if h2c {
		tr.Protocols = new(http.Protocols)
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	t.Cleanup(tr.CloseIdleConnections)
	s, err := client.Open(client.Config{URL: url, Token: token, Transport: tr})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// cluster is a placement of several nodes, the first preferred.
type cluster []api.Node

func (c cluster) Pick(context.Context, dsec.Spec, dsec.CreateOptions) ([]api.Node, error) {
	return c, nil
}

func (c cluster) Find(number uint16) (api.Node, error) {
	for _, n := range c {
		if n.Number == number {
			return n, nil
		}
	}
	return api.Node{}, dsec.Errorf(dsec.NotFound, "no node %d", number)
}

func (c cluster) All() []api.Node { return c }

// door is a front door before fakes: the first in this process, the second
// behind a connection.
type door struct {
	url    string
	local  *rpctest.Fake
	remote *rpctest.Fake
	mu     sync.Mutex
	log    []api.Access
}

func build(t *testing.T, change func(*api.Config)) *door {
	t.Helper()
	d := &door{local: rpctest.New(), remote: rpctest.New()}
	d.remote.Key, d.remote.Place.Node, d.remote.Name = d.local.Key, 2, "fake2"
	local := api.Node{Name: "fake", Number: 1, Handler: rpc.Handler(d.local.Services(), rpc.Options{}), Services: d.local.Services()}
	behind := d.remote.Services()
	behind.Projects = d.local.Services().Projects // the cluster's, as everywhere
	url := listen(t, api.Trust("peer-secret", rpc.Handler(behind, rpc.Options{})))
	remote, closing, err := api.Remote{Name: "fake2", Number: 2, URL: url, Secret: "peer-secret"}.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(closing)
	c := api.Config{
		Auth: auth, Key: &d.local.Key, Nodes: cluster{local, remote}, Local: d.local.Services(),
		Events: api.Events{Access: func(a api.Access) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.log = append(d.log, a)
		}},
	}
	if change != nil {
		change(&c)
	}
	d.url = listen(t, api.New(c))
	return d
}

// full makes a node refuse new sandboxes.
func full(f *rpctest.Fake) {
	f.SetFail(func(_ context.Context, op string) error {
		if op == "Sandboxes.Create" {
			return dsec.Errorf(dsec.Exhausted, "the node is full")
		}
		return nil
	})
}

var spec = dsec.Spec{Environment: dsec.Environment{Base: "debian"}}

func TestThroughTheDoor(t *testing.T) {
	for _, h2c := range []bool{false, true} {
		for _, where := range []string{"fake", "fake2"} {
			t.Run(fmt.Sprintf("h2c=%v/%s", h2c, where), func(t *testing.T) {
				d := build(t, nil)
				if where == "fake2" {
					full(d.local)
				}
				useSandbox(t, open(t, d.url, "a", h2c), where)
			})
		}
	}
}

// useSandbox does one of everything.
func useSandbox(t *testing.T, s dsec.Services, where string) {
	ctx := t.Context()
	b, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
	if err != nil || b.Node != where || b.Spec.Project != "pa" {
		t.Fatalf("Create: node %q, project %q, %v, want %s and pa", b.Node, b.Spec.Project, err, where)
	}
	on := dsec.Call{Sandbox: b.ID, Step: dsec.Step{Session: "s ä", Number: 2}}
	if r, err := s.Commands.Run(ctx, on, dsec.Command{Shell: "echo hi"}, nil); err != nil || string(r.Out) != "hi\n" || r.Step != on.Step {
		t.Errorf("Run: %+v, %v", r, err)
	}
	on.Step = dsec.Step{}
	big := bytes.Repeat([]byte("0123456789"), 300_000)
	if i, err := s.Files.Write(ctx, on, dsec.FileOp{Path: "/big"}, dsec.WriteOptions{}, bytes.NewReader(big)); err != nil || i.Size != int64(len(big)) {
		t.Errorf("Write: %+v, %v", i, err)
	}
	rc, err := s.Files.Read(ctx, on, dsec.FileOp{Path: "/big"}, dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(rc); err != nil || !bytes.Equal(got, big) {
		t.Errorf("Read: %d bytes, %v", len(got), err)
	}
	rc.Close()
	st, err := s.Commands.Start(ctx, on, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	// Attached before there is output, and fed while attached.
	var out []byte
	ended := 0
	fed := make(chan error, 1)
	go func() {
		_, err := s.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Data: []byte("fed"), Close: true})
		fed <- err
	}()
	for o, err := range s.Commands.Attach(ctx, on, st.ID, 0) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, o.Data...)
		if o.Status != nil {
			ended++
		}
	}
	if err := <-fed; err != nil || string(out) != "fed" || ended != 1 {
		t.Errorf("attached: %q, %d ends, write %v", out, ended, err)
	}
	c, err := s.Ports.Dial(ctx, on, 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Error(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "pingbye" {
		t.Errorf("port answered %q, %v", got, err)
	}
	c.Close()
	if _, err := s.Files.Stat(ctx, on, dsec.FileOp{Path: "/none"}); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("Stat: %v, want NotFound", err)
	}
	var e *dsec.Error
	if _, err := s.Files.Stat(ctx, on, dsec.FileOp{Path: "/none"}); !errors.As(err, &e) || e.Request == "" || e.Sandbox != b.ID {
		t.Errorf("Stat: %#v, want a request id and the sandbox", err)
	}
	if l, err := s.Sandboxes.List(ctx, dsec.Filter{}); err != nil || len(l) != 1 || l[0].ID != b.ID {
		t.Errorf("List: %+v, %v", l, err)
	}
	if x, err := s.Sandboxes.Stop(ctx, b.ID); err != nil || x.State != dsec.Stopped {
		t.Errorf("Stop: %+v, %v", x, err)
	}
	if x, err := s.Sandboxes.Wait(ctx, b.ID); err != nil || x.State != dsec.Stopped {
		t.Errorf("Wait: %+v, %v", x, err)
	}
}

func TestProjectsAreApart(t *testing.T) {
	for _, where := range []string{"fake", "fake2"} {
		t.Run(where, func(t *testing.T) {
			d := build(t, nil)
			if where == "fake2" {
				full(d.local)
			}
			ctx := t.Context()
			a, b, admin := open(t, d.url, "a", false), open(t, d.url, "b", false), open(t, d.url, "admin", false)
			box, err := a.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			on := dsec.Call{Sandbox: box.ID}
			foreign := map[string]error{}
			_, foreign["Get"] = b.Sandboxes.Get(ctx, box.ID)
			_, foreign["Stop"] = b.Sandboxes.Stop(ctx, box.ID)
			_, foreign["Pause"] = b.Sandboxes.Pause(ctx, box.ID)
			_, foreign["Resume"] = b.Sandboxes.Resume(ctx, box.ID)
			_, foreign["Run"] = b.Commands.Run(ctx, on, dsec.Command{Shell: "true"}, nil)
			_, foreign["Read"] = b.Files.Read(ctx, on, dsec.FileOp{Path: "/"}, dsec.ReadRange{})
			_, foreign["Write"] = b.Files.Write(ctx, on, dsec.FileOp{Path: "/x"}, dsec.WriteOptions{}, strings.NewReader("x"))
			_, foreign["Dial"] = b.Ports.Dial(ctx, on, 7)
			for _, err := range b.Commands.Attach(ctx, on, "c1", 0) {
				foreign["Attach"] = err
			}
			for name, err := range foreign {
				if dsec.KindOf(err) != dsec.NotFound || err == nil {
					t.Errorf("%s of another project's sandbox: %v, want NotFound", name, err)
				}
			}
			if l, err := b.Sandboxes.List(ctx, dsec.Filter{}); err != nil || len(l) != 0 {
				t.Errorf("List of another project: %+v, %v", l, err)
			}
			if l, err := admin.Sandboxes.List(ctx, dsec.Filter{}); err != nil || len(l) != 1 {
				t.Errorf("List of the admin: %+v, %v", l, err)
			}
			if _, err := admin.Commands.Run(ctx, on, dsec.Command{Shell: "true"}, nil); err != nil {
				t.Errorf("Run of the admin: %v", err)
			}
			s := spec
			s.Project = "pa"
			if _, err := b.Sandboxes.Create(ctx, s, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Denied {
				t.Errorf("Create in another project: %v, want Denied", err)
			}
			if _, err := admin.Sandboxes.Create(ctx, s, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.NotFound {
				t.Errorf("Create in a project that does not exist: %v, want NotFound", err)
			}
			if _, err := admin.Projects.Create(ctx, dsec.Project{Name: "pa"}); err != nil {
				t.Error(err)
			}
			if x, err := admin.Sandboxes.Create(ctx, s, dsec.CreateOptions{}); err != nil || x.Spec.Project != "pa" {
				t.Errorf("Create for a project: %q, %v", x.Spec.Project, err)
			}
			// What the door says to nodes is not believed from outside.
			req, _ := http.NewRequest("POST", d.url+"/dsec.v1.Sandboxes/Get", strings.NewReader("{}"))
			for k, v := range map[string]string{
				"Content-Type": "application/json", "Authorization": "Bearer b", "Dsec-Sandbox": string(box.ID),
				"Dsec-Caller-Project": "pa", "Dsec-Caller-Token": "ta", "Dsec-Caller-Admin": "1", "Dsec-Peer": "peer-secret",
			} {
				req.Header.Set(k, v)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != http.StatusNotFound {
				t.Errorf("Get with forged headers: %s, want 404", res.Status)
			}
		})
	}
}

func TestRights(t *testing.T) {
	d := build(t, nil)
	ctx := t.Context()
	box, err := open(t, d.url, "a", false).Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	calls := map[string]func(s dsec.Services) error{
		"create": func(s dsec.Services) error { _, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{}); return err },
		"run": func(s dsec.Services) error {
			_, err := s.Commands.Run(ctx, dsec.Call{Sandbox: box.ID}, dsec.Command{Shell: "true"}, nil)
			return err
		},
		"commit": func(s dsec.Services) error { _, err := s.Sandboxes.Commit(ctx, box.ID, "w@1"); return err },
		"images": func(s dsec.Services) error { _, err := s.Images.List(ctx, dsec.ImageQuery{}); return err },
		"upload": func(s dsec.Services) error {
			_, err := s.Images.Upload(ctx, dsec.ImportOptions{Name: "x"}, strings.NewReader(""))
			return err
		},
		"collect": func(s dsec.Services) error {
			_, err := s.Images.Collect(ctx, dsec.CollectOptions{Alone: true})
			return err
		},
		"tokens":  func(s dsec.Services) error { _, err := s.Tokens.List(ctx); return err },
		"issue":   func(s dsec.Services) error { _, err := s.Tokens.Issue(ctx, dsec.Token{Name: "n"}); return err },
		"nodes":   func(s dsec.Services) error { _, err := s.Nodes.Nodes(ctx); return err },
		"tenants": func(s dsec.Services) error { _, err := s.Projects.List(ctx); return err },
		"found":   func(s dsec.Services) error { _, err := s.Projects.Create(ctx, dsec.Project{Name: "new"}); return err },
	}
	may := map[string]string{
		"a": "create run images", "img": "images upload collect", "both": "create run commit images upload collect", "none": "",
		"admin": "create run images collect tokens issue nodes tenants found",
	}
	for token, names := range may {
		s := open(t, d.url, token, false)
		for name, call := range calls {
			err := call(s)
			switch denied := dsec.KindOf(err) == dsec.Denied && err != nil; {
			case strings.Contains(names, name) && err != nil && dsec.KindOf(err) != dsec.Exists:
				t.Errorf("%s by %s: %v, want success", name, token, err)
			case !strings.Contains(names, name) && token != "admin" && !denied:
				t.Errorf("%s by %s: %v, want Denied", name, token, err)
			}
		}
	}
}

func TestUnauthenticated(t *testing.T) {
	d := build(t, nil)
	for _, token := range []string{"", "unknown"} {
		s := open(t, d.url, token, false)
		_, err := s.Sandboxes.List(t.Context(), dsec.Filter{})
		var e *dsec.Error
		if !errors.As(err, &e) || e.Kind != dsec.Unauthenticated || e.Request == "" {
			t.Errorf("token %q: %#v, want Unauthenticated with a request id", token, err)
		}
		_, err = s.Files.Read(t.Context(), dsec.Call{Sandbox: "sbx"}, dsec.FileOp{Path: "/x"}, dsec.ReadRange{})
		if dsec.KindOf(err) != dsec.Unauthenticated {
			t.Errorf("stream with token %q: %v, want Unauthenticated", token, err)
		}
	}
	res, err := http.Get(d.url + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, _ := io.ReadAll(res.Body); res.StatusCode != 200 || !strings.Contains(string(b), dsec.Version) {
		t.Errorf("healthz: %s %s", res.Status, b)
	}
}

func TestWrongTagAsksNobody(t *testing.T) {
	d := build(t, nil)
	s := open(t, d.url, "admin", false)
	var other dsec.IDKey
	other[0] = 1
	for _, id := range []dsec.SandboxID{other.New(dsec.Place{Node: 1, Epoch: 1}), "sbx", d.local.Key.New(dsec.Place{Node: 9})} {
		if _, err := s.Sandboxes.Get(t.Context(), id); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("Get(%s): %v, want NotFound", id, err)
		}
	}
	if n := d.local.Calls("Sandboxes.Get") + d.remote.Calls("Sandboxes.Get"); n != 0 {
		t.Errorf("the nodes were asked %d times, want never", n)
	}
}

func TestFullCluster(t *testing.T) {
	d := build(t, nil)
	full(d.local)
	full(d.remote)
	s := open(t, d.url, "a", false)
	if _, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("Create: %v, want Exhausted", err)
	}
	if l, r := d.local.Calls("Sandboxes.Create"), d.remote.Calls("Sandboxes.Create"); l != 1 || r != 1 {
		t.Errorf("nodes were asked %d and %d times, want once each", l, r)
	}
}

func TestListOverNodes(t *testing.T) {
	d := build(t, nil)
	s := open(t, d.url, "a", false)
	var want []dsec.SandboxID
	for i := range 6 {
		d.local.SetFail(nil)
		if i%2 == 1 {
			full(d.local)
		}
		b, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		want = append([]dsec.SandboxID{b.ID}, want...)
	}
	var got []dsec.SandboxID
	f := dsec.Filter{Limit: 2}
	for {
		page, err := s.Sandboxes.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, b := range page {
			got = append(got, b.ID)
		}
		f.After = got[len(got)-1]
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("pages gave %v, want %v", got, want)
	}
}

func TestOverload(t *testing.T) {
	d := build(t, func(c *api.Config) { c.MaxInFlight = 1 })
	s := open(t, d.url, "a", false)
	box, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	entered := make(chan struct{})
	d.local.SetFail(func(ctx context.Context, op string) error {
		if op == "Sandboxes.Wait" {
			close(entered)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = s.Sandboxes.Wait(ctx, box.ID)
	}()
	<-entered
	if _, err := s.Sandboxes.List(t.Context(), dsec.Filter{}); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("a call too many: %v, want Exhausted", err)
	}
	cancel()
	<-done
}

func TestNodeGone(t *testing.T) {
	var faults atomic.Int32
	remote, closing, err := api.Remote{Name: "gone", Number: 1, URL: "http://127.0.0.1:1", Secret: "s", Fault: func(node string, err error) {
		if node == "gone" && err != nil {
			faults.Add(1)
		}
	}}.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer closing()
	d := build(t, func(c *api.Config) { c.Nodes = api.Single{Node: remote} })
	s, _ := client.Open(client.Config{URL: d.url, Token: "a", Retry: -1, Transport: &http.Transport{DisableKeepAlives: true}})
	id := d.local.Key.New(dsec.Place{Node: 1, Epoch: 1})
	_, err = s.Sandboxes.Get(t.Context(), id)
	var e *dsec.Error
	if !errors.As(err, &e) || e.Kind != dsec.Unavailable || e.Request == "" || e.Sandbox != id || strings.Contains(err.Error(), "127.0.0.1") {
		t.Errorf("Get on a node that is gone: %v, want Unavailable without its address", err)
	}
	_, err = s.Files.Read(t.Context(), dsec.Call{Sandbox: id}, dsec.FileOp{Path: "/x"}, dsec.ReadRange{})
	if dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("Read on a node that is gone: %v, want Unavailable", err)
	}
	if n := faults.Load(); n != 2 {
		t.Errorf("%d faults told, want 2", n)
	}
}

func TestTrustRefusesStrangers(t *testing.T) {
	url := listen(t, api.Trust("s", rpc.Handler(rpctest.New().Services(), rpc.Options{})))
	s := open(t, url, "a", false)
	if _, err := s.Nodes.Nodes(t.Context()); dsec.KindOf(err) != dsec.Unauthenticated {
		t.Errorf("a call past the door: %v, want Unauthenticated", err)
	}
	url = listen(t, api.Trust("", rpc.Handler(rpctest.New().Services(), rpc.Options{})))
	if _, err := open(t, url, "a", false).Nodes.Nodes(t.Context()); dsec.KindOf(err) != dsec.Unauthenticated {
		t.Errorf("a call to a node without a secret: %v, want Unauthenticated", err)
	}
}

func TestAccess(t *testing.T) {
	d := build(t, nil)
	s := open(t, d.url, "a", false)
	box, err := s.Sandboxes.Create(t.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Sandboxes.Get(t.Context(), box.ID)
	if err != nil {
		t.Fatal(err)
	}
	_, err = open(t, d.url, "x", false).Nodes.Nodes(t.Context())
	var e *dsec.Error
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.log) != 3 {
		t.Fatalf("%d calls logged, want 3", len(d.log))
	}
	if a := d.log[1]; a.Procedure != "/dsec.v1.Sandboxes/Get" || a.Sandbox != box.ID || a.Token != "ta" || a.Project != "pa" || a.Status != 200 || a.Sent == 0 || a.Request == "" {
		t.Errorf("logged %+v", a)
	}
	if a := d.log[2]; a.Status != 401 || a.Request != e.Request || a.Token != "" {
		t.Errorf("logged %+v, want 401 of request %s", a, e.Request)
	}
}

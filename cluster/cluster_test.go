package cluster_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

// server is the etcd that tests share; each uses names of its own.
var server *cluster.Embedded

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "cluster-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if server, err = cluster.StartEmbedded(context.Background(), cluster.EmbeddedOptions{Dir: dir}); err != nil {
		panic(err)
	}
	defer server.Close()
	return m.Run()
}

func open(t testing.TB) *cluster.Cluster {
	t.Helper()
	c, err := cluster.Open(t.Context(), cluster.Options{Endpoints: server.Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

func wantKind(t *testing.T, err error, want dsec.ErrorKind) {
	t.Helper()
	if err == nil || dsec.KindOf(err) != want {
		t.Errorf("error %v, want kind %v", err, want)
	}
}

// eventually waits for what another replica or a lease brings about.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s does not come about", what)
		}
	}
}

// What was agreed on outlives the process, also in a folder with a path too long for a socket.
func TestEmbedded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	var key dsec.IDKey
	for i := range 2 {
		c, err := cluster.OpenEmbedded(t.Context(), dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.IDKey(t.Context())
		if err != nil || got == (dsec.IDKey{}) {
			t.Fatalf("key: %v", err)
		}
		if i == 0 {
			key = got
			_, err = c.Projects().Create(t.Context(), dsec.Project{Name: "kept"})
		} else {
			if got != key {
				t.Error("the key changed")
			}
			_, err = c.Projects().Get("kept")
		}
		if err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", st.Mode(), err)
	}
}

// The embedded etcd, which knows no passwords, opens no TCP port.
func TestEmbeddedListensOnItsSocketOnly(t *testing.T) {
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		b, err := os.ReadFile(table)
		if err != nil {
			continue // no IPv6
		}
		inodes := map[string]bool{}
		for _, line := range strings.Split(string(b), "\n") {
			if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" {
				inodes["socket:["+f[9]+"]"] = true
			}
		}
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if link, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && inodes[link] {
				t.Errorf("%s: descriptor %s listens on TCP", table, fd.Name())
			}
		}
	}
}

func TestUnreachable(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := cluster.Open(ctx, cluster.Options{Endpoints: []string{"unix://" + l.Addr().String()}}); err == nil {
		t.Error("open without a server succeeds")
	} else if k := dsec.KindOf(err); k != dsec.Timeout && k != dsec.Unavailable {
		t.Errorf("%v, want Timeout or Unavailable", err)
	}
}

func TestKeyIsShared(t *testing.T) {
	a, errA := open(t).IDKey(t.Context())
	b, errB := open(t).IDKey(t.Context())
	if errA != nil || errB != nil || a != b {
		t.Errorf("two openings see two keys: %v, %v", errA, errB)
	}
}

func TestTokens(t *testing.T) {
	a, b := open(t), open(t)
	ctx := t.Context()
	want := dsec.Token{Name: "trainer", Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightSandboxes, dsec.RightImages}}
	secret, err := a.Tokens().Issue(ctx, want)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(secret, "dsec_") || len(secret) < 30 {
		t.Errorf("secret has the form of %.8s...", secret)
	}
	got, err := a.Tokens().Authenticate(secret) // at once
	if err != nil || got.Created.IsZero() {
		t.Fatalf("authenticate: %v, %v", got, err)
	}
	want.Created = got.Created
	if !reflect.DeepEqual(got, want) {
		t.Errorf("token %+v, want %+v", got, want)
	}
	eventually(t, "the token on the other replica", func() bool {
		_, err := b.Tokens().Authenticate(secret)
		return err == nil
	})
	list, err := b.Tokens().List(ctx)
	if err != nil || len(list) != 1 || !reflect.DeepEqual(list[0], want) {
		t.Errorf("list: %+v, %v", list, err)
	}
	for _, bad := range []string{"", "dsec_", secret[:len(secret)-1], secret + "a", strings.ToUpper(secret)} {
		_, err := a.Tokens().Authenticate(bad)
		wantKind(t, err, dsec.Unauthenticated)
		if err != nil && bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("error %q repeats the secret", err)
		}
	}
	_, err = b.Tokens().Issue(ctx, want)
	wantKind(t, err, dsec.Exists)

	if err := b.Tokens().Revoke(ctx, "trainer"); err != nil {
		t.Fatal(err)
	}
	_, err = b.Tokens().Authenticate(secret)
	wantKind(t, err, dsec.Unauthenticated)
	eventually(t, "the revocation on the other replica", func() bool {
		_, err := a.Tokens().Authenticate(secret)
		return dsec.KindOf(err) == dsec.Unauthenticated
	})
	wantKind(t, a.Tokens().Revoke(ctx, "trainer"), dsec.NotFound)
	again, err := a.Tokens().Issue(ctx, want)
	if err != nil || again == secret {
		t.Errorf("the name is not free again: %v", err)
	}
	if err := a.Tokens().Revoke(ctx, "trainer"); err != nil {
		t.Error(err)
	}
}

func TestTokenExpires(t *testing.T) {
	c := open(t)
	secret, err := c.Tokens().Issue(t.Context(), dsec.Token{Name: "short", Project: cluster.DefaultProject,
		Rights: []dsec.Right{dsec.RightAdmin}, Expires: time.Now().Add(300 * time.Millisecond)})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the expiry", func() bool {
		_, err := c.Tokens().Authenticate(secret)
		return dsec.KindOf(err) == dsec.Unauthenticated && err != nil
	})
	if err := c.Tokens().Revoke(t.Context(), "short"); err != nil {
		t.Error(err)
	}
}

// Nobody revokes the last token that can make others, nor leaves one that ends earlier.
func TestLastOperatorStays(t *testing.T) {
	c, err := cluster.OpenEmbedded(t.Context(), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, tokens := t.Context(), c.Tokens()
	issue := func(name string, right dsec.Right, ends time.Time) string {
		t.Helper()
		secret, err := tokens.Issue(ctx, dsec.Token{Name: name, Project: cluster.DefaultProject, Rights: []dsec.Right{right}, Expires: ends})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	first := issue("operator", dsec.RightAdmin, time.Time{})
	issue("worker", dsec.RightSandboxes, time.Time{})
	issue("brief", dsec.RightAdmin, time.Now().Add(time.Hour))
	wantKind(t, tokens.Revoke(ctx, "operator"), dsec.Conflict)
	if _, err := tokens.Authenticate(first); err != nil {
		t.Errorf("the refused revocation took the token: %v", err)
	}
	if err := tokens.Revoke(ctx, "brief"); err != nil {
		t.Errorf("one of two: %v", err)
	}
	if err := tokens.Revoke(ctx, "worker"); err != nil {
		t.Errorf("no operator's: %v", err)
	}
	// Its owner renews it in one step.
	second, err := tokens.Renew(ctx, dsec.Token{Name: "operator", Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightAdmin}})
	if err != nil || second == first {
		t.Fatalf("renew: %v", err)
	}
	if _, err := tokens.Authenticate(first); dsec.KindOf(err) != dsec.Unauthenticated || err == nil {
		t.Errorf("the renewed token still opens: %v", err)
	}
	if _, err := tokens.Renew(ctx, dsec.Token{Name: "fresh", Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightAdmin}}); err != nil {
		t.Errorf("renew what is not there: %v", err)
	}
	// Of two that revoke each other one stays.
	var wg sync.WaitGroup
	for _, name := range []string{"operator", "fresh"} {
		wg.Go(func() {
			if err := tokens.Revoke(ctx, name); err != nil && dsec.KindOf(err) != dsec.Conflict {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if list, err := tokens.List(ctx); err != nil || len(list) != 1 {
		t.Errorf("%d tokens are left, want 1: %v", len(list), err)
	}
}

func TestTokenRefused(t *testing.T) {
	c := open(t)
	rights := []dsec.Right{dsec.RightAdmin}
	for name, test := range map[string]struct {
		token dsec.Token
		kind  dsec.ErrorKind
	}{
		"no name":    {dsec.Token{Project: "default", Rights: rights}, dsec.Invalid},
		"slash":      {dsec.Token{Name: "a/b", Project: "default", Rights: rights}, dsec.Invalid},
		"no rights":  {dsec.Token{Name: "a", Project: "default"}, dsec.Invalid},
		"no right":   {dsec.Token{Name: "a", Project: "default", Rights: []dsec.Right{"fly"}}, dsec.Invalid},
		"no project": {dsec.Token{Name: "a", Project: "none", Rights: rights}, dsec.NotFound},
		"past":       {dsec.Token{Name: "a", Project: "default", Rights: rights, Expires: time.Unix(1, 0)}, dsec.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Tokens().Issue(t.Context(), test.token)
			wantKind(t, err, test.kind)
		})
	}
}

func entry(name, version, digest string) cluster.Entry {
	return cluster.Entry{Image: dsec.Image{Name: name, Version: version, Digest: digest, Role: dsec.Base, Size: 42}, Creator: "me"}
}

func TestNames(t *testing.T) {
	a, b := open(t), open(t)
	ctx, n := t.Context(), a.Names()
	for i, v := range []string{"9", "10", "2"} { // neither sorted as text nor as numbers
		e := entry("lib/python", v, fmt.Sprintf("sha256:%d", i))
		if err := n.Put(ctx, e); err != nil {
			t.Fatal(err)
		}
		for _, ref := range []string{"lib/python", "lib/python@latest", "lib/python@" + v} {
			if got, err := n.Resolve(ref); err != nil || !reflect.DeepEqual(got, e) {
				t.Errorf("%s: %+v, %v, want %+v", ref, got, err, e)
			}
		}
	}
	if err := n.Put(ctx, entry("lib/python", "9", "sha256:0")); err != nil {
		t.Errorf("same again: %v", err)
	}
	if got, err := n.Resolve("lib/python"); err != nil || got.Version != "2" {
		t.Errorf("newest is %s, want 2: %v", got.Version, err)
	}
	wantKind(t, n.Put(ctx, entry("lib/python", "9", "sha256:other")), dsec.Exists)
	other := entry("lib/python", "9", "sha256:0")
	other.Role = dsec.Toolkit
	wantKind(t, n.Put(ctx, other), dsec.Exists)
	// A bare name means one role, and does not stand for several versions in a removal.
	other.Version, other.Digest = "11", "sha256:11"
	wantKind(t, n.Put(ctx, other), dsec.Exists)
	wantKind(t, n.Delete(ctx, "lib/python"), dsec.Conflict)
	for _, e := range []cluster.Entry{
		entry("", "1", "d"), entry("a", "", "d"), entry("a", "latest", "d"), entry("a", "1", ""),
		entry("a@b", "1", "d"), entry("A", "1", "d"), entry("a", "1/2", "d"), entry("../a", "1", "d"),
	} {
		wantKind(t, n.Put(ctx, e), dsec.Invalid)
	}
	for _, ref := range []string{"", "lib", "lib/python@3", "lib/python@", "lib/python@9@9", "no@latest"} {
		if ref == "lib/python@" {
			continue // the same as without
		}
		_, err := n.Resolve(ref)
		wantKind(t, err, dsec.NotFound)
	}
	if err := n.Put(ctx, entry("lib/python-dev", "1", "sha256:x")); err != nil {
		t.Fatal(err)
	}
	// The other replica sees the same order.
	eventually(t, "all names on the other replica", func() bool { return len(list(t, b.Names())) == 4 })
	var refs []string
	for _, e := range list(t, b.Names()) {
		refs = append(refs, e.Ref())
	}
	if got, want := strings.Join(refs, " "), "lib/python@2 lib/python@10 lib/python@9 lib/python-dev@1"; got != want {
		t.Errorf("list %q, want %q", got, want)
	}
	// Deleting.
	for _, step := range []struct{ del, newest string }{{"lib/python@10", "2"}, {"lib/python@latest", "9"}, {"lib/python", ""}} {
		if err := n.Delete(ctx, step.del); err != nil {
			t.Fatal(err)
		}
		if got, err := n.Resolve("lib/python"); got.Version != step.newest || (err != nil) != (step.newest == "") {
			t.Errorf("after %s the newest is %q, %v, want %q", step.del, got.Version, err, step.newest)
		}
		wantKind(t, n.Delete(ctx, "lib/python@10"), dsec.NotFound)
	}
	wantKind(t, n.Delete(ctx, "A b"), dsec.Invalid)
	if _, err := n.Resolve("lib/python-dev"); err != nil {
		t.Error(err)
	}
	// A name that was removed may stand for something else, and is then the newest.
	if err := n.Put(ctx, entry("lib/python", "9", "sha256:other")); err != nil {
		t.Error(err)
	}
}

// A project has names that no other sees, also on a replica that starts later.
func TestNamesOfProjects(t *testing.T) {
	a := open(t)
	ctx, n := t.Context(), a.Names()
	put := func(project dsec.ProjectID, name, version, digest string) error {
		e := entry(name, version, digest)
		e.Project = project
		return n.Put(ctx, e)
	}
	for _, e := range [][4]string{
		{"", "shared/x", "1", "sha256:s"}, {"pa", "own/x", "1", "sha256:a1"}, {"pa", "own/x", "2", "sha256:a2"},
		{"pb", "own/x", "1", "sha256:b"}, {"pb", "only-b", "1", "sha256:c"},
	} {
		if err := put(dsec.ProjectID(e[0]), e[1], e[2], e[3]); err != nil {
			t.Fatalf("%v: %v", e, err)
		}
	}
	wantKind(t, put("pa", "shared/x", "2", "sha256:z"), dsec.Exists)
	wantKind(t, put("pa:pb", "x", "2", "sha256:z"), dsec.Invalid)
	late := open(t)
	for _, names := range []cluster.Names{n, late.Names()} {
		for _, c := range []struct {
			of        cluster.Names
			ref, want string // digest; empty means that there is none
		}{
			{names.Of("pa"), "own/x", "sha256:a2"}, {names.Of("pa"), "own/x@1", "sha256:a1"}, {names.Of("pa"), "shared/x", "sha256:s"},
			{names.Of("pa"), "only-b", ""}, {names.Of("pa"), "only-b@1", ""}, {names.Of("pb"), "own/x@latest", "sha256:b"},
			{names.Of("pb"), "own/x@2", ""}, {names.Of("pc"), "own/x", ""}, {names.Of(""), "own/x", ""}, {names.Of(""), "shared/x@1", "sha256:s"},
			{names, "shared/x", "sha256:s"}, {names, "only-b", "sha256:c"}, {names, "own/x@2", "sha256:a2"},
		} {
			got, err := c.of.Resolve(c.ref)
			if got.Digest != c.want || (err != nil) != (c.want == "") || err != nil && dsec.KindOf(err) != dsec.NotFound {
				t.Errorf("%s: %q, %v, want %q", c.ref, got.Digest, err, c.want)
			}
		}
		_, err := names.Resolve("own/x@1")
		wantKind(t, err, dsec.Conflict) // whose?
		for project, want := range map[dsec.ProjectID]string{"pa": "own/x@2 own/x@1 shared/x@1", "pb": "only-b@1 own/x@1 shared/x@1", "pc": "shared/x@1"} {
			var refs []string
			for _, e := range list(t, names.Of(project)) {
				if strings.HasPrefix(e.Name, "own/") || strings.HasPrefix(e.Name, "only-") || strings.HasPrefix(e.Name, "shared/") {
					refs = append(refs, e.Ref())
				}
			}
			if got := strings.Join(refs, " "); got != want {
				t.Errorf("list of %s: %q, want %q", project, got, want)
			}
		}
	}
	wantKind(t, n.Of("pa").Delete(ctx, "only-b"), dsec.NotFound)
	wantKind(t, n.Of("pa").Delete(ctx, "shared/x"), dsec.Denied)
	wantKind(t, n.Of("pa").Delete(ctx, "own/x"), dsec.Conflict)
	for _, del := range []struct {
		of  cluster.Names
		ref string
	}{{n.Of("pa"), "own/x@2"}, {n.Of("pa"), "own/x"}, {n, "own/x"}, {n, "only-b@1"}, {n, "shared/x"}} {
		if err := del.of.Delete(ctx, del.ref); err != nil {
			t.Errorf("delete %s: %v", del.ref, err)
		}
	}
}

// Of many who put one name at the same time, those with one digest win and the others lose.
func TestNamesRace(t *testing.T) {
	c := open(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	won := map[string]int{}
	for i := range 12 {
		wg.Go(func() {
			digest := fmt.Sprintf("sha256:%d", i%3)
			err := c.Names().Put(t.Context(), entry("race", "1", digest))
			if err != nil && dsec.KindOf(err) != dsec.Exists {
				t.Error(err)
			}
			if err == nil {
				mu.Lock()
				won[digest]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	got, err := c.Names().Resolve("race@1")
	if err != nil || len(won) != 1 || won[got.Digest] != 4 {
		t.Errorf("won: %v, stands for %s, %v", won, got.Digest, err)
	}
}

package cluster_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

func TestProjects(t *testing.T) {
	c := open(t)
	ctx, p := t.Context(), c.Projects()
	if pr, err := p.Get(cluster.DefaultProject); err != nil || pr.Name != cluster.DefaultProject {
		t.Errorf("default project: %+v, %v", pr, err)
	}
	create := func(name string, q dsec.Quota) error {
		_, err := p.Create(ctx, dsec.Project{Name: dsec.ProjectID(name), Quota: q})
		return err
	}
	top := dsec.Quota{Sandboxes: 10, Memory: 1 << 30, TTL: time.Hour}
	wantKind(t, create("top/sub", dsec.Quota{}), dsec.NotFound) // nothing above it yet
	for name, q := range map[string]dsec.Quota{"top": top, "other": {}} {
		if err := create(name, q); err != nil {
			t.Fatal(err)
		}
	}
	made, err := p.Create(ctx, dsec.Project{Name: "top/sub", Quota: dsec.Quota{Sandboxes: 5, CPU: 0.007}})
	if got, e := p.Get("top/sub"); err != nil || e != nil || got != made || got.Quota.CPU != 0.007 || got.Created.IsZero() {
		t.Errorf("%+v, %v and %+v, %v", made, err, got, e)
	}
	wantKind(t, create("top", top), dsec.Exists)
	wantKind(t, create("top/sub", dsec.Quota{}), dsec.Exists)
	for _, q := range []dsec.Quota{{Sandboxes: 11}, {Memory: 1<<30 + 1}, {TTL: 2 * time.Hour}, {Sandboxes: -1}} {
		wantKind(t, create("top/more", q), dsec.Invalid)
		wantKind(t, p.SetQuota(ctx, "top/sub", q), dsec.Invalid)
	}
	wantKind(t, p.SetQuota(ctx, "top", dsec.Quota{Sandboxes: 4}), dsec.Invalid) // less than what is below
	if err := p.SetQuota(ctx, "top", dsec.Quota{}); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"A b", "", "/", "top/", "/top", "top//x", "top/@x", strings.Repeat("a/", 8) + "a", strings.Repeat("a", 64)} {
		wantKind(t, create(name, dsec.Quota{}), dsec.Invalid)
	}
	wantKind(t, p.Remove(ctx, cluster.DefaultProject), dsec.Invalid)
	wantKind(t, p.Remove(ctx, "none"), dsec.NotFound)
	wantKind(t, p.Remove(ctx, "top"), dsec.Conflict)
}

// A project that is removed takes what is its own along, and nothing of others.
func TestRemoveProject(t *testing.T) {
	c := open(t)
	ctx, p, tokens, names := t.Context(), c.Projects(), c.Tokens(), c.Names()
	for _, name := range []dsec.ProjectID{"a", "a/b", "a/bc"} {
		if _, err := p.Create(ctx, dsec.Project{Name: name}); err != nil {
			t.Fatal(err)
		}
		e := entry("img", "1", "sha256:"+string(name))
		e.Project = name
		if err := names.Put(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	secrets := map[dsec.ProjectID]string{}
	for _, name := range []dsec.ProjectID{"a/b", "a/bc"} {
		for i := range 60 { // more than one transaction takes
			secret, err := tokens.Issue(ctx, dsec.Token{Name: fmt.Sprintf("%s/t%d", name, i), Project: name, Rights: []dsec.Right{dsec.RightDelegate}})
			if err != nil {
				t.Fatal(err)
			}
			secrets[name] = secret
		}
	}
	admin := dsec.Token{Name: "boss", Project: "a/b", Rights: []dsec.Right{dsec.RightAdmin}}
	for _, name := range []string{"boss", "heir"} {
		admin.Name = name
		if _, err := tokens.Issue(ctx, admin); err != nil {
			t.Fatal(err)
		}
		admin.Project = cluster.DefaultProject
	}
	wantKind(t, p.Remove(ctx, "a/b"), dsec.Conflict) // an operator's token
	if err := tokens.Revoke(ctx, "boss"); err != nil {
		t.Fatal(err)
	}
	living := spec("a/b/", 1)
	living.Project = "a/b"
	if err := c.Ledger().Take("sb1", living); err != nil {
		t.Fatal(err)
	}
	wantKind(t, p.Remove(ctx, "a/b"), dsec.Conflict) // a sandbox
	c.Ledger().Give("sb1", living)
	if err := p.Remove(ctx, "a/b"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, c.Ledger().Take("sb2", living), dsec.NotFound)
	_, err := tokens.Authenticate(secrets["a/b"])
	wantKind(t, err, dsec.Unauthenticated)
	if _, err := tokens.Authenticate(secrets["a/bc"]); err != nil {
		t.Error(err)
	}
	list, err := tokens.List(ctx)
	for _, tok := range list {
		if err != nil || tok.Project == "a/b" {
			t.Errorf("token %s is left: %v", tok.Name, err)
		}
	}
	// What comes after it in the same name has nothing of it, but what its parent has.
	if _, err := p.Create(ctx, dsec.Project{Name: "a/b"}); err != nil {
		t.Fatal(err)
	}
	_, err = tokens.Authenticate(secrets["a/b"])
	wantKind(t, err, dsec.Unauthenticated)
	for project, want := range map[dsec.ProjectID]string{"a/b": "sha256:a", "a/bc": "sha256:a/bc", "a": "sha256:a", "a/b/@sbx": "sha256:a"} {
		if got, err := names.Of(project).Resolve("img"); err != nil || got.Digest != want {
			t.Errorf("img of %s is %s, want %s: %v", project, got.Digest, want, err)
		}
	}
	wantKind(t, names.Of("a/b").Delete(ctx, "img"), dsec.Denied)
}

func spec(project dsec.ProjectID, sandboxes int) *dsec.Spec {
	s := dsec.Spec{Project: project, API: &dsec.Delegation{Quota: dsec.Quota{Sandboxes: sandboxes}}}.WithDefaults()
	return &s
}

// However many creates there are at once, exactly the quota gets through, and every project
// above counts.
func TestLedgerIsExact(t *testing.T) {
	c := open(t)
	l := c.Ledger()
	for name, q := range map[dsec.ProjectID]dsec.Quota{"q": {Sandboxes: 100}, "q/a": {}, "q/b": {CPU: 30}} {
		for range 2 { // in any order
			c.Projects().Create(t.Context(), dsec.Project{Name: name.Parent()})  //nolint:errcheck // is there or is made
			c.Projects().Create(t.Context(), dsec.Project{Name: name, Quota: q}) //nolint:errcheck
			if err := c.Projects().SetQuota(t.Context(), name, q); err != nil {
				t.Fatal(err)
			}
		}
	}
	var got, full atomic.Int64
	var all sync.WaitGroup
	for i := range 1000 {
		all.Go(func() {
			s := spec([]dsec.ProjectID{"q/a", "q/b"}[i%2], 1)
			switch err := l.Take(dsec.SandboxID(fmt.Sprint("sb", i)), s); {
			case err == nil:
				got.Add(1)
			case dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), "project q"):
				t.Error(err)
			default:
				full.Add(1)
			}
		})
	}
	all.Wait()
	q, b := l.Used("q"), l.Used("q/b")
	if got.Load() != 100 || full.Load() != 900 || q.Sandboxes != 100 || b.CPU > 30 || l.Used("q/a").Sandboxes+b.Sandboxes != 100 {
		t.Errorf("%d got through and %d did not: %+v, %+v", got.Load(), full.Load(), q, b)
	}
}

// The project of a sandbox is there as long as the sandbox is.
func TestLedgerOfASandbox(t *testing.T) {
	c := open(t)
	l := c.Ledger()
	owner := spec("default", 2)
	child := spec(dsec.SandboxProject("default", "sbowner"), 9)
	wantKind(t, l.Take("sb1", child), dsec.NotFound)
	l.Keep("sbowner", owner)
	for _, id := range []dsec.SandboxID{"sb1", "sb2"} {
		if err := l.Take(id, child); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, l.Take("sb3", child), dsec.Exhausted)
	// A grandchild counts in each, whatever its own owner was given.
	grand := spec(dsec.SandboxProject(child.Project, "sb1"), 1)
	wantKind(t, l.Take("sb3", grand), dsec.Exhausted)
	l.Give("sb2", child)
	if err := l.Take("sb3", grand); err != nil {
		t.Error(err)
	}
	if u := l.Used("default"); u.Sandboxes != 3 || u.CPU != 3 || u.Memory != 3<<30 {
		t.Errorf("%+v", u)
	}
	l.Give("sbowner", owner)
	wantKind(t, l.Take("sb4", child), dsec.NotFound)
}

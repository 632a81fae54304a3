package cluster_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

// list gives all images of a view, in pages of two.
func list(t *testing.T, n cluster.Names) (all []cluster.Entry) {
	t.Helper()
	for q := (cluster.Query{Limit: 2}); ; {
		page, next, err := n.Page(q)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, page...)
		if q.After = next; next == "" {
			return all
		}
		if len(page) != 2 {
			t.Fatalf("a page of %d with a next one", len(page))
		}
	}
}

func TestTags(t *testing.T) {
	a, b := open(t), open(t)
	ctx, n := t.Context(), a.Names()
	for i, v := range []string{"1", "2", "3"} {
		if err := n.Put(ctx, entry("tagged", v, fmt.Sprintf("sha256:%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	e, err := n.Tag(ctx, "tagged@1", "stable", "me")
	if err != nil || e.Ref() != "tagged@1" || !slices.Equal(e.Tags, []string{"stable"}) {
		t.Fatalf("tag: %+v, %v", e, err)
	}
	resolves := func(n cluster.Names, ref, want string) {
		t.Helper()
		if e, err := n.Resolve(ref); err != nil || e.Ref() != want {
			t.Errorf("%s is %s, %v, want %s", ref, e.Ref(), err, want)
		}
	}
	resolves(n, "tagged@stable", "tagged@1")
	resolves(n, "tagged", "tagged@3")
	eventually(t, "the tag on the other replica", func() bool { e, err := b.Names().Resolve("tagged@stable"); return err == nil && e.Version == "1" })
	late := open(t)
	resolves(late.Names(), "tagged@stable", "tagged@1")

	// It moves, also by way of itself, and does not change the order of versions.
	if _, err := n.Tag(ctx, "tagged@2", "stable", "me"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Tag(ctx, "tagged@stable", "beta", "me"); err != nil {
		t.Fatal(err)
	}
	resolves(n, "tagged@beta", "tagged@2")
	resolves(n, "tagged@latest", "tagged@3")
	if e, _ := n.Resolve("tagged@1"); len(e.Tags) != 0 {
		t.Errorf("the old version has the tags %v", e.Tags)
	}
	if e, _ := n.Resolve("tagged@2"); !slices.Equal(e.Tags, []string{"beta", "stable"}) {
		t.Errorf("the new version has the tags %v", e.Tags)
	}

	// A version never changes, nor does a tag become one.
	for _, bad := range []struct {
		ref, tag string
		want     dsec.ErrorKind
	}{
		{"tagged@1", "2", dsec.Exists}, {"tagged@1", "1", dsec.Exists}, {"tagged@1", "latest", dsec.Invalid}, {"tagged@1", "", dsec.Invalid},
		{"tagged@1", "a/b", dsec.Invalid}, {"tagged@1", "a@b", dsec.Invalid}, {"tagged@9", "x", dsec.NotFound}, {"Bad", "x", dsec.Invalid},
	} {
		_, err := n.Tag(ctx, bad.ref, bad.tag, "me")
		wantKind(t, err, bad.want)
	}
	wantKind(t, n.Put(ctx, entry("tagged", "stable", "sha256:9")), dsec.Exists)

	// What a tag stands for stays; the tag goes alone.
	wantKind(t, n.Delete(ctx, "tagged@2"), dsec.Conflict)
	for _, del := range []string{"tagged@stable", "tagged@beta", "tagged@2"} {
		if err := n.Delete(ctx, del); err != nil {
			t.Errorf("delete %s: %v", del, err)
		}
	}
	wantKind(t, n.Delete(ctx, "tagged@stable"), dsec.NotFound)
	if err := n.Put(ctx, entry("tagged", "stable", "sha256:9")); err != nil {
		t.Errorf("what was a tag cannot be a version: %v", err)
	}
}

// A project tags its own images alone, and its tags are its own.
func TestTagsOfProjects(t *testing.T) {
	c := open(t)
	ctx, n := t.Context(), c.Names()
	id := dsec.SandboxProject("p", new(dsec.IDKey).New(dsec.Place{Node: 1}))
	for _, p := range []dsec.ProjectID{"", "p", id} {
		e := entry("of-"+fmt.Sprint(p.Depth()), "1", "sha256:1")
		e.Project = p
		if err := n.Put(ctx, e); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Of(p).Tag(ctx, e.Name, "t", ""); err != nil {
			t.Errorf("tag in %q: %v", p, err)
		}
	}
	_, err := n.Of("p").Tag(ctx, "of-0", "mine", "")
	wantKind(t, err, dsec.Denied)
	_, err = n.Of("q").Resolve("of-1@t")
	wantKind(t, err, dsec.NotFound)
	if e, err := n.Of(id).Resolve("of-1@t"); err != nil || e.Ref() != "of-1@1" {
		t.Errorf("a tag from above: %s, %v", e.Ref(), err)
	}
	// With a sandbox its names go, tags too.
	if err := n.Drop(ctx, id); err != nil {
		t.Fatal(err)
	}
	if n.Any(id) || !n.Any("p") {
		t.Errorf("names: the sandbox's %v, the project's %v", n.Any(id), n.Any("p"))
	}
	e := entry("of-2", "t", "sha256:1")
	e.Project = id
	if err := n.Put(ctx, e); err != nil {
		t.Errorf("the tag is still there: %v", err)
	}
}

// Of tags that move and versions that go at the same time, none is left standing for nothing.
func TestTagsRace(t *testing.T) {
	c := open(t)
	ctx, n := t.Context(), c.Names()
	for i := range 8 {
		name := fmt.Sprintf("tagrace%d", i)
		for _, v := range []string{"1", "2"} {
			if err := n.Put(ctx, entry(name, v, "sha256:"+v)); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := n.Tag(ctx, name+"@2", "t", ""); err != nil && dsec.KindOf(err) != dsec.NotFound {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := n.Delete(ctx, name+"@2"); err != nil && dsec.KindOf(err) != dsec.Conflict {
				t.Error(err)
			}
		})
		wg.Wait()
		_, tag := n.Resolve(name + "@t")
		_, version := n.Resolve(name + "@2")
		if (tag == nil) != (version == nil) {
			t.Errorf("%s: tag %v, version %v", name, tag, version)
		}
	}
}

func TestPages(t *testing.T) {
	c := open(t)
	ctx, n := t.Context(), c.Names()
	for _, ref := range []string{"page/a@1", "page/b@1", "page/b@2", "page/b@3", "page/c@1", "pagf@1"} {
		name, v := dsec.SplitImageName(ref)
		if err := n.Put(ctx, entry(name, v, "sha256:"+ref)); err != nil {
			t.Fatal(err)
		}
	}
	refs := func(q cluster.Query) (refs []string, next string) {
		t.Helper()
		page, next, err := n.Page(q)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page {
			refs = append(refs, e.Ref())
		}
		return refs, next
	}
	first, next := refs(cluster.Query{Prefix: "page/", Limit: 2})
	if !slices.Equal(first, []string{"page/a@1", "page/b@3"}) || next == "" {
		t.Fatalf("first page: %v, next %q", first, next)
	}
	// What the page ended with may be gone; the list goes on behind it.
	if err := n.Delete(ctx, first[1]); err != nil {
		t.Fatal(err)
	}
	second, end := refs(cluster.Query{Prefix: "page/", Limit: 10, After: next})
	if !slices.Equal(second, []string{"page/b@2", "page/b@1", "page/c@1"}) || end != "" {
		t.Errorf("second page: %v, next %q", second, end)
	}
	if got, _ := refs(cluster.Query{Digest: "sha256:page/c@1"}); !slices.Equal(got, []string{"page/c@1"}) {
		t.Errorf("by digest: %v", got)
	}
	for _, bad := range []string{"x", "!", "eyJ9"} {
		_, _, err := n.Page(cluster.Query{After: bad})
		wantKind(t, err, dsec.Invalid)
	}
}

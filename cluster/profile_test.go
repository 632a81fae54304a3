package cluster_test

import (
	"testing"

	"github.com/dsec-go/dsec"
)

func TestProfiles(t *testing.T) {
	a, b := open(t).Profiles(), open(t).Profiles()
	ctx := t.Context()
	_, err := a.Get(ctx, "sha256:l")
	wantKind(t, err, dsec.NotFound)
	if added, err := a.Add(ctx, "sha256:l", "sha256:p"); err != nil || !added {
		t.Fatalf("add: %v, %v", added, err)
	}
	if added, err := b.Add(ctx, "sha256:l", "sha256:q"); err != nil || added {
		t.Errorf("a second one: %v, %v", added, err)
	}
	if got, err := b.Get(ctx, "sha256:l"); err != nil || got != "sha256:p" {
		t.Errorf("profile %q, %v", got, err)
	}
	// What is written beside the mirror keeps nobody waiting for it.
	if _, err := open(t).Projects().Create(ctx, dsec.Project{Name: "beside"}); err != nil {
		t.Errorf("a project after a profile: %v", err)
	}
	if all, err := b.All(ctx); err != nil || len(all) != 1 || all["sha256:l"] != "sha256:p" {
		t.Errorf("all: %v, %v", all, err)
	}
	for _, p := range []string{"sha256:q", "sha256:p"} { // one that is not the layer's is no reason
		if err := a.Remove(ctx, "sha256:l", p); err != nil {
			t.Error(err)
		}
		_, err := a.Get(ctx, "sha256:l")
		if gone := dsec.KindOf(err) == dsec.NotFound && err != nil; gone != (p == "sha256:p") {
			t.Errorf("after removing %s: %v", p, err)
		}
	}
}

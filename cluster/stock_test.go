package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dsec-go/dsec"
)

// shelf is a store: which blobs of how many bytes each layer has.
type shelf map[string]map[string]int64

func (s shelf) parts(_ context.Context, digest string) (parts []dsec.ImagePart, err error) {
	l, ok := s[digest]
	if !ok {
		return nil, dsec.Errorf(dsec.NotFound, "no layer %s", digest)
	}
	for d, size := range l {
		parts = append(parts, dsec.ImagePart{Kind: "data", Digest: d, Size: size})
	}
	return parts, nil
}

func TestStock(t *testing.T) {
	c := open(t)
	ctx := t.Context()
	store := shelf{
		"base": {"b": 100 << 20}, "over": {"b": 100 << 20, "o": 10 << 20}, "one": {"x": 20 << 20, "y": 5 << 20},
		"two": {"x": 20 << 20, "z": 7 << 20}, "z": {"z": 7 << 20}, "four": {"w": 4 << 20}, "alone": {"b": 100 << 20, "q": 3 << 20},
	}
	stock := c.Stock(store.parts)
	for _, p := range []dsec.Project{
		{Name: "st", Quota: dsec.Quota{Images: 45 << 20}}, {Name: "st/a"}, {Name: "st/b", Quota: dsec.Quota{Images: 30 << 20}},
	} {
		if _, err := c.Projects().Create(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	_, err := c.Projects().Create(ctx, dsec.Project{Name: "st/c", Quota: dsec.Quota{Images: 46 << 20}})
	wantKind(t, err, dsec.Invalid)
	for _, step := range []struct {
		project      dsec.ProjectID
		name, digest string
		want         string // of the error
	}{
		{"", "base", "base", ""},
		{"", "alone", "alone", ""},
		{"st/b", "over", "over", ""}, // 10 of its own: the base is everybody's
		{"st/b", "one", "one", "project st/b has 10 of the 30 MiB of images of its quota, 25 more do not fit"},
		{"st/a", "one", "one", ""},
		{"st/a", "again", "one", ""}, // nothing more
		{"st/a", "two", "two", ""},   // 7 more, x is there
		{"st/a", "over", "over", ""}, // what is below the same bound is counted once
		{"st/b", "z", "z", ""},
		{"st/a", "four", "four", "project st has 42 of the 45 MiB of images of its quota, 4 more do not fit"},
	} {
		e := entry("stock/"+step.name, "1", step.digest)
		e.Project = step.project
		err := stock.Put(ctx, e)
		switch {
		case step.want == "" && err != nil:
			t.Errorf("%s in %q: %v", step.digest, step.project, err)
		case step.want != "" && (dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), step.want)):
			t.Errorf("%s in %q: %v, want %q", step.digest, step.project, err, step.want)
		}
	}
	gone := entry("stock/x", "1", "one")
	gone.Project = "st/never"
	wantKind(t, stock.Put(ctx, gone), dsec.NotFound)

	used, err := stock.Used(ctx)
	if err != nil || used["st"] != 42<<20 || used["st/a"] != 42<<20 || used["st/b"] != 17<<20 {
		t.Errorf("used %v, %v", used, err)
	}
	if most, err := stock.Room(ctx, "st/b"); err != nil || most != 30<<20 {
		t.Errorf("room %d, %v", most, err)
	}
	if most, err := stock.Room(ctx, ""); err != nil || most != 0 {
		t.Errorf("room of everybody %d, %v", most, err)
	}
	if err := c.Projects().SetQuota(ctx, "st", dsec.Quota{Images: 42 << 20}); err != nil {
		t.Fatal(err)
	}
	_, err = stock.Room(ctx, "st/a")
	wantKind(t, err, dsec.Exhausted)

	unique := func(digest string) (int64, int) {
		t.Helper()
		u, err := stock.Usage(ctx, []string{digest})
		if err != nil || u[digest] == nil {
			t.Fatalf("usage of %s: %v, %v", digest, u, err)
		}
		return u[digest].Unique, len(u[digest].Parts)
	}
	for digest, want := range map[string]int64{"alone": 3 << 20, "base": 0, "one": 0, "two": 0} {
		if got, n := unique(digest); got != want || n != len(store[digest]) {
			t.Errorf("%s: %d bytes are its own in %d parts, want %d", digest, got, n, want)
		}
	}
	if err := c.Names().Of("st/a").Delete(ctx, "stock/again"); err != nil {
		t.Fatal(err)
	}
	if got, _ := unique("one"); got != 5<<20 {
		t.Errorf("with one name less %d bytes are its own, want 5 MiB", got)
	}
	if u, err := stock.Usage(ctx, []string{"none"}); err != nil || u["none"] != nil {
		t.Errorf("usage of nothing: %v, %v", u["none"], err)
	}
}

// Imports at the same time do not get in together where each alone would.
func TestStockRace(t *testing.T) {
	c := open(t)
	ctx := t.Context()
	if _, err := c.Projects().Create(ctx, dsec.Project{Name: "strace", Quota: dsec.Quota{Images: 3 << 20}}); err != nil {
		t.Fatal(err)
	}
	store := shelf{}
	for i := range 8 {
		store[fmt.Sprint("race", i)] = map[string]int64{fmt.Sprint("blob", i): 1 << 20}
	}
	stock := c.Stock(store.parts)
	var wg sync.WaitGroup
	var in atomic.Int32
	for i := range 8 {
		wg.Go(func() {
			e := entry(fmt.Sprint("strace/", i), "1", fmt.Sprint("race", i))
			e.Project = "strace"
			switch err := stock.Put(ctx, e); {
			case err == nil:
				in.Add(1)
			case dsec.KindOf(err) != dsec.Exhausted:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if in.Load() != 3 {
		t.Errorf("%d of 8 images of 1 MiB went into 3 MiB", in.Load())
	}
}

// A store that does not answer is told, and asked again.
func TestStockUnavailable(t *testing.T) {
	c := open(t)
	ctx := t.Context()
	if err := c.Names().Put(ctx, entry("stock-away", "1", "away")); err != nil {
		t.Fatal(err)
	}
	defer c.Names().Delete(ctx, "stock-away") //nolint:errcheck // the server goes too
	var away atomic.Bool
	away.Store(true)
	stock := c.Stock(func(ctx context.Context, digest string) ([]dsec.ImagePart, error) {
		if away.Load() {
			return nil, &dsec.Error{Kind: dsec.Unavailable, Err: errors.New("no answer")}
		}
		return shelf{"away": {"a": 1}}.parts(ctx, digest)
	})
	_, err := stock.Usage(ctx, []string{"away"})
	wantKind(t, err, dsec.Unavailable)
	away.Store(false)
	if u, err := stock.Usage(ctx, []string{"away"}); err != nil || u["away"] == nil || u["away"].Unique != 1 {
		t.Errorf("usage %v, %v", u["away"], err)
	}
}

package cluster_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

func register(t *testing.T, c *cluster.Cluster, name, instance string) *cluster.Registration {
	t.Helper()
	r, err := c.Register(t.Context(), cluster.NodeOptions{Name: name, Instance: instance, Address: instance + ":1", Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(context.Background()) })
	return r
}

func find(c *cluster.Cluster, name string) cluster.Node {
	for _, n := range c.Nodes() {
		if n.Name == name {
			return n
		}
	}
	return cluster.Node{}
}

func TestRegister(t *testing.T) {
	a, b := open(t), open(t)
	ctx := t.Context()
	r := register(t, a, "reg", "one")
	place := r.Place()
	if place.Node == 0 || place.Epoch != 1 {
		t.Errorf("place %+v", place)
	}
	want := cluster.Node{Name: "reg", Place: place, Live: true, Address: "one:1"}
	if got, err := a.NodeAt(place); err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	eventually(t, "the node on the other replica", func() bool { return find(b, "reg") == want })

	// Another node of that name is told so; a newer life of the same one is not.
	_, err := b.Register(ctx, cluster.NodeOptions{Name: "reg", Instance: "two"})
	wantKind(t, err, dsec.Conflict)
	again := register(t, b, "reg", "one")
	if again.Place() != place {
		t.Errorf("after a restart %+v, want %+v", again.Place(), place)
	}
	_, err = a.BumpEpoch(ctx, "reg", place.Epoch)
	wantKind(t, err, dsec.Conflict) // it is alive

	for range 2 {
		if err := again.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	eventually(t, "the end of the node", func() bool { return !find(a, "reg").Live })
	// Going away cleanly is no loss: number and epoch stay.
	if got := register(t, a, "reg", "three").Place(); got != place {
		t.Errorf("after a clean end %+v, want %+v", got, place)
	}
	wantKind(t, errOf(a.NodeAt(dsec.Place{Node: 60000, Epoch: 1})), dsec.NotFound)
	wantKind(t, errOf(a.NodeAt(dsec.Place{Node: place.Node, Epoch: 2})), dsec.NotFound)
	wantKind(t, errOf(a.Register(ctx, cluster.NodeOptions{Name: "UP", Instance: "x"})), dsec.Invalid)
	wantKind(t, errOf(a.Register(ctx, cluster.NodeOptions{Name: "up"})), dsec.Invalid)
	wantKind(t, errOf(a.BumpEpoch(ctx, "nobody", 1)), dsec.NotFound)
}

func errOf[T any](_ T, err error) error { return err }

// A node that dies is declared lost; when it comes back it has a new epoch, and when it was
// only cut off it learns that it has been given up.
func TestLost(t *testing.T) {
	c := open(t)
	ctx := t.Context()
	dead, err := cluster.Open(ctx, cluster.Options{Endpoints: server.Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	r, err := dead.Register(ctx, cluster.NodeOptions{Name: "lost", Instance: "one", Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	old := r.Place()
	eventually(t, "the node", func() bool { return find(c, "lost").Live })
	dead.Close() // no more signs of life, and no farewell
	eventually(t, "the end of the lease", func() bool { return find(c, "lost").Name == "lost" && !find(c, "lost").Live })
	wantKind(t, errOf(c.BumpEpoch(ctx, "lost", old.Epoch+1)), dsec.Conflict)
	if n, err := c.NodeAt(old); err != nil || n.Live {
		t.Errorf("before it is declared lost: %+v, %v", n, err)
	}
	now, err := c.BumpEpoch(ctx, "lost", old.Epoch)
	if err != nil || now != (dsec.Place{Node: old.Node, Epoch: old.Epoch + 1}) {
		t.Fatalf("bump: %+v, %v", now, err)
	}
	wantKind(t, errOf(c.BumpEpoch(ctx, "lost", old.Epoch)), dsec.Conflict) // one declaration is enough
	wantKind(t, errOf(c.NodeAt(old)), dsec.Lost)
	if got := register(t, c, "lost", "one").Place(); got != now {
		t.Errorf("back as %+v, want %+v", got, now)
	}
	if err := r.Close(ctx); dsec.KindOf(err) == dsec.Internal && err != nil {
		t.Errorf("close on a closed cluster: %v", err)
	}
}

// A lease that is lost is taken again, unless the node has been given up meanwhile.
func TestLeaseLost(t *testing.T) {
	c := open(t)
	ctx := t.Context()
	r := register(t, c, "lease", "one")
	r.RevokeLease(t)
	eventually(t, "the node again", func() bool { return find(c, "lease").Live })
	select {
	case <-r.Fenced():
		t.Fatal("fenced without cause")
	default:
	}
	// Given up before it can register again.
	for {
		r.RevokeLease(t)
		if _, err := c.BumpEpoch(ctx, "lease", r.Place().Epoch); err == nil {
			break
		}
	}
	select {
	case <-r.Fenced():
	case <-time.After(time.Minute):
		t.Fatal("not fenced")
	}
}

func TestNumbersAreUnique(t *testing.T) {
	clusters := []*cluster.Cluster{open(t), open(t)}
	var wg sync.WaitGroup
	var mu sync.Mutex
	names := map[uint16]string{}
	for i := range 10 {
		wg.Go(func() {
			name := fmt.Sprintf("many-%d", i)
			r, err := clusters[i%2].Register(t.Context(), cluster.NodeOptions{Name: name, Instance: "x"})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			if other, taken := names[r.Place().Node]; taken {
				t.Errorf("%s and %s are both number %d", name, other, r.Place().Node)
			}
			names[r.Place().Node] = name
			mu.Unlock()
			if err := r.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

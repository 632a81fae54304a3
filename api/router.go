package api

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-go/dsec"
)

// Node is one node as the front door reaches it. Both fields lead to the same
// node: Handler takes calls as they come, Services those that are decoded here.
type Node struct {
	Name     string
	Number   uint16
	Handler  http.Handler  // rpc.Handler of a node in this process, or Remote
	Services dsec.Services // the node itself, or a client of it
}

// Placement knows the nodes. All methods are safe for concurrent use.
type Placement interface {
	// Pick gives the nodes to try for a new sandbox, best first. It is
	// Exhausted when there is none.
	Pick(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) ([]Node, error)

	// Find gives the node with a number; NotFound for a number that no node
	// has, Lost for one whose sandboxes are lost.
	Find(number uint16) (Node, error)

	// All gives the nodes that are asked for a listing.
	All() []Node
}

// Single is the placement of one node.
type Single struct{ Node Node }

// Pick gives the node.
func (s Single) Pick(context.Context, dsec.Spec, dsec.CreateOptions) ([]Node, error) {
	return []Node{s.Node}, nil
}

// Find gives the node if the number is its own.
func (s Single) Find(number uint16) (Node, error) {
	if number != s.Node.Number {
		return Node{}, dsec.Errorf(dsec.NotFound, "no node has the number %d", number)
	}
	return s.Node, nil
}

// All gives the node.
func (s Single) All() []Node { return []Node{s.Node} }

// router is dsec.Sandboxes over all nodes.
type router struct {
	key   *dsec.IDKey
	nodes Placement
}

// node finds the node of a sandbox by the ID alone.
func (r router) node(id dsec.SandboxID) (Node, error) {
	place, err := r.key.Place(id)
	if err != nil {
		return Node{}, err
	}
	n, err := r.nodes.Find(place.Node)
	return n, dsec.WithOp("api.Find", id, err)
}

// Create tries the nodes in order for as long as they are full.
func (r router) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	if err := spec.Check(); err != nil {
		return dsec.Sandbox{}, err
	}
	nodes, err := r.nodes.Pick(ctx, spec, opt)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	err = dsec.Errorf(dsec.Exhausted, "there is no node for it")
	for _, n := range nodes {
		var b dsec.Sandbox
		b, err = n.Services.Sandboxes.Create(ctx, spec, opt)
		if err == nil || dsec.KindOf(err) != dsec.Exhausted {
			return b, err
		}
	}
	return dsec.Sandbox{}, err
}

func (r router) Get(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Get(ctx, id)
}

// List asks all nodes at once and merges, newest first. A node that does not
// answer fails the listing: one with a part missing would be believed.
func (r router) List(ctx context.Context, f dsec.Filter) ([]dsec.Sandbox, error) {
	nodes := r.nodes.All()
	if len(nodes) == 1 {
		return nodes[0].Services.Sandboxes.List(ctx, f)
	}
	limit := f.Limit
	after := func(dsec.Sandbox) bool { return true }
	if f.After != "" {
		// Only its own node knows where it stands; elsewhere its time says it.
		last, err := r.Get(ctx, f.After)
		if err != nil {
			return nil, err
		}
		after = func(b dsec.Sandbox) bool { return newest(last, b) < 0 }
		f.After, f.Limit = "", 0
	}
	parts := make([][]dsec.Sandbox, len(nodes))
	g, ctx := errgroup.WithContext(ctx)
	for i, n := range nodes {
		g.Go(func() (err error) {
			parts[i], err = n.Services.Sandboxes.List(ctx, f)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	all := slices.Concat(parts...)
	all = slices.DeleteFunc(all, func(b dsec.Sandbox) bool { return !after(b) })
	slices.SortStableFunc(all, newest)
	if limit > 0 && len(all) > limit {
		all = all[:limit]
	}
	return all, nil
}

// newest orders sandboxes from the newest on.
func newest(a, b dsec.Sandbox) int {
	return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(b.ID, a.ID))
}

func (r router) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Extend(ctx, id, ttl)
}

func (r router) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Stop(ctx, id)
}

func (r router) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Pause(ctx, id)
}

func (r router) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Resume(ctx, id)
}

func (r router) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return n.Services.Sandboxes.Wait(ctx, id)
}

func (r router) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	n, err := r.node(id)
	if err != nil {
		return dsec.Image{}, err
	}
	return n.Services.Sandboxes.Commit(ctx, id, name)
}

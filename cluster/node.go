package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// defaultLease is how long a node counts as alive after its last sign.
const defaultLease = 10 * time.Second

// nodeRecord is what lasts of a node.
type nodeRecord struct {
	Number uint16
	Epoch  uint32
}

// liveRecord is there while the node is.
type liveRecord struct {
	Address  string
	Instance string
}

// Node is a node that has ever registered.
type Node struct {
	Name    string
	Place   dsec.Place
	Live    bool   // its lease is held
	Address string // of its edge, while it is live
}

// NodeOptions say who registers.
type NodeOptions struct {
	Name    string
	Address string // where other programs reach its edge
	// Instance tells two nodes of one name from a node that is back: the same value, kept with
	// the node's data, takes its registration over at once; another one is a Conflict as
	// long as the first is live.
	Instance string
	Lease    time.Duration // 0 means 10 s; whole seconds
}

// Registration is a node's place in the cluster and its sign of life.
type Registration struct {
	c      *Cluster
	o      NodeOptions
	place  dsec.Place
	cancel context.CancelFunc
	done   chan struct{}
	fenced chan struct{}

	mu    sync.Mutex
	lease clientv3.LeaseID
}

// Register gives the node its number and epoch, new ones if its name is new, and keeps its
// lease alive until Close. The number never changes. The epoch changes only by BumpEpoch. When
// etcd is away for longer than the lease, the node registers again by itself.
func (c *Cluster) Register(ctx context.Context, o NodeOptions) (*Registration, error) {
	const op = "cluster.Register"
	if err := checkName(op, "node", o.Name); err != nil {
		return nil, err
	}
	if o.Instance == "" {
		return nil, failf(op, dsec.Invalid, "node %s has no instance", o.Name)
	}
	if o.Lease <= 0 {
		o.Lease = defaultLease
	}
	place, err := c.place(ctx, o.Name)
	if err != nil {
		return nil, err
	}
	r := &Registration{c: c, o: o, place: place, done: make(chan struct{}), fenced: make(chan struct{})}
	if err := r.announce(ctx); err != nil {
		return nil, err
	}
	// The lease outlives the call.
	ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go r.run(ctx)
	return r, nil
}

// place returns the number and epoch of a node, and gives it some if it is new.
func (c *Cluster) place(ctx context.Context, name string) (dsec.Place, error) {
	const op = "cluster.Register"
	for {
		rec, _, err := c.node(ctx, op, name)
		if err == nil {
			return dsec.Place{Node: rec.Number, Epoch: rec.Epoch}, nil
		}
		if dsec.KindOf(err) != dsec.NotFound {
			return dsec.Place{}, err
		}
		var number uint16
		c.mirror.read(func(s *state) {
			for n := uint16(1); n < math.MaxUint16; n++ {
				if _, taken := s.numbers[n]; !taken {
					number = n
					return
				}
			}
		})
		if number == 0 {
			return dsec.Place{}, failf(op, dsec.Exhausted, "all node numbers are taken")
		}
		rec = nodeRecord{Number: number, Epoch: 1}
		key := keyNumbers + strconv.Itoa(int(number))
		ok, err := c.commit(ctx, op, []clientv3.Cmp{absent(keyNodes + name), absent(key)},
			clientv3.OpPut(keyNodes+name, encode(rec)), clientv3.OpPut(key, name))
		if err != nil {
			return dsec.Place{}, err
		}
		if !ok {
			// Another node was faster. Its writes must be here before the next try.
			if err := c.catchUp(ctx, op); err != nil {
				return dsec.Place{}, err
			}
		}
	}
}

// catchUp waits until the mirror has everything that etcd has now.
func (c *Cluster) catchUp(ctx context.Context, op string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	// The newest change below our root: later revisions of other keys would never come.
	got, err := c.client.Get(ctx, root, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1),
		clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend))
	if err != nil || len(got.Kvs) == 0 {
		return fail(op, err)
	}
	return fail(op, c.mirror.wait(ctx, got.Kvs[0].ModRevision))
}

// node reads the record of a node and its revision from etcd.
func (c *Cluster) node(ctx context.Context, op, name string) (nodeRecord, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := c.client.Get(ctx, keyNodes+name)
	if err != nil {
		return nodeRecord{}, 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return nodeRecord{}, 0, failf(op, dsec.NotFound, "no node is called %.80q", name)
	}
	var rec nodeRecord
	if err := json.Unmarshal(got.Kvs[0].Value, &rec); err != nil {
		return nodeRecord{}, 0, failf(op, dsec.Internal, "decode node %s: %w", name, err)
	}
	return rec, got.Kvs[0].ModRevision, nil
}

// announce takes a lease and writes the live key under it.
func (r *Registration) announce(ctx context.Context) error {
	const op = "cluster.Register"
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	client, key := r.c.client, keyLive+r.o.Name
	lease, err := client.Grant(ctx, int64(math.Ceil(r.o.Lease.Seconds())))
	if err != nil {
		return fail(op, err)
	}
	for {
		rec, revision, err := r.c.node(ctx, op, r.o.Name)
		if err == nil && rec != (nodeRecord{Number: r.place.Node, Epoch: r.place.Epoch}) {
			err = failf(op, dsec.Lost, "node %s is now number %d epoch %d, was %v", r.o.Name, rec.Number, rec.Epoch, r.place)
		}
		var seen int64
		if err == nil {
			seen, err = r.claim(ctx, op)
		}
		if err == nil {
			var ok bool
			ok, err = r.c.commit(ctx, op, []clientv3.Cmp{unchanged(keyNodes+r.o.Name, revision), unchanged(key, seen)},
				clientv3.OpPut(key, encode(liveRecord{Address: r.o.Address, Instance: r.o.Instance}), clientv3.WithLease(lease.ID)))
			if ok && err == nil {
				r.mu.Lock()
				r.lease = lease.ID
				r.mu.Unlock()
				return nil
			}
		}
		if err != nil {
			client.Revoke(ctx, lease.ID) //nolint:errcheck // it expires by itself
			return err
		}
	}
}

// claim returns the revision of the live key, 0 if there is none, unless it is another's.
func (r *Registration) claim(ctx context.Context, op string) (int64, error) {
	got, err := r.c.client.Get(ctx, keyLive+r.o.Name)
	if err != nil {
		return 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return 0, nil
	}
	var live liveRecord
	if json.Unmarshal(got.Kvs[0].Value, &live) != nil || live.Instance != r.o.Instance {
		return 0, failf(op, dsec.Conflict, "another node called %s is alive at %s", r.o.Name, live.Address)
	}
	return got.Kvs[0].ModRevision, nil
}

// run keeps the lease alive and takes a new one when it is lost.
func (r *Registration) run(ctx context.Context) {
	defer close(r.done)
	for {
		r.mu.Lock()
		lease := r.lease
		r.mu.Unlock()
		if alive, err := r.c.client.KeepAlive(ctx, lease); err == nil {
			for range alive { // closed when the lease is gone
			}
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(min(time.Second, r.o.Lease/4)):
			}
			err := r.announce(ctx)
			if err == nil {
				break
			}
			if k := dsec.KindOf(err); k == dsec.Lost || k == dsec.Conflict || k == dsec.NotFound {
				close(r.fenced)
				return
			}
		}
	}
}

// Place returns the node's number and epoch.
func (r *Registration) Place() dsec.Place { return r.place }

// Fenced is closed when the cluster has given this node up: its epoch has changed or another
// instance has its name. The sandboxes of this epoch are declared lost, and the node must
// stop them.
func (r *Registration) Fenced() <-chan struct{} { return r.fenced }

// Close takes the node out of the live ones at once. It may be called twice.
func (r *Registration) Close(ctx context.Context) error {
	r.cancel()
	<-r.done
	r.mu.Lock()
	lease := r.lease
	r.lease = clientv3.NoLease
	r.mu.Unlock()
	if lease == clientv3.NoLease {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := r.c.client.Revoke(ctx, lease)
	if err != nil && strings.Contains(err.Error(), "lease not found") {
		return nil // it has expired
	}
	return fail("cluster.Close", err)
}

// BumpEpoch declares the sandboxes of a node lost: IDs of the epoch from are Lost from now
// on. It is a Conflict while the node is live, and if its epoch is not from.
func (c *Cluster) BumpEpoch(ctx context.Context, name string, from uint32) (dsec.Place, error) {
	const op = "cluster.BumpEpoch"
	rec, revision, err := c.node(ctx, op, name)
	if err != nil {
		return dsec.Place{}, err
	}
	if rec.Epoch != from {
		return dsec.Place{}, failf(op, dsec.Conflict, "node %s is in epoch %d, not %d", name, rec.Epoch, from)
	}
	rec.Epoch++
	ok, err := c.commit(ctx, op, []clientv3.Cmp{absent(keyLive + name), unchanged(keyNodes+name, revision)},
		clientv3.OpPut(keyNodes+name, encode(rec)))
	if err != nil {
		return dsec.Place{}, err
	}
	if !ok {
		return dsec.Place{}, failf(op, dsec.Conflict, "node %s is alive or has changed", name)
	}
	return dsec.Place{Node: rec.Number, Epoch: rec.Epoch}, nil
}

// Nodes returns all nodes by name, from the mirror.
func (c *Cluster) Nodes() []Node {
	var nodes []Node
	c.mirror.read(func(s *state) {
		for name := range s.nodes {
			nodes = append(nodes, s.node(name))
		}
	})
	slices.SortFunc(nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return nodes
}

// NodeAt returns the node that a sandbox ID leads to, from the mirror. An epoch that is past
// is Lost; a number that nobody has is NotFound.
func (c *Cluster) NodeAt(p dsec.Place) (Node, error) {
	const op = "cluster.NodeAt"
	var n Node
	c.mirror.read(func(s *state) {
		if name, ok := s.numbers[p.Node]; ok {
			n = s.node(name)
		}
	})
	switch {
	case n.Name == "" || p.Epoch > n.Place.Epoch:
		return Node{}, failf(op, dsec.NotFound, "no node has number %d and epoch %d", p.Node, p.Epoch)
	case p.Epoch < n.Place.Epoch:
		return Node{}, failf(op, dsec.Lost, "the sandboxes of node %s from epoch %d are lost", n.Name, p.Epoch)
	}
	return n, nil
}

// node puts together what is known of a node.
func (s *state) node(name string) Node {
	rec := s.nodes[name]
	live, ok := s.live[name]
	return Node{Name: name, Place: dsec.Place{Node: rec.Number, Epoch: rec.Epoch}, Live: ok, Address: live.Address}
}

// String is for messages.
func (n Node) String() string { return fmt.Sprintf("%s (%d.%d)", n.Name, n.Place.Node, n.Place.Epoch) }

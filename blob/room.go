package blob

import (
	"container/list"
	"context"
	"fmt"
	"sync"
)

// room keeps the fast store of a Cached within a bound. It knows what is in there in order
// of use, what is held, and how much is on its way.
//
// It never evicts what is held: by an open reader of the Cached, or by Hold. What the fast
// store itself knows to be in use (Folder.Busy: an open file, a mounted layer) it leaves
// alone too. So what can be evicted may not be enough, and then there is no room.
type room struct {
	fast  Store
	limit int64 // 0 or less: no bound, and nothing here is used

	loading sync.Mutex // held while the fast store is listed, the first time
	loaded  bool

	mu      sync.Mutex
	order   *list.List // of *tenant, the last used first
	tenants map[Digest]*list.Element
	held    map[Digest]int
	leaving map[Digest]chan struct{} // being deleted; closed when that is over
	used    int64                    // what tenants have and what is on its way
}

type tenant struct {
	d    Digest
	size int64
}

// busier is a Store that knows who else uses a blob.
type busier interface {
	Busy(d Digest) bool
}

func (r *room) init(fast Store, limit int64) {
	r.fast, r.limit = fast, limit
	r.order, r.tenants, r.held, r.leaving = list.New(), map[Digest]*list.Element{}, map[Digest]int{}, map[Digest]chan struct{}{}
}

// load finds out what an earlier process has left, which is old to us. It waits for the
// first blob that needs room, so that a start lists nothing.
func (r *room) load(ctx context.Context) error {
	r.loading.Lock()
	defer r.loading.Unlock()
	if r.loaded {
		return nil
	}
	for info, err := range r.fast.List(ctx) {
		if err != nil {
			return fmt.Errorf("list cache: %w", err)
		}
		r.mu.Lock()
		if r.tenants[info.Digest] == nil {
			r.tenants[info.Digest] = r.order.PushBack(&tenant{info.Digest, info.Size})
			r.used += info.Size
		}
		r.mu.Unlock()
	}
	r.loaded = true
	return nil
}

// hold waits out an eviction that has begun: what is found afterwards stays.
func (r *room) hold(d Digest) (release func()) {
	if r.limit <= 0 {
		return func() {}
	}
	r.mu.Lock()
	for r.leaving[d] != nil {
		over := r.leaving[d]
		r.mu.Unlock()
		<-over
		r.mu.Lock()
	}
	defer r.mu.Unlock()
	r.held[d]++
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.held[d]--; r.held[d] == 0 {
			delete(r.held, d)
		}
	})
}

// touch notes a use.
func (r *room) touch(d Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.tenants[d]; e != nil {
		r.order.MoveToFront(e)
	}
}

// gone notes that a blob was deleted.
func (r *room) gone(d Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.tenants[d]; e != nil {
		r.remove(e)
	}
}

// remove forgets a tenant. Requires: r.mu held.
func (r *room) remove(e *list.Element) {
	t := e.Value.(*tenant)
	r.order.Remove(e)
	delete(r.tenants, t.d)
	r.used -= t.size
}

// reserve makes room for a blob that is about to come. Settle gives it back or makes the
// blob a tenant.
func (r *room) reserve(ctx context.Context, d Digest, size int64) error {
	if size > r.limit {
		return fmt.Errorf("blob %s has %d bytes, its cache is bound to %d: %w", d, size, r.limit, ErrFull)
	}
	if err := r.load(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	r.used += size
	over := r.used - r.limit
	r.mu.Unlock()
	if err := r.evict(ctx, over); err != nil {
		r.settle(d, size, false)
		return fmt.Errorf("blob %s: %w", d, err)
	}
	return nil
}

// settle ends a reservation.
func (r *room) settle(d Digest, size int64, there bool) {
	r.mu.Lock()
	r.used -= size
	r.mu.Unlock()
	if there {
		r.add(d, size)
	}
}

// add takes in a blob that has come.
func (r *room) add(d Digest, size int64) {
	if r.limit <= 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.tenants[d]; e != nil {
		r.order.MoveToFront(e)
		return
	}
	r.tenants[d] = r.order.PushFront(&tenant{d, size})
	r.used += size
}

// trim comes back to the bound after blobs that came by themselves.
func (r *room) trim(ctx context.Context) {
	if r.limit <= 0 || r.load(ctx) != nil {
		return
	}
	r.mu.Lock()
	over := r.used - r.limit
	r.mu.Unlock()
	r.evict(ctx, over) //nolint:errcheck // the next reservation says so
}

// evict deletes at least n bytes of what nobody uses, the longest unused first.
func (r *room) evict(ctx context.Context, n int64) error {
	tried := map[Digest]bool{}
	for n > 0 {
		t := r.victim(tried)
		if t == nil {
			return fmt.Errorf("everything in the cache is in use: %w", ErrFull)
		}
		tried[t.d] = true
		busy := false
		if b, ok := r.fast.(busier); ok {
			busy = b.Busy(t.d)
		}
		var err error
		if !busy {
			err = r.fast.Delete(ctx, t.d)
		}
		if busy || err != nil {
			r.add(t.d, t.size)
		} else {
			n -= t.size
		}
		r.mu.Lock()
		close(r.leaving[t.d])
		delete(r.leaving, t.d)
		r.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// victim takes out the tenant that was not used for the longest time, of those that are
// neither held nor tried already, and marks it as leaving.
func (r *room) victim(tried map[Digest]bool) *tenant {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e := r.order.Back(); e != nil; e = e.Prev() {
		if t := e.Value.(*tenant); r.held[t.d] == 0 && !tried[t.d] {
			r.remove(e)
			r.leaving[t.d] = make(chan struct{})
			return t
		}
	}
	return nil
}

package cluster

import (
	"context"
	"slices"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// RevokeLease takes the present lease away behind the registration's back.
func (r *Registration) RevokeLease(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	lease := r.lease
	r.mu.Unlock()
	r.c.client.Revoke(t.Context(), lease) //nolint:errcheck // it may be gone already
	got, err := r.c.client.Get(t.Context(), keyLive+r.o.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.c.mirror.wait(t.Context(), got.Header.Revision); err != nil && r.c.mirror.at() < got.Header.Revision {
		t.Fatal(err)
	}
}

// PutMany writes entries as they are, many at a time.
func (n Names) PutMany(ctx context.Context, entries []Entry) error {
	for batch := range slices.Chunk(entries, maxOps) {
		var ops []clientv3.Op
		for _, e := range batch {
			ops = append(ops, clientv3.OpPut(imageKey{e.Project, e.Name}.key(e.Version), encode(e)))
		}
		if _, err := n.c.client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return err
		}
	}
	return n.c.catchUp(ctx, "test")
}

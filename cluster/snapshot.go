package cluster

import (
	"context"
	"encoding/json"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// snapshotRoot is beside the mirror's keys: nobody needs the list but who asks
// for it.
const snapshotRoot = "/dsec-snapshots/"

// Snapshots is the list of saved states. The states themselves are in a store.
type Snapshots struct{ c *Cluster }

// Snapshots returns the list of the cluster.
func (c *Cluster) Snapshots() Snapshots { return Snapshots{c} }

// AddSnapshot adds one. Environment variables, which may be large, are left out.
func (s Snapshots) AddSnapshot(ctx context.Context, snap dsec.Snapshot) error {
	const op = "cluster.AddSnapshot"
	snap.Spec.Env = nil
	b, err := json.Marshal(snap)
	if err != nil {
		return fail(op, err)
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err = s.c.client.Put(ctx, snapshotRoot+string(snap.ID), string(b))
	return fail(op, err)
}

// DropSnapshot removes one from the list. One that is not there is no error.
func (s Snapshots) DropSnapshot(ctx context.Context, snap dsec.Snapshot) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := s.c.client.Delete(ctx, snapshotRoot+string(snap.ID))
	return fail("cluster.DropSnapshot", err)
}

// Snapshots lists them, in no order.
func (s Snapshots) Snapshots(ctx context.Context) ([]dsec.Snapshot, error) {
	const op = "cluster.Snapshots"
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := s.c.client.Get(ctx, snapshotRoot, clientv3.WithPrefix())
	if err != nil {
		return nil, fail(op, err)
	}
	all := make([]dsec.Snapshot, len(got.Kvs))
	for i, kv := range got.Kvs {
		if err := json.Unmarshal(kv.Value, &all[i]); err != nil {
			return nil, fail(op, fmt.Errorf("decode %s: %w", kv.Key, err))
		}
	}
	return all, nil
}

package cluster

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// profileRoot is beside the mirror's keys: a node asks once for each layer that it
// mounts for the first time, and nobody waits for the answer.
const profileRoot = "/dsec-profiles/"

// Profiles keeps, for layers, the digest of the blob that says which of their bytes
// are wanted first. The blobs themselves are in the store.
type Profiles struct{ c *Cluster }

// Profiles returns those of the cluster.
func (c *Cluster) Profiles() Profiles { return Profiles{c} }

// Get gives the profile of a layer; NotFound if it has none.
func (p Profiles) Get(ctx context.Context, layer string) (profile string, err error) {
	const op = "cluster.Profile"
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := p.c.client.Get(ctx, profileRoot+layer)
	if err != nil {
		return "", fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return "", failf(op, dsec.NotFound, "layer %.80s has no profile", layer)
	}
	return string(got.Kvs[0].Value), nil
}

// Add gives a layer its profile. It keeps one that it has: that was recorded when
// nothing was fetched ahead. It reports whether profile is the one now.
func (p Profiles) Add(ctx context.Context, layer, profile string) (added bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	key := profileRoot + layer
	got, err := p.c.client.Txn(ctx).If(absent(key)).Then(clientv3.OpPut(key, profile)).Commit()
	if err != nil {
		return false, fail("cluster.AddProfile", err)
	}
	return got.Succeeded, nil
}

// Remove takes a profile away from a layer if it is still the one.
func (p Profiles) Remove(ctx context.Context, layer, profile string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	key := profileRoot + layer
	_, err := p.c.client.Txn(ctx).If(clientv3.Compare(clientv3.Value(key), "=", profile)).Then(clientv3.OpDelete(key)).Commit()
	return fail("cluster.RemoveProfile", err)
}

// All gives all profiles by layer.
func (p Profiles) All(ctx context.Context) (map[string]string, error) {
	all, end := map[string]string{}, clientv3.GetPrefixRangeEnd(profileRoot)
	for from, more := profileRoot, true; more; {
		pctx, cancel := context.WithTimeout(ctx, callLimit)
		got, err := p.c.client.Get(pctx, from, clientv3.WithRange(end), clientv3.WithLimit(loadPage))
		cancel()
		if err != nil {
			return nil, fail("cluster.Profiles", err)
		}
		for _, kv := range got.Kvs {
			all[strings.TrimPrefix(string(kv.Key), profileRoot)] = string(kv.Value)
		}
		if more = got.More && len(got.Kvs) > 0; more {
			from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
		}
	}
	return all, nil
}

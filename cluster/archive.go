package cluster

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// archiveRoot is beside the mirror's keys: nobody needs archives until a log is
// read whose node is gone.
const archiveRoot = "/dsec-logs/"

// Archives keeps the list of segments that hold trajectories of ended sandboxes,
// of all nodes. A node adds one a minute at most.
type Archives struct{ c *Cluster }

// Archives returns the archives of the cluster.
func (c *Cluster) Archives() Archives { return Archives{c} }

// archiveKey sorts by time; the segment makes it unique.
func archiveKey(segment string, at time.Time) string {
	return fmt.Sprintf("%s%s/%s", archiveRoot, at.UTC().Format("20060102T150405"), segment)
}

// AddArchive adds a segment. Adding one again changes nothing.
func (a Archives) AddArchive(ctx context.Context, segment string, at time.Time) error {
	const op = "cluster.AddArchive"
	if segment == "" {
		return failf(op, dsec.Invalid, "the segment has no name")
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := a.c.client.Put(ctx, archiveKey(segment, at), segment)
	return fail(op, err)
}

// DropArchive removes a segment from the list. One that is not there is no error.
func (a Archives) DropArchive(ctx context.Context, segment string, at time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := a.c.client.Delete(ctx, archiveKey(segment, at))
	return fail("cluster.DropArchive", err)
}

// Archives lists the segments, newest first.
func (a Archives) Archives(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := a.c.client.Get(ctx, archiveRoot, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
	if err != nil {
		return nil, fail("cluster.Archives", err)
	}
	all := make([]string, len(got.Kvs))
	for i, kv := range got.Kvs {
		all[i] = string(kv.Value)
	}
	return all, nil
}

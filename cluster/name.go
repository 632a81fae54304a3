package cluster

import (
	"context"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// latest is the version that stands for the newest one. None can be put under it.
const latest = "latest"

var (
	imageName    = regexp.MustCompile(`^[a-z0-9]([a-z0-9._/:-]{0,198}[a-z0-9])?$`)
	imageVersion = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)
)

// Entry is what an image name stands for, and who put it.
type Entry struct {
	dsec.Image
	Creator string
}

// Names keeps the names of images: "name@version" stands for one digest for ever, "name" and
// "name@latest" for the version that was put last.
type Names struct{ c *Cluster }

// Names returns the image names of the cluster.
func (c *Cluster) Names() Names { return Names{c} }

// Put names an image. To put the same digest in the same role again is nothing new and
// changes nothing; another one under a name that is taken is Exists, and so is a version in
// another role than the name's others: a bare name must not come to mean a workspace where it
// was a base.
func (n Names) Put(ctx context.Context, e Entry) error {
	const op = "cluster.PutName"
	if !imageName.MatchString(e.Name) || !imageVersion.MatchString(e.Version) || e.Version == latest {
		return failf(op, dsec.Invalid, "image name %.200q: want name@version with a version other than %s", e.Ref(), latest)
	}
	if e.Digest == "" {
		return failf(op, dsec.Invalid, "image %s has no digest", e.Ref())
	}
	if err := e.Role.Check(); err != nil {
		return dsec.WithOp(op, "", err)
	}
	if other, err := n.Resolve(e.Name); err == nil && other.Role != e.Role {
		return failf(op, dsec.Exists, "%s is the name of a %s; a %s needs another", e.Name, other.Role, e.Role)
	}
	key := keyImages + e.Ref()
	for {
		ok, err := n.c.commit(ctx, op, []clientv3.Cmp{absent(key)}, clientv3.OpPut(key, encode(e)))
		if ok || err != nil {
			return err
		}
		old, _, err := n.read(ctx, op, e.Ref())
		if dsec.KindOf(err) == dsec.NotFound && err != nil {
			continue // just removed
		}
		if err != nil {
			return err
		}
		if old.Digest != e.Digest || old.Role != e.Role {
			return failf(op, dsec.Exists, "image %s is %s %s already; a version never changes", e.Ref(), old.Role, old.Digest)
		}
		return n.c.catchUp(ctx, op) // whoever put it may not have been us
	}
}

// Resolve returns the image of "name", "name@latest" or "name@version", from the mirror.
func (n Names) Resolve(ref string) (Entry, error) {
	name, version, _ := strings.Cut(ref, "@")
	var list []imageRecord
	n.c.mirror.read(func(s *state) { list = s.images[name] })
	for _, r := range list {
		if version == "" || version == latest || version == r.Version {
			return r.Entry, nil
		}
	}
	return Entry{}, failf("cluster.Resolve", dsec.NotFound, "no image is called %.200q", ref)
}

// List returns all images by name, the newest version first.
func (n Names) List() []Entry {
	var list []Entry
	n.c.mirror.read(func(s *state) {
		names := make([]string, 0, len(s.images))
		for name := range s.images {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			for _, r := range s.images[name] {
				list = append(list, r.Entry)
			}
		}
	})
	return list
}

// Delete forgets "name@version", or with "name" alone its only version. It is NotFound if
// there is none, and Conflict if there are several.
func (n Names) Delete(ctx context.Context, ref string) error {
	const op = "cluster.DeleteName"
	name, version, _ := strings.Cut(ref, "@")
	if !imageName.MatchString(name) || version != "" && !imageVersion.MatchString(version) {
		return failf(op, dsec.Invalid, "image name %.200q", ref)
	}
	if version == "" {
		several := 0
		n.c.mirror.read(func(s *state) { several = len(s.images[name]) })
		if several > 1 {
			return failf(op, dsec.Conflict, "image %s has %d versions; say which, as %s@VERSION", name, several, name)
		}
	}
	if version == latest {
		e, err := n.Resolve(ref)
		if err != nil {
			return dsec.WithOp(op, "", err)
		}
		version = e.Version
	}
	del := clientv3.OpDelete(keyImages + name + "@" + version)
	if version == "" {
		del = clientv3.OpDelete(keyImages+name+"@", clientv3.WithPrefix())
	}
	dctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	resp, err := n.c.client.Do(dctx, del)
	if err != nil {
		return fail(op, err)
	}
	if resp.Del().Deleted == 0 {
		return failf(op, dsec.NotFound, "no image is called %.200q", ref)
	}
	return fail(op, n.c.mirror.wait(dctx, resp.Del().Header.Revision))
}

// read gets one entry and its revision from etcd.
func (n Names) read(ctx context.Context, op, ref string) (Entry, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := n.c.client.Get(ctx, keyImages+ref)
	if err != nil {
		return Entry{}, 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return Entry{}, 0, failf(op, dsec.NotFound, "no image is called %s", ref)
	}
	var e Entry
	if err := json.Unmarshal(got.Kvs[0].Value, &e); err != nil {
		return Entry{}, 0, failf(op, dsec.Internal, "decode image %s: %w", ref, err)
	}
	return e, got.Kvs[0].ModRevision, nil
}

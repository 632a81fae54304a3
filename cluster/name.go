package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// Entry is what an image name stands for, and who put it.
type Entry struct {
	dsec.Image
	Creator string
}

// Names keeps the names of images: "name@version" stands for one digest for ever, "name@tag" for
// the version that it was given last, "name" and "name@latest" for the version that was put last. A
// name is everybody's, or that of one
// project, which no other sees. Names itself is the operator's view, Of a project's.
type Names struct {
	c       *Cluster
	project dsec.ProjectID
	one     bool // the view of project alone
}

// Names returns all image names of the cluster.
func (c *Cluster) Names() Names { return Names{c: c} }

// Of returns the names that a project sees: its own, those of projects above it, and
// everybody's. Of "" it is everybody's.
func (n Names) Of(project dsec.ProjectID) Names { return Names{n.c, project, true} }

// Put names an image, for its Project. To put the same digest in the same role again is nothing
// new and changes nothing; another one under a name that is taken is Exists, and so is a
// version in another role than the name's others: a bare name must not come to mean a workspace
// where it was a base. Nor can a project take a name that is everybody's.
func (n Names) Put(ctx context.Context, e Entry) error {
	const op = "cluster.PutName"
	if err := dsec.CheckNewImageName(e.Ref()); err != nil {
		return dsec.WithOp(op, "", err)
	}
	if e.Digest == "" {
		return failf(op, dsec.Invalid, "image %s has no digest", e.Ref())
	}
	if err := e.Role.Check(); err != nil {
		return dsec.WithOp(op, "", err)
	}
	if e.Project != "" {
		if err := checkOwner(op, e.Project); err != nil {
			return err
		}
	}
	k := imageKey{e.Project, e.Name}
	if other, ok := n.newest(k); ok && other.Role != e.Role {
		return failf(op, dsec.Exists, "%s is the name of a %s; a %s needs another", e.Name, other.Role, e.Role)
	}
	if _, ok := n.newest(imageKey{"", e.Name}); ok && e.Project != "" {
		return failf(op, dsec.Exists, "%s is the name of an image that is everybody's; project %s needs another", e.Name, e.Project)
	}
	e.Tags, e.Usage = nil, nil
	key := k.key(e.Version)
	for {
		ok, err := n.c.commit(ctx, op, []clientv3.Cmp{absent(key), absent(k.tag(e.Version))}, clientv3.OpPut(key, encode(e)))
		if ok || err != nil {
			return err
		}
		old, err := n.read(ctx, op, key)
		if dsec.KindOf(err) == dsec.NotFound && err != nil {
			if err := n.c.catchUp(ctx, op); err != nil {
				return err
			}
			if version, ok := n.tag(k, e.Version); ok {
				return failf(op, dsec.Exists, "%s is a tag of %s@%s already", e.Ref(), e.Name, version)
			}
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

// newest gives the version of a name that was put last.
func (n Names) newest(k imageKey) (e Entry, ok bool) {
	n.c.mirror.read(func(s *state) {
		if list := s.images[k]; len(list) > 0 {
			e, ok = list[0].Entry, true
		}
	})
	return e, ok
}

// Resolve returns the image of "name", "name@latest", "name@version" or "name@tag", from the mirror. A
// project's own comes before that of one above, and everybody's last. The operator sees everybody's, and one that a single
// project has; one of several is Conflict.
func (n Names) Resolve(ref string) (Entry, error) {
	const op = "cluster.Resolve"
	name, version := dsec.SplitImageName(ref)
	var found []Entry
	n.c.mirror.read(func(s *state) {
		for _, k := range n.keys(s, name) {
			if r, ok := s.find(k, version); ok {
				found = append(found, s.tagged(k, r))
			}
		}
	})
	switch {
	case len(found) == 0:
		return Entry{}, failf(op, dsec.NotFound, "no image is called %.200q", ref)
	case len(found) > 1 && !n.one && found[0].Project != "":
		return Entry{}, severalOwners(op, ref)
	}
	return found[0], nil
}

// find gives the record of a version, of what a tag stands for, or, for none and "latest", of the
// newest.
func (s *state) find(k imageKey, version string) (imageRecord, bool) {
	list := s.images[k]
	if len(list) > 0 && (version == "" || version == dsec.LatestVersion) {
		return list[0], true
	}
	i := slices.IndexFunc(list, func(r imageRecord) bool { return r.Version == version })
	if i < 0 {
		if to, ok := s.tags[k][version]; ok {
			i = slices.IndexFunc(list, func(r imageRecord) bool { return r.Version == to })
		}
	}
	if i < 0 {
		return imageRecord{}, false
	}
	return list[i], true
}

// keys gives the keys of a name that n sees, the one that counts most first.
func (n Names) keys(s *state, name string) []imageKey {
	switch {
	case n.project != "":
		var line []imageKey
		for p := range n.project.Line() {
			line = append(line, imageKey{p, name})
		}
		return append(line, imageKey{"", name})
	case n.one:
		return []imageKey{{"", name}}
	}
	return s.owners[name]
}

func severalOwners(op, ref string) error {
	return failf(op, dsec.Conflict, "several projects have an image called %.200q; only they can name theirs", ref)
}

// Layers gives how many names of n's view stand for each layer, all at one moment.
func (n Names) Layers() map[string]int {
	all := map[string]int{}
	n.c.mirror.read(func(s *state) {
		for k, list := range s.images {
			if n.sees(k) {
				for _, r := range list {
					all[r.Digest]++
				}
			}
		}
	})
	return all
}

// owner is a layer and whose name stands for it.
type owner struct {
	project dsec.ProjectID
	digest  string
}

// owners gives all names of the cluster without the names.
func (n Names) owners() (all []owner) {
	n.c.mirror.read(func(s *state) {
		all = make([]owner, 0, len(s.images))
		for k, list := range s.images {
			for _, r := range list {
				all = append(all, owner{k.project, r.Digest})
			}
		}
	})
	return all
}

// sees reports whether a key is in n's view.
func (n Names) sees(k imageKey) bool {
	return !n.one || k.project == "" || n.project.Within(k.project)
}

// Delete forgets "name@version", "name@tag", or with "name" alone its only version. It is NotFound if
// there is none, and Conflict if there are several or tags stand for it. A project can forget its
// own alone.
func (n Names) Delete(ctx context.Context, ref string) error {
	const op = "cluster.DeleteName"
	if err := dsec.CheckImageName(ref); err != nil {
		return dsec.WithOp(op, "", err)
	}
	if err := n.c.catchUp(ctx, op); err != nil { // what another replica has put is to be found
		return err
	}
	e, err := n.Resolve(ref)
	if err != nil {
		return dsec.WithOp(op, "", err)
	}
	if n.project != "" && e.Project != n.project {
		return failf(op, dsec.Denied, "image %s is not that of project %s", e.Ref(), n.project)
	}
	k := imageKey{e.Project, e.Name}
	_, version := dsec.SplitImageName(ref)
	if _, ok := n.tag(k, version); ok && version != e.Version {
		return n.untag(ctx, op, k, version)
	}
	if version == "" {
		several := 0
		n.c.mirror.read(func(s *state) { several = len(s.images[k]) })
		if several > 1 {
			return failf(op, dsec.Conflict, "image %s has %d versions; say which, as %s@VERSION", e.Name, several, e.Name)
		}
	}
	if len(e.Tags) > 0 {
		return failf(op, dsec.Conflict, "image %s has the tags %s; move or remove them first", e.Ref(), strings.Join(e.Tags, ", "))
	}
	// A tag that comes to stand for it meanwhile moves its revision.
	key, at := k.key(e.Version), n.revision(k, e.Version)
	ok, err := n.c.commit(ctx, op, []clientv3.Cmp{unchanged(key, at)}, clientv3.OpDelete(key))
	if err == nil && !ok {
		if err = n.c.catchUp(ctx, op); err == nil && n.revision(k, e.Version) == 0 {
			return failf(op, dsec.NotFound, "no image is called %.200q", ref)
		}
		err = cmp.Or(err, failf(op, dsec.Conflict, "image %s has just been given a tag", e.Ref()))
	}
	return err
}

// Any reports whether a project has names of its own.
func (n Names) Any(p dsec.ProjectID) (some bool) {
	n.c.mirror.read(func(s *state) { some = s.owned[p] > 0 })
	return some
}

// Drop forgets all names of a project that is the SandboxProject of an ended sandbox.
func (n Names) Drop(ctx context.Context, p dsec.ProjectID) error {
	const op = "cluster.DropNames"
	if _, ok := p.Owner(); !ok {
		return failf(op, dsec.Invalid, "project %.80q is not that of a sandbox", string(p))
	}
	_, err := n.c.commit(ctx, op, nil, dropNames(p)...)
	return err
}

// dropNames deletes the names of a project and their tags.
func dropNames(p dsec.ProjectID) []clientv3.Op {
	return []clientv3.Op{
		clientv3.OpDelete(keyOwn+escape(p)+"/", clientv3.WithPrefix()),
		clientv3.OpDelete(keyOwnTags+escape(p)+"/", clientv3.WithPrefix()),
	}
}

// checkOwner tells whether an image can be of a project: one that somebody made, or a sandbox's.
func checkOwner(op string, p dsec.ProjectID) error {
	for part := range p.Line() {
		if id, ok := part.Owner(); ok {
			if id.Check() != nil {
				return failf(op, dsec.Invalid, "project %.80q is of no sandbox", string(p))
			}
			continue
		}
		if err := checkName(op, "project", string(part[strings.LastIndexByte(string(part), '/')+1:])); err != nil {
			return err
		}
	}
	return nil
}

// read gets one entry from etcd.
func (n Names) read(ctx context.Context, op, key string) (Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := n.c.client.Get(ctx, key)
	if err != nil {
		return Entry{}, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return Entry{}, failf(op, dsec.NotFound, "no image has the key %s", key)
	}
	var e Entry
	if err := json.Unmarshal(got.Kvs[0].Value, &e); err != nil {
		return Entry{}, failf(op, dsec.Internal, "decode image %s: %w", key, err)
	}
	return e, nil
}

package cluster

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// tagRecord is what is written of a tag: its key has its name.
type tagRecord struct {
	Version string
	Moved   time.Time
	Creator string `json:",omitempty"`
}

// tagTries bounds how often Tag begins anew because what it has read has changed.
const tagTries = 10

// Tag lets "name@tag" stand for the version that ref resolves to, atomically if it stood for
// another. It is Exists when the tag is a version, Denied when the image is not the project's of
// n's view. The version cannot be deleted meanwhile.
func (n Names) Tag(ctx context.Context, ref, tag, creator string) (Entry, error) {
	const op = "cluster.Tag"
	if err := dsec.CheckImageName(ref); err != nil {
		return Entry{}, dsec.WithOp(op, "", err)
	}
	name, _ := dsec.SplitImageName(ref)
	if err := dsec.CheckNewImageName(name + "@" + tag); err != nil {
		return Entry{}, dsec.WithOp(op, "", err)
	}
	for range tagTries {
		if err := n.c.catchUp(ctx, op); err != nil {
			return Entry{}, err
		}
		e, err := n.Resolve(ref)
		if err != nil {
			return Entry{}, dsec.WithOp(op, "", err)
		}
		if n.project != "" && e.Project != n.project {
			return Entry{}, failf(op, dsec.Denied, "image %s is not that of project %s", e.Ref(), n.project)
		}
		k := imageKey{e.Project, e.Name}
		if n.revision(k, tag) != 0 {
			return Entry{}, failf(op, dsec.Exists, "%s@%s is a version; a version never changes", e.Name, tag)
		}
		// Writing the version anew moves its revision, which a deletion looks at.
		bare := e
		bare.Tags = nil
		key := k.key(e.Version)
		ok, err := n.c.commit(ctx, op,
			[]clientv3.Cmp{unchanged(key, n.revision(k, e.Version)), absent(k.key(tag))},
			clientv3.OpPut(k.tag(tag), encode(tagRecord{e.Version, time.Now().UTC(), creator})), clientv3.OpPut(key, encode(bare)))
		if err != nil {
			return Entry{}, err
		}
		if ok {
			return n.resolveIn(k, e.Version)
		}
	}
	return Entry{}, failf(op, dsec.Conflict, "image %.200q keeps changing", ref)
}

// resolveIn gives a version of a key, as it is now.
func (n Names) resolveIn(k imageKey, version string) (e Entry, err error) {
	err = failf("cluster.Tag", dsec.NotFound, "image %s@%s has just been removed", k.name, version)
	n.c.mirror.read(func(s *state) {
		if r, ok := s.find(k, version); ok {
			e, err = s.tagged(k, r), nil
		}
	})
	return e, err
}

// untag removes a tag. The version that it stands for stays.
func (n Names) untag(ctx context.Context, op string, k imageKey, tag string) error {
	ok, err := n.c.commit(ctx, op, []clientv3.Cmp{present(k.tag(tag))}, clientv3.OpDelete(k.tag(tag)))
	if err == nil && !ok {
		err = failf(op, dsec.NotFound, "no image is called %s@%s", k.name, tag)
	}
	return err
}

// tag gives the version that a tag stands for.
func (n Names) tag(k imageKey, tag string) (version string, ok bool) {
	n.c.mirror.read(func(s *state) { version, ok = s.tags[k][tag] })
	return version, ok
}

// revision gives where a version was last written; 0 if there is none of that name.
func (n Names) revision(k imageKey, version string) (at int64) {
	n.c.mirror.read(func(s *state) {
		for _, r := range s.images[k] {
			if r.Version == version {
				at = r.modified
			}
		}
	})
	return at
}

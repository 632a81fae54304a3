package cluster

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// DefaultProject is there from the first day and cannot be removed.
const DefaultProject dsec.ProjectID = "default"

// Quota bounds what a project and all below it use at once. Zero does not bound.
type Quota struct {
	Sandboxes int
	MilliCPU  int64
	Memory    int64 // bytes
}

// Project is a tenant. Its quota lies within that of its parent.
type Project struct {
	Name    dsec.ProjectID
	Parent  dsec.ProjectID // empty for one at the top
	Quota   Quota
	Created time.Time `json:",omitzero"`
}

// Projects keeps the projects. Sharing their quota out to the replicas of the api is not
// here yet: this is the record of it.
type Projects struct{ c *Cluster }

// Projects returns the projects of the cluster.
func (c *Cluster) Projects() Projects { return Projects{c} }

// Get returns one project, from the mirror.
func (p Projects) Get(name dsec.ProjectID) (Project, error) {
	var out Project
	var ok bool
	p.c.mirror.read(func(s *state) { out, ok = s.projects[name] })
	if !ok {
		return Project{}, failf("cluster.Project", dsec.NotFound, "no project is called %.80q", string(name))
	}
	out.Name = name
	return out, nil
}

// List returns all projects by name, from the mirror.
func (p Projects) List() []Project {
	var list []Project
	p.c.mirror.read(func(s *state) {
		for name, pr := range s.projects {
			pr.Name = name
			list = append(list, pr)
		}
	})
	slices.SortFunc(list, func(a, b Project) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return list
}

// Create makes a project. Its parent must exist and be no closer. Created is set here.
func (p Projects) Create(ctx context.Context, pr Project) error {
	const op = "cluster.CreateProject"
	if err := checkName(op, "project", string(pr.Name)); err != nil {
		return err
	}
	if err := pr.Quota.check(op); err != nil {
		return err
	}
	pr.Created = time.Now().UTC()
	key := keyProjects + string(pr.Name)
	conds := []clientv3.Cmp{absent(key)}
	if pr.Parent != "" {
		// Read from etcd with its revision, and so that the parent cannot change in between.
		parent, revision, err := p.read(ctx, op, pr.Parent)
		if err != nil {
			return err
		}
		if !pr.Quota.within(parent.Quota) {
			return failf(op, dsec.Invalid, "the quota of %s is larger than that of its parent %s", pr.Name, pr.Parent)
		}
		conds = append(conds, unchanged(keyProjects+string(pr.Parent), revision))
	}
	ok, err := p.c.commit(ctx, op, conds, clientv3.OpPut(key, encode(pr)))
	if err == nil && !ok {
		err = failf(op, dsec.Exists, "a project is called %s already, or its parent has just changed", pr.Name)
	}
	return err
}

// SetQuota changes the bounds of a project. They must lie within those of its parent and
// leave room for each project below it.
func (p Projects) SetQuota(ctx context.Context, name dsec.ProjectID, q Quota) error {
	const op = "cluster.SetQuota"
	if err := q.check(op); err != nil {
		return err
	}
	if err := p.c.catchUp(ctx, op); err != nil {
		return err
	}
	pr, revision, err := p.read(ctx, op, name)
	if err != nil {
		return err
	}
	for _, other := range p.List() {
		if other.Name == pr.Parent && !q.within(other.Quota) || other.Parent == name && !other.Quota.within(q) {
			return failf(op, dsec.Invalid, "the quota of %s does not go with that of %s", name, other.Name)
		}
	}
	pr.Quota = q
	key := keyProjects + string(name)
	ok, err := p.c.commit(ctx, op, []clientv3.Cmp{unchanged(key, revision)}, clientv3.OpPut(key, encode(pr)))
	if err == nil && !ok {
		err = failf(op, dsec.Conflict, "project %s has just changed", name)
	}
	return err
}

// Delete removes a project that no token and no other project refers to.
func (p Projects) Delete(ctx context.Context, name dsec.ProjectID) error {
	const op = "cluster.DeleteProject"
	if name == DefaultProject {
		return failf(op, dsec.Invalid, "project %s stays", name)
	}
	if err := p.c.catchUp(ctx, op); err != nil {
		return err
	}
	_, revision, err := p.read(ctx, op, name)
	if err != nil {
		return err
	}
	var user string
	p.c.mirror.read(func(s *state) {
		for other, pr := range s.projects {
			if pr.Parent == name {
				user = "project " + string(other)
			}
		}
		for _, tok := range s.tokens {
			if tok.Project == name {
				user = "token " + tok.Name
			}
		}
	})
	if user != "" {
		return failf(op, dsec.Conflict, "project %s still has %s", name, user)
	}
	key := keyProjects + string(name)
	ok, err := p.c.commit(ctx, op, []clientv3.Cmp{unchanged(key, revision)}, clientv3.OpDelete(key))
	if err == nil && !ok {
		err = failf(op, dsec.Conflict, "project %s has just changed", name)
	}
	return err
}

// read gets a project and its revision from etcd.
func (p Projects) read(ctx context.Context, op string, name dsec.ProjectID) (Project, int64, error) {
	if err := checkName(op, "project", string(name)); err != nil {
		return Project{}, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := p.c.client.Get(ctx, keyProjects+string(name))
	if err != nil {
		return Project{}, 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return Project{}, 0, failf(op, dsec.NotFound, "no project is called %s", name)
	}
	var pr Project
	if err := json.Unmarshal(got.Kvs[0].Value, &pr); err != nil {
		return Project{}, 0, failf(op, dsec.Internal, "decode project %s: %w", name, err)
	}
	pr.Name = name
	return pr, got.Kvs[0].ModRevision, nil
}

func (q Quota) check(op string) error {
	if q.Sandboxes < 0 || q.MilliCPU < 0 || q.Memory < 0 {
		return failf(op, dsec.Invalid, "a quota cannot be negative")
	}
	return nil
}

// within tells whether q bounds at least as much as outer.
func (q Quota) within(outer Quota) bool {
	fits := func(in, out int64) bool { return out == 0 || in != 0 && in <= out }
	return fits(int64(q.Sandboxes), int64(outer.Sandboxes)) && fits(q.MilliCPU, outer.MilliCPU) && fits(q.Memory, outer.Memory)
}

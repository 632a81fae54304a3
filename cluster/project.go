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

// project is what is written of a project: its key has its name.
type project struct {
	Quota   dsec.Quota `json:",omitzero"`
	Created time.Time  `json:",omitzero"`
}

// Projects keeps the projects, and tells what they use as the Ledger of this process counts it.
type Projects struct{ c *Cluster }

var _ dsec.Projects = Projects{}

// Projects returns the projects of the cluster.
func (c *Cluster) Projects() Projects { return Projects{c} }

// Get returns one project, from the mirror.
func (p Projects) Get(name dsec.ProjectID) (dsec.Project, error) {
	var out project
	var ok bool
	p.c.mirror.read(func(s *state) { out, ok = s.projects[name] })
	if !ok {
		return dsec.Project{}, failf("cluster.Project", dsec.NotFound, "no project is called %.80q", string(name))
	}
	return p.view(name, out), nil
}

// List implements dsec.Projects, from the mirror.
func (p Projects) List(context.Context) ([]dsec.Project, error) {
	all := map[dsec.ProjectID]project{}
	p.c.mirror.read(func(s *state) {
		for name, pr := range s.projects {
			all[name] = pr
		}
	})
	list := make([]dsec.Project, 0, len(all))
	for name, pr := range all {
		list = append(list, p.view(name, pr))
	}
	slices.SortFunc(list, func(a, b dsec.Project) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return list, nil
}

func (p Projects) view(name dsec.ProjectID, pr project) dsec.Project {
	return dsec.Project{Name: name, Quota: pr.Quota, Created: pr.Created, Used: p.c.ledger.Used(name)}
}

// Create implements dsec.Projects. Created is set here.
func (p Projects) Create(ctx context.Context, pr dsec.Project) (dsec.Project, error) {
	const op = "cluster.CreateProject"
	if err := pr.Name.Check(); err != nil {
		return dsec.Project{}, dsec.WithOp(op, "", err)
	}
	if err := pr.Quota.Check(); err != nil {
		return dsec.Project{}, dsec.WithOp(op, "", err)
	}
	key := keyProjects + string(pr.Name)
	made := project{Quota: pr.Quota, Created: time.Now().UTC()}
	conds := []clientv3.Cmp{absent(key)}
	ops := []clientv3.Op{clientv3.OpPut(key, encode(made))}
	if parent := pr.Name.Parent(); parent != "" {
		// Read from etcd with its revision, which this moves, so that neither its quota
		// changes in between nor somebody removes it who has not seen its child.
		above, revision, err := p.read(ctx, op, parent)
		if err != nil {
			return dsec.Project{}, err
		}
		if !fits(pr.Quota, above.Quota) {
			return dsec.Project{}, failf(op, dsec.Invalid, "the quota of %s is larger than that of %s", pr.Name, parent)
		}
		conds = append(conds, unchanged(keyProjects+string(parent), revision))
		ops = append(ops, clientv3.OpPut(keyProjects+string(parent), encode(above)))
	}
	if _, err := p.Get(pr.Name); err != nil { // what an interrupted removal left is nobody's
		if err := p.purge(ctx, op, pr.Name); err != nil {
			return dsec.Project{}, err
		}
	}
	ok, err := p.c.commit(ctx, op, conds, ops...)
	if err != nil {
		return dsec.Project{}, err
	}
	if !ok {
		return dsec.Project{}, failf(op, dsec.Exists, "a project is called %s already, or the one above it has just changed", pr.Name)
	}
	return p.view(pr.Name, made), nil
}

// SetQuota implements dsec.Projects.
func (p Projects) SetQuota(ctx context.Context, name dsec.ProjectID, q dsec.Quota) error {
	const op = "cluster.SetQuota"
	if err := q.Check(); err != nil {
		return dsec.WithOp(op, "", err)
	}
	if err := p.c.catchUp(ctx, op); err != nil {
		return err
	}
	pr, revision, err := p.read(ctx, op, name)
	if err != nil {
		return err
	}
	var wrong dsec.ProjectID
	p.c.mirror.read(func(s *state) {
		for other, o := range s.projects {
			if other == name.Parent() && !fits(q, o.Quota) || other.Parent() == name && !fits(o.Quota, q) {
				wrong = other
			}
		}
	})
	if wrong != "" {
		return failf(op, dsec.Invalid, "the quota of %s does not go with that of %s", name, wrong)
	}
	pr.Quota = q
	key := keyProjects + string(name)
	ok, err := p.c.commit(ctx, op, []clientv3.Cmp{unchanged(key, revision)}, clientv3.OpPut(key, encode(pr)))
	if err == nil && !ok {
		err = failf(op, dsec.Conflict, "project %s has just changed", name)
	}
	return err
}

// Remove implements dsec.Projects. A token with the right of an operator is not ended with its
// project: that is Conflict.
func (p Projects) Remove(ctx context.Context, name dsec.ProjectID) error {
	const op = "cluster.RemoveProject"
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
	open, err := p.c.ledger.close(name) // no create begins from here on
	if err != nil {
		return dsec.WithOp(op, "", err)
	}
	defer open()
	var user string
	p.c.mirror.read(func(s *state) {
		for other := range s.projects {
			if other.Parent() == name {
				user = "project " + string(other)
			}
		}
		for _, tok := range s.tokens {
			if tok.Project == name && slices.Contains(tok.Rights, dsec.RightAdmin) {
				user = "token " + tok.Name + ", an operator's"
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
	if err != nil {
		return err
	}
	return p.purge(ctx, op, name)
}

// purge deletes the tokens and the image names of a project that is not there. Its tokens are
// void already.
func (p Projects) purge(ctx context.Context, op string, name dsec.ProjectID) error {
	if err := p.c.catchUp(ctx, op); err != nil {
		return err
	}
	var ops []clientv3.Op
	p.c.mirror.read(func(s *state) {
		for hash, tok := range s.tokens {
			if tok.Project == name {
				ops = append(ops, clientv3.OpDelete(keyNames+tok.Name), clientv3.OpDelete(keyTokens+hash))
			}
		}
	})
	ops = append(ops, dropNames(name)...)
	for batch := range slices.Chunk(ops, maxOps) {
		if _, err := p.c.commit(ctx, op, nil, batch...); err != nil {
			return err
		}
	}
	return nil
}

// maxOps is how much one transaction of etcd may do by its defaults, rounded down to an even
// number: a token has two keys.
const maxOps = 100

// read gets a project and its revision from etcd.
func (p Projects) read(ctx context.Context, op string, name dsec.ProjectID) (project, int64, error) {
	if err := name.Check(); err != nil {
		return project{}, 0, dsec.WithOp(op, "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := p.c.client.Get(ctx, keyProjects+string(name))
	if err != nil {
		return project{}, 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return project{}, 0, failf(op, dsec.NotFound, "no project is called %s", name)
	}
	var pr project
	if err := json.Unmarshal(got.Kvs[0].Value, &pr); err != nil {
		return project{}, 0, failf(op, dsec.Internal, "decode project %s: %w", name, err)
	}
	return pr, got.Kvs[0].ModRevision, nil
}

// fits tells whether q is no larger than outer. What q leaves open outer bounds.
func fits(q, outer dsec.Quota) bool {
	ok := func(in, out int64) bool { return out == 0 || in <= out }
	return ok(int64(q.Sandboxes), int64(outer.Sandboxes)) && (outer.CPU == 0 || q.CPU <= outer.CPU) &&
		ok(q.Memory, outer.Memory) && ok(q.Images, outer.Images) && ok(int64(q.TTL), int64(outer.TTL))
}

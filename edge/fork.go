package edge

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// child is one sandbox of a fork on its way.
type child struct {
	req       *request
	entry     *entry // nil until it is in the table
	counted   bool   // by the quota
	release   func() // of its layers
	machine   driver.Machine
	following bool // it runs, and has a record
}

// Fork makes copies of a sandbox, all or none. It goes on if the caller of one
// with a key goes away.
func (s snapshots) Fork(ctx context.Context, id dsec.SandboxID, count int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	const op = "edge.Fork"
	n := s.n
	all, err := func() ([]dsec.Sandbox, error) {
		switch {
		case count < 1 || count > dsec.MaxForks:
			return nil, dsec.Errorf(dsec.Invalid, "%d children are not between 1 and %d", count, dsec.MaxForks)
		case len(opt.Key) > dsec.MaxKeyBytes-forkKeyBytes:
			return nil, dsec.Errorf(dsec.Invalid, "key of %d bytes is longer than %d", len(opt.Key), dsec.MaxKeyBytes-forkKeyBytes)
		case opt.TTL != 0 && (opt.TTL < dsec.MinTTL || opt.TTL > dsec.MaxTTL):
			return nil, dsec.Errorf(dsec.Invalid, "ttl %v is not between %v and %v", opt.TTL, dsec.MinTTL, dsec.MaxTTL)
		}
		e, err := n.get(id)
		if err != nil {
			return nil, err
		}
		return once(ctx, n, "fork", keyID{e.record().spec.spec.Project, opt.Key}, func(ctx context.Context) ([]dsec.Sandbox, error) {
			return n.fork(ctx, id, count, opt)
		})
	}()
	if err != nil {
		err = dsec.WithOp(op, id, err)
		n.events.Refused(RefusedEvent{Error: err})
		return nil, err
	}
	return all, nil
}

// forkKeyBytes is what the keys of children are longer than that of their fork.
const forkKeyBytes = 16

// forkKey names child i; "" if the fork has no key.
func forkKey(key string, i int) string {
	if key == "" {
		return ""
	}
	return key + "/fork/" + strconv.Itoa(i)
}

func (n *Node) fork(ctx context.Context, id dsec.SandboxID, count int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	if done, err := n.forkedBefore(id, count, opt); done != nil || err != nil {
		return done, err
	}
	if _, err := able[driver.Forker](n, id, "be forked"); err != nil {
		return nil, err
	}
	parent, m, err := n.begin(ctx, id)
	if err != nil {
		return nil, err
	}
	defer parent.finish()
	rec := parent.record()
	guest, err := n.guestOf(ctx, rec)
	if err != nil {
		return nil, err
	}
	spec, err := n.childSpec(rec, id, opt)
	if err != nil {
		return nil, err
	}
	if err := parent.beginCommit(); err != nil {
		return nil, err
	}
	defer parent.endCommit()
	ctx, stop, err := n.whileAlive(ctx, m, "it was being forked")
	if err != nil {
		return nil, err
	}
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	shared := n.intern.spec(spec)
	begin := time.Now()
	kids := make([]*child, count)
	for i := range kids {
		kids[i] = &child{req: &request{
			id: n.cfg.Keys.New(n.cfg.Place), begin: begin, mark: begin, spec: shared, key: forkKey(opt.Key, i),
		}}
	}
	env := environment{layers: *rec.layers, guest: guest}
	err = n.makeChildren(ctx, cancel, m, env, kids)
	for _, k := range kids { // a Close waits until here
		if k.req.reserved {
			defer n.work.Done()
		}
	}
	if err != nil {
		n.undoChildren(kids, err)
		return nil, err
	}
	out := make([]dsec.Sandbox, count)
	for i, k := range kids {
		n.follow(k.entry, k.machine)
		out[i] = n.glance(k.entry)
		n.events.Created(CreatedEvent{
			ID: k.entry.id, Kind: spec.Kind, Project: spec.Project, Job: spec.Job, Key: k.req.key, From: spec.From,
			Took: out[i].Took, Stages: k.req.stages,
		})
	}
	return out, nil
}

// forkedBefore finds the children that a key stands for.
func (n *Node) forkedBefore(id dsec.SandboxID, count int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	if opt.Key == "" {
		return nil, nil
	}
	project := dsec.ProjectID("")
	if e, err := n.get(id); err == nil {
		project = e.record().spec.spec.Project
	}
	var out []dsec.Sandbox
	for i := range dsec.MaxForks {
		n.mu.RLock()
		e := n.keys[keyID{project, forkKey(opt.Key, i)}]
		n.mu.RUnlock()
		if e == nil {
			break
		}
		if e.record().spec.spec.From != string(id) {
			return nil, dsec.Errorf(dsec.Conflict, "key %q forked another sandbox", opt.Key)
		}
		out = append(out, n.glance(e))
	}
	if out != nil && len(out) != count {
		return nil, dsec.Errorf(dsec.Conflict, "key %q made %d children", opt.Key, len(out))
	}
	return out, nil
}

// childSpec gives what the children of a sandbox are.
func (n *Node) childSpec(rec *record, id dsec.SandboxID, opt dsec.ForkOptions) (dsec.Spec, error) {
	s := n.specOf(rec)
	s.From, s.Hostname = string(id), ""
	if opt.TTL != 0 {
		s.TTL = opt.TTL
	}
	for k, v := range opt.Labels {
		if s.Labels == nil {
			s.Labels = map[string]string{}
		}
		s.Labels[k] = v
	}
	plain := s
	plain.From = ""
	return s, plain.Check() // the labels may be too many, or too long
}

// makeChildren brings all children into the table and has the driver make their
// machines. What it leaves when it fails is undone by undoChildren.
func (n *Node) makeChildren(ctx context.Context, cancel context.CancelCauseFunc, m driver.Machine, env environment, kids []*child) error {
	for _, k := range kids {
		if err := n.reserve(); err != nil {
			return err
		}
		k.req.reserved = true
		if err := n.take(k.req); err != nil {
			return err
		}
		k.counted = true
	}
	if err := n.gate.enter(ctx); err != nil {
		return err
	}
	defer n.gate.leave()
	if err := n.room(); err != nil {
		return err
	}
	spec := kids[0].req.spec.spec
	configs := make([]driver.Config, len(kids))
	for i, k := range kids {
		k.req.stage(StageAdmission)
		e, err := n.announce(k.req, env, cancel)
		if err != nil {
			return err
		}
		k.entry = e
		root, release, err := n.root(ctx, n.drivers[spec.Kind], env.digests())
		if err != nil {
			return causeOf(ctx, fmt.Errorf("mount environment: %w", err))
		}
		k.release = release
		k.req.stage(StageLayers)
		configs[i] = driver.Config{
			ID: e.id, Root: root, Resources: spec.Resources, Hostname: hostname(spec, e.id), Guest: n.withDoor(e.id, spec, env.guest),
		}
	}
	patience := n.startTimeout(spec.Kind)
	limit, done := context.WithTimeoutCause(ctx, patience, dsec.Errorf(dsec.Timeout, "the sandboxes did not start within %v", patience))
	defer done()
	ms, err := m.(driver.Forker).Fork(limit, configs) //nolint:forcetypeassert // fork has looked
	if err != nil {
		return causeOf(limit, err)
	}
	for i, k := range kids {
		k.machine = ms[i]
		k.req.stages = append(k.req.stages, ms[i].Stages()...)
		k.req.mark = time.Now()
	}
	for _, k := range kids {
		if _, err := n.establish(k.req, k.entry, k.machine, k.release); err != nil {
			return err
		}
		k.following = true
	}
	return nil
}

// undoChildren gives back what a fork that failed has.
func (n *Node) undoChildren(kids []*child, cause error) {
	for _, k := range kids {
		switch {
		case k.following:
			n.follow(k.entry, k.machine)
			n.end(k.entry, judge(dsec.CauseAdmission, "another sandbox of the fork could not be made"), nobodyWaits)
		case k.entry != nil:
			n.abandon(k.entry, k.machine, k.release, cause) //nolint:errcheck // it gives cause, or that somebody stopped it
		default:
			if k.counted {
				n.give(k.req.id, k.req.spec)
			}
			if k.req.reserved {
				n.unreserve()
			}
		}
	}
}

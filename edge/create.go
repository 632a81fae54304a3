package edge

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Names of the stages of a creation that are the edge's own.
const (
	StageAdmission = "admission" // checks, references, room
	StageQueue     = "queue"     // waiting for a start
	StageLayers    = "layers"    // the environment made mountable
	StageCheck     = "check"     // that the user and the folder asked for are there
	StageJournal   = "journal"
)

// creation is a keyed create under way, shared by all that ask for it.
type creation struct {
	spec    *sharedSpec
	cancel  context.CancelCauseFunc
	waiters int           // guarded by Node.mu; at 0 it is cancelled
	done    chan struct{} // closed once the rest is set
	entry   *entry
	err     error
}

// request is one create on its way to a sandbox.
type request struct {
	id     dsec.SandboxID
	begin  time.Time
	until  int64 // how long the creator's token lasts, of one with an API; 0 for ever
	spec   *sharedSpec
	key    string
	stages []dsec.Stage
	mark   time.Time // end of the last stage
}

// stage records that a stage ends now.
func (r *request) stage(name string) {
	now := time.Now()
	r.stages = append(r.stages, dsec.Stage{Name: name, Took: now.Sub(r.mark)})
	r.mark = now
}

// Create makes a sandbox, as the contract says. It is Exhausted at once, or
// after Limits.QueueWait at the latest, when the node has no room.
func (n *Node) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	begin := time.Now()
	spec = spec.WithDefaults()
	e, err := n.createOrFind(ctx, begin, spec, opt)
	if err != nil {
		err = dsec.WithOp("edge.Create", "", err)
		n.events.Refused(RefusedEvent{Kind: spec.Kind, Error: err, Took: time.Since(begin)})
		return dsec.Sandbox{}, err
	}
	return n.glance(e), nil
}

func (n *Node) createOrFind(ctx context.Context, begin time.Time, spec dsec.Spec, opt dsec.CreateOptions) (*entry, error) {
	if err := spec.Check(); err != nil {
		return nil, err
	}
	if len(opt.Key) > dsec.MaxKeyBytes {
		return nil, dsec.Errorf(dsec.Invalid, "key of %d bytes is longer than %d", len(opt.Key), dsec.MaxKeyBytes)
	}
	if n.drivers[spec.Kind] == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "this node has no sandboxes of kind %s", spec.Kind)
	}
	if err := n.delegable(spec); err != nil {
		return nil, err
	}
	req := &request{
		id: n.cfg.Keys.New(n.cfg.Place), begin: begin, mark: begin, until: until(ctx, spec), spec: n.intern.spec(spec), key: opt.Key,
	}
	if opt.Key == "" {
		return n.create(ctx, req)
	}
	for {
		found, err := n.join(keyID{spec.Project, opt.Key}, req)
		switch {
		case err != nil:
			return nil, err
		case found.entry != nil:
			return found.entry, nil
		case found.joined != nil:
			return n.await(ctx, found.joined)
		}
		select {
		case <-found.undone:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// keyed is what a key stands for; one of its fields is set.
type keyed struct {
	entry  *entry        // the sandbox of an earlier create
	joined *creation     // a creation under way, of which the caller is a waiter now
	undone chan struct{} // everybody who asked for it went away; closed when the key is free
}

// join finds what a key stands for, and begins a creation if it is nothing.
func (n *Node) join(k keyID, req *request) (keyed, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.keys[k]; e != nil {
		e.mu.Lock()
		other := e.rec.spec.sum != req.spec.sum
		e.mu.Unlock()
		if other {
			return keyed{}, errOtherSpec(req.key)
		}
		return keyed{entry: e}, nil
	}
	if c := n.creating[k]; c != nil {
		if c.spec.sum != req.spec.sum {
			return keyed{}, errOtherSpec(req.key)
		}
		if c.waiters == 0 {
			return keyed{undone: c.done}, nil
		}
		c.waiters++
		return keyed{joined: c}, nil
	}
	if n.closed {
		return keyed{}, errClosing
	}
	// The creation is not the first caller's: whoever repeats the call while it
	// runs waits for the same one, and it is undone when the last of them is
	// gone.
	ctx, cancel := context.WithCancelCause(n.life)
	c := &creation{spec: req.spec, cancel: cancel, waiters: 1, done: make(chan struct{})}
	n.creating[k] = c
	n.work.Go(func() {
		defer cancel(nil)
		c.entry, c.err = n.create(ctx, req)
		n.mu.Lock()
		delete(n.creating, k)
		n.mu.Unlock()
		close(c.done)
	})
	return keyed{joined: c}, nil
}

func errOtherSpec(key string) error {
	return dsec.Errorf(dsec.Conflict, "key %q created a sandbox of another spec", key)
}

// await waits for a creation as one of its callers.
func (n *Node) await(ctx context.Context, c *creation) (*entry, error) {
	select {
	case <-c.done:
		return c.entry, c.err
	case <-ctx.Done():
	}
	cause := context.Cause(ctx)
	n.mu.Lock()
	c.waiters--
	last := c.waiters == 0
	n.mu.Unlock()
	if last {
		c.cancel(cause)
	}
	return nil, cause
}

// create goes the whole way from an accepted Spec to a running sandbox. Its
// failure leaves nothing behind, except the record of one that was stopped
// meanwhile.
func (n *Node) create(ctx context.Context, req *request) (*entry, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(n.life, func() { cancel(errClosing) })()

	if err := n.reserve(); err != nil {
		return nil, err
	}
	defer n.work.Done()
	admitted := false
	defer func() {
		if !admitted {
			n.unreserve()
		}
	}()
	if err := n.take(req); err != nil {
		return nil, err
	}
	defer func() {
		if !admitted {
			n.give(req.id, req.spec)
		}
	}()
	env, err := n.resolve(ctx, req.spec.spec)
	if err != nil {
		return nil, err
	}
	if err := n.room(); err != nil {
		return nil, err
	}
	req.stage(StageAdmission)
	if err := n.gate.enter(ctx); err != nil {
		return nil, err
	}
	defer n.gate.leave()
	req.stage(StageQueue)
	if err := n.room(); err != nil { // it may have waited
		return nil, err
	}

	e, err := n.announce(req, env, cancel)
	if err != nil {
		return nil, err
	}
	admitted = true
	m, release, err := n.start(ctx, req, env, e)
	if err != nil {
		return nil, n.abandon(e, m, release, err)
	}
	rec, err := n.establish(req, e, m, release)
	if err != nil {
		return nil, n.abandon(e, m, release, err)
	}
	n.follow(e, m)
	n.events.Created(CreatedEvent{
		ID: e.id, Kind: req.spec.spec.Kind, Project: req.spec.spec.Project, Job: req.spec.spec.Job, Key: req.key,
		Took: rec.took, Stages: req.stages,
	})
	return e, nil
}

// announce puts a sandbox into the table as one that is being created.
func (n *Node) announce(req *request, env environment, cancel context.CancelCauseFunc) (*entry, error) {
	now := time.Now()
	rec := &record{
		spec: req.spec, layers: n.intern.digests(env.digests()), key: req.key, state: dsec.Creating,
		created: now.UnixNano(), expires: now.Add(req.spec.spec.TTL).UnixNano(), until: req.until,
	}
	e := &entry{id: req.id, rec: rec, cancel: cancel, lastUsed: now.UnixNano()}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing { // since it was let into the queue
		return nil, errClosing
	}
	if owner, gone := n.orphaned(req.spec.spec.Project); gone {
		return nil, dsec.Errorf(dsec.Conflict, "sandbox %s, for which it was to be created, has ended", owner)
	}
	n.insert(e)
	return e, nil
}

// start mounts the environment and starts the machine. What it returns beside
// an error is still to be given back.
func (n *Node) start(ctx context.Context, req *request, env environment, e *entry) (m driver.Machine, release func(), err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, n.limits.StartTimeout,
		dsec.Errorf(dsec.Timeout, "the sandbox did not start within %v", n.limits.StartTimeout))
	defer cancel()
	spec := req.spec.spec
	layers, release, err := n.cfg.Roots.Acquire(ctx, env.digests())
	if err != nil {
		return nil, nil, causeOf(ctx, fmt.Errorf("mount environment: %w", err))
	}
	req.stage(StageLayers)
	host := spec.Hostname
	if host == "" {
		host = string(e.id[:12])
	}
	m, err = n.drivers[spec.Kind].Start(ctx, driver.Config{
		ID: e.id, Root: driver.Root{Layers: layers}, Resources: spec.Resources, Hostname: host, Guest: n.withDoor(e.id, spec, env.guest),
	})
	if err != nil {
		return nil, release, causeOf(ctx, err)
	}
	if spec.API != nil {
		if err := openInlet(ctx, m, spec.API.Port); err != nil {
			return m, release, causeOf(ctx, err)
		}
	}
	req.stages = append(req.stages, m.Stages()...)
	req.mark = time.Now()
	if spec.User != "" || spec.Cwd != "" {
		if err := inhabitable(ctx, m, spec); err != nil {
			return m, release, causeOf(ctx, err)
		}
		req.stage(StageCheck)
	}
	return m, release, nil
}

// inhabitable is Invalid when the user or the folder that s asks for is not in
// its environment: every command would fail for it, long after the create.
// Only the guest sees the layers as one, so it is asked; what the images
// themselves say is not checked.
func inhabitable(ctx context.Context, m driver.Machine, s dsec.Spec) error {
	stat := func(op dsec.FileOp) (dsec.FileInfo, error) {
		return m.Guest().Files().Stat(ctx, dsec.Call{Sandbox: m.ID()}, op)
	}
	if s.User != "" {
		if _, err := stat(dsec.FileOp{Path: "/", User: s.User}); err != nil && dsec.KindOf(err) != dsec.Denied {
			return err // for an unknown one Invalid, with its name
		}
	}
	if s.Cwd == "" {
		return nil
	}
	// The dot makes a link to a folder a folder, and is nowhere else. Asked as
	// root: who may enter is no matter of the create, since commands have users
	// of their own.
	i, err := stat(dsec.FileOp{Path: s.Cwd + "/.", User: "0"})
	switch kind := dsec.KindOf(err); {
	case err != nil && kind == dsec.NotFound:
		return dsec.Errorf(dsec.Invalid, "working directory %q: no such directory", s.Cwd)
	case err != nil && kind == dsec.Invalid, err == nil && i.Type != dsec.TypeDir:
		return dsec.Errorf(dsec.Invalid, "working directory %q is not a directory", s.Cwd)
	}
	return err
}

// causeOf prefers the reason for which ctx ended, where that is why err is.
func causeOf(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		return context.Cause(ctx)
	}
	return hostFault(err)
}

// establish writes the record of a started machine and makes it the sandbox's.
func (n *Node) establish(req *request, e *entry, m driver.Machine, release func()) (*record, error) {
	now := time.Now()
	e.mu.Lock()
	rec := *e.rec
	e.mu.Unlock()
	rec.state = dsec.Running
	rec.created, rec.expires = now.UnixNano(), now.Add(req.spec.spec.TTL).UnixNano()
	rec.stages = req.stages
	rec.took = now.Sub(req.begin)
	stopped := false
	err := n.append(rec.change(e.id, rec.created), func() {
		// How long the record took is known only now: in the table, and in the
		// next checkpoint.
		req.stage(StageJournal)
		rec.stages = make([]dsec.Stage, len(req.stages))
		for i, s := range req.stages {
			rec.stages[i] = dsec.Stage{Name: n.intern.name(s.Name), Took: s.Took}
		}
		rec.took = time.Since(req.begin)
		n.mu.Lock()
		defer n.mu.Unlock()
		e.mu.Lock()
		defer e.mu.Unlock()
		e.rec = &rec
		n.takeKey(e)
		if stopped = e.ending != nil; stopped {
			return
		}
		e.machine, e.release, e.cancel = m, release, nil
		e.lastUsed = rec.created
	})
	if err == nil && stopped {
		err = errStopped
	}
	return &rec, err
}

var errStopped = dsec.Errorf(dsec.Conflict, "the sandbox was stopped while it was being created")

// abandon gives back what a failed create has. One that somebody stopped
// becomes an ended sandbox, since that caller knows its ID; its key stands for
// it. Every other is taken out of the table as if it had never been there.
func (n *Node) abandon(e *entry, m driver.Machine, release func(), cause error) error {
	if m != nil {
		n.discard(m, release)
	} else if release != nil {
		release()
	}
	n.mu.Lock()
	e.mu.Lock()
	end := e.ending
	if end == nil {
		// From here on nobody can ask for an end.
		n.remove(e)
		n.alive--
		rec := *e.rec
		rec.state, rec.ended = dsec.Failed, time.Now().UnixNano()
		rec.verdict = judge(dsec.CauseAdmission, cause.Error())
		e.rec = &rec
		e.letGo()
	}
	e.mu.Unlock()
	n.mu.Unlock()
	if end == nil {
		n.give(e.id, e.record().spec)
		return cause
	}
	n.conclude(e, end, driver.Exit{})
	return dsec.WithOp("", e.id, errStopped)
}

// discard stops a machine that no record stands for, again and again until it
// is gone or the node closes; then the next Open does.
func (n *Node) discard(m driver.Machine, release func()) {
	// A first attempt is made on a closing node too: its creates leave nothing.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.life), discardTimeout)
	defer cancel()
	err := m.Stop(ctx)
	if err == nil {
		if release != nil {
			release()
		}
		return
	}
	n.events.StopFailed(m.ID(), err)
	n.spawn(func() {
		retry := time.NewTicker(stopRetry)
		defer retry.Stop()
		for {
			select {
			case <-retry.C:
			case <-n.life.Done():
				return
			}
			if err := m.Stop(n.life); err != nil {
				n.events.StopFailed(m.ID(), err)
				continue
			}
			if release != nil {
				release()
			}
			return
		}
	})
}

// discardTimeout bounds the first stop of a machine whose create failed.
const discardTimeout = 10 * time.Second

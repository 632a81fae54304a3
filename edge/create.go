package edge

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/snapshot"
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
	from   *snapshot.State // that it begins with; nil for none
	stages []dsec.Stage
	mark   time.Time // end of the last stage

	reserved bool // of a fork's: counted by reserve
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
	var from *snapshot.State
	if spec.From != "" {
		filled, st, err := n.fromSnapshot(ctx, spec)
		if err != nil {
			if e := n.keyOfGone(spec, opt.Key); e != nil && dsec.KindOf(err) == dsec.NotFound {
				return e, nil
			}
			return nil, err
		}
		spec, from = filled, st
	}
	if err := n.offered(spec.Kind, from != nil); err != nil {
		return nil, err
	}
	if err := n.delegable(spec); err != nil {
		return nil, err
	}
	req := &request{
		id: n.cfg.Keys.New(n.cfg.Place), begin: begin, mark: begin, until: until(ctx, spec), spec: n.intern.spec(spec), key: opt.Key, from: from,
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

// offered is Unsupported for a kind that this node does not have, or that cannot
// begin with a snapshot.
func (n *Node) offered(kind dsec.Kind, saved bool) error {
	d := n.drivers[kind]
	if d == nil {
		if why := n.cfg.Absent[kind]; why != nil {
			return dsec.Errorf(dsec.Unsupported, "this node has no sandboxes of kind %s: %w", kind, why)
		}
		return dsec.Errorf(dsec.Unsupported, "this node has no sandboxes of kind %s", kind)
	}
	if _, ok := d.(driver.Restorer); saved && !ok {
		return unable(kind, "begin with a snapshot")
	}
	return nil
}

// keyOfGone finds the sandbox of an earlier create from a snapshot that is gone.
func (n *Node) keyOfGone(spec dsec.Spec, key string) *entry {
	n.mu.RLock()
	e := n.keys[keyID{spec.Project, key}]
	n.mu.RUnlock()
	if key == "" || e == nil || e.record().spec.spec.From != spec.From {
		return nil
	}
	return e
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
	var env environment
	var err error
	if req.from != nil {
		g := req.from.Guest
		env = environment{layers: req.from.Layers, guest: driver.GuestConfig{Env: g.Env, Cwd: g.Cwd, User: g.User}}
	} else if env, err = n.resolve(ctx, req.spec.spec); err != nil {
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
		From: req.spec.spec.From, Took: rec.took, Stages: req.stages,
	})
	return e, nil
}

// announce puts a sandbox into the table as one that is being created.
func (n *Node) announce(req *request, env environment, cancel context.CancelCauseFunc) (*entry, error) {
	now := n.clock.now()
	rec := &record{
		spec: req.spec, layers: n.intern.digests(env.digests()), key: req.key, state: dsec.Creating,
		created: now.UnixNano(), expires: now.Add(req.spec.spec.TTL).UnixNano(), until: req.until,
	}
	if req.spec.spec.From != "" {
		rec.from = &env.guest
	}
	e := &entry{id: req.id, clock: n.clock, rec: rec, cancel: cancel, lastUsed: now.UnixNano()}
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
	limit := n.startTimeout(req.spec.spec.Kind)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, dsec.Errorf(dsec.Timeout, "the sandbox did not start within %v", limit))
	defer cancel()
	spec := req.spec.spec
	root, release, err := n.root(ctx, n.drivers[spec.Kind], env.digests())
	if err != nil {
		return nil, nil, causeOf(ctx, fmt.Errorf("mount environment: %w", err))
	}
	req.stage(StageLayers)
	c := driver.Config{
		ID: e.id, Root: root, Resources: spec.Resources, Hostname: hostname(spec, e.id), Guest: n.withDoor(e.id, spec, env.guest),
	}
	if req.from != nil {
		m, err = n.restore(ctx, req, c)
	} else {
		m, err = n.drivers[spec.Kind].Start(ctx, c)
	}
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

// bootFactor is how much longer a machine with firmware may take to start than
// others: it boots a whole operating system, emulated where the host has no KVM.
const bootFactor = 5

func (n *Node) startTimeout(kind dsec.Kind) time.Duration {
	if kind == dsec.FullVM {
		return bootFactor * n.limits.StartTimeout
	}
	return n.limits.StartTimeout
}

// hostname gives the host name of a sandbox. A copy must not be taken for its
// original or another copy, and the beginning of an ID is much the same on a
// node: its name is from where the ID is random.
func hostname(s dsec.Spec, id dsec.SandboxID) string {
	switch {
	case s.Hostname != "":
		return s.Hostname
	case s.From != "":
		return string(id[:2] + id[12:22])
	}
	return string(id[:12])
}

// root makes an environment what a driver wants.
func (n *Node) root(ctx context.Context, d driver.Driver, digests []string) (driver.Root, func(), error) {
	form := driver.FormMounts
	if r, ok := d.(driver.Rooted); ok {
		form = r.RootForm()
	}
	files, able := n.cfg.Roots.(FileRoots)
	switch {
	case form == driver.FormMounts:
		layers, release, err := n.cfg.Roots.Acquire(ctx, digests)
		return driver.Root{Layers: layers}, release, err
	case !able:
		return driver.Root{}, nil, dsec.Errorf(dsec.Unsupported, "this node gives sandboxes of kind %s no files", d.Kind())
	case form == driver.FormFiles:
		layers, release, err := files.AcquireFiles(ctx, digests)
		return driver.Root{Files: layers}, release, err
	}
	path, release, err := files.AcquireDisk(ctx, digests[0])
	return driver.Root{Disk: path}, release, err
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
	now := n.clock.now()
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
		rec.state, rec.ended = dsec.Failed, n.clock.nano()
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

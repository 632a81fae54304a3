package job

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Config is what Jobs is made of. Journal is required.
type Config struct {
	Journal Journal

	// Label sets labels of one sandbox, an empty value takes one away; default:
	// Label is Unsupported.
	Label func(ctx context.Context, id dsec.SandboxID, labels map[string]string) (dsec.Sandbox, error)

	Parallel int           // sandboxes worked on at once, over all jobs; default 4 per core, at least 16
	Keep     time.Duration // how long a job is kept after the last of it ended; default 24 h
	Compact  int           // appended records that lead to a checkpoint; default 20,000
	Events   int           // kept of each job; default dsec.MaxJobEvents
	Max      int           // jobs at a time; default 10,000
	Error    func(error)   // told what goes wrong behind the calls; default nobody
}

// Journal is the node's write-ahead log as jobs need it; safe for concurrent
// use. Log has the real one.
type Journal interface {
	// Own says once, before Replay, how everything is saved for a checkpoint:
	// save calls cut while its state stands for all records so far, and adds
	// records for that state.
	Own(save func(cut func(), add func(payload []byte) error) error) error
	// Replay calls f with every record.
	Replay(f func(payload []byte) error) error
	// Append adds a record, which survives the process, and gives its number.
	Append(payload []byte) (uint64, error)
	// Sync returns once record seq and all before it survive a loss of power.
	Sync(ctx context.Context, seq uint64) error
	// Checkpoint has save called and lets go of what it replaces.
	Checkpoint() error
}

// key names a job. Projects have nothing to do with each other.
type key struct {
	project dsec.ProjectID
	id      dsec.JobID
}

// entry is one job. It is guarded by Jobs.mu.
type entry struct {
	key
	policy   dsec.OnDisconnect
	lease    time.Duration
	epoch    uint64
	state    dsec.JobState
	settled  bool // the policy, or the stop, has been carried out
	created  time.Time
	labels   map[string]string
	token    string // the client's key of its creation
	leaseEnd time.Time
	timer    *time.Timer // of the lease
	owner    *tenure     // nil without a lease or an owner
	base     *tenure     // what no lease ends; nil while it is not needed
	members  map[dsec.SandboxID]*member
	counts   map[dsec.State]int
	lastEnd  time.Time // of a member
	log      events
}

// member is a sandbox of a job.
type member struct {
	id    dsec.SandboxID
	job   *entry
	key   string
	state dsec.State
	ended time.Time
}

// Jobs is the jobs of one node. It is safe for concurrent use.
type Jobs struct {
	cfg   Config
	feed  feed
	slots chan struct{}

	life context.Context // of what outlives a call; Close ends it
	kill context.CancelCauseFunc
	work sync.WaitGroup // guarded by mu: what life governs

	logMu    sync.Mutex // over an append and the change that it describes
	appended int        // records since the last checkpoint; guarded by logMu

	mu        sync.Mutex
	jobs      map[key]*entry
	members   map[dsec.SandboxID]*member
	sandboxes dsec.Sandboxes // nil before Bind
	closed    bool
}

var _ dsec.Jobs = (*Jobs)(nil)

var errClosing = dsec.Errorf(dsec.Unavailable, "the node is closing")

// Open gives the jobs that the journal tells of. Note takes what happens from
// here on; calls are answered after Bind, and nothing runs before Run.
func Open(cfg Config) (*Jobs, error) {
	cfg.Parallel = cmp.Or(cfg.Parallel, max(16, 4*runtime.GOMAXPROCS(0)))
	cfg.Keep = cmp.Or(cfg.Keep, 24*time.Hour)
	cfg.Compact = cmp.Or(cfg.Compact, 20_000)
	cfg.Events = cmp.Or(cfg.Events, dsec.MaxJobEvents)
	cfg.Max = cmp.Or(cfg.Max, 10_000)
	if cfg.Error == nil {
		cfg.Error = func(error) {}
	}
	j := &Jobs{
		cfg: cfg, slots: make(chan struct{}, cfg.Parallel),
		jobs: map[key]*entry{}, members: map[dsec.SandboxID]*member{},
	}
	j.feed.wake = make(chan struct{}, 1)
	j.life, j.kill = context.WithCancelCause(context.Background())
	if err := cfg.Journal.Own(j.save); err != nil {
		return nil, fmt.Errorf("open jobs: %w", err)
	}
	err := cfg.Journal.Replay(func(b []byte) error {
		c, err := decode(b)
		if err == nil {
			j.appended++
			j.apply(c)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open jobs: %w", err)
	}
	for _, e := range j.jobs {
		e.log.shown = e.log.last // what was replayed is on the disk
	}
	return j, nil
}

// Bind says whose sandboxes they are: those within Fence.
func (j *Jobs) Bind(sandboxes dsec.Sandboxes) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.sandboxes = sandboxes
}

// Run brings jobs and sandboxes to agree, then does what time asks for: ends
// leases, carries out policies, forgets old jobs. It returns when ctx or the
// jobs end.
func (j *Jobs) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(j.life, stop)()
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.work.Add(1) // Close waits: what runs here writes the journal
	defer j.work.Done()
	for _, e := range j.jobs {
		j.wakeUp(e)
	}
	j.mu.Unlock()
	var loops sync.WaitGroup
	defer loops.Wait()
	defer stop()
	loops.Go(func() { j.follow(ctx) })
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	for {
		select {
		case <-ctx.Done():
			j.mu.Lock()
			for _, e := range j.jobs {
				e.stopTimer()
			}
			j.mu.Unlock()
			return nil
		case now := <-minute.C:
			j.prune(now)
			j.maintain()
		}
	}
}

// wakeUp begins a job's clock in this process: a lease has its whole length
// again, since renewals are not written, and a policy that was begun goes on.
// Requires: mu held.
func (j *Jobs) wakeUp(e *entry) {
	switch {
	case e.state == dsec.JobActive:
		j.resume(e)
	case !e.settled:
		j.spawnLocked(func() { j.settle(e, nil) })
	}
}

// Close ends what runs. Jobs, leases and sandboxes stay; bulk creates end and
// are repeated by whoever wants the rest. It may be called twice.
func (j *Jobs) Close() error {
	j.mu.Lock()
	j.closed = true
	for _, e := range j.jobs {
		e.stopTimer()
	}
	j.mu.Unlock()
	j.kill(errClosing)
	j.work.Wait()
	j.drain() // what ended meanwhile; the rest is found by the next Run
	return nil
}

// spawn runs f in a goroutine that Close waits for; false on a closed Jobs.
func (j *Jobs) spawn(f func()) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.spawnLocked(f)
}

// Requires: mu held.
func (j *Jobs) spawnLocked(f func()) bool {
	if j.closed {
		return false
	}
	j.work.Go(f)
	return true
}

// append writes what build makes of the present state, applies it, and then
// calls then, all as one step. A build that gives the zero change, or an error,
// changes nothing. build and then are called with mu held and do not block.
func (j *Jobs) append(build func() (change, error), then func()) (seq uint64, err error) {
	j.logMu.Lock()
	defer j.logMu.Unlock()
	j.mu.Lock()
	c, err := build()
	j.mu.Unlock()
	if err != nil || c.Op == "" {
		return 0, err
	}
	seq, err = j.cfg.Journal.Append(c.encode())
	if err != nil {
		return 0, dsec.Errorf(dsec.Unavailable, "write journal: %w", err)
	}
	j.appended++
	j.mu.Lock()
	defer j.mu.Unlock()
	j.apply(c)
	if then != nil {
		then()
	}
	return seq, nil
}

// sync makes what was appended durable, and then visible: the events of e up to
// number n. A caller that went away does not keep others from seeing it.
func (j *Jobs) sync(seq uint64, e *entry, n uint64) error {
	if err := j.cfg.Journal.Sync(context.WithoutCancel(j.life), seq); err != nil {
		return dsec.Errorf(dsec.Unavailable, "write journal: %w", err)
	}
	j.mu.Lock()
	e.log.show(n)
	j.mu.Unlock()
	return nil
}

// find gives the job of an ID to the caller of ctx: that of his own project, else
// the one of those that he sees. Requires: mu held.
func (j *Jobs) find(ctx context.Context, id dsec.JobID) (*entry, error) {
	caller, ok := dsec.CallerFrom(ctx)
	if e := j.jobs[key{caller.Project, id}]; e != nil {
		return e, nil
	}
	var found *entry
	for _, e := range j.jobs {
		if e.id != id || ok && !caller.Sees(e.project) {
			continue
		}
		if found != nil {
			return nil, dsec.Errorf(dsec.Conflict, "several projects have a job %q: %s and %s", id, found.project, e.project)
		}
		found = e
	}
	if found == nil {
		return nil, dsec.Errorf(dsec.NotFound, "no job has the id %q", id[:min(len(id), 64)])
	}
	return found, nil
}

// unlike names what a job was not made with, "" if it was made with all of spec. Its labels may
// have been set since, so that those it was made with are not known any more.
func (e *entry) unlike(spec dsec.JobSpec) string {
	switch {
	case spec.ID != "" && spec.ID != e.id:
		return "id"
	case spec.OnDisconnect != e.policy:
		return "policy (on disconnect " + string(e.policy) + ")"
	case spec.Lease != e.lease:
		return "lease (" + e.lease.String() + ")"
	}
	return ""
}

// Create makes a job whose first owner is the caller.
func (j *Jobs) Create(ctx context.Context, spec dsec.JobSpec, opt dsec.CreateOptions) (dsec.Job, error) {
	const op = "job.Create"
	if err := spec.Check(); err != nil {
		return dsec.Job{}, dsec.WithOp(op, "", err)
	}
	if len(opt.Key) > dsec.MaxKeyBytes {
		return dsec.Job{}, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "key of %d bytes is longer than %d", len(opt.Key), dsec.MaxKeyBytes))
	}
	spec.OnDisconnect = cmp.Or(spec.OnDisconnect, dsec.DisconnectPause)
	if caller, ok := dsec.CallerFrom(ctx); ok && spec.Project == "" {
		spec.Project = caller.Project
	}
	k := key{spec.Project, spec.ID}
	if k.id == "" {
		k.id = madeID()
	}
	var e *entry
	seq, err := j.append(func() (change, error) {
		if old := j.keyed(k.project, opt.Key); old != nil {
			if what := old.unlike(spec); what != "" {
				return change{}, dsec.Errorf(dsec.Conflict, "key %q made job %q with another %s", opt.Key, old.id, what)
			}
			e = old
			return change{}, nil
		}
		if j.jobs[k] != nil {
			return change{}, dsec.Errorf(dsec.Exists, "job %q exists", k.id)
		}
		if len(j.jobs) >= j.cfg.Max {
			return change{}, dsec.Errorf(dsec.Exhausted, "there are %d jobs", len(j.jobs))
		}
		return change{
			Op: opMade, Project: k.project, Job: k.id, At: time.Now().UnixNano(), Policy: spec.OnDisconnect, Lease: spec.Lease,
			Epoch: 1, Labels: withLabels(nil, spec.Labels), Key: opt.Key, State: dsec.JobActive,
		}, nil
	}, func() {
		e = j.jobs[k]
		j.grant(e)
	})
	if err == nil && seq != 0 {
		err = j.sync(seq, e, 0)
	}
	if err != nil {
		return dsec.Job{}, dsec.WithOp(op, "", err)
	}
	return j.view(e), nil
}

// keyed finds the job that a client's key made. Requires: mu held.
func (j *Jobs) keyed(project dsec.ProjectID, token string) *entry {
	if token == "" {
		return nil
	}
	for _, e := range j.jobs {
		if e.project == project && e.token == token {
			return e
		}
	}
	return nil
}

// Get returns the record.
func (j *Jobs) Get(ctx context.Context, id dsec.JobID) (dsec.Job, error) {
	j.flush(ctx)
	j.mu.Lock()
	e, err := j.find(ctx, id)
	j.mu.Unlock()
	if err != nil {
		return dsec.Job{}, dsec.WithOp("job.Get", "", err)
	}
	return j.view(e), nil
}

// List returns all jobs that the caller sees, newest first.
func (j *Jobs) List(ctx context.Context) ([]dsec.Job, error) {
	j.flush(ctx)
	caller, bound := dsec.CallerFrom(ctx)
	j.mu.Lock()
	defer j.mu.Unlock()
	all := []dsec.Job{}
	for _, e := range j.jobs {
		if !bound || caller.Sees(e.project) {
			all = append(all, e.job())
		}
	}
	slices.SortFunc(all, func(a, b dsec.Job) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Project, b.Project))
	})
	return all, nil
}

func (j *Jobs) view(e *entry) dsec.Job {
	j.mu.Lock()
	defer j.mu.Unlock()
	return e.job()
}

// job gives e in the words of the contract. Requires: Jobs.mu held.
func (e *entry) job() dsec.Job {
	counts := maps.Clone(e.counts)
	maps.DeleteFunc(counts, func(_ dsec.State, n int) bool { return n == 0 })
	out := dsec.Job{
		ID: e.id, Project: e.project, OnDisconnect: e.policy, Lease: e.lease, Epoch: e.epoch, State: e.state,
		Created: e.created, Labels: maps.Clone(e.labels), Counts: counts, Events: e.log.shown,
	}
	if e.state == dsec.JobActive && !e.leaseEnd.IsZero() {
		out.LeaseEnds = e.leaseEnd.Round(0).UTC()
	}
	return out
}

// prune forgets members whose record is forgotten too, and jobs of which
// nothing is left.
func (j *Jobs) prune(now time.Time) {
	limit := now.Add(-j.cfg.Keep)
	var old []key
	j.mu.Lock()
	for _, e := range j.jobs {
		for id, m := range e.members {
			// An hour more, so that a listing never has one that is forgotten here.
			if m.state.Ended() && m.ended.Before(limit.Add(-time.Hour)) {
				e.counts[m.state]--
				delete(e.members, id)
				delete(j.members, id)
			}
		}
		owned := e.state == dsec.JobActive && e.owner != nil && e.lease > 0
		if !owned && len(e.members) == 0 && e.created.Before(limit) && e.lastEnd.Before(limit) && e.leaseEnd.Before(limit) {
			old = append(old, e.key)
		}
	}
	j.mu.Unlock()
	for _, k := range old {
		_, err := j.append(func() (change, error) {
			if e := j.jobs[k]; e == nil || len(e.members) > 0 || e.owner != nil && e.lease > 0 {
				return change{}, nil
			}
			return change{Op: opForgotten, Project: k.project, Job: k.id}, nil
		}, nil)
		if err != nil {
			j.cfg.Error(err)
		}
	}
}

// maintain compacts a journal that has grown.
func (j *Jobs) maintain() {
	j.logMu.Lock()
	grown := j.appended >= j.cfg.Compact
	j.logMu.Unlock()
	if !grown {
		return
	}
	if err := j.cfg.Journal.Checkpoint(); err != nil {
		j.cfg.Error(fmt.Errorf("checkpoint jobs: %w", err))
	}
}

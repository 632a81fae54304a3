package job_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/job"
)

// memJournal is a Journal in memory. It outlives the process as a disk does;
// what was not synced ends with cut, as in a loss of power.
type memJournal struct {
	mu      sync.Mutex
	records [][]byte
	base    int // number of the last record before the first of records
	synced  uint64
	fail    error
	dead    bool // the process was killed
	save    func(func(), func([]byte) error) error
	syncs   int
}

var errDead = errors.New("killed")

func (m *memJournal) Own(save func(func(), func([]byte) error) error) error {
	m.save = save
	return nil
}

func (m *memJournal) Replay(f func([]byte) error) error {
	m.mu.Lock()
	all := slices.Clone(m.records)
	m.mu.Unlock()
	for _, b := range all {
		if err := f(b); err != nil {
			return err
		}
	}
	return nil
}

func (m *memJournal) Append(b []byte) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.dead:
		return 0, errDead
	case m.fail != nil:
		return 0, m.fail
	}
	m.records = append(m.records, slices.Clone(b))
	return uint64(m.base + len(m.records)), nil
}

func (m *memJournal) Sync(_ context.Context, seq uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errDead
	}
	m.synced = max(m.synced, seq)
	m.syncs++
	return nil
}

func (m *memJournal) Checkpoint() error {
	m.mu.Lock()
	at := len(m.records)
	m.mu.Unlock()
	var snap [][]byte
	err := m.save(func() {
		m.mu.Lock()
		at = len(m.records)
		m.mu.Unlock()
	}, func(b []byte) error { snap = append(snap, slices.Clone(b)); return nil })
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.base += at - len(snap)
	m.records = append(snap, m.records[at:]...)
	return nil
}

func (m *memJournal) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// node is dsec.Sandboxes in memory, telling a Jobs what becomes of them.
type node struct {
	mu     sync.Mutex
	key    dsec.IDKey
	boxes  map[dsec.SandboxID]*dsec.Sandbox
	order  []dsec.SandboxID
	keys   map[string]dsec.SandboxID
	tell   func(job.Change)
	create func(context.Context, dsec.Spec) error // called before each, outside the lock
	pause  func(context.Context, dsec.SandboxID) error
	active int
	most   int // creates and pauses at once
}

func newNode() *node {
	return &node{boxes: map[dsec.SandboxID]*dsec.Sandbox{}, keys: map[string]dsec.SandboxID{}, tell: func(job.Change) {}}
}

func (n *node) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *node) enter() func() {
	n.mu.Lock()
	n.active++
	n.most = max(n.most, n.active)
	n.mu.Unlock()
	return func() {
		n.mu.Lock()
		n.active--
		n.mu.Unlock()
	}
}

func (n *node) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	defer n.enter()()
	n.mu.Lock()
	create := n.create
	n.mu.Unlock()
	if create != nil {
		if err := create(ctx, spec); err != nil {
			return dsec.Sandbox{}, err
		}
	}
	if err := ctx.Err(); err != nil {
		return dsec.Sandbox{}, context.Cause(ctx)
	}
	spec = spec.WithDefaults()
	if err := spec.Check(); err != nil {
		return dsec.Sandbox{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	k := string(spec.Project) + "\x00" + opt.Key
	if id, ok := n.keys[k]; ok && opt.Key != "" {
		return *n.boxes[id], nil
	}
	b := &dsec.Sandbox{ID: n.key.New(dsec.Place{Node: 1, Epoch: 1}), Spec: spec, State: dsec.Running, Key: opt.Key, Created: time.Now()}
	n.boxes[b.ID] = b
	n.order = append(n.order, b.ID)
	n.keys[k] = b.ID
	n.tell(change(b))
	return *b, nil
}

func change(b *dsec.Sandbox) job.Change {
	return job.Change{
		Sandbox: b.ID, Project: b.Spec.Project, Job: b.Spec.Job, Key: b.Key, State: b.State, Cause: b.Cause, Detail: b.Detail,
	}
}

func (n *node) Get(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b := n.boxes[id]; b != nil {
		return *b, nil
	}
	return dsec.Sandbox{}, dsec.Errorf(dsec.NotFound, "no sandbox")
}

func (n *node) List(_ context.Context, f dsec.Filter) ([]dsec.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []dsec.Sandbox
	for i := len(n.order) - 1; i >= 0; i-- {
		if b := n.boxes[n.order[i]]; b != nil && (f.All || !b.State.Ended()) {
			out = append(out, *b)
		}
	}
	return out, nil
}

func (n *node) turn(id dsec.SandboxID, to dsec.State, cause dsec.Cause) (dsec.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.boxes[id]
	switch {
	case b == nil:
		return dsec.Sandbox{}, dsec.Errorf(dsec.NotFound, "no sandbox")
	case b.State.Ended() && to.Ended():
		return *b, nil
	case b.State.Ended():
		return dsec.Sandbox{}, dsec.Errorf(dsec.Conflict, "it has ended")
	case b.State != to:
		b.State, b.Cause = to, cause
		if to.Ended() {
			b.Ended = time.Now()
		}
		c := change(b)
		if !to.Ended() {
			c = job.Change{Sandbox: id, State: to} // what the edge tells of a pause
		}
		n.tell(c)
	}
	return *b, nil
}

func (n *node) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	defer n.enter()()
	n.mu.Lock()
	pause := n.pause
	n.mu.Unlock()
	if pause != nil {
		if err := pause(ctx, id); err != nil {
			return dsec.Sandbox{}, err
		}
	}
	return n.turn(id, dsec.Paused, "")
}

func (n *node) Resume(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return n.turn(id, dsec.Running, "")
}

func (n *node) Stop(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return n.turn(id, dsec.Stopped, dsec.CauseUser)
}

func (n *node) Extend(ctx context.Context, id dsec.SandboxID, _ time.Duration) (dsec.Sandbox, error) {
	return n.Get(ctx, id)
}

func (n *node) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return n.Get(ctx, id)
}

func (n *node) Commit(context.Context, dsec.SandboxID, string) (dsec.Image, error) {
	return dsec.Image{}, nil
}

func (n *node) count(s dsec.State) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := 0
	for _, b := range n.boxes {
		if b.State == s {
			c++
		}
	}
	return c
}

// rig is a Jobs over a node and a journal that outlive it.
type rig struct {
	t       testing.TB
	journal *memJournal
	node    *node
	config  job.Config
	jobs    *job.Jobs
	s       dsec.Services   // fenced
	early   func(*job.Jobs) // called before Run
	stop    func()
}

func newRig(t testing.TB) *rig {
	r := &rig{t: t, journal: &memJournal{}, node: newNode()}
	r.open()
	t.Cleanup(func() { r.close() })
	return r
}

// open starts a Jobs on what there is, and lets it Run.
func (r *rig) open() {
	r.t.Helper()
	cfg := r.config
	cfg.Journal = r.journal
	cfg.Label = func(_ context.Context, id dsec.SandboxID, labels map[string]string) (dsec.Sandbox, error) {
		r.node.mu.Lock()
		defer r.node.mu.Unlock()
		b := r.node.boxes[id]
		if b.Spec.Labels == nil {
			b.Spec.Labels = map[string]string{}
		}
		for k, v := range labels {
			b.Spec.Labels[k] = v
		}
		return *b, nil
	}
	j, err := job.Open(cfg)
	if err != nil {
		r.t.Fatalf("open: %v", err)
	}
	r.node.mu.Lock()
	r.node.tell = j.Note
	r.node.mu.Unlock()
	j.Bind(r.node)
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	if r.early != nil {
		r.early(j)
	}
	go func() {
		defer close(ran)
		j.Run(ctx)
	}()
	r.jobs, r.s = j, j.Fence(dsec.Services{Sandboxes: r.node})
	r.stop = sync.OnceFunc(func() { cancel(); <-ran })
}

func (r *rig) close() {
	r.stop()
	if err := r.jobs.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
}

// kill is kill -9: nothing reaches the journal from here on, and nobody is told.
func (r *rig) kill() {
	r.journal.set(func() { r.journal.dead = true })
	r.node.mu.Lock()
	r.node.tell = func(job.Change) {}
	r.node.mu.Unlock()
	r.stop()
	r.jobs.Close()
	r.journal.set(func() { r.journal.dead = false })
}

func (r *rig) make(id dsec.JobID, p dsec.OnDisconnect, lease time.Duration) dsec.Job {
	r.t.Helper()
	j, err := r.jobs.Create(r.t.Context(), dsec.JobSpec{ID: id, OnDisconnect: p, Lease: lease}, dsec.CreateOptions{})
	if err != nil {
		r.t.Fatalf("create job: %v", err)
	}
	return j
}

func spec() dsec.Spec { return dsec.Spec{Environment: dsec.Environment{Base: "debian"}} }

// fill creates n sandboxes of a job.
func (r *rig) fill(id dsec.JobID, epoch uint64, n int) []dsec.JobResult {
	r.t.Helper()
	out, err := collect(r.jobs.CreateMany(r.t.Context(), id, epoch, items(n)))
	if err != nil || len(out) != n {
		r.t.Fatalf("create many: %d results, %v", len(out), err)
	}
	return out
}

func items(n int) []dsec.JobItem {
	list := make([]dsec.JobItem, n)
	for i := range list {
		list[i] = dsec.JobItem{Key: fmt.Sprint("item-", i), Spec: spec()}
	}
	return list
}

func collect[T any](seq func(func(T, error) bool)) (all []T, err error) {
	for v, e := range seq {
		if e != nil {
			return all, e
		}
		all = append(all, v)
	}
	return all, nil
}

func (r *rig) events(id dsec.JobID, after uint64) []dsec.JobEvent {
	r.t.Helper()
	all, err := collect(r.jobs.Events(r.t.Context(), id, dsec.JobEventOptions{After: after}))
	if err != nil {
		r.t.Fatalf("events: %v", err)
	}
	return all
}

// types gives how many events of each type there are.
func types(all []dsec.JobEvent) map[dsec.JobEventType]int {
	m := map[dsec.JobEventType]int{}
	for _, e := range all {
		m[e.Type]++
	}
	return m
}

func (r *rig) get(id dsec.JobID) dsec.Job {
	r.t.Helper()
	j, err := r.jobs.Get(r.t.Context(), id)
	if err != nil {
		r.t.Fatalf("get: %v", err)
	}
	return j
}

func wantKind(t testing.TB, what string, err error, kind dsec.ErrorKind) {
	t.Helper()
	if err == nil || dsec.KindOf(err) != kind {
		t.Fatalf("%s: error %v, want kind %v", what, err, kind)
	}
}

// TestMain fails a package that leaves goroutines.
func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // the fuzzer keeps its own goroutines
	}
	before := runtime.NumGoroutine()
	code := m.Run()
	for deadline := time.Now().Add(5 * time.Second); code == 0 && runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "goroutines are left:\n%s\n", buf[:runtime.Stack(buf, true)])
			code = 1
		}
	}
	os.Exit(code)
}

package edge_test

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
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// memJournal is a Journal in memory. It outlives the node as a disk does.
type memJournal struct {
	mu      sync.Mutex
	records [][]byte
	fail    error // of Append and Checkpoint
	dead    bool  // the process that appends was killed
	left    int   // appends until it is killed; 0 means never
	onKill  func()
	save    func(func([]byte) error) error
	saved   func()
}

func (j *memJournal) Own(save func(func([]byte) error) error, saved func()) error {
	j.save, j.saved = save, saved
	return nil
}

var errKilled = errors.New("killed")

func (j *memJournal) Append(b []byte) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.dead:
		return errKilled
	case j.fail != nil:
		return j.fail
	}
	j.records = append(j.records, slices.Clone(b))
	if j.left > 0 {
		if j.left--; j.left == 0 {
			j.dead = true
			if j.onKill != nil {
				j.onKill()
			}
		}
	}
	return nil
}

func (j *memJournal) Replay(f func([]byte) error) error {
	j.mu.Lock()
	all := j.records
	j.mu.Unlock()
	for _, b := range all {
		if err := f(b); err != nil {
			return err
		}
	}
	return nil
}

func (j *memJournal) Checkpoint() error {
	j.mu.Lock()
	upTo := len(j.records)
	err := j.fail
	if j.dead {
		err = errKilled
	}
	j.mu.Unlock()
	if err != nil {
		return err
	}
	var snap [][]byte
	if err := j.save(func(b []byte) error { snap = append(snap, slices.Clone(b)); return nil }); err != nil {
		return err
	}
	j.mu.Lock()
	j.records = append(snap, j.records[upTo:]...)
	j.mu.Unlock()
	j.saved()
	return nil
}

func (j *memJournal) setFail(err error) {
	j.mu.Lock()
	j.fail = err
	j.mu.Unlock()
}

// names is a Names in memory.
type names struct {
	mu     sync.Mutex
	images map[string]dsec.Image
}

func (n *names) Resolve(_ context.Context, project dsec.ProjectID, name string) (dsec.Image, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	img, ok := n.images[name]
	if !ok || img.Project != "" && img.Project != project {
		return dsec.Image{}, dsec.Errorf(dsec.NotFound, "no image %q", name)
	}
	return img, nil
}

func (n *names) Register(_ context.Context, img dsec.Image) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.images[img.Ref()]; ok {
		return dsec.Errorf(dsec.Exists, "image %s exists", img.Ref())
	}
	n.images[img.Ref()] = img
	return nil
}

// roots counts what is acquired and not given back.
type roots struct {
	mu   sync.Mutex
	held int
	fail error
}

func (r *roots) Acquire(_ context.Context, digests []string) ([]*os.File, func(), error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		return nil, nil, r.fail
	}
	r.held++
	return make([]*os.File, len(digests)), sync.OnceFunc(func() {
		r.mu.Lock()
		r.held--
		r.mu.Unlock()
	}), nil
}

func (r *roots) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held
}

// hostFigures is a Host whose figures a test sets.
type hostFigures struct {
	mu sync.Mutex
	s  edge.HostSample
}

func (h *hostFigures) Sample() (edge.HostSample, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.s, nil
}

func (h *hostFigures) change(f func(*edge.HostSample)) {
	h.mu.Lock()
	f(&h.s)
	h.mu.Unlock()
}

func roomy() edge.HostSample {
	return edge.HostSample{
		CPUs: 2, Memory: 16 << 30, Available: 12 << 30, Disk: 1 << 40, DiskFree: 1 << 39, InodesFree: -1,
		Tasks: 200, MaxTasks: 32768,
	}
}

// rig is a node on a synthetic host, with everything that outlives an edge.
type rig struct {
	t       testing.TB
	key     dsec.IDKey
	place   dsec.Place
	boot    string
	host    *synthetic.Host
	journal edge.Journal
	mem     *memJournal // journal, unless a test has its own
	names   *names
	roots   *roots
	figures *hostFigures
	config  func(*edge.Config) // last word on the configuration

	node   *edge.Node
	driver *synthetic.Driver
	stop   func() // ends Run

	mu      sync.Mutex
	created []edge.CreatedEvent
	ended   []edge.EndedEvent
	refused []edge.RefusedEvent
	adopted edge.AdoptedEvent
}

func newRig(t testing.TB, opt synthetic.Options) *rig {
	t.Helper()
	r := &rig{
		t: t, place: dsec.Place{Node: 7, Epoch: 3}, boot: "boot-1", host: synthetic.New(opt),
		mem: &memJournal{}, roots: &roots{}, figures: &hostFigures{s: roomy()},
		names: &names{images: map[string]dsec.Image{}},
	}
	r.journal = r.mem
	r.key[0] = 42
	r.image("debian", dsec.Base)
	r.image("task", dsec.Workspace)
	r.image("tools", dsec.Toolkit)
	return r
}

func (r *rig) image(name string, role dsec.Role) {
	r.names.images[name] = dsec.Image{Name: name, Version: "1", Role: role, Digest: "sha256:" + name, Config: dsec.ImageConfig{
		Env: []string{"PATH=/usr/bin:/" + name, "FROM=" + name}, Cwd: "/" + name, User: name,
	}}
}

// open starts a node on what the rig has, and lets it Run.
func (r *rig) open() *edge.Node {
	r.t.Helper()
	n, err := r.tryOpen()
	if err != nil {
		r.t.Fatalf("open: %v", err)
	}
	return n
}

func (r *rig) tryOpen() (*edge.Node, error) {
	r.driver = r.host.Driver()
	r.roots = &roots{} // of this process
	cfg := edge.Config{
		Name: "n7", Keys: &r.key, Place: r.place, Boot: r.boot, Drivers: []driver.Driver{r.driver},
		Journal: r.journal, Names: r.names, Roots: r.roots, Host: r.figures,
		Events: edge.Events{
			Created: func(e edge.CreatedEvent) { r.note(func() { r.created = append(r.created, e) }) },
			Ended:   func(e edge.EndedEvent) { r.note(func() { r.ended = append(r.ended, e) }) },
			Refused: func(e edge.RefusedEvent) { r.note(func() { r.refused = append(r.refused, e) }) },
			Adopted: func(e edge.AdoptedEvent) { r.note(func() { r.adopted = e }) },
		},
	}
	if r.config != nil {
		r.config(&cfg)
	}
	n, err := edge.Open(r.t.Context(), cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		n.Run(ctx)
	}()
	r.node = n
	r.stop = sync.OnceFunc(func() { cancel(); <-ran })
	return n, nil
}

func (r *rig) note(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// close ends the node in order and leaves the machines.
func (r *rig) close() {
	r.t.Helper()
	r.stop()
	if err := r.node.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
}

// kill is kill -9: nothing that the node does from here on reaches the host or
// the journal.
func (r *rig) kill() {
	r.driver.Detach()
	r.mem.mu.Lock()
	r.mem.dead = true
	r.mem.mu.Unlock()
	r.stop()
	r.node.Close() // only ends its goroutines: the journal refuses everything
	r.mem.mu.Lock()
	r.mem.dead = false
	r.mem.left = 0
	r.mem.mu.Unlock()
}

func spec() dsec.Spec { return dsec.Spec{Environment: dsec.Environment{Base: "debian"}} }

func (r *rig) create(s dsec.Spec, key string) dsec.Sandbox {
	r.t.Helper()
	sb, err := r.node.Create(r.t.Context(), s, dsec.CreateOptions{Key: key})
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	return sb
}

func (r *rig) get(id dsec.SandboxID) dsec.Sandbox {
	r.t.Helper()
	sb, err := r.node.Get(r.t.Context(), id)
	if err != nil {
		r.t.Fatalf("get: %v", err)
	}
	return sb
}

// exec runs a line and returns its output.
func (r *rig) exec(id dsec.SandboxID, line string) string {
	r.t.Helper()
	res, err := r.node.Services().Commands.Run(r.t.Context(), dsec.Call{Sandbox: id}, dsec.Command{Shell: line}, nil)
	if err != nil {
		r.t.Fatalf("run %q: %v", line, err)
	}
	return string(res.Out)
}

// wantKind fails unless err is of the kind.
func wantKind(t testing.TB, what string, err error, kind dsec.ErrorKind) {
	t.Helper()
	if err == nil || dsec.KindOf(err) != kind {
		t.Fatalf("%s: error %v of kind %v, want kind %v", what, err, dsec.KindOf(err), kind)
	}
}

// wantEnd fails unless the sandbox has ended as said.
func (r *rig) wantEnd(id dsec.SandboxID, state dsec.State, cause dsec.Cause) dsec.Sandbox {
	r.t.Helper()
	sb := r.get(id)
	if sb.State != state || sb.Cause != cause || sb.Ended.IsZero() {
		r.t.Fatalf("sandbox is %s, cause %q (%s), ended %v; want %s, cause %q", sb.State, sb.Cause, sb.Detail, sb.Ended, state, cause)
	}
	return sb
}

// wantNothing fails if the host has machines or layers are held.
func (r *rig) wantNothing() {
	r.t.Helper()
	if m := r.host.Machines(); len(m) != 0 {
		r.t.Errorf("machines %v are left", m)
	}
	if n := r.roots.count(); n != 0 {
		r.t.Errorf("%d environments are held", n)
	}
}

// eventually waits for a condition that other goroutines bring about.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !cond(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
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

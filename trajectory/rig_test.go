package trajectory_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

// rig is a node with recorded services on a synthetic host and a disk that
// forgets what was not synced.
type rig struct {
	t     testing.TB
	key   dsec.IDKey
	host  *synthetic.Host
	disk  *journaltest.CrashFS
	dir   string                      // of the journal
	fs    func(journal.FS) journal.FS // last word on the disk
	store *blob.Memory
	lists *archives
	tune  func(*trajectory.Config)
	inner func(dsec.Services) dsec.Services // put between recorder and node

	driver  *synthetic.Driver
	journal *journal.Journal
	log     *trajectory.Log
	node    *edge.Node
	rec     atomic.Pointer[trajectory.Recorder]
	dsec.Services

	mu     sync.Mutex
	faults []error
}

func newRig(t testing.TB) *rig {
	r := &rig{
		t: t, host: synthetic.New(synthetic.Options{}), disk: journaltest.NewCrashFS(), dir: "journal", store: new(blob.Memory), lists: &archives{},
	}
	r.key[0] = 42
	return r
}

type names struct{}

func (names) Resolve(_ context.Context, _ dsec.ProjectID, name string) (dsec.Image, error) {
	return dsec.Image{Name: name, Version: "1", Role: dsec.Base, Digest: "sha256:" + name}, nil
}
func (names) Register(context.Context, dsec.Image) error { return nil }

type roots struct{}

func (roots) Acquire(_ context.Context, d []string) ([]*os.File, func(), error) {
	return make([]*os.File, len(d)), func() {}, nil
}

type roomy struct{}

func (roomy) Sample() (edge.HostSample, error) {
	return edge.HostSample{CPUs: 2, Memory: 16 << 30, Available: 12 << 30, Disk: 1 << 40, DiskFree: 1 << 39, InodesFree: -1, Tasks: 200, MaxTasks: 32768}, nil
}

// archives is an Archives that outlives nodes.
type archives struct {
	mu  sync.Mutex
	all []string
}

func (a *archives) AddArchive(_ context.Context, segment string, _ time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = slices.Insert(a.all, 0, segment)
	return nil
}

func (a *archives) DropArchive(_ context.Context, segment string, _ time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = slices.DeleteFunc(a.all, func(s string) bool { return s == segment })
	return nil
}

func (a *archives) Archives(context.Context) ([]string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.all), nil
}

// open starts a process of the node.
func (r *rig) open() *rig {
	r.t.Helper()
	var fs journal.FS = r.disk
	if r.fs != nil {
		fs = r.fs(fs)
	}
	var err error
	if r.journal, err = journal.Open(r.dir, journal.Options{FS: fs}); err != nil {
		r.t.Fatal(err)
	}
	cfg := trajectory.Config{Store: r.store, Archives: r.lists, Fault: func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.faults = append(r.faults, err)
		if r.node != nil && errors.Is(err, journal.ErrFailed) {
			r.node.Distrust()
		}
	}}
	if r.tune != nil {
		r.tune(&cfg)
	}
	if r.log, err = trajectory.Open(r.t.Context(), r.journal, cfg); err != nil {
		r.t.Fatal(err)
	}
	r.driver = r.host.Driver()
	r.node, err = edge.Open(r.t.Context(), edge.Config{
		Name: "n", Keys: &r.key, Place: dsec.Place{Node: 1, Epoch: 1}, Boot: "b", Drivers: []driver.Driver{r.driver},
		Journal: &edge.Log{Journal: r.journal}, Names: names{}, Roots: roots{}, Host: roomy{},
		Events: edge.Events{
			Ending: func(e edge.EndingEvent) {
				if rec := r.rec.Load(); rec != nil {
					rec.Salvage(e.ID, e.Guest.Commands())
				}
			},
			Ended: func(e edge.EndedEvent) { r.log.Ended(e.ID, e.State, e.Cause, e.Detail) },
			Resumed: func(e edge.ResumedEvent) {
				if e.Detail != "" {
					r.log.Note(e.ID, dsec.RecordResume, e.Detail)
				}
				if rec := r.rec.Load(); rec != nil {
					rec.Awake(e.ID)
				}
			},
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	inner := r.node.Services()
	if r.inner != nil {
		inner = r.inner(inner)
	}
	rec := trajectory.NewRecorder(r.log, inner, r.node)
	r.rec.Store(rec)
	if err := rec.Recover(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	r.Services = rec.Services()
	return r
}

// close ends the process in order.
func (r *rig) close() {
	r.rec.Load().Close()
	r.node.Close()
	r.journal.Close()
}

// kill is kill -9; with a power cut what was not synced may be lost.
func (r *rig) kill(after func(*journaltest.CrashFS) *journaltest.CrashFS) {
	disk := after(r.disk)
	r.driver.Detach()
	r.close() // the old process writes to a disk that nobody reads any more
	r.disk = disk
}

func process(d *journaltest.CrashFS) *journaltest.CrashFS { return d.Kill() }

func (r *rig) create() dsec.SandboxID {
	r.t.Helper()
	sb, err := r.Sandboxes.Create(r.t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "b"}}, dsec.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return sb.ID
}

func step(id dsec.SandboxID, session string, n uint64) dsec.Call {
	return dsec.Call{Sandbox: id, Step: dsec.Step{Session: session, Number: n}}
}

func sh(line string) dsec.Command { return dsec.Command{Shell: line} }

func (r *rig) run(on dsec.Call, line string) dsec.Result {
	r.t.Helper()
	res, err := r.Commands.Run(r.t.Context(), on, sh(line), nil)
	if err != nil {
		r.t.Fatalf("run %q: %v", line, err)
	}
	return res
}

// inGuest counts the commands that the guest knows: what really ran.
func (r *rig) inGuest(id dsec.SandboxID) int {
	r.t.Helper()
	all, err := r.node.Services().Commands.List(r.t.Context(), dsec.Call{Sandbox: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return len(all)
}

// records gives a verified trajectory.
func (r *rig) records(id dsec.SandboxID) []dsec.Record {
	r.t.Helper()
	h, err := r.Trajectories.Head(r.t.Context(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	v := trajectory.NewVerifier(id)
	var all []dsec.Record
	for rec, err := range r.Trajectories.Records(r.t.Context(), id, 0) {
		if err != nil {
			r.t.Fatal(err)
		}
		if err := v.Add(rec.Raw); err != nil {
			r.t.Fatal(err)
		}
		if all = append(all, rec); rec.Seq == h.Seq {
			break // there may be more by now
		}
	}
	if err := v.End(h); err != nil {
		r.t.Fatal(err)
	}
	return all
}

func ops(all []dsec.Record) string {
	var s []string
	for _, r := range all {
		op := string(r.Op)
		switch {
		case r.Error != nil:
			op += "!"
		case r.Of != 0:
			op += "="
		}
		s = append(s, op)
	}
	return strings.Join(s, " ")
}

func wantKind(t testing.TB, what string, err error, kind dsec.ErrorKind, texts ...string) {
	t.Helper()
	if err == nil || dsec.KindOf(err) != kind {
		t.Fatalf("%s: error %v, want kind %v", what, err, kind)
	}
	for _, x := range texts {
		if !strings.Contains(err.Error(), x) {
			t.Errorf("%s: %q does not say %q", what, err, x)
		}
	}
}

// eventually waits for what becomes true by itself.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for !f() {
		select {
		case <-t.Context().Done():
			t.Fatalf("%s did not come", what)
		default:
			runtime.Gosched()
		}
	}
}

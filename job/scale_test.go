package job_test

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/job"
	"github.com/dsec-go/dsec/journal"
)

// bases are images, layers and a host without limits.
type bases struct{}

func (bases) Resolve(context.Context, dsec.ProjectID, string) (dsec.Image, error) {
	return dsec.Image{Name: "debian", Version: "1", Role: dsec.Base, Digest: "sha256:debian"}, nil
}

func (bases) Register(context.Context, dsec.Image) error { return nil }

func (bases) Acquire(_ context.Context, digests []string) ([]*os.File, func(), error) {
	return make([]*os.File, len(digests)), func() {}, nil
}

func (bases) Sample() (edge.HostSample, error) {
	return edge.HostSample{
		CPUs: 2, Memory: 16 << 40, Available: 12 << 40, Disk: 1 << 50, DiskFree: 1 << 49, InodesFree: -1, Tasks: 200, MaxTasks: 1 << 30,
	}, nil
}

// whole is jobs over an edge over a synthetic host, with a real journal that
// they share.
type whole struct {
	edge    *edge.Node
	jobs    *job.Jobs
	journal *journal.Journal
	stop    func()
}

func openWhole(t *testing.T, dir string, key *dsec.IDKey, host *synthetic.Host) *whole {
	t.Helper()
	records, err := journal.Open(dir, journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w := &whole{journal: records}
	if w.jobs, err = job.Open(job.Config{Journal: &job.Log{Journal: records}, Error: func(err error) { t.Errorf("jobs: %v", err) }}); err != nil {
		t.Fatal(err)
	}
	w.edge, err = edge.Open(t.Context(), edge.Config{
		Name: "n1", Keys: key, Place: dsec.Place{Node: 1, Epoch: 1}, Boot: "b", Drivers: []driver.Driver{host.Driver()},
		Journal: &edge.Log{Journal: records}, Names: bases{}, Roots: bases{}, Host: bases{}, Limits: edge.Limits{Sandboxes: 64_000},
		Events: edge.Events{
			Created: func(e edge.CreatedEvent) {
				w.jobs.Note(job.Change{Sandbox: e.ID, Project: e.Project, Job: e.Job, Key: e.Key, State: dsec.Running})
			},
			Ended: func(e edge.EndedEvent) {
				w.jobs.Note(job.Change{
					Sandbox: e.ID, Project: e.Project, Job: e.Job, Key: e.Key, State: e.State, Cause: e.Cause, Detail: e.Detail,
				})
			},
			Paused:  func(e edge.PausedEvent) { w.jobs.Note(job.Change{Sandbox: e.ID, State: dsec.Paused}) },
			Resumed: func(e edge.ResumedEvent) { w.jobs.Note(job.Change{Sandbox: e.ID, State: dsec.Running}) },
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.jobs.Bind(w.edge)
	ctx, cancel := context.WithCancel(context.Background())
	var runs sync.WaitGroup
	runs.Go(func() { w.edge.Run(ctx) })
	runs.Go(func() { w.jobs.Run(ctx) })
	w.stop = sync.OnceFunc(func() { cancel(); runs.Wait() })
	return w
}

func (w *whole) close(t *testing.T) {
	t.Helper()
	w.stop()
	for _, err := range []error{w.jobs.Close(), w.edge.Close(), w.journal.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
}

// One job of 32,000: created in one call, told of, found again after a restart,
// stopped in one call.
func TestThirtyTwoThousand(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	dir, key, host := t.TempDir(), &dsec.IDKey{1}, synthetic.New(synthetic.Options{})
	w := openWhole(t, dir, key, host)
	j, err := w.jobs.Create(t.Context(), dsec.JobSpec{ID: "train", Lease: time.Hour}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	list := items(dsec.MaxJobItems)
	begin := time.Now()
	seen := make([]dsec.SandboxID, len(list))
	for x, err := range w.jobs.CreateMany(t.Context(), "train", j.Epoch, list) {
		if err != nil || x.Err != nil {
			t.Fatalf("%+v, %v", x, err)
		}
		seen[x.Index] = x.Sandbox.ID
	}
	t.Logf("%d creates took %v", len(list), time.Since(begin))
	n := 0
	for e, err := range w.jobs.Events(t.Context(), "train", dsec.JobEventOptions{}) {
		if err != nil || e.Type != dsec.EventCreated || e.Key == "" {
			t.Fatalf("%+v, %v", e, err)
		}
		n++
	}
	if n != len(list) {
		t.Errorf("%d events", n)
	}
	w.close(t)

	w = openWhole(t, dir, key, host)
	defer w.close(t)
	got, err := w.jobs.Open(t.Context(), "train")
	if err != nil || got.Epoch != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	for x, err := range w.jobs.CreateMany(t.Context(), "train", got.Epoch, list) {
		if err != nil || x.Err != nil || x.Sandbox.ID != seen[x.Index] {
			t.Fatalf("repeated: %+v, %v, want %s", x, err, seen[x.Index])
		}
	}
	n = 0
	for x, err := range w.jobs.Stop(t.Context(), "train") {
		if err != nil || x.Err != nil {
			t.Fatalf("%+v, %v", x, err)
		}
		n++
	}
	if n != len(list) || len(host.Machines()) != 0 {
		t.Errorf("%d were stopped, %d machines are left", n, len(host.Machines()))
	}
	t.Logf("all took %v", time.Since(begin))
}

package client_test

import (
	"context"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
)

// fakeJobs is a job service whose answers are known. What is not here is not
// called.
type fakeJobs struct {
	dsec.Jobs
	job    dsec.Job
	labels map[string]string
	items  []dsec.JobItem
	spec   dsec.JobSpec
	key    string
	renew  func(epoch uint64) error
	calls  atomic.Int32
	epoch  atomic.Uint64 // of the last context
}

func (f *fakeJobs) Create(ctx context.Context, s dsec.JobSpec, o dsec.CreateOptions) (dsec.Job, error) {
	f.spec, f.key = s, o.Key
	return f.job, nil
}

func (f *fakeJobs) Open(context.Context, dsec.JobID) (dsec.Job, error) { return f.job, nil }

func (f *fakeJobs) Renew(_ context.Context, _ dsec.JobID, epoch uint64) (dsec.Job, error) {
	f.calls.Add(1)
	if f.renew == nil {
		return f.job, nil
	}
	return f.job, f.renew(epoch)
}

func (f *fakeJobs) Get(ctx context.Context, id dsec.JobID) (dsec.Job, error) {
	f.epoch.Store(dsec.EpochFrom(ctx))
	if id != f.job.ID {
		return dsec.Job{}, dsec.Errorf(dsec.NotFound, "no job has the id %q", id)
	}
	return f.job, nil
}

func (f *fakeJobs) List(context.Context) ([]dsec.Job, error) { return []dsec.Job{f.job, f.job}, nil }

func (f *fakeJobs) Label(ctx context.Context, _ dsec.JobID, labels map[string]string) iter.Seq2[dsec.JobResult, error] {
	f.labels = labels
	return f.Pause(ctx, "")
}

func (f *fakeJobs) Pause(context.Context, dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	return func(yield func(dsec.JobResult, error) bool) {
		_ = yield(dsec.JobResult{Index: 0, Key: "k", Sandbox: dsec.Sandbox{ID: "sb1", State: dsec.Paused}}, nil) &&
			yield(dsec.JobResult{Index: 1, Sandbox: dsec.Sandbox{ID: "sb2"}, Err: dsec.Errorf(dsec.Conflict, "it has ended")}, nil) &&
			yield(dsec.JobResult{Index: 2, Sandbox: dsec.Sandbox{ID: "sb3"}, Err: io.ErrClosedPipe}, nil)
	}
}

func (f *fakeJobs) CreateMany(_ context.Context, _ dsec.JobID, _ uint64, items []dsec.JobItem) iter.Seq2[dsec.JobResult, error] {
	f.items = items
	first := f.calls.Add(1) == 1
	return func(yield func(dsec.JobResult, error) bool) {
		for i, it := range items {
			if first && i == 2 {
				yield(dsec.JobResult{}, dsec.Errorf(dsec.Unavailable, "the node is closing"))
				return
			}
			if !yield(dsec.JobResult{Index: i, Key: it.Key, Sandbox: dsec.Sandbox{ID: dsec.SandboxID(fmt.Sprint("sb", i))}}, nil) {
				return
			}
		}
	}
}

func (f *fakeJobs) Events(_ context.Context, _ dsec.JobID, o dsec.JobEventOptions) iter.Seq2[dsec.JobEvent, error] {
	f.calls.Add(1)
	return func(yield func(dsec.JobEvent, error) bool) {
		for n := o.After + 1; n <= 10; n++ {
			if !yield(dsec.JobEvent{Seq: n, Time: time.Unix(int64(n), 0).UTC(), Type: dsec.EventFailed, Sandbox: "sb1", Key: "k", Cause: dsec.CauseGuestDied, Detail: "d", Retry: true, Epoch: 3, Missed: 4}, nil) {
				return
			}
			if n%3 == 0 {
				yield(dsec.JobEvent{}, dsec.Errorf(dsec.Unavailable, "the node is closing"))
				return
			}
		}
	}
}

func newJobs(t *testing.T) (*fakeJobs, dsec.Services, string) {
	f := &fakeJobs{job: dsec.Job{
		ID: "train", Project: "p", OnDisconnect: dsec.DisconnectStop, Lease: 30 * time.Second, Epoch: 7, State: dsec.JobActive,
		LeaseEnds: time.Unix(100, 5).UTC(), Created: time.Unix(50, 0).UTC(), Labels: map[string]string{"a": "b"},
		Counts: map[dsec.State]int{dsec.Running: 3}, Events: 9,
	}}
	url := serve(t, rpc.Handler(dsec.Services{Jobs: f}, rpc.Options{}))
	s, err := client.Open(client.Config{URL: url, Transport: transport(t, "h1")})
	if err != nil {
		t.Fatal(err)
	}
	return f, s, url
}

// What goes over the wire arrives as it was, also over broken streams: each
// result and each event once.
func TestJobs(t *testing.T) {
	f, s, url := newJobs(t)
	ctx := t.Context()
	want := fmt.Sprint(f.job)
	spec := dsec.JobSpec{ID: "train", Project: "p", OnDisconnect: dsec.DisconnectKeep, Lease: time.Minute, Labels: map[string]string{"c": "d"}}
	for what, call := range map[string]func() (dsec.Job, error){
		"create": func() (dsec.Job, error) { return s.Jobs.Create(ctx, spec, dsec.CreateOptions{Key: "a key"}) },
		"open":   func() (dsec.Job, error) { return s.Jobs.Open(ctx, "train") },
		"renew":  func() (dsec.Job, error) { return s.Jobs.Renew(ctx, "train", 7) },
		"get":    func() (dsec.Job, error) { return s.Jobs.Get(dsec.WithEpoch(ctx, 7), "train") },
	} {
		if j, err := call(); err != nil || fmt.Sprint(j) != want {
			t.Errorf("%s: %v, %v, want %s", what, j, err, want)
		}
	}
	if fmt.Sprint(f.spec) != fmt.Sprint(spec) || f.key != "a key" || f.epoch.Load() != 7 {
		t.Errorf("spec %+v, key %q, epoch %d", f.spec, f.key, f.epoch.Load())
	}
	if list, err := s.Jobs.List(ctx); err != nil || len(list) != 2 || fmt.Sprint(list[1]) != want {
		t.Errorf("list: %v, %v", list, err)
	}
	if _, err := s.Jobs.Get(ctx, "none"); err == nil || dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("no job: %v", err)
	}

	var results []dsec.JobResult
	for r, err := range s.Jobs.Label(ctx, "train", map[string]string{"x": ""}) {
		if err != nil {
			t.Fatal(err)
		}
		results = append(results, r)
	}
	if len(results) != 3 || results[0].Key != "k" || results[0].Sandbox.State != dsec.Paused || results[0].Err != nil || len(f.labels) != 1 {
		t.Fatalf("label: %+v, labels %v", results, f.labels)
	}
	if err := results[1].Err; dsec.KindOf(err) != dsec.Conflict || !strings.Contains(err.Error(), "it has ended") || results[1].Sandbox.ID != "sb2" {
		t.Errorf("the second: %+v", results[1])
	}
	if err := results[2].Err; dsec.KindOf(err) != dsec.Internal || strings.Contains(err.Error(), "closed pipe") {
		t.Errorf("an internal fault shows its text: %v", err)
	}

	a, b := dsec.Spec{Environment: dsec.Environment{Base: "a"}}, dsec.Spec{Environment: dsec.Environment{Base: "b"}}
	items := []dsec.JobItem{{Key: "1", Spec: a}, {Key: "2", Spec: b}, {Spec: a}, {Key: "4", Spec: b}}
	f.calls.Store(0)
	var indexes []int
	for r, err := range s.Jobs.CreateMany(ctx, "train", 7, items) {
		if err != nil || r.Key != items[r.Index].Key {
			t.Fatalf("create many: %+v, %v", r, err)
		}
		indexes = append(indexes, r.Index)
	}
	if fmt.Sprint(indexes) != "[0 1 2 3]" || f.calls.Load() != 2 {
		t.Errorf("items %v in %d calls", indexes, f.calls.Load())
	}
	for i, it := range f.items {
		if it.Spec.Environment.Base != items[i].Spec.Environment.Base || it.Key == "" {
			t.Errorf("item %d arrives as %+v", i, it)
		}
	}

	f.calls.Store(0)
	var seen []uint64
	for e, err := range s.Jobs.Events(ctx, "train", dsec.JobEventOptions{After: 1, Follow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprint(dsec.JobEvent{Seq: e.Seq, Time: time.Unix(int64(e.Seq), 0).UTC(), Type: dsec.EventFailed, Sandbox: "sb1", Key: "k", Cause: dsec.CauseGuestDied, Detail: "d", Retry: true, Epoch: 3, Missed: 4}); fmt.Sprint(e) != want {
			t.Errorf("event %+v, want %s", e, want)
		}
		seen = append(seen, e.Seq)
	}
	if fmt.Sprint(seen) != "[2 3 4 5 6 7 8 9 10]" || f.calls.Load() != 4 {
		t.Errorf("events %v in %d calls", seen, f.calls.Load())
	}

	// By hand: an epoch that is no number, and an item of no spec.
	for _, x := range []struct{ epoch, method, body string }{
		{"x", "Get", `{"job":"train"}`}, {"0", "Get", `{"job":"train"}`}, {"-1", "Get", `{"job":"train"}`},
		{"", "CreateMany", ""}, {"", "Get", `{"jobs":"train"}`},
	} {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/dsec.v1.Jobs/"+x.method, strings.NewReader(x.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if x.method == "CreateMany" {
			const text = `{"job":"train","items":[{"key":"a","spec":1}]}`
			req.Body = io.NopCloser(strings.NewReader("\x00\x00\x00\x00" + string(rune(len(text))) + text))
			req.ContentLength = int64(5 + len(text))
			req.Header.Set("Content-Type", "application/connect+json")
		}
		req.Header.Set(rpc.HeaderEpoch, x.epoch)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if !strings.Contains(string(b), "invalid_argument") {
			t.Errorf("%s with epoch %q: %s", x.method, x.epoch, b)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// A lease is renewed three times in its time, also over a server that is away,
// and its context ends with the job's next owner.
func TestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var away, fenced atomic.Bool
		f := &fakeJobs{job: dsec.Job{ID: "train", Epoch: 7, Lease: 30 * time.Second}, renew: func(epoch uint64) error {
			switch {
			case epoch != 7:
				return dsec.Errorf(dsec.Invalid, "epoch %d", epoch)
			case away.Load():
				return dsec.Errorf(dsec.Unavailable, "away")
			case fenced.Load():
				return dsec.Errorf(dsec.Conflict, "fenced")
			}
			return nil
		}}
		l, err := client.OpenJob(t.Context(), dsec.Services{Jobs: f}, "train")
		if err != nil {
			t.Fatal(err)
		}
		if dsec.EpochFrom(l.Context()) != 7 || l.Job().ID != "train" {
			t.Errorf("epoch %d of %+v", dsec.EpochFrom(l.Context()), l.Job())
		}
		time.Sleep(time.Minute + time.Second)
		if n := f.calls.Load(); n != 6 {
			t.Errorf("%d renewals in two leases", n)
		}
		away.Store(true)
		time.Sleep(time.Minute)
		if l.Context().Err() != nil || time.Since(l.Renewed()) < time.Minute {
			t.Errorf("with the server away: %v, renewed %v ago", l.Context().Err(), time.Since(l.Renewed()))
		}
		away.Store(false)
		time.Sleep(2 * time.Second)
		if ago := time.Since(l.Renewed()); ago > 2*time.Second {
			t.Errorf("the server is back, renewed %v ago", ago)
		}
		fenced.Store(true)
		time.Sleep(11 * time.Second)
		if cause := context.Cause(l.Context()); cause == nil || dsec.KindOf(cause) != dsec.Conflict {
			t.Errorf("fenced, the context ends with %v", cause)
		}
		l.Close()
		l.Close()

		fenced.Store(false)
		l = client.HoldJob(t.Context(), dsec.Services{Jobs: f}, f.job)
		l.Close()
		before := f.calls.Load()
		time.Sleep(time.Hour)
		if n := f.calls.Load() - before; n != 0 {
			t.Errorf("%d renewals after it was closed", n)
		}
	})
}

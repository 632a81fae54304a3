package job_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/job"
)

// A bulk create yields a result for each item, and repeated nothing twice.
func TestCreateMany(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	j := r.make("train", "", time.Minute)
	list := items(300)
	list[7].Spec.Environment.Base = ""
	list[8].Spec.Job = "another"
	list[9].Spec.Project = "another"
	list[10].Key = ""
	first, err := collect(r.jobs.CreateMany(ctx, "train", j.Epoch, list))
	if err != nil || len(first) != len(list) {
		t.Fatalf("%d results, %v", len(first), err)
	}
	made := map[int]dsec.SandboxID{}
	for _, x := range first {
		if x.Key != list[x.Index].Key {
			t.Errorf("item %d has the key %q", x.Index, x.Key)
		}
		if bad := x.Index >= 7 && x.Index <= 9; bad {
			wantKind(t, fmt.Sprint("item ", x.Index), x.Err, dsec.Invalid)
			continue
		}
		if x.Err != nil || x.Sandbox.Spec.Job != "train" {
			t.Errorf("item %d: %+v", x.Index, x)
		}
		made[x.Index] = x.Sandbox.ID
	}
	if len(made) != len(list)-3 {
		t.Errorf("%d items were made", len(made))
	}
	again, err := collect(r.jobs.CreateMany(ctx, "train", j.Epoch, list))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range again {
		if same := x.Sandbox.ID == made[x.Index]; same != (x.Index != 10) {
			t.Errorf("item %d repeated gives %s, at first %s", x.Index, x.Sandbox.ID, made[x.Index])
		}
	}
	if n := r.node.count(dsec.Running); n != len(made)+1 {
		t.Errorf("%d sandboxes were made, want %d", n, len(made)+1)
	}
	if n := r.get("train").Counts[dsec.Running]; n != len(made)+1 {
		t.Errorf("the job counts %d", n)
	}
	// The same key in another job is another sandbox.
	r.make("other", "", time.Minute)
	x := r.fill("other", 1, 1)[0]
	if x.Err != nil || x.Sandbox.ID == made[0] {
		t.Errorf("the same key in another job: %+v", x)
	}
	// Faults are events with their key; these are nothing that another try mends.
	n := 0
	for _, e := range r.events("train", 0) {
		if e.Type == dsec.EventFailed {
			n++
			if e.Sandbox != "" || e.Key == "" || e.Retry || e.Detail == "" || e.Cause != dsec.CauseAdmission {
				t.Errorf("event %+v", e)
			}
		}
	}
	if n != 6 {
		t.Errorf("%d events of faults, want 3 of each call", n)
	}
}

// What is wrong with a call as a whole is Invalid, and nothing is made.
func TestBadInput(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.make("train", "", time.Minute)
	twice := items(3)
	twice[2].Key = twice[0].Key
	long := items(1)
	long[0].Key = strings.Repeat("x", dsec.MaxItemKey+1)
	for what, call := range map[string]func() error{
		"too many items": func() error {
			_, err := collect(r.jobs.CreateMany(ctx, "train", 1, make([]dsec.JobItem, dsec.MaxJobItems+1)))
			return err
		},
		"a key twice":       func() error { _, err := collect(r.jobs.CreateMany(ctx, "train", 1, twice)); return err },
		"a long key":        func() error { _, err := collect(r.jobs.CreateMany(ctx, "train", 1, long)); return err },
		"a bulk to come":    func() error { _, err := collect(r.jobs.CreateMany(ctx, "train", 2, items(1))); return err },
		"no lease":          func() error { return r.tryMake(dsec.JobSpec{}) },
		"a short lease":     func() error { return r.tryMake(dsec.JobSpec{Lease: time.Millisecond}) },
		"a negative lease":  func() error { return r.tryMake(dsec.JobSpec{Lease: -time.Second}) },
		"a long lease":      func() error { return r.tryMake(dsec.JobSpec{Lease: dsec.MaxLease + 1}) },
		"an unknown policy": func() error { return r.tryMake(dsec.JobSpec{Lease: time.Minute, OnDisconnect: "explode"}) },
		"a bad id":          func() error { return r.tryMake(dsec.JobSpec{Lease: time.Minute, ID: "a\nb"}) },
		"a long id": func() error {
			return r.tryMake(dsec.JobSpec{Lease: time.Minute, ID: dsec.JobID(strings.Repeat("x", 129))})
		},
		"a bad label": func() error { return r.tryMake(dsec.JobSpec{Lease: time.Minute, Labels: map[string]string{"": "x"}}) },
		"an event to come": func() error {
			_, err := collect(r.jobs.Events(ctx, "train", dsec.JobEventOptions{After: 1}))
			return err
		},
		"a bad job of a sandbox": func() error {
			s := spec()
			s.Job = dsec.JobID(strings.Repeat("x", 129))
			_, err := r.s.Sandboxes.Create(ctx, s, dsec.CreateOptions{})
			return err
		},
		"a bad sandbox of a job that is not there": func() error {
			_, err := r.s.Sandboxes.Create(ctx, dsec.Spec{Job: "new"}, dsec.CreateOptions{})
			return err
		},
	} {
		wantKind(t, what, call(), dsec.Invalid)
	}
	wantKind(t, "a taken id", r.tryMake(dsec.JobSpec{ID: "train", Lease: time.Minute}), dsec.Exists)
	for what, call := range map[string]func() error{
		"get":    func() error { _, err := r.jobs.Get(ctx, "none"); return err },
		"open":   func() error { _, err := r.jobs.Open(ctx, "none"); return err },
		"renew":  func() error { _, err := r.jobs.Renew(ctx, "none", 1); return err },
		"pause":  func() error { _, err := collect(r.jobs.Pause(ctx, "none")); return err },
		"stop":   func() error { _, err := collect(r.jobs.Stop(ctx, "none")); return err },
		"events": func() error { _, err := collect(r.jobs.Events(ctx, "none", dsec.JobEventOptions{})); return err },
		"create": func() error { _, err := collect(r.jobs.CreateMany(ctx, "none", 0, items(1))); return err },
	} {
		wantKind(t, what+" of no job", call(), dsec.NotFound)
	}
	if list, err := r.jobs.List(ctx); err != nil || len(list) != 1 {
		t.Errorf("jobs: %+v, %v", list, err)
	}
	if n := r.node.count(dsec.Running); n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}

func (r *rig) tryMake(s dsec.JobSpec) error {
	_, err := r.jobs.Create(r.t.Context(), s, dsec.CreateOptions{})
	return err
}

// A repeated Create with its key is the same job.
func TestCreateIsRepeatable(t *testing.T) {
	r := newRig(t)
	s := dsec.JobSpec{Lease: time.Minute}
	a, err := r.jobs.Create(t.Context(), s, dsec.CreateOptions{Key: "k"})
	if err != nil || a.ID == "" || a.Epoch != 1 || a.OnDisconnect != dsec.DisconnectPause {
		t.Fatalf("%+v, %v", a, err)
	}
	b, err := r.jobs.Create(t.Context(), s, dsec.CreateOptions{Key: "k"})
	if err != nil || a.ID != b.ID {
		t.Errorf("%+v, %v", b, err)
	}
	s.OnDisconnect = dsec.DisconnectStop
	_, err = r.jobs.Create(t.Context(), s, dsec.CreateOptions{Key: "k"})
	wantKind(t, "another job with the key", err, dsec.Conflict)
}

// A lease that is lost during a bulk create ends it: what was made follows the
// policy, also what was under way, the rest is Conflict, and nothing is left to
// run.
func TestLeaseLostDuringCreate(t *testing.T) {
	for _, policy := range []dsec.OnDisconnect{dsec.DisconnectPause, dsec.DisconnectStop} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				j := r.make("train", policy, 10*time.Second)
				r.node.set(func() {
					r.node.create = func(context.Context, dsec.Spec) error {
						time.Sleep(time.Second) // and hears of no end, as a machine that starts does
						return nil
					}
				})
				all, err := collect(r.jobs.CreateMany(t.Context(), "train", j.Epoch, items(1000)))
				if err != nil || len(all) != 1000 {
					t.Fatalf("%d results, %v", len(all), err)
				}
				made := 0
				for _, x := range all {
					if x.Err == nil {
						made++
						continue
					}
					wantKind(t, "an item after the end", x.Err, dsec.Conflict)
				}
				synctest.Wait()
				if made == 0 || made == 1000 {
					t.Fatalf("%d were made", made)
				}
				if n := r.node.count(dsec.Running); n != 0 {
					t.Errorf("%d run", n)
				}
				if n := r.node.count(dsec.Paused) + r.node.count(dsec.Stopped); n != made {
					t.Errorf("%d are paused or stopped, %d were made", n, made)
				}
				_, err = collect(r.jobs.CreateMany(t.Context(), "train", j.Epoch, items(1)))
				wantKind(t, "a create after the end", err, dsec.Conflict)
				s := spec()
				s.Job = "train"
				_, err = r.s.Sandboxes.Create(dsec.WithEpoch(t.Context(), 1), s, dsec.CreateOptions{})
				wantKind(t, "a single create after the end", err, dsec.Conflict)

				// The next owner gets the rest with the same call.
				r.node.set(func() { r.node.create = nil })
				j, err = r.jobs.Open(t.Context(), "train")
				if err != nil {
					t.Fatal(err)
				}
				again := r.fill("train", j.Epoch, 1000)
				for _, x := range again {
					if x.Err != nil {
						t.Fatalf("the next owner: %v", x.Err)
					}
				}
				if n := len(r.node.order); n != 1000 {
					t.Errorf("%d sandboxes were made, want 1000", n)
				}
			})
		})
	}
}

// The work goes on when its caller goes away, with a bound on how much at once.
func TestWorkOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", "", time.Hour)
		r.node.set(func() { r.node.create = func(context.Context, dsec.Spec) error { time.Sleep(time.Second); return nil } })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		n := 0
		for _, err := range r.jobs.CreateMany(ctx, "train", j.Epoch, items(500)) {
			if err != nil {
				wantKind(t, "the caller", err, dsec.Canceled)
				break
			}
			if n++; n == 3 {
				cancel()
			}
		}
		for range r.jobs.Pause(t.Context(), "train") {
			break // has what it wanted to know
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if all, paused := len(r.node.order), r.node.count(dsec.Paused); all != 500 || paused == 0 {
			t.Errorf("%d were made, %d are paused", all, paused)
		}
		if r.node.most > 16 || r.node.most < 2 {
			t.Errorf("%d at once", r.node.most)
		}
	})
}

// Pause, resume, label and stop of all; a stop is for good.
func TestAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx := t.Context()
		j := r.make("train", "", time.Minute)
		r.fill("train", j.Epoch, 50)
		r.make("other", "", time.Hour)
		r.fill("other", 1, 5)
		ended := r.node.order[3]
		r.node.turn(ended, dsec.Failed, dsec.CauseGuestDied)
		paused, err := collect(r.jobs.Pause(ctx, "train"))
		if err != nil || len(paused) != 49 || r.node.count(dsec.Paused) != 49 {
			t.Errorf("pause: %d results, %v", len(paused), err)
		}
		for _, x := range paused {
			if x.Err != nil || x.Sandbox.State != dsec.Paused || x.Key == "" {
				t.Errorf("pause: %+v", x)
			}
		}
		if c := r.get("train").Counts; c[dsec.Paused] != 49 || c[dsec.Failed] != 1 || len(c) != 2 {
			t.Errorf("counts %v", c)
		}
		resumed, err := collect(r.jobs.Resume(ctx, "train"))
		if err != nil || len(resumed) != 49 || r.node.count(dsec.Paused) != 0 {
			t.Errorf("resume: %d results, %v", len(resumed), err)
		}
		labeled, err := collect(r.jobs.Label(ctx, "train", map[string]string{"round": "2"}))
		if err != nil || len(labeled) != 49 || labeled[0].Sandbox.Spec.Labels["round"] != "2" {
			t.Errorf("label: %d results, %v", len(labeled), err)
		}
		if l := r.get("train").Labels; l["round"] != "2" {
			t.Errorf("labels of the job: %v", l)
		}
		stopped, err := collect(r.jobs.Stop(ctx, "train"))
		if err != nil || len(stopped) != 49 || r.node.count(dsec.Stopped) != 49 || r.node.count(dsec.Running) != 5 {
			t.Errorf("stop: %d results, %v", len(stopped), err)
		}
		synctest.Wait()
		_, err = r.jobs.Open(ctx, "train")
		wantKind(t, "open", err, dsec.Conflict)
		_, err = r.jobs.Renew(ctx, "train", 1)
		wantKind(t, "renew", err, dsec.Conflict)
		_, err = collect(r.jobs.CreateMany(ctx, "train", 0, items(1)))
		wantKind(t, "create", err, dsec.Conflict)
		s := spec()
		s.Job = "train"
		_, err = r.s.Sandboxes.Create(ctx, s, dsec.CreateOptions{})
		wantKind(t, "create one", err, dsec.Conflict)
		if again, err := collect(r.jobs.Stop(ctx, "train")); err != nil || len(again) != 0 {
			t.Errorf("stop again: %v, %v", again, err)
		}
		time.Sleep(2 * time.Minute)
		if got := r.get("train"); got.State != dsec.JobStopped {
			t.Errorf("the job is %s", got.State)
		}
		// A day later nothing is left of it; the other has an owner no more.
		r.node.mu.Lock()
		clear(r.node.boxes)
		r.node.mu.Unlock()
		time.Sleep(26 * time.Hour)
		synctest.Wait()
		_, err = r.jobs.Get(ctx, "train")
		wantKind(t, "a forgotten job", err, dsec.NotFound)
	})
}

// Projects see nothing of each other's jobs; an operator sees all.
func TestProjects(t *testing.T) {
	r := newRig(t)
	as := func(p dsec.ProjectID) context.Context {
		return dsec.WithCaller(t.Context(), dsec.Caller{Project: p, Token: "t"})
	}
	for _, p := range []dsec.ProjectID{"pa", "pb"} {
		if _, err := r.jobs.Create(as(p), dsec.JobSpec{ID: "same", Lease: time.Minute}, dsec.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.jobs.Create(as(p), dsec.JobSpec{ID: "of-" + dsec.JobID(p), Lease: time.Minute}, dsec.CreateOptions{Key: "k"}); err != nil {
			t.Fatal(err)
		}
		if all, err := collect(r.jobs.CreateMany(as(p), "same", 1, items(2))); err != nil || all[0].Err != nil || all[0].Sandbox.Spec.Project != p {
			t.Fatalf("%+v, %v", all, err)
		}
	}
	_, err := r.jobs.Get(as("pa"), "of-pb")
	wantKind(t, "another's job", err, dsec.NotFound)
	_, err = r.jobs.Open(as("pa"), "of-pb")
	wantKind(t, "open another's job", err, dsec.NotFound)
	_, err = collect(r.jobs.Stop(as("pa"), "of-pb"))
	wantKind(t, "stop another's job", err, dsec.NotFound)
	if all, err := collect(r.jobs.Pause(as("pa"), "same")); err != nil || len(all) != 2 || all[0].Sandbox.Spec.Project != "pa" {
		t.Errorf("%+v, %v", all, err)
	}
	if list, err := r.jobs.List(as("pa")); err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
	if list, err := r.jobs.List(t.Context()); err != nil || len(list) != 4 {
		t.Errorf("%+v, %v", list, err)
	}
	if j, err := r.jobs.Get(t.Context(), "of-pb"); err != nil || j.Project != "pb" {
		t.Errorf("the operator: %+v, %v", j, err)
	}
	if _, err := r.jobs.Create(as("pa/sub"), dsec.JobSpec{ID: "below", Lease: time.Minute}, dsec.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if j, err := r.jobs.Get(as("pa"), "below"); err != nil || j.Project != "pa/sub" {
		t.Errorf("a job of a project below: %+v, %v", j, err)
	}
	_, err = r.jobs.Get(as("pa/sub"), "of-pa")
	wantKind(t, "a job of the project above", err, dsec.NotFound)
	_, err = r.jobs.Get(t.Context(), "same")
	wantKind(t, "a job that is two", err, dsec.Conflict)
	if j, err := r.jobs.Get(dsec.WithCaller(t.Context(), dsec.Caller{Project: "pb", Admin: true}), "same"); err != nil || j.Project != "pb" {
		t.Errorf("an operator of pb: %+v, %v", j, err)
	}
}

// A sandbox that names a job which nobody made brings it into being: it keeps
// its sandboxes and has no lease, until somebody opens it.
func TestImplicitJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		s := spec()
		s.Job = "free word"
		if _, err := r.s.Sandboxes.Create(t.Context(), s, dsec.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		j := r.get("free word")
		if j.OnDisconnect != dsec.DisconnectKeep || j.Lease != 0 || j.Epoch != 0 || j.State != dsec.JobActive || j.Counts[dsec.Running] != 1 {
			t.Errorf("%+v", j)
		}
		wantKind(t, "making it", r.tryMake(dsec.JobSpec{ID: "free word", Lease: time.Minute}), dsec.Exists)
		time.Sleep(48 * time.Hour)
		if n := r.node.count(dsec.Running); n != 1 {
			t.Error("it did not stay")
		}
		if j, err := r.jobs.Open(t.Context(), "free word"); err != nil || j.Epoch != 1 || !j.LeaseEnds.IsZero() {
			t.Errorf("open: %+v, %v", j, err)
		}
		if _, err := r.jobs.Renew(t.Context(), "free word", 1); err != nil {
			t.Errorf("renew: %v", err)
		}
	})
}

func TestItemKey(t *testing.T) {
	for _, item := range []string{"a", "a/b", "train/a"} {
		if got := job.ItemKey("train", job.SandboxKey("train", item)); got != item {
			t.Errorf("key %q became %q", item, got)
		}
	}
	if job.SandboxKey("a/b", "c") == job.SandboxKey("a", "b/c") {
		t.Error("items of two jobs have one key")
	}
	for _, k := range []string{"", "a", "other/a", "train", job.SandboxKey("other", "a"), job.SandboxKey("train/a", "a")} {
		if got := job.ItemKey("train", k); got != "" {
			t.Errorf("key %q is that of item %q", k, got)
		}
	}
}

package job_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/job"
)

// A lease that nobody renews ends, and the node does what the policy says; one
// that is renewed does not.
func TestLeaseEnds(t *testing.T) {
	for policy, want := range map[dsec.OnDisconnect]dsec.State{
		dsec.DisconnectPause: dsec.Paused, dsec.DisconnectKeep: dsec.Running, dsec.DisconnectStop: dsec.Stopped,
	} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				j := r.make("train", policy, 30*time.Second)
				r.fill("train", j.Epoch, 10)
				for range 10 {
					time.Sleep(20 * time.Second)
					if _, err := r.jobs.Renew(t.Context(), "train", j.Epoch); err != nil {
						t.Fatalf("renew: %v", err)
					}
				}
				if got := r.get("train"); got.State != dsec.JobActive || got.Counts[dsec.Running] != 10 || !got.LeaseEnds.Equal(time.Now().Add(30*time.Second)) {
					t.Fatalf("renewed: %+v", got)
				}
				time.Sleep(29 * time.Second)
				if got := r.get("train"); got.State != dsec.JobActive {
					t.Fatalf("before its end the job is %s", got.State)
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				got := r.get("train")
				if got.State != dsec.JobDisconnected || got.Counts[want] != 10 || r.node.count(want) != 10 || !got.LeaseEnds.IsZero() {
					t.Errorf("after its end: %+v, %d are %s", got, r.node.count(want), want)
				}
				if n := types(r.events("train", 0)); n[dsec.EventLease] != 1 || n[dsec.EventCreated] != 10 || n[dsec.EventPaused]+n[dsec.EventStopped] != map[bool]int{true: 0, false: 10}[policy == dsec.DisconnectKeep] {
					t.Errorf("events: %v", n)
				}

				// The same owner may come back as long as nobody else did.
				if got, err := r.jobs.Renew(t.Context(), "train", j.Epoch); err != nil || got.State != dsec.JobActive || got.Epoch != j.Epoch {
					t.Errorf("back: %+v, %v", got, err)
				}
				if policy == dsec.DisconnectPause && r.node.count(dsec.Paused) != 10 {
					t.Error("coming back resumed what was paused")
				}
			})
		})
	}
}

// Opening fences the owner before, at every call, also on what it creates.
func TestOpenFences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx := t.Context()
		j := r.make("train", "", 30*time.Second)
		box := r.fill("train", j.Epoch, 1)[0].Sandbox
		old, now := dsec.WithEpoch(ctx, 1), dsec.WithEpoch(ctx, 2)
		if _, err := r.s.Sandboxes.Get(old, box.ID); err != nil {
			t.Fatalf("the owner: %v", err)
		}
		_, err := r.s.Sandboxes.Get(now, box.ID)
		wantKind(t, "epoch of the future", err, dsec.Invalid)
		j2, err := r.jobs.Open(ctx, "train")
		if err != nil || j2.Epoch != 2 {
			t.Fatalf("open: %+v, %v", j2, err)
		}
		for what, call := range map[string]func(context.Context) error{
			"get":    func(ctx context.Context) error { _, err := r.s.Sandboxes.Get(ctx, box.ID); return err },
			"resume": func(ctx context.Context) error { _, err := r.s.Sandboxes.Resume(ctx, box.ID); return err },
			"create": func(ctx context.Context) error {
				s := spec()
				s.Job = "train"
				_, err := r.s.Sandboxes.Create(ctx, s, dsec.CreateOptions{})
				return err
			},
			"pause all": func(ctx context.Context) error { _, err := collect(r.jobs.Pause(ctx, "train")); return err },
			"label all": func(ctx context.Context) error {
				_, err := collect(r.jobs.Label(ctx, "train", map[string]string{"a": "b"}))
				return err
			},
			"create many": func(ctx context.Context) error {
				_, err := collect(r.jobs.CreateMany(ctx, "train", dsec.EpochFrom(ctx), nil))
				return err
			},
		} {
			wantKind(t, what+" of the owner before", call(old), dsec.Conflict)
			if err := call(now); err != nil {
				t.Errorf("%s of the owner: %v", what, err)
			}
			if err := call(ctx); err != nil {
				t.Errorf("%s of an operator: %v", what, err)
			}
		}
		_, err = r.jobs.Renew(ctx, "train", 1)
		wantKind(t, "renewal of the owner before", err, dsec.Conflict)
		_, err = r.jobs.Renew(ctx, "train", 3)
		wantKind(t, "renewal of the future", err, dsec.Invalid)
		_, err = r.jobs.Renew(ctx, "train", 0)
		wantKind(t, "renewal of nobody", err, dsec.Invalid)
		// The lease of the one before does not end that of the next.
		time.Sleep(20 * time.Second)
		if _, err := r.jobs.Renew(ctx, "train", 2); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if got := r.get("train"); got.State != dsec.JobActive {
			t.Errorf("the job is %s", got.State)
		}
		// A sandbox of no job, and one that nobody knows, pass the fence.
		free, err := r.s.Sandboxes.Create(old, spec(), dsec.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.s.Sandboxes.Get(old, free.ID); err != nil {
			t.Errorf("a sandbox without a job: %v", err)
		}
		_, err = r.s.Sandboxes.Get(old, "sbnowhere")
		wantKind(t, "no sandbox", err, dsec.NotFound)
	})
}

// After a restart each lease has its whole length again, and then ends.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", dsec.DisconnectPause, time.Minute)
		r.fill("train", j.Epoch, 3)
		if _, err := r.jobs.Open(t.Context(), "train"); err != nil {
			t.Fatal(err)
		}
		before := r.events("train", 0)
		time.Sleep(59 * time.Second)
		r.kill()
		time.Sleep(time.Hour) // the node is down
		r.open()
		got := r.get("train")
		if got.State != dsec.JobActive || got.Epoch != 2 || got.Counts[dsec.Running] != 3 || got.Lease != time.Minute {
			t.Fatalf("after a restart: %+v", got)
		}
		after := r.events("train", 0)
		if len(after) != len(before) {
			t.Fatalf("%d events became %d", len(before), len(after))
		}
		for i := range after {
			if after[i] != before[i] {
				t.Errorf("event %+v became %+v", before[i], after[i])
			}
		}
		time.Sleep(59 * time.Second)
		if r.node.count(dsec.Paused) != 0 {
			t.Error("the lease had no grace")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if r.node.count(dsec.Paused) != 3 {
			t.Error("the lease did not end")
		}
		// Once carried out, the policy is not carried out again.
		for id := range r.node.boxes {
			r.node.Resume(t.Context(), id)
			break
		}
		synctest.Wait()
		r.kill()
		r.open()
		synctest.Wait()
		if n := r.node.count(dsec.Running); n != 1 {
			t.Errorf("%d run after an operator woke one", n)
		}
	})
}

// Calls that come before Run find the lease as it was, also its bulk create.
func TestCallsBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.make("train", "", time.Minute)
		before := r.events("train", 0)
		r.kill()
		r.early = func(j *job.Jobs) {
			if got, err := j.Renew(t.Context(), "train", 1); err != nil || got.State != dsec.JobActive {
				t.Errorf("renew: %+v, %v", got, err)
			}
		}
		r.open()
		if after := r.events("train", 0); len(after) != len(before) {
			t.Errorf("events of a renewal: %+v", after)
		}
		r.kill()
		r.early = func(j *job.Jobs) {
			if all, err := collect(j.CreateMany(t.Context(), "train", 1, items(3))); err != nil || len(all) != 3 || all[0].Err != nil {
				t.Errorf("create: %+v, %v", all, err)
			}
		}
		r.open()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if n := r.node.count(dsec.Paused); n != 3 {
			t.Errorf("%d are paused", n)
		}
	})
}

// A policy that a kill interrupted is finished by the next process.
func TestPolicyGoesOnAfterKill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", dsec.DisconnectPause, time.Minute)
		r.fill("train", j.Epoch, 200)
		slow := make(chan struct{})
		r.node.set(func() {
			r.node.pause = func(ctx context.Context, _ dsec.SandboxID) error {
				select {
				case <-slow:
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
		})
		time.Sleep(61 * time.Second)
		synctest.Wait()
		r.kill()
		close(slow)
		r.open()
		synctest.Wait()
		if n := r.node.count(dsec.Paused); n != 200 {
			t.Errorf("%d of 200 are paused", n)
		}
		if got := r.get("train"); got.State != dsec.JobDisconnected {
			t.Errorf("the job is %s", got.State)
		}
	})
}

// What cannot be paused is tried again; an owner who is back ends that.
func TestPolicyTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", dsec.DisconnectPause, time.Minute)
		r.fill("train", j.Epoch, 2)
		var bad atomic.Bool
		bad.Store(true)
		r.node.set(func() {
			r.node.pause = func(context.Context, dsec.SandboxID) error {
				if bad.Load() {
					return dsec.Errorf(dsec.Unavailable, "not now")
				}
				return nil
			}
		})
		time.Sleep(2 * time.Minute)
		if n := r.node.count(dsec.Running); n != 2 {
			t.Fatalf("%d run", n)
		}
		if _, err := r.jobs.Renew(t.Context(), "train", 1); err != nil {
			t.Fatal(err)
		}
		bad.Store(false)
		time.Sleep(50 * time.Second)
		synctest.Wait()
		if n := r.node.count(dsec.Running); n != 2 {
			t.Errorf("%d run although the owner is back", n)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if n := r.node.count(dsec.Paused); n != 2 {
			t.Errorf("%d are paused", n)
		}
	})
}

// With a journal that cannot be written nobody becomes the owner, and a lease
// ends all the same.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", dsec.DisconnectPause, time.Minute)
		r.fill("train", j.Epoch, 5)
		r.get("train")
		r.journal.set(func() { r.journal.fail = errors.New("no space left") })
		_, err := r.jobs.Open(t.Context(), "train")
		wantKind(t, "open", err, dsec.Unavailable)
		_, err = r.jobs.Create(t.Context(), dsec.JobSpec{Lease: time.Minute}, dsec.CreateOptions{})
		wantKind(t, "create", err, dsec.Unavailable)
		if _, err := r.jobs.Renew(t.Context(), "train", 1); err != nil {
			t.Errorf("a renewal needs no disk: %v", err)
		}
		time.Sleep(62 * time.Second)
		synctest.Wait()
		if n := r.node.count(dsec.Paused); n != 5 {
			t.Errorf("%d are paused", n)
		}
		r.journal.set(func() { r.journal.fail = nil })
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if got := r.get("train"); got.State != dsec.JobDisconnected || got.Counts[dsec.Paused] != 5 {
			t.Errorf("with room again: %+v", got)
		}
		if n := types(r.events("train", 0)); n[dsec.EventPaused] != 5 || n[dsec.EventLease] != 1 {
			t.Errorf("events: %v", n)
		}
	})
}

// An epoch that was given out survives a loss of power: two owners never have
// the same.
func TestOpenIsDurable(t *testing.T) {
	r := newRig(t)
	r.make("train", "", time.Minute)
	for want := uint64(2); want < 5; want++ {
		j, err := r.jobs.Open(t.Context(), "train")
		if err != nil || j.Epoch != want {
			t.Fatalf("open: %+v, %v", j, err)
		}
		r.journal.set(func() {
			if r.journal.synced != uint64(r.journal.base+len(r.journal.records)) {
				t.Errorf("epoch %d was given out before it was durable", want)
			}
		})
	}
}

// An owner who comes back while the policy is pausing a sandbox finds it
// running: he may wait already for what runs in it.
func TestOpenWhilePausing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", dsec.DisconnectPause, 30*time.Second)
		r.fill("train", j.Epoch, 1)
		pausing, goOn := make(chan struct{}), make(chan struct{})
		r.node.mu.Lock()
		r.node.pause = func(context.Context, dsec.SandboxID) error {
			close(pausing)
			<-goOn
			return nil
		}
		r.node.mu.Unlock()
		<-pausing
		if _, err := r.jobs.Open(t.Context(), "train"); err != nil {
			t.Fatal(err)
		}
		close(goOn)
		synctest.Wait()
		if n := r.node.count(dsec.Running); n != 1 {
			t.Errorf("%d sandboxes run", n)
		}
	})
}

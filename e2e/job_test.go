package e2e_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// TestKilledUnderAJob kills dsec up under a bulk create, a reader of the events
// and an owner that renews. Each item is one sandbox, each event comes once, the
// owner stays the owner; and once it is gone its lease ends, also over a kill.
func TestKilledUnderAJob(t *testing.T) {
	n := own(t)
	const many = 24
	_, err := n.Jobs.Create(ctx(t), dsec.JobSpec{ID: "train", Lease: 5 * time.Second}, dsec.CreateOptions{})
	must(t, err)
	lease, err := client.OpenJob(ctx(t), n.Services, "train")
	must(t, err)
	defer lease.Close()
	items := make([]dsec.JobItem, many)
	for i := range items {
		items[i] = dsec.JobItem{Key: fmt.Sprint("item ", i), Spec: plain()}
	}
	var wg sync.WaitGroup
	reader, creator := n.another(t), n.another(t)
	var events []dsec.JobEvent
	wg.Go(func() {
		for e, err := range reader.Jobs.Events(ctx(t), "train", dsec.JobEventOptions{Follow: true}) {
			if err != nil {
				t.Errorf("events: %v", err)
				return
			}
			events = append(events, e)
		}
	})
	first, made := make(chan struct{}), map[int]dsec.SandboxID{}
	created := make(chan struct{})
	go func() {
		defer close(created)
		for r, err := range creator.Jobs.CreateMany(lease.Context(), "train", lease.Job().Epoch, items) {
			if err != nil || r.Err != nil {
				t.Errorf("create many: %+v, %v", r, err)
				return
			}
			if _, twice := made[r.Index]; twice {
				t.Errorf("item %d came twice", r.Index)
			}
			made[r.Index] = r.Sandbox.ID
			if len(made) == 1 {
				close(first)
			}
		}
	}()
	<-first // some are made, some are under way
	for range 2 {
		n.kill()
		must(t, n.start())
	}
	<-created
	if list, err := n.Sandboxes.List(ctx(t), dsec.Filter{Job: "train"}); err != nil || len(list) != many || len(made) != many {
		t.Errorf("%d sandboxes, %d results, %v", len(list), len(made), err)
	}
	if j, err := n.Jobs.Get(ctx(t), "train"); err != nil || j.Epoch != 2 || j.State != dsec.JobActive || j.Counts[dsec.Running] != many {
		t.Errorf("after the kills: %+v, %v", j, err)
	}
	if err := lease.Context().Err(); err != nil {
		t.Errorf("the owner lost it: %v", err)
	}

	// The owner is gone, and so is the node for a while.
	lease.Close()
	n.kill()
	must(t, n.start())
	eventually(t, "all are paused", func() bool {
		list, err := n.Sandboxes.List(ctx(t), dsec.Filter{Job: "train", State: dsec.Paused})
		return err == nil && len(list) == many
	})
	n.sh(t, made[0], "true") // wakes it, and it alone
	if list, err := n.Sandboxes.List(ctx(t), dsec.Filter{Job: "train", State: dsec.Paused}); err != nil || len(list) != many-1 {
		t.Errorf("%d are paused, %v", len(list), err)
	}
	for r, err := range n.Jobs.Stop(ctx(t), "train") {
		if err != nil || r.Err != nil {
			t.Errorf("stop: %+v, %v", r, err)
		}
	}
	wg.Wait() // the events end with the job
	count := map[dsec.JobEventType]int{}
	for i, e := range events {
		if e.Seq != uint64(i+1) {
			t.Fatalf("event %d has the number %d", i+1, e.Seq)
		}
		count[e.Type]++
	}
	if count[dsec.EventCreated] != many || count[dsec.EventPaused] != many || count[dsec.EventLease] != 1 || count[dsec.EventStopped] != many+1 {
		t.Errorf("events: %v", count)
	}
}

// TestLeaseSaysWhy: what a job's policy pauses or stops says that it was the lease, in its state,
// its record and the events, so that nobody takes it for a call of a user.
func TestLeaseSaysWhy(t *testing.T) {
	n := shared(t)
	for policy, state := range map[dsec.OnDisconnect]dsec.State{dsec.DisconnectPause: dsec.Paused, dsec.DisconnectStop: dsec.Stopped} {
		id := dsec.JobID("why-" + string(policy))
		j, err := n.Jobs.Create(ctx(t), dsec.JobSpec{ID: id, Lease: time.Second, OnDisconnect: policy}, dsec.CreateOptions{})
		must(t, err)
		spec := plain()
		spec.Job = id
		sb, err := n.Sandboxes.Create(dsec.WithEpoch(ctx(t), j.Epoch), spec, dsec.CreateOptions{})
		must(t, err)
		want := fmt.Sprintf("nobody holds the lease of job %s, epoch 1: its policy is %s", id, policy)
		for {
			if sb, err = n.Sandboxes.Get(ctx(t), sb.ID); err != nil || sb.State == state {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		must(t, err)
		if state == dsec.Stopped && (sb.Cause != dsec.CauseLease || sb.Detail != want) {
			t.Errorf("stopped by %q, %q", sb.Cause, sb.Detail)
		}
		for e, err := range n.Jobs.Events(ctx(t), id, dsec.JobEventOptions{Follow: true}) {
			must(t, err)
			if e.Sandbox != sb.ID || e.Type != dsec.EventPaused && e.Type != dsec.EventStopped {
				continue
			}
			if e.Detail != want || e.Type == dsec.EventStopped && (e.Cause != dsec.CauseLease || !e.Retry) {
				t.Errorf("event %+v, want %q", e, want)
			}
			break
		}
		told := false
		for r, err := range n.Trajectories.Records(ctx(t), sb.ID, 0) {
			must(t, err)
			told = told || strings.Contains(string(r.Raw), want)
		}
		if !told {
			t.Errorf("no record of %s has %q", sb.ID, want)
		}
		_, err = n.Sandboxes.Stop(ctx(t), sb.ID)
		must(t, err)
	}
}

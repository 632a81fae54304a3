package job_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/job"
)

// Each end is an event with its cause, and says whether another try is worth it.
func TestCauses(t *testing.T) {
	r := newRig(t)
	j := r.make("train", "", time.Minute)
	ends := []struct {
		state dsec.State
		cause dsec.Cause
		want  dsec.JobEventType
		retry bool
	}{
		{dsec.Stopped, dsec.CauseUser, dsec.EventStopped, false},
		{dsec.Stopped, dsec.CauseTTL, dsec.EventStopped, false},
		{dsec.Stopped, dsec.CauseIdle, dsec.EventStopped, false},
		{dsec.Stopped, dsec.CauseEvicted, dsec.EventStopped, true},
		{dsec.Stopped, dsec.CauseNodeDown, dsec.EventStopped, true},
		{dsec.Stopped, dsec.CauseLease, dsec.EventStopped, true},
		{dsec.Failed, dsec.CauseOOM, dsec.EventOOM, false},
		{dsec.Failed, dsec.CauseDisk, dsec.EventFailed, false},
		{dsec.Failed, dsec.CauseGuestDied, dsec.EventFailed, true},
		{dsec.LostGone, dsec.CauseNodeLost, dsec.EventLost, true},
	}
	boxes := r.fill("train", j.Epoch, len(ends))
	want := map[dsec.SandboxID]int{}
	for i, e := range ends {
		id := boxes[i].Sandbox.ID
		r.node.turn(id, e.state, e.cause)
		want[id] = i
	}
	n := 0
	for i, ev := range r.events("train", 0) {
		if ev.Seq != uint64(i+1) {
			t.Errorf("event %d has the number %d", i+1, ev.Seq)
		}
		if ev.Type == dsec.EventCreated {
			continue
		}
		e := ends[want[ev.Sandbox]]
		n++
		if ev.Type != e.want || ev.Cause != e.cause || ev.Retry != e.retry || ev.Key == "" || ev.Time.IsZero() {
			t.Errorf("end %+v is event %+v", e, ev)
		}
	}
	if n != len(ends) {
		t.Errorf("%d events of %d ends", n, len(ends))
	}
}

// A reader that follows sees everything once, also over its own restarts, and
// the end of the job.
func TestFollow(t *testing.T) {
	r := newRig(t)
	j := r.make("train", "", time.Minute)
	done := make(chan []dsec.JobEvent)
	go func() {
		var all []dsec.JobEvent
		for over := false; !over; {
			over = true
			after := uint64(len(all))
			for e, err := range r.jobs.Events(t.Context(), "train", dsec.JobEventOptions{After: after, Follow: true}) {
				if err != nil {
					t.Errorf("events: %v", err)
					break
				}
				all = append(all, e)
				if len(all)%100 == 0 { // a connection that breaks
					over = false
					break
				}
			}
		}
		done <- all
	}()
	r.fill("train", j.Epoch, 300)
	if _, err := collect(r.jobs.Pause(t.Context(), "train")); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(r.jobs.Stop(t.Context(), "train")); err != nil {
		t.Fatal(err)
	}
	all := <-done
	for i, e := range all {
		if e.Seq != uint64(i+1) {
			t.Fatalf("event %d has the number %d", i+1, e.Seq)
		}
	}
	if n := types(all); n[dsec.EventCreated] != 300 || n[dsec.EventPaused] != 300 || n[dsec.EventStopped] != 301 || len(all) != 901 {
		t.Errorf("%v", n)
	}
}

// A reader that waits goes away with its context, and with the node.
func TestFollowEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.make("train", "", time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := collect(r.jobs.Events(ctx, "train", dsec.JobEventOptions{Follow: true}))
		wantKind(t, "a reader", err, dsec.Timeout)
		closed := make(chan error)
		go func() {
			_, err := collect(r.jobs.Events(t.Context(), "train", dsec.JobEventOptions{Follow: true}))
			closed <- err
		}()
		synctest.Wait()
		r.close()
		wantKind(t, "a reader at the end of the node", <-closed, dsec.Unavailable)
	})
}

// Of many events the oldest are dropped, and a reader is told how many.
func TestGap(t *testing.T) {
	r := &rig{t: t, journal: &memJournal{}, node: newNode(), config: job.Config{Events: 40}}
	r.open()
	defer func() { r.close() }()
	j := r.make("train", "", time.Minute)
	r.fill("train", j.Epoch, 100)
	r.jobs.Get(t.Context(), "train")
	check := func(what string) {
		t.Helper()
		all := r.events("train", 10)
		gap := all[0]
		if gap.Type != dsec.EventGap || gap.Missed == 0 || gap.Seq != 10+gap.Missed {
			t.Fatalf("%s: first %+v", what, gap)
		}
		for i, e := range all[1:] {
			if e.Seq != gap.Seq+uint64(i)+1 || e.Type != dsec.EventCreated {
				t.Errorf("%s: event %+v behind the gap of %d", what, e, gap.Missed)
			}
		}
		if last := all[len(all)-1].Seq; last != 100 || len(all) < 41 {
			t.Errorf("%s: %d events up to %d", what, len(all), last)
		}
		if rest := r.events("train", 99); len(rest) != 1 || rest[0].Seq != 100 {
			t.Errorf("%s: the last is %+v", what, rest)
		}
	}
	check("at first")
	if err := r.journal.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	r.kill()
	r.open()
	check("after a checkpoint and a kill")
}

// What happened while nobody was told is found at the next start: no event is
// missing, and none comes twice.
func TestNothingIsMissed(t *testing.T) {
	r := newRig(t)
	j := r.make("train", "", time.Hour)
	boxes := r.fill("train", j.Epoch, 10)
	before := r.events("train", 0)
	r.journal.set(func() { r.journal.dead = true }) // what is told from here on is lost
	r.node.turn(boxes[0].Sandbox.ID, dsec.Failed, dsec.CauseOOM)
	r.node.turn(boxes[1].Sandbox.ID, dsec.Paused, "")
	s := spec()
	s.Job = "train"
	if _, err := r.node.Create(t.Context(), s, dsec.CreateOptions{Key: job.SandboxKey("train", "late")}); err != nil {
		t.Fatal(err)
	}
	gone := boxes[2].Sandbox.ID
	r.node.mu.Lock()
	delete(r.node.boxes, gone)
	r.node.mu.Unlock()
	r.kill()
	r.open()
	after := r.events("train", 0)
	if !slices.Equal(after[:len(before)], before) {
		t.Errorf("what was seen has changed: %+v, was %+v", after, before)
	}
	n := types(after[len(before):])
	if n[dsec.EventOOM] != 1 || n[dsec.EventPaused] != 1 || n[dsec.EventCreated] != 1 || n[dsec.EventLost] != 1 || len(after) != len(before)+4 {
		t.Errorf("events of the meantime: %+v", after[len(before):])
	}
	r.kill()
	r.open()
	if again := r.events("train", 0); !slices.Equal(again, after) {
		t.Errorf("a restart made %+v of %+v", again, after)
	}
	if c := r.get("train").Counts; c[dsec.Running] != 8 || c[dsec.Paused] != 1 || c[dsec.Failed] != 1 || c[dsec.LostGone] != 1 {
		t.Errorf("counts %v", c)
	}
}

// A checkpoint at any time holds everything that was appended before.
func TestCheckpoint(t *testing.T) {
	r := newRig(t)
	j := r.make("train", "", time.Hour)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				if err := r.journal.Checkpoint(); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	r.fill("train", j.Epoch, 2000)
	if _, err := collect(r.jobs.Pause(t.Context(), "train")); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(r.jobs.Label(t.Context(), "train", map[string]string{"a": "b"})); err != nil {
		t.Fatal(err)
	}
	want := r.get("train")
	all := r.events("train", 0)
	close(stop)
	<-stopped
	r.kill()
	r.open()
	got := r.get("train")
	got.LeaseEnds = want.LeaseEnds
	if got.Counts[dsec.Paused] != 2000 || got.Events != want.Events || got.Labels["a"] != "b" || got.Epoch != 1 || !got.Created.Equal(want.Created) {
		t.Errorf("%+v became %+v", want, got)
	}
	if again := r.events("train", 0); !slices.Equal(again, all) {
		t.Errorf("%d events became %d", len(all), len(again))
	}
}

// Events wait for a journal that cannot be written, and none is shown before it
// is.
func TestEventsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		j := r.make("train", "", time.Hour)
		r.get("train")
		r.journal.set(func() { r.journal.fail = errors.New("no space left") })
		r.fill("train", j.Epoch, 3)
		if all := r.events("train", 0); len(all) != 0 {
			t.Errorf("events %+v of a full disk", all)
		}
		r.journal.set(func() { r.journal.fail = nil })
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if all := r.events("train", 0); len(all) != 3 {
			t.Errorf("events %+v", all)
		}
	})
}

// A journal of another build is refused, and so is one that is none.
func FuzzReplay(f *testing.F) {
	j := &memJournal{}
	r := &rig{t: f, journal: j, node: newNode()}
	r.open()
	made := r.make("train", "", time.Minute)
	r.fill("train", made.Epoch, 3)
	r.get("train")
	r.close()
	j.Checkpoint()
	for _, b := range j.records {
		f.Add(b)
	}
	f.Add([]byte(`{"v":2,"op":"made","j":"x"}`))
	f.Add([]byte(`{"v":1,"op":"happened","j":"x","ev":[{"n":18446744073709551615,"e":"lost","s":"sb"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		made := []byte(`{"v":1,"op":"made","j":"x","at":1,"state":"active","policy":"keep"}`)
		j, err := job.Open(job.Config{Journal: &memJournal{records: [][]byte{made, b}}})
		if err != nil {
			return
		}
		defer j.Close()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // nothing runs that could be waited for
		if _, err := j.List(ctx); err != nil {
			t.Error(err)
		}
	})
}

package edge_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/journal"
)

// sameRecord fails unless two records agree in all but use.
func sameRecord(t *testing.T, got, want dsec.Sandbox) {
	t.Helper()
	got.LastUsed, want.LastUsed = time.Time{}, time.Time{}
	got.Usage, want.Usage = dsec.Usage{}, dsec.Usage{}
	// The record's own write is timed after it was written.
	got.Took, want.Took = 0, 0
	trim := func(s []dsec.Stage) []dsec.Stage {
		return slices.DeleteFunc(slices.Clone(s), func(s dsec.Stage) bool { return s.Name == edge.StageJournal })
	}
	got.Stages, want.Stages = trim(got.Stages), trim(want.Stages)
	if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
		t.Errorf("record after the restart\n%s\nwant\n%s", g, w)
	}
}

// An edge that is closed or killed harms no sandbox and no running command.
func TestRestartAdopts(t *testing.T) {
	for name, end := range map[string]func(*rig){"close": (*rig).close, "kill": (*rig).kill} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, synthetic.Options{})
			r.open()
			s := spec()
			s.Labels = map[string]string{"x": "y"}
			s.Job = "j"
			a, b := r.create(s, "key"), r.create(spec(), "")
			cmd, err := r.node.Services().Commands.Start(t.Context(), dsec.Call{Sandbox: a.ID}, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.node.Extend(t.Context(), a.ID, 5*time.Hour); err != nil {
				t.Fatal(err)
			}
			if _, err := r.node.Stop(t.Context(), b.ID); err != nil {
				t.Fatal(err)
			}
			a, b = r.get(a.ID), r.get(b.ID)
			end(r)
			r.open()
			defer r.close()
			sameRecord(t, r.get(a.ID), a)
			sameRecord(t, r.get(b.ID), b)
			if r.adopted.Adopted != 1 || r.adopted.Records != 2 || r.adopted.Rebooted {
				t.Errorf("adopted %+v", r.adopted)
			}
			eventually(t, "the running command is counted", func() bool { return r.get(a.ID).Usage.Commands == 1 })
			c := r.node.Services().Commands
			on := dsec.Call{Sandbox: a.ID}
			if _, err := c.Write(t.Context(), on, cmd.ID, dsec.StdinWrite{Data: []byte("still here"), Close: true}); err != nil {
				t.Fatal(err)
			}
			st, err := c.Wait(t.Context(), on, cmd.ID)
			out, _ := c.Read(t.Context(), on, cmd.ID, dsec.Stdout, 0, 100)
			if err != nil || st.Outcome != dsec.Exited || string(out) != "still here" {
				t.Errorf("command ended %v with %q, %v", st.Outcome, out, err)
			}
			if got, err := r.node.Stop(t.Context(), a.ID); err != nil || got.Cause != dsec.CauseUser {
				t.Errorf("stop of an adopted sandbox gave %+v, %v", got, err)
			}
			if m := r.host.Machines(); len(m) != 0 {
				t.Errorf("machines %v are left", m)
			}
		})
	}
}

func TestWhatARestartFinds(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	lives, died, ending, gone := r.create(spec(), ""), r.create(spec(), ""), r.create(spec(), ""), r.create(spec(), "")
	// Two ends were decided; one machine was still there when the edge died.
	for _, sb := range []dsec.Sandbox{ending, gone} {
		r.host.Fail(synthetic.OpStop, 1, errors.New("boom"))
		if _, err := r.node.Stop(t.Context(), sb.ID); err == nil {
			t.Fatal("the stop did not fail")
		}
	}
	r.kill()
	r.host.Crash(died.ID, dsec.CauseGuestDied, "")
	r.host.Crash(gone.ID, dsec.CauseGuestDied, "")
	orphan := r.key.New(r.place)
	if _, err := r.host.Driver().Start(t.Context(), driver.Config{ID: orphan}); err != nil {
		t.Fatal(err)
	}
	r.open()
	defer r.close()
	if got := r.get(lives.ID); got.State != dsec.Running {
		t.Errorf("the living sandbox is %s", got.State)
	}
	r.wantEnd(died.ID, dsec.Failed, dsec.CauseGuestDied)
	r.wantEnd(gone.ID, dsec.Stopped, dsec.CauseUser)
	got, err := r.node.Wait(t.Context(), ending.ID)
	if err != nil || got.State != dsec.Stopped || got.Cause != dsec.CauseUser {
		t.Errorf("the ending sandbox became %+v, %v", got, err)
	}
	eventually(t, "the orphan is removed", func() bool { return slices.Equal(r.host.Machines(), []dsec.SandboxID{lives.ID}) })
	if a := r.adopted; a.Adopted != 1 || a.Orphans != 1 || a.Gone != 1 || a.Ending != 2 {
		t.Errorf("adopted %+v", a)
	}
}

func TestReboot(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	sb := r.create(spec(), "")
	r.kill()
	r.host.Reboot()
	r.boot = "boot-2"
	r.open()
	got := r.wantEnd(sb.ID, dsec.LostGone, dsec.CauseNodeLost)
	if !strings.Contains(got.Detail, "reboot") {
		t.Errorf("detail %q", got.Detail)
	}
	_, err := r.node.Services().Commands.List(t.Context(), dsec.Call{Sandbox: sb.ID})
	wantKind(t, "call of a lost sandbox", err, dsec.Lost)
	// The next restart on the same boot is not a reboot again.
	sb = r.create(spec(), "")
	r.close()
	r.host.Crash(sb.ID, dsec.CauseGuestDied, "")
	r.open()
	defer r.close()
	r.wantEnd(sb.ID, dsec.Failed, dsec.CauseGuestDied)
}

func TestNewEpochLosesWhatWas(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	sb := r.create(spec(), "k")
	r.close()
	r.place.Epoch++
	r.open()
	defer r.close()
	eventually(t, "the old machine is stopped", func() bool { return len(r.host.Machines()) == 0 })
	_, err := r.node.Get(t.Context(), sb.ID)
	wantKind(t, "get", err, dsec.Lost)
	eventually(t, "it is listed as lost", func() bool {
		all, err := r.node.List(t.Context(), dsec.Filter{State: dsec.LostGone})
		return err == nil && len(all) == 1 && all[0].Cause == dsec.CauseNodeLost
	})
	if fresh := r.create(spec(), ""); fresh.State != dsec.Running {
		t.Errorf("a new sandbox is %s", fresh.State)
	}
}

func TestKindWithoutDriver(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	r.create(spec(), "")
	r.close()
	was := r.host
	r.host = synthetic.New(synthetic.Options{Kind: dsec.FnCall})
	if _, err := r.tryOpen(); err == nil || !strings.Contains(err.Error(), "no driver of kind container") {
		t.Fatalf("open without the driver of a living sandbox: %v", err)
	}
	// Nothing was changed by the refusal.
	r.host = was
	r.open()
	defer r.close()
	if r.adopted.Adopted != 1 {
		t.Errorf("adopted %+v", r.adopted)
	}
}

// Whatever record the edge dies after, the next one finds a table and a host
// that agree.
func TestKillAfterEachRecord(t *testing.T) {
	for left := 2; left < 12; left++ { // the first is Open's own
		r := newRig(t, synthetic.Options{})
		r.open()
		r.mem.mu.Lock()
		r.mem.left = left - 1
		r.mem.onKill = func() { r.driver.Detach() }
		r.mem.mu.Unlock()
		known := map[dsec.SandboxID]bool{}
		var stopped []dsec.SandboxID
		ctx := t.Context()
		for i := range 4 {
			sb, err := r.node.Create(ctx, spec(), dsec.CreateOptions{Key: fmt.Sprint("k", i)})
			if err != nil {
				continue
			}
			known[sb.ID] = true
			r.node.Extend(ctx, sb.ID, time.Hour)
			if i%2 == 0 {
				if _, err := r.node.Stop(ctx, sb.ID); err == nil {
					stopped = append(stopped, sb.ID)
				}
			}
		}
		r.kill()
		r.open()
		eventually(t, "the ends are finished", func() bool {
			all, _ := r.node.List(ctx, dsec.Filter{})
			return len(all) == len(r.host.Machines())
		})
		all, err := r.node.List(ctx, dsec.Filter{All: true})
		if err != nil {
			t.Fatal(err)
		}
		machines := r.host.Machines()
		for _, sb := range all {
			if !known[sb.ID] && sb.State == dsec.Running {
				// The record was the last thing that was written: its caller
				// finds it again by its key.
				if again := r.create(spec(), sb.Key); again.ID != sb.ID {
					t.Errorf("killed after %d: key %s gives %s, not %s", left, sb.Key, again.ID, sb.ID)
				}
			}
			if sb.State == dsec.Running != slices.Contains(machines, sb.ID) {
				t.Errorf("killed after %d: sandbox %s is %s, machines %v", left, sb.ID, sb.State, machines)
			}
		}
		for id := range known {
			if _, err := r.node.Get(ctx, id); err != nil {
				t.Errorf("killed after %d: a sandbox that was given out: %v", left, err)
			}
		}
		for _, id := range stopped {
			if sb := r.get(id); sb.State == dsec.Running {
				t.Errorf("killed after %d: a sandbox that was stopped runs", left)
			}
		}
		r.close()
	}
}

// Ended records are forgotten after a day, by a running node, by one that was
// down meanwhile, and across a checkpoint; then their IDs are NotFound.
func TestForgetting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, synthetic.Options{})
		r.open()
		a, b, c := r.create(spec(), "a"), r.create(spec(), "b"), r.create(spec(), "")
		stop := func(id dsec.SandboxID) {
			if _, err := r.node.Stop(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		stop(a.ID)
		time.Sleep(23 * time.Hour) // fake
		r.wantEnd(a.ID, dsec.Stopped, dsec.CauseUser)
		r.wantEnd(b.ID, dsec.Stopped, dsec.CauseTTL)
		time.Sleep(62 * time.Minute)
		_, err := r.node.Get(t.Context(), a.ID)
		wantKind(t, "forgotten", err, dsec.NotFound)
		if again := r.create(spec(), "a"); again.ID == a.ID {
			t.Error("a forgotten key gives the old sandbox")
		}
		r.close()
		time.Sleep(48 * time.Hour)
		for range 2 {
			r.open()
			for _, id := range []dsec.SandboxID{a.ID, b.ID, c.ID} {
				_, err := r.node.Get(t.Context(), id)
				wantKind(t, "forgotten after a restart", err, dsec.NotFound)
			}
			r.close()
		}
	})
}

// A checkpoint compacts the real journal, and what is opened from it is the
// same table.
func TestCheckpointOfTheRealJournal(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, synthetic.Options{})
	r.config = func(c *edge.Config) { c.Compact = 100 }
	reopen := func() *journal.Journal {
		j, err := journal.Open(dir, journal.Options{})
		if err != nil {
			t.Fatal(err)
		}
		r.journal = &edge.Log{Journal: j}
		r.open()
		return j
	}
	j := reopen()
	for i := range 60 {
		sb := r.create(spec(), fmt.Sprint(i))
		if i%2 == 0 {
			if _, err := r.node.Stop(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "a checkpoint", func() bool { return j.Stats().Snapshot > 100 })
	before, err := r.node.List(t.Context(), dsec.Filter{All: true})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.close()
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		j = reopen()
		after, err := r.node.List(t.Context(), dsec.Filter{All: true})
		if err != nil || len(after) != len(before) {
			t.Fatalf("%d records after a restart, %v, want %d", len(after), err, len(before))
		}
		for i := range after {
			sameRecord(t, after[i], before[i])
		}
	}
	r.close()
	j.Close()
}

func TestJournalThatCannotBeRead(t *testing.T) {
	for name, b := range map[string]string{
		"no record":      "nonsense",
		"newer format":   `{"v":99,"op":"boot"}`,
		"unknown change": `{"v":1,"op":"danced"}`,
		"no spec":        `{"v":1,"op":"created","id":"x","at":1}`,
		"bad spec":       `{"v":1,"op":"created","id":"x","at":1,"spec":7}`,
	} {
		r := newRig(t, synthetic.Options{})
		r.mem.records = [][]byte{[]byte(b)}
		if _, err := r.tryOpen(); err == nil {
			t.Errorf("%s: opened", name)
			r.close()
		}
	}
}

func TestJournalThatFails(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	n := r.open()
	defer r.close()
	a, b := r.create(spec(), ""), r.create(spec(), "")
	r.mem.setFail(errors.New("no space"))
	_, err := n.Create(t.Context(), spec(), dsec.CreateOptions{})
	wantKind(t, "create", err, dsec.Unavailable)
	if m := r.host.Machines(); len(m) != 2 {
		t.Errorf("machines %v, want the two of before", m)
	}
	starts := r.host.Calls(synthetic.OpStart)
	_, err = n.Create(t.Context(), spec(), dsec.CreateOptions{})
	wantKind(t, "create on a node known to be broken", err, dsec.Unavailable)
	if r.host.Calls(synthetic.OpStart) != starts {
		t.Error("a machine was started though its record cannot be written")
	}
	_, err = n.Extend(t.Context(), a.ID, time.Hour)
	wantKind(t, "extend", err, dsec.Unavailable)
	if got := r.exec(a.ID, "echo on"); got != "on\n" {
		t.Errorf("exec on a broken node wrote %q", got)
	}
	if got, err := n.Stop(t.Context(), b.ID); err != nil || got.State != dsec.Stopped {
		t.Errorf("stop on a broken node gave %+v, %v", got, err)
	}
	r.mem.setFail(nil)
	eventually(t, "it heals", func() bool { return !n.Counts().Broken })
	r.create(spec(), "")
	r.close()
	r.open()
	// What could not be appended is in the checkpoint that healed it.
	r.wantEnd(b.ID, dsec.Stopped, dsec.CauseUser)
}

package edge_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

func (r *rig) pause(id dsec.SandboxID) dsec.Sandbox {
	r.t.Helper()
	sb, err := r.node.Pause(r.t.Context(), id)
	if err != nil || sb.State != dsec.Paused || sb.Paused.IsZero() || !r.host.Paused(id) {
		r.t.Fatalf("pause: %s since %v, %v; the machine stands: %v", sb.State, sb.Paused, err, r.host.Paused(id))
	}
	return sb
}

// wantRuns fails unless the sandbox and its machine run.
func (r *rig) wantRuns(what string, id dsec.SandboxID) {
	r.t.Helper()
	if sb := r.get(id); sb.State != dsec.Running || !sb.Paused.IsZero() || sb.Reclaimed != 0 || r.host.Paused(id) {
		r.t.Fatalf("%s: it is %s since %v, the machine stands: %v", what, sb.State, sb.Paused, r.host.Paused(id))
	}
}

func TestPauseAndResume(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	var mu sync.Mutex
	var events []string
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, fmt.Sprintf(format, args...))
	}
	r.config = func(c *edge.Config) {
		c.Events.Paused = func(e edge.PausedEvent) { note("paused %q", e.Detail) }
		c.Events.Resumed = func(e edge.ResumedEvent) { note("resumed %q, %d bytes were back", e.Detail, e.Reclaimed) }
		c.Events.Reclaimed = func(e edge.ReclaimedEvent) { note("reclaimed %d, %v", e.Bytes, e.Error) }
	}
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	r.host.SetUsage(sb.ID, dsec.Usage{Memory: 1000})
	first := r.pause(sb.ID)
	eventually(t, "its memory comes back", func() bool { return r.get(sb.ID).Reclaimed == 1000 })
	if again := r.pause(sb.ID); !again.Paused.Equal(first.Paused) || r.host.Calls(synthetic.OpPause) != 1 {
		t.Errorf("a second pause: since %v, was %v", again.Paused, first.Paused)
	}
	// Looking does not wake it, nor does what needs no guest.
	if l, err := r.node.List(t.Context(), dsec.Filter{State: dsec.Paused}); err != nil || len(l) != 1 || l[0].ID != sb.ID {
		t.Errorf("list of the paused: %v, %v", l, err)
	}
	if _, err := r.node.Extend(t.Context(), sb.ID, time.Hour); err != nil {
		t.Error(err)
	}
	if r.get(sb.ID).State != dsec.Paused {
		t.Error("looking woke it")
	}
	for range 2 {
		if got, err := r.node.Resume(t.Context(), sb.ID); err != nil || got.State != dsec.Running {
			t.Fatalf("resume: %+v, %v", got, err)
		}
	}
	r.wantRuns("after Resume", sb.ID)
	r.pause(sb.ID)
	if out := r.exec(sb.ID, "echo hello"); out != "hello\n" {
		t.Errorf("it printed %q", out)
	}
	r.wantRuns("after a command", sb.ID)
	r.pause(sb.ID)
	if got, err := r.node.Stop(t.Context(), sb.ID); err != nil || got.State != dsec.Stopped || !got.Paused.IsZero() {
		t.Errorf("stop of a paused one: %+v, %v", got, err)
	}
	for _, f := range []func(context.Context, dsec.SandboxID) (dsec.Sandbox, error){r.node.Pause, r.node.Resume} {
		_, err := f(t.Context(), sb.ID)
		wantKind(t, "pause or resume of an ended one", err, dsec.Conflict)
		_, err = f(t.Context(), r.key.New(dsec.Place{Node: 1}))
		wantKind(t, "pause or resume of another node's", err, dsec.NotFound)
	}
	r.wantNothing()
	mu.Lock()
	defer mu.Unlock()
	events = slices.DeleteFunc(events, func(s string) bool { return s == "reclaimed 0, <nil>" })
	want := []string{
		`paused ""`, "reclaimed 1000, <nil>", `resumed "", 1000 bytes were back`,
		`paused ""`, `resumed "a call", 0 bytes were back`, `paused ""`,
	}
	if !slices.Equal(events, want) {
		t.Errorf("events %q, want %q", events, want)
	}
}

func TestEveryCallWakes(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	on, ctx := dsec.Call{Sandbox: sb.ID}, t.Context()
	s := r.node.Services()
	if _, err := s.Files.Write(ctx, on, dsec.FileOp{Path: "/f"}, dsec.WriteOptions{}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	cmd, err := s.Commands.Start(ctx, on, dsec.Command{Shell: "cat", Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Commands.Write(ctx, on, cmd.ID, dsec.StdinWrite{Data: []byte("for those who read")}); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"list commands": func() error { _, err := s.Commands.List(ctx, on); return err },
		"write": func() error {
			_, err := s.Commands.Write(ctx, on, cmd.ID, dsec.StdinWrite{Data: []byte("x")})
			return err
		},
		"read": func() error { _, err := s.Commands.Read(ctx, on, cmd.ID, dsec.Stdout, 0, 1); return err },
		"attach": func() error {
			for _, err := range s.Commands.Attach(ctx, on, cmd.ID, 0) {
				return err
			}
			return nil
		},
		"stat": func() error { _, err := s.Files.Stat(ctx, on, dsec.FileOp{Path: "/f"}); return err },
		"list files": func() error {
			for _, err := range s.Files.List(ctx, on, dsec.FileOp{Path: "/"}, 1) {
				return err
			}
			return nil
		},
		"read file": func() error {
			f, err := s.Files.Read(ctx, on, dsec.FileOp{Path: "/f"}, dsec.ReadRange{})
			if err == nil {
				err = f.Close()
			}
			return err
		},
		"dial": func() error {
			c, err := s.Ports.Dial(ctx, on, 80)
			if err == nil {
				return c.Close()
			}
			if dsec.KindOf(err) == dsec.Unavailable { // nobody listens
				return nil
			}
			return err
		},
	} {
		r.pause(sb.ID)
		if err := call(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		r.wantRuns(name, sb.ID)
	}
}

func TestThousandCallsWakeItOnce(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	for round := range 3 {
		r.pause(sb.ID)
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				res, err := r.node.Services().Commands.Run(t.Context(), dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: "echo up"}, nil)
				if err != nil || string(res.Out) != "up\n" {
					t.Errorf("%q, %v", res.Out, err)
				}
			})
		}
		wg.Wait()
		if n := r.host.Calls(synthetic.OpResume); n != round+1 {
			t.Fatalf("round %d: resumed %d times", round, n)
		}
	}
}

// TestPauseStorm pauses, resumes and runs at once; the synthetic guest reports
// a command that reaches it while it stands.
func TestPauseStorm(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 300 {
				var err error
				switch {
				case i < 4:
					_, err = r.node.Services().Commands.Run(t.Context(), dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: "true"}, nil)
				case i < 7:
					_, err = r.node.Pause(t.Context(), sb.ID)
				default:
					_, err = r.node.Resume(t.Context(), sb.ID)
				}
				// A pause may come between the look and the call: the guest of a
				// real machine then has the command wait for the resume.
				if err != nil && !strings.Contains(err.Error(), "was started in a machine that is paused") {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	r.exec(sb.ID, "true")
	r.wantRuns("after the storm", sb.ID)
}

func TestCommandAfterEachResume(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	for i := range 1000 {
		r.pause(sb.ID)
		if i%2 == 0 {
			if _, err := r.node.Resume(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		if out := r.exec(sb.ID, fmt.Sprintf("echo %d", i)); out != fmt.Sprintf("%d\n", i) {
			t.Fatalf("command %d printed %q", i, out)
		}
	}
}

func TestPauseThatFails(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	boom := dsec.Errorf(dsec.Unavailable, "boom")
	r.host.Fail(synthetic.OpPause, 1, boom)
	_, err := r.node.Pause(t.Context(), sb.ID)
	wantKind(t, "pause", err, dsec.Unavailable)
	r.wantRuns("after a pause that failed", sb.ID)

	r.mem.setFail(errors.New("disk full"))
	_, err = r.node.Pause(t.Context(), sb.ID)
	wantKind(t, "pause that cannot be recorded", err, dsec.Unavailable)
	r.wantRuns("after a pause without a record", sb.ID)
	r.mem.setFail(nil)

	since := r.pause(sb.ID).Paused
	r.host.Fail(synthetic.OpResume, 1, boom)
	_, err = r.node.Services().Commands.List(t.Context(), dsec.Call{Sandbox: sb.ID})
	wantKind(t, "a call whose resume fails", err, dsec.Unavailable)
	if got := r.get(sb.ID); got.State != dsec.Paused || !got.Paused.Equal(since) {
		t.Errorf("after a resume that failed it is %s since %v", got.State, got.Paused)
	}
	// One that cannot be recorded happens all the same.
	r.mem.setFail(errors.New("disk full"))
	r.exec(sb.ID, "true")
	r.wantRuns("after a resume without a record", sb.ID)
	r.mem.setFail(nil)

	// The end of a machine under a turn is told as such.
	r.pause(sb.ID)
	r.host.Intercept(synthetic.OpResume, 1, func(context.Context) error {
		r.host.Crash(sb.ID, dsec.CauseOOM, "gone")
		return dsec.Errorf(dsec.Conflict, "the machine is gone")
	})
	_, err = r.node.Services().Commands.List(t.Context(), dsec.Call{Sandbox: sb.ID})
	wantKind(t, "a call whose sandbox ends", err, dsec.Conflict)
	if got, err := r.node.Wait(t.Context(), sb.ID); err != nil || got.Cause != dsec.CauseOOM {
		t.Errorf("it ended %+v, %v", got, err)
	}
}

// TestCallerLeavesTurn lets a caller go away in the middle: the turn is
// everybody's.
func TestCallerLeavesTurn(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	for op, call := range map[string]func(context.Context, dsec.SandboxID) (dsec.Sandbox, error){
		synthetic.OpPause: r.node.Pause, synthetic.OpResume: r.node.Resume,
	} {
		if op == synthetic.OpResume {
			r.pause(sb.ID)
		} else {
			r.exec(sb.ID, "true")
		}
		ctx, cancel := context.WithCancel(t.Context())
		r.host.Intercept(op, 1, func(context.Context) error { cancel(); return nil })
		if _, err := call(ctx, sb.ID); err != nil && dsec.KindOf(err) != dsec.Canceled {
			t.Errorf("%s: %v", op, err)
		}
		eventually(t, op+" is carried out", func() bool {
			return r.host.Paused(sb.ID) == (op == synthetic.OpPause) && (r.get(sb.ID).State == dsec.Paused) == (op == synthetic.OpPause)
		})
	}
}

func TestRestartFindsPaused(t *testing.T) {
	for _, how := range []string{"close", "kill", "checkpoint"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t, synthetic.Options{})
			if how == "checkpoint" {
				r.config = func(c *edge.Config) { c.Compact = 1 }
			}
			r.open()
			sb := r.create(spec(), "")
			r.host.SetUsage(sb.ID, dsec.Usage{Memory: 5})
			before := r.pause(sb.ID)
			eventually(t, "memory is back", func() bool { return r.get(sb.ID).Reclaimed == 5 })
			if how == "kill" {
				r.kill()
			} else {
				r.close()
			}
			r.open()
			defer r.close()
			if got := r.get(sb.ID); got.State != dsec.Paused || !got.Paused.Equal(before.Paused) || got.Reclaimed != 5 || !r.host.Paused(sb.ID) {
				t.Errorf("after the restart: %s since %v, %d bytes", got.State, got.Paused, got.Reclaimed)
			}
			r.exec(sb.ID, "true")
			r.wantRuns("after a command", sb.ID)
		})
	}
}

// TestKillInATurn kills the edge on both sides of each step of a pause and of a
// resume: whatever was told holds, and the sandbox answers.
func TestKillInATurn(t *testing.T) {
	for _, c := range []struct {
		name string
		turn func(r *rig, id dsec.SandboxID)
		want dsec.State
	}{
		{"before it stands", func(r *rig, id dsec.SandboxID) {
			r.host.Intercept(synthetic.OpPause, 1, func(context.Context) error { r.kill0(); return errKilled })
			r.node.Pause(r.t.Context(), id) //nolint:errcheck // it is killed
		}, dsec.Running},
		{"before the record", func(r *rig, id dsec.SandboxID) {
			r.host.Intercept(synthetic.OpPause, 1, func(context.Context) error { r.kill0(); return nil })
			r.host.Fail(synthetic.OpResume, 1, errKilled) // nor can it undo anything
			r.node.Pause(r.t.Context(), id)               //nolint:errcheck // it is killed
		}, dsec.Running},
		{"after the record", func(r *rig, id dsec.SandboxID) { r.pause(id) }, dsec.Paused},
		{"before it goes on", func(r *rig, id dsec.SandboxID) {
			r.pause(id)
			r.host.Intercept(synthetic.OpResume, 1, func(context.Context) error { r.kill0(); return errKilled })
			r.node.Resume(r.t.Context(), id) //nolint:errcheck // it is killed
		}, dsec.Running},
		{"the machine goes against the record", func(r *rig, id dsec.SandboxID) {
			r.pause(id)
			r.mem.setFail(errors.New("disk full"))
			r.exec(id, "true")
			r.kill()
			r.mem.setFail(nil)
		}, dsec.Running},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, synthetic.Options{})
			r.open()
			sb := r.create(spec(), "")
			c.turn(r, sb.ID)
			r.kill()
			r.open()
			defer r.close()
			eventually(t, "the machine is "+string(c.want), func() bool { return r.host.Paused(sb.ID) == (c.want == dsec.Paused) })
			if got := r.get(sb.ID); got.State != c.want {
				t.Errorf("it is %s, want %s", got.State, c.want)
			}
			if out := r.exec(sb.ID, "echo there"); out != "there\n" {
				t.Errorf("it printed %q", out)
			}
			r.wantRuns("in the end", sb.ID)
		})
	}
}

// kill0 ends the journal as a kill does, from within the node.
func (r *rig) kill0() {
	r.mem.mu.Lock()
	r.mem.dead = true
	r.mem.mu.Unlock()
}

func TestTimesOfAPaused(t *testing.T) {
	inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
		s := spec()
		s.TTL, s.Idle = time.Hour, time.Minute
		a, b := r.create(s, ""), r.create(s, "")
		r.pause(a.ID)
		r.pause(b.ID)
		sleep(59 * time.Minute)
		if got := r.get(a.ID); got.State != dsec.Paused {
			t.Fatalf("idle ended a paused one: %s, %s", got.State, got.Cause)
		}
		// Its idle time begins with the resume.
		if _, err := r.node.Extend(t.Context(), a.ID, time.Hour); err != nil {
			t.Fatal(err)
		}
		if _, err := r.node.Resume(t.Context(), a.ID); err != nil {
			t.Fatal(err)
		}
		sleep(time.Minute - time.Nanosecond)
		r.wantRuns("before its idle time", a.ID)
		sleep(time.Nanosecond)
		r.wantEnd(a.ID, dsec.Stopped, dsec.CauseIdle)
		r.wantEnd(b.ID, dsec.Stopped, dsec.CauseTTL)
		r.wantNothing()
	})
}

// TestPressure lets the host run short of memory.
func TestPressure(t *testing.T) {
	var mu sync.Mutex
	var events []edge.PressureEvent
	config := func(c *edge.Config) {
		c.Limits.PauseIdle = time.Minute
		c.Events.Pressure = func(e edge.PressureEvent) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		}
	}
	inFakeTime(t, synthetic.Options{}, config, func(t *testing.T, r *rig) {
		var all []dsec.Sandbox
		for range 6 {
			all = append(all, r.create(spec(), ""))
			r.host.SetUsage(all[len(all)-1].ID, dsec.Usage{Memory: 200 << 20})
			sleep(time.Second)
		}
		busy := all[0]
		if _, err := r.node.Services().Commands.Start(t.Context(), dsec.Call{Sandbox: busy.ID}, dsec.Command{Shell: "hang"}); err != nil {
			t.Fatal(err)
		}
		paused := func() (n []int) {
			for i, sb := range all {
				if r.get(sb.ID).State == dsec.Paused {
					n = append(n, i)
				}
			}
			return n
		}
		pressure := func(p float64) {
			r.figures.change(func(h *edge.HostSample) { h.Pressure.Memory = p; h.Available = 7 << 30 })
		}
		pressure(14)
		sleep(2 * time.Minute)
		if n := paused(); n != nil {
			t.Errorf("without pressure %v were paused", n)
		}
		pressure(16)
		sleep(1100 * time.Millisecond)
		if n := paused(); !slices.Equal(n, []int{1}) { // 128 MiB are asked for in a round
			t.Errorf("in the first round %v were paused, want the longest idle", n)
		}
		pressure(6) // between the levels it goes on
		sleep(time.Second)
		if n := paused(); !slices.Equal(n, []int{1, 2}) {
			t.Errorf("in the second round %v were paused", n)
		}
		pressure(5)
		sleep(time.Second)
		pressure(14) // and here it does not begin again
		sleep(time.Minute)
		if n := paused(); !slices.Equal(n, []int{1, 2}) {
			t.Errorf("after the pressure %v were paused", n)
		}
		// A use makes it young.
		r.exec(all[3].ID, "true")
		r.figures.change(func(h *edge.HostSample) { h.Available = 1700 << 20; h.Pressure.Memory = 90 })
		sleep(10 * time.Second)
		if n := paused(); !slices.Equal(n, []int{1, 2, 4, 5}) {
			t.Errorf("when memory is short %v were paused", n)
		}
		sleep(2 * time.Minute)
		if n := paused(); !slices.Equal(n, []int{1, 2, 3, 4, 5}) {
			t.Errorf("after a long shortage %v were paused", n)
		}
		if got := r.get(busy.ID); got.State != dsec.Running {
			t.Errorf("one with a running command is %s", got.State)
		}
		mu.Lock()
		defer mu.Unlock()
		var on []bool
		for _, e := range events {
			on = append(on, e.On)
		}
		if !slices.Equal(on, []bool{true, false, true}) {
			t.Errorf("pressure events %v", on)
		}
	})
}

// TestPressureOnMachines pauses machines that give their memory back by being
// paused, as virtual machines do.
func TestPressureOnMachines(t *testing.T) {
	inFakeTime(t, synthetic.Options{Kind: dsec.MicroVM, Whole: true}, func(c *edge.Config) { c.Limits.PauseIdle = time.Minute }, func(t *testing.T, r *rig) {
		s := spec()
		s.Kind = dsec.MicroVM
		sb := r.create(s, "")
		r.host.SetUsage(sb.ID, dsec.Usage{Memory: 200 << 20})
		sleep(2 * time.Minute)
		r.figures.change(func(h *edge.HostSample) { h.Pressure.Memory = 16; h.Available = 7 << 30 })
		sleep(1100 * time.Millisecond)
		got := r.get(sb.ID)
		if got.State != dsec.Paused || got.Reclaimed != 200<<20 {
			t.Errorf("it is %s and gave %d bytes back", got.State, got.Reclaimed)
		}
		r.figures.change(func(h *edge.HostSample) { *h = roomy() })
		if out := r.exec(sb.ID, "echo awake"); out != "awake\n" {
			t.Errorf("it says %q", out)
		}
	})
}

package trajectory_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

func TestEveryChangeIsRecorded(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	on := dsec.Call{Sandbox: id}
	ctx := dsec.WithCaller(t.Context(), dsec.Caller{Project: "p", Token: "trainer"})
	if _, err := r.Commands.Run(ctx, on, dsec.Command{Shell: "echo out"}, []byte("in")); err != nil {
		t.Fatal(err)
	}
	st, err := r.Commands.Start(ctx, on, dsec.Command{Shell: "cat", Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Data: []byte("fed")}); err != nil {
		t.Fatal(err)
	}
	if err := r.Commands.Signal(ctx, on, st.ID, "TERM"); err != nil {
		t.Fatal(err)
	}
	if st, err = r.Commands.Wait(ctx, on, st.ID); err != nil || st.Signal != "TERM" || !st.Step.IsZero() {
		t.Fatalf("%+v %v", st, err)
	}
	if _, err := r.Files.Write(ctx, on, dsec.FileOp{Path: "/f"}, dsec.WriteOptions{}, strings.NewReader("content")); err != nil {
		t.Fatal(err)
	}
	if err := r.Files.Move(ctx, on, dsec.FileOp{Path: "/f"}, "/g"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "remove", r.Files.Remove(ctx, on, dsec.FileOp{Path: "/none"}), dsec.NotFound)
	if _, err := r.Sandboxes.Stop(ctx, id); err != nil {
		t.Fatal(err)
	}
	all := r.records(id)
	want := "create command command= command stdin stdin= signal signal= command= write write= move move= remove remove! stop end"
	if got := ops(all); got != want {
		t.Fatalf("recorded\n%s, want\n%s", got, want)
	}
	if all[1].Who.Token != "trainer" || all[1].Who.Project != "p" || all[15].Who.Token != "trainer" {
		t.Errorf("who: %+v %+v", all[1].Who, all[15].Who)
	}
	for seq, want := range map[uint64]string{2: "in", 5: "fed", 11: "content"} {
		body, err := r.Trajectories.Body(ctx, id, seq)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		b.ReadFrom(body)
		if b.String() != want {
			t.Errorf("body of record %d: %q, want %q", seq, b.String(), want)
		}
	}
	r.close()
}

// TestPaused answers steps without waking the sandbox; what is new wakes it, and
// so does nothing else. A command that stood still is followed by the next
// process once it goes on.
func TestPaused(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	r.run(step(id, "s", 1), "true")
	long, err := r.Commands.Start(t.Context(), step(id, "s", 2), sh("sleep 0.2"))
	if err != nil {
		t.Fatal(err)
	}
	state := func() dsec.State {
		sb, err := r.Sandboxes.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		return sb.State
	}
	if _, err := r.Sandboxes.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.open()
	if res := r.run(step(id, "s", 1), "true"); !res.Replayed || state() != dsec.Paused {
		t.Fatalf("%+v, %s", res, state())
	}
	r.run(step(id, "s", 3), "true")
	if s := state(); s != dsec.Running {
		t.Fatal(s)
	}
	if st, err := r.Commands.Wait(t.Context(), dsec.Call{Sandbox: id}, long.ID); err != nil || st.Outcome != dsec.Exited {
		t.Fatalf("%+v %v", st, err)
	}
	want := "create command command= command pause pause= command resume"
	if got := ops(r.records(id)); !strings.HasPrefix(got, want) || strings.Contains(got, "!") || strings.Count(got, "=") != 4 {
		t.Errorf("recorded\n%s, want\n%s and two answers", got, want)
	}
	r.close()
}

// TestFastForward repeats steps: of a living sandbox, an ended one, one whose
// process was killed and whose power was cut, and one in the archive.
func TestFastForward(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	warn := dsec.Command{Argv: []string{"warn", "no"}}
	check := func(when string) {
		t.Helper()
		res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("echo one"), nil)
		if err != nil || string(res.Out) != "one\n" || !res.Replayed || res.Outcome != dsec.Exited || res.Step != step(id, "s", 1).Step {
			t.Fatalf("%s: %+v %v", when, res, err)
		}
		res, err = r.Commands.Run(t.Context(), step(id, "s", 7), warn, nil)
		if err != nil || string(res.Err) != "no\n" || !res.Replayed {
			t.Fatalf("%s: %+v %v", when, res, err)
		}
		st, err := r.Commands.Wait(t.Context(), dsec.Call{Sandbox: id}, res.ID)
		if err != nil || st.Outcome != dsec.Exited || st.Stderr.Total != 3 {
			t.Fatalf("%s: %+v %v", when, st, err)
		}
		out := ""
		for o, err := range r.Commands.Attach(t.Context(), dsec.Call{Sandbox: id}, res.ID, 1) {
			if err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			out += string(o.Data)
		}
		if out != "o\n" {
			t.Fatalf("%s: attached to %q", when, out)
		}
		_, err = r.Commands.Run(t.Context(), step(id, "s", 1), sh("echo two"), nil)
		wantKind(t, when+": another command", err, dsec.Diverged, `"shell"`, `"echo one"`, `"echo two"`, "step 1", `"s"`)
		_, err = r.Commands.Run(t.Context(), step(id, "s", 1), dsec.Command{Shell: "echo one", Timeout: 90 * time.Second}, nil)
		wantKind(t, when+": another timeout", err, dsec.Diverged, `"timeout"`, "recorded nothing", "asked 1m30s")
		err = r.Files.Remove(t.Context(), step(id, "s", 1), dsec.FileOp{Path: "/x"})
		wantKind(t, when+": another operation", err, dsec.Diverged, "operation")
	}
	if res := r.run(step(id, "s", 1), "echo one"); res.Replayed || string(res.Out) != "one\n" {
		t.Fatalf("%+v", res)
	}
	// Numbers are names: a gap, then a lower one.
	if _, err := r.Commands.Run(t.Context(), step(id, "s", 7), warn, nil); err != nil {
		t.Fatal(err)
	}
	r.run(step(id, "s", 3), "true")
	check("alive")
	if n := r.inGuest(id); n != 3 {
		t.Fatalf("%d commands ran, want 3", n)
	}
	r.kill(process)
	r.open()
	check("killed")
	r.kill(func(d *journaltest.CrashFS) *journaltest.CrashFS { return d.PowerCut(rand.New(rand.NewPCG(1, 2))) })
	r.open()
	check("power cut")
	if n := r.inGuest(id); n != 3 {
		t.Fatalf("%d commands ran, want 3", n)
	}
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	check("ended")
	_, err := r.Commands.Run(t.Context(), step(id, "s", 8), sh("true"), nil)
	wantKind(t, "a new step of an ended sandbox", err, dsec.Conflict)
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("archived")
	r.kill(process)
	r.open()
	check("archived and killed")
	r.records(id)
	r.close()
}

// TestOneStepTwoCallers has many callers at once: one runs, the others attach.
func TestOneStepTwoCallers(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	var wg sync.WaitGroup
	replayed := make(chan bool, 50)
	for range cap(replayed) {
		wg.Go(func() {
			res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("sleep 0.05"), nil)
			if err != nil {
				t.Error(err)
			}
			replayed <- res.Replayed
		})
	}
	wg.Wait()
	first := 0
	for range cap(replayed) {
		if !<-replayed {
			first++
		}
	}
	if n := r.inGuest(id); n != 1 || first != 1 {
		t.Fatalf("%d commands ran, %d callers were first", n, first)
	}
	if got := ops(r.records(id)); got != "create command command=" {
		t.Fatal(got)
	}
	r.close()
}

// hold is a node's Commands whose Run can be stopped before or after it.
type hold struct {
	dsec.Commands
	before, after chan struct{} // nil lets it pass
	reached       chan struct{}
}

func (h *hold) Run(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	stop := func(gate chan struct{}) error {
		if gate == nil {
			return nil
		}
		h.reached <- struct{}{}
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := stop(h.before); err != nil {
		return dsec.Result{}, err
	}
	res, err := h.Commands.Run(ctx, on, c, stdin)
	if e := stop(h.after); e != nil {
		return dsec.Result{}, e
	}
	return res, err
}

// TestStepAfterCrash is the table of docs/decisions/trajectory.md: what a
// repeated step gets after the node's process was killed in the middle.
func TestStepAfterCrash(t *testing.T) {
	for _, c := range []struct {
		name   string
		line   string
		hold   func(*hold)
		while  func(r *rig, id dsec.SandboxID) // the process is dead
		want   dsec.Outcome
		replay bool
		ran    int
	}{
		{name: "running in the guest", line: "sleep 0.2", want: dsec.Exited, ran: 1},
		{name: "finished in the guest", line: "true", hold: func(h *hold) { h.after = make(chan struct{}) }, want: dsec.Exited, ran: 1},
		{name: "unknown to the guest", line: "true", hold: func(h *hold) { h.before = make(chan struct{}) }, want: dsec.Exited, ran: 1},
		{name: "guest gone", line: "sleep 1000", while: func(r *rig, id dsec.SandboxID) {
			r.host.Crash(id, dsec.CauseGuestDied, "for the test")
		}, want: dsec.Interrupted, replay: true, ran: -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			h := &hold{reached: make(chan struct{}, 1)}
			if c.hold != nil {
				c.hold(h)
			}
			r.inner = func(s dsec.Services) dsec.Services {
				h.Commands = s.Commands
				s.Commands = h
				return s
			}
			r.open()
			id := r.create()
			go r.Commands.Run(t.Context(), step(id, "s", 1), sh(c.line), nil)
			if c.hold != nil {
				<-h.reached
			} else {
				eventually(t, "the command", func() bool { return r.inGuest(id) == 1 })
			}
			r.kill(process)
			if c.while != nil {
				c.while(r, id)
			}
			r.inner = nil
			r.open()
			res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh(c.line), nil)
			if err != nil || res.Outcome != c.want {
				t.Fatalf("%+v %v, want %s", res, err, c.want)
			}
			if c.ran >= 0 {
				if n := r.inGuest(id); n != c.ran {
					t.Errorf("%d commands ran, want %d", n, c.ran)
				}
			} else if !strings.Contains(res.Detail, "guest-died") {
				t.Errorf("detail %q", res.Detail)
			}
			again, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh(c.line), nil)
			if err != nil || !again.Replayed || again.Outcome != c.want || again.ID != res.ID {
				t.Errorf("again: %+v %v", again, err)
			}
			_, err = r.Commands.Run(t.Context(), step(id, "s", 1), sh("echo other"), nil)
			wantKind(t, "another command", err, dsec.Diverged)
			r.records(id)
			r.close()
		})
	}
}

// TestInterrupted ends sandboxes over running commands, in each way. The callers
// are told why; the record says interrupted, to whoever repeats the step.
func TestInterrupted(t *testing.T) {
	for name, end := range map[string]func(*rig, dsec.SandboxID){
		"stopped": func(r *rig, id dsec.SandboxID) { r.Sandboxes.Stop(t.Context(), id) },
		"down":    func(r *rig, _ dsec.SandboxID) { r.node.Down(t.Context()) },
		"crashed": func(r *rig, id dsec.SandboxID) { r.host.Crash(id, dsec.CauseGuestDied, "for the test") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).open()
			id := r.create()
			soFar := strings.Repeat("so far ", 30_000) // more than lies in a record
			errs := make(chan error, 1)
			go func() {
				_, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("sleep 1000"), nil)
				errs <- err
			}()
			cat, err := r.Commands.Start(t.Context(), step(id, "s", 2), dsec.Command{Shell: "cat", Stdin: dsec.StdinPipe})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.Commands.Write(t.Context(), dsec.Call{Sandbox: id}, cat.ID, dsec.StdinWrite{Data: []byte(soFar)}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "both commands", func() bool { return r.inGuest(id) == 2 })
			end(r, id)
			wantKind(t, "who waits", <-errs, dsec.Conflict)
			eventually(t, "the end", func() bool {
				h, err := r.Trajectories.Head(t.Context(), id)
				return err == nil && h.Over
			})
			res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("sleep 1000"), nil)
			if err != nil || res.Outcome != dsec.Interrupted || !res.Replayed {
				t.Errorf("%+v %v", res, err)
			}
			st, err := r.Commands.Start(t.Context(), step(id, "s", 2), dsec.Command{Shell: "cat", Stdin: dsec.StdinPipe})
			if err != nil || st.Outcome != dsec.Interrupted || !st.Replayed {
				t.Errorf("%+v %v", st, err)
			}
			if name != "crashed" { // then nobody could ask
				out := ""
				for o, err := range r.Commands.Attach(t.Context(), dsec.Call{Sandbox: id}, cat.ID, 0) {
					if err != nil {
						t.Fatal(err)
					}
					out += string(o.Data)
				}
				if out != soFar || st.ID != cat.ID || st.Stdout != (dsec.StreamStat{Total: int64(len(soFar)), Kept: int64(len(soFar))}) {
					t.Errorf("printed %d bytes, %+v", len(out), st)
				}
			}
			if got := ops(r.records(id)); strings.Contains(got, "!") || strings.Count(got, "command=") != 2 || !strings.HasSuffix(got, "end") {
				t.Error(got)
			}
			r.close()
		})
	}
}

// TestUnnamedAfterCrash takes up commands that no caller will repeat.
func TestUnnamedAfterCrash(t *testing.T) {
	r := newRig(t)
	h := &hold{reached: make(chan struct{}, 1), before: make(chan struct{})}
	r.open()
	id := r.create()
	st, err := r.Commands.Start(t.Context(), dsec.Call{Sandbox: id}, sh("sleep 0.1"))
	if err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.inner = func(s dsec.Services) dsec.Services {
		h.Commands = s.Commands
		s.Commands = h
		return s
	}
	r.open()
	if st, err = r.Commands.Wait(t.Context(), dsec.Call{Sandbox: id}, st.ID); err != nil || st.Outcome != dsec.Exited || !st.Step.IsZero() {
		t.Fatalf("%+v %v", st, err)
	}
	go r.Commands.Run(t.Context(), dsec.Call{Sandbox: id}, sh("true"), nil)
	<-h.reached
	r.kill(process)
	r.inner = nil
	r.open()
	eventually(t, "the record of what was never begun", func() bool {
		return ops(r.records(id)) == "create command command= command command!"
	})
	r.close()
}

// TestBytes repeats requests whose names and arguments are no UTF-8.
func TestBytes(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	cmd := func(b string) dsec.Command {
		return dsec.Command{Argv: []string{"echo", b}, Env: map[string]string{"A\xfe": b, "B": "="}}
	}
	run := func(b string) (dsec.Result, error) {
		return r.Commands.Run(t.Context(), step(id, "s", 1), cmd(b), nil)
	}
	if _, err := run("A\xffB"); err != nil {
		t.Fatal(err)
	}
	_, err := run("A\xfeB")
	wantKind(t, "other bytes", err, dsec.Diverged, "argv")
	_, err = run("A\ufffdB")
	wantKind(t, "the replacement character", err, dsec.Diverged, "argv")
	r.kill(process)
	r.open()
	if res, err := run("A\xffB"); err != nil || !res.Replayed || string(res.Out) != "A\xffB\n" {
		t.Fatalf("%+v %v", res, err)
	}
	got, err := trajectory.CommandOf(r.records(id)[1].Request)
	if want := cmd("A\xffB"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v %v, want %+v", got, err, want)
	}
	on := step(id, "s", 2)
	write := func(path string) (dsec.FileInfo, error) {
		return r.Files.Write(t.Context(), on, dsec.FileOp{Path: path}, dsec.WriteOptions{}, strings.NewReader("x"))
	}
	for range 2 {
		if info, err := write("/\xff"); err != nil || info.Path != "/\xff" {
			t.Fatalf("%+v %v", info, err)
		}
	}
	_, err = write("/\xfe")
	wantKind(t, "another path", err, dsec.Diverged, "path")
	r.close()
}

// TestLabelsAreRecorded looks for a sandbox's labels in its first record, and for
// what is set later.
func TestLabelsAreRecorded(t *testing.T) {
	r := newRig(t).open()
	sb, err := r.Sandboxes.Create(t.Context(), dsec.Spec{
		Environment: dsec.Environment{Base: "b"}, Labels: map[string]string{"task": "t-17"},
	}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if first := r.records(sb.ID)[0]; !strings.Contains(string(first.Request), `"Labels":{"task":"t-17"}`) {
		t.Errorf("%s", first.Request)
	}
	set := map[string]string{"task": "", "reward": "1"}
	if _, err := r.rec.Load().Label(t.Context(), sb.ID, set, r.node.Label); err != nil {
		t.Fatal(err)
	}
	if all := r.records(sb.ID); all[len(all)-1].Op != dsec.RecordLabel || string(all[len(all)-1].Request) != `{"labels":{"reward":"1","task":""}}` {
		t.Errorf("%+v", all[len(all)-1])
	}
	many := map[string]string{}
	for i := range dsec.MaxLabels + 1 {
		many[strings.Repeat("l", i+1)] = "x"
	}
	before := len(r.records(sb.ID))
	if _, err := r.rec.Load().Label(t.Context(), sb.ID, many, r.node.Label); dsec.KindOf(err) != dsec.Invalid || len(r.records(sb.ID)) != before {
		t.Errorf("too many: %v, %d records became %d", err, before, len(r.records(sb.ID)))
	}
	r.close()
}

package trajectory_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

// TestLostSync fails the sync behind an answer. The caller hears that the
// journal has failed and nothing else, also when it asks again, whatever is new
// is refused, and the next process has the answer: here from the guest.
func TestLostSync(t *testing.T) {
	r := newRig(t)
	var faulty *journaltest.Faulty
	r.fs = func(fs journal.FS) journal.FS { faulty = journaltest.NewFaulty(fs); return faulty }
	r.open()
	id := r.create()
	r.run(step(id, "s", 1), "true")
	cat, err := r.Commands.Start(t.Context(), step(id, "s", 2), dsec.Command{Shell: "cat", Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	faulty.FailAt(journaltest.JournalSync, 1, errors.New("the disk has gone"))
	_, err = r.Commands.Run(t.Context(), step(id, "s", 3), sh("true"), nil)
	wantKind(t, "an answer that cannot be kept", err, dsec.Unavailable, "journal failed", "the disk has gone")
	for range 2 {
		_, err = r.Commands.Run(t.Context(), step(id, "s", 3), sh("true"), nil)
		wantKind(t, "the same step", err, dsec.Unavailable, "journal failed", "the disk has gone")
		_, err = r.Commands.Run(t.Context(), step(id, "s", 4), sh("true"), nil)
		wantKind(t, "a new step", err, dsec.Unavailable, "journal failed")
	}
	if res := r.run(step(id, "s", 1), "true"); !res.Replayed {
		t.Error("what was durable before is not answered any more")
	}
	if err := r.Commands.Signal(t.Context(), dsec.Call{Sandbox: id}, cat.ID, "KILL"); dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("a signal: %v", err)
	}
	r.mu.Lock()
	told := len(r.faults) > 0 && errors.Is(errors.Join(r.faults...), journal.ErrFailed)
	r.mu.Unlock()
	if !told || !r.node.Counts().Broken {
		t.Error("the node was not told")
	}
	_, err = r.Sandboxes.Create(t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "b"}}, dsec.CreateOptions{})
	wantKind(t, "a create", err, dsec.Unavailable)
	r.kill(process)
	r.fs = nil
	r.open()
	if res := r.run(step(id, "s", 3), "true"); res.Outcome != dsec.Exited {
		t.Errorf("afterwards: %+v", res)
	}
	if n := r.inGuest(id); n != 3 {
		t.Errorf("%d commands ran, want 3", n)
	}
	r.records(id)
	r.close()
}

// slowFS holds back syncs of the journal while it is told to.
type slowFS struct {
	journal.FS
	held    atomic.Pointer[chan struct{}]
	reached chan struct{}
}

type slowFile struct {
	journal.File
	fs *slowFS
}

func (s *slowFS) Create(name string) (journal.File, error) {
	f, err := s.FS.Create(name)
	return slowFile{f, s}, err
}

func (s *slowFS) Open(name string) (journal.File, error) {
	f, err := s.FS.Open(name)
	return slowFile{f, s}, err
}

func (f slowFile) Sync() error {
	if gate := f.fs.held.Load(); gate != nil {
		select {
		case f.fs.reached <- struct{}{}:
		default:
		}
		<-*gate
	}
	return f.File.Sync()
}

// TestNoAnswerBeforeItIsDurable looks, in each way, at a command whose end is on
// its way to the disk.
func TestNoAnswerBeforeItIsDurable(t *testing.T) {
	r := newRig(t)
	slow := &slowFS{reached: make(chan struct{}, 1)}
	r.fs = func(fs journal.FS) journal.FS { slow.FS = fs; return slow }
	r.open()
	id := r.create()
	gate := make(chan struct{})
	slow.held.Store(&gate)
	go r.Commands.Run(t.Context(), step(id, "s", 1), sh("echo hi"), nil)
	<-slow.reached
	all, err := r.Commands.List(t.Context(), dsec.Call{Sandbox: id})
	if err != nil || len(all) != 1 || all[0].Outcome != dsec.StillRunning {
		t.Fatalf("the list shows %+v %v", all, err)
	}
	on, cmd := dsec.Call{Sandbox: id}, all[0].ID
	seen := make(chan string, 4)
	look := func(name string, f func() (dsec.Outcome, error)) {
		go func() {
			o, err := f()
			if err != nil || o != dsec.Exited {
				t.Errorf("%s: %q %v", name, o, err)
			}
			seen <- name
		}()
	}
	look("run", func() (dsec.Outcome, error) {
		res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("echo hi"), nil)
		return res.Outcome, err
	})
	look("start", func() (dsec.Outcome, error) {
		st, err := r.Commands.Start(t.Context(), step(id, "s", 1), sh("echo hi"))
		return st.Outcome, err
	})
	look("wait", func() (dsec.Outcome, error) {
		st, err := r.Commands.Wait(t.Context(), on, cmd)
		return st.Outcome, err
	})
	look("attach", func() (dsec.Outcome, error) {
		var last dsec.Outcome
		for o, err := range r.Commands.Attach(t.Context(), on, cmd, 0) {
			if err != nil {
				return last, err
			}
			if o.Status != nil {
				last = o.Status.Outcome
			}
		}
		return last, nil
	})
	for range 200 { // they have every chance to say too much
		if _, err := r.Commands.List(t.Context(), on); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case name := <-seen:
		t.Errorf("%s has seen an end that is not durable", name)
	default:
	}
	slow.held.Store(nil)
	close(gate)
	for range cap(seen) {
		<-seen
	}
	r.close()
}

// cut is a node's Commands whose Run breaks off behind the guest's back.
type cut struct {
	dsec.Commands
	on   atomic.Bool
	call atomic.Bool // also the guest hears nothing
}

func (c *cut) Run(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	if c.on.Load() {
		if !c.call.Load() {
			c.Commands.Run(ctx, on, cmd, stdin) //nolint:errcheck // it is lost
		}
		return dsec.Result{}, dsec.Errorf(dsec.Unavailable, "the connection broke")
	}
	return c.Commands.Run(ctx, on, cmd, stdin)
}

// TestBrokenOff breaks the call of a command. Whoever looks at the sandbox sees
// the command as the guest has it, and its end gets into the record.
func TestBrokenOff(t *testing.T) {
	for name, look := range map[string]func(*rig, dsec.SandboxID) (dsec.Outcome, error){
		"list": func(r *rig, id dsec.SandboxID) (dsec.Outcome, error) {
			var all []dsec.CommandStatus
			var err error
			eventually(r.t, "the end", func() bool {
				all, err = r.Commands.List(r.t.Context(), dsec.Call{Sandbox: id})
				return err != nil || len(all) == 1 && all[0].Outcome != dsec.StillRunning
			})
			return all[0].Outcome, err
		},
		"wait": func(r *rig, id dsec.SandboxID) (dsec.Outcome, error) {
			all, err := r.node.Services().Commands.List(r.t.Context(), dsec.Call{Sandbox: id})
			if err != nil {
				return "", err
			}
			st, err := r.Commands.Wait(r.t.Context(), dsec.Call{Sandbox: id}, all[0].ID)
			return st.Outcome, err
		},
	} {
		for _, on := range []dsec.Step{{}, {Session: "s", Number: 1}} {
			t.Run(name+" "+on.Session, func(t *testing.T) {
				r := newRig(t)
				c := new(cut)
				r.inner = func(s dsec.Services) dsec.Services { c.Commands = s.Commands; s.Commands = c; return s }
				r.open()
				id := r.create()
				c.on.Store(true)
				_, err := r.Commands.Run(t.Context(), dsec.Call{Sandbox: id, Step: on}, sh("true"), nil)
				wantKind(t, "the call", err, dsec.Unavailable, "the connection broke")
				c.on.Store(false)
				if got := ops(r.records(id)); got != "create command" {
					t.Fatal(got)
				}
				if o, err := look(r, id); err != nil || o != dsec.Exited {
					t.Errorf("%s %v", o, err)
				}
				if got := ops(r.records(id)); got != "create command command=" {
					t.Error(got)
				}
				if !on.IsZero() {
					if res := r.run(dsec.Call{Sandbox: id, Step: on}, "true"); !res.Replayed {
						t.Error("it ran again")
					}
				}
				if n := r.inGuest(id); n != 1 {
					t.Errorf("%d commands ran", n)
				}
				r.close()
			})
		}
	}
}

// TestBrokenOffBefore breaks a call before the guest hears of it. The record says
// so of a command without a name; one with a name is run by whoever repeats it.
func TestBrokenOffBefore(t *testing.T) {
	r := newRig(t)
	c := new(cut)
	r.inner = func(s dsec.Services) dsec.Services { c.Commands = s.Commands; s.Commands = c; return s }
	r.open()
	id := r.create()
	c.on.Store(true)
	c.call.Store(true)
	for _, on := range []dsec.Call{{Sandbox: id}, step(id, "s", 1)} {
		_, err := r.Commands.Run(t.Context(), on, sh("true"), nil)
		wantKind(t, "the call", err, dsec.Unavailable)
	}
	c.on.Store(false)
	if _, err := r.Commands.List(t.Context(), dsec.Call{Sandbox: id}); err != nil {
		t.Fatal(err)
	}
	all := r.records(id)
	if got := ops(all); got != "create command command command!" || !strings.Contains(all[3].Error.Text, "the guest does not know it") || all[3].Of != 2 {
		t.Fatal(got, all[len(all)-1])
	}
	if res := r.run(step(id, "s", 1), "true"); res.Outcome != dsec.Exited {
		t.Errorf("%+v", res)
	}
	if got := ops(r.records(id)); got != "create command command command! command=" {
		t.Error(got)
	}
	r.close()
}

// countedStore counts what is read.
type countedStore struct {
	trajectory.Store
	gets atomic.Int64
}

func (c *countedStore) Get(ctx context.Context, d blob.Digest, at, n int64) (io.ReadCloser, error) {
	c.gets.Add(1)
	return c.Store.Get(ctx, d, at, n)
}

// TestForeignArchives finds trajectories in the archives of other nodes, without
// reading each archive for each question.
func TestForeignArchives(t *testing.T) {
	r := newRig(t).open()
	var ids []dsec.SandboxID
	for range 20 {
		id := r.create()
		if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if err := r.log.Tidy(t.Context()); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	r.kill(func(*journaltest.CrashFS) *journaltest.CrashFS { return journaltest.NewCrashFS() })
	counted := &countedStore{Store: r.store}
	r.tune = func(c *trajectory.Config) { c.Store = counted }
	r.open()
	_, err := r.Trajectories.Head(t.Context(), ids[0]+"x")
	wantKind(t, "an unknown sandbox", err, dsec.NotFound)
	before := counted.gets.Load()
	for range 50 {
		_, err := r.Trajectories.Head(t.Context(), ids[0]+"x")
		wantKind(t, "an unknown sandbox", err, dsec.NotFound)
	}
	if n := counted.gets.Load(); n != before {
		t.Errorf("%d reads to find nothing again", n-before)
	}
	for _, id := range ids {
		if h, err := r.Trajectories.Head(t.Context(), id); err != nil || !h.Over {
			t.Errorf("%s: %+v %v", id, h, err)
		}
	}
	if err := r.lists.DropArchive(t.Context(), r.lists.all[len(r.lists.all)-1], time.Time{}); err != nil {
		t.Fatal(err)
	}
	_, err = r.Trajectories.Head(t.Context(), ids[0])
	wantKind(t, "a dropped one", err, dsec.NotFound)
	r.close()
}

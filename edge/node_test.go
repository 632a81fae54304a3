package edge_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/journal"
)

func TestLifeOfASandbox(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	j, err := journal.Open(t.TempDir(), journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	r.journal = &edge.Log{Journal: j}
	n := r.open()
	defer r.close()

	s := spec()
	s.Environment.Workspace, s.Environment.Toolkits = "task", []string{"tools"}
	s.Env = map[string]string{"FROM": "spec"}
	s.Labels = map[string]string{"a": "b"}
	sb := r.create(s, "")
	if sb.State != dsec.Running || sb.Node != "n7" || sb.Spec.TTL != dsec.DefaultTTL || sb.Took <= 0 {
		t.Errorf("created %+v", sb)
	}
	if got, want := sb.Expires.Sub(sb.Created), dsec.DefaultTTL; got != want {
		t.Errorf("expires after %v, want %v", got, want)
	}
	if want := []string{"sha256:debian", "sha256:task", "sha256:tools"}; !slices.Equal(sb.Layers, want) {
		t.Errorf("layers %v, want %v", sb.Layers, want)
	}
	var stages []string
	for _, st := range sb.Stages {
		stages = append(stages, st.Name)
	}
	if want := []string{"admission", "queue", "layers", "synthetic", "journal"}; !slices.Equal(stages, want) {
		t.Errorf("stages %v, want %v", stages, want)
	}
	c, _ := r.host.Config(sb.ID)
	if want := []string{"FROM=spec", "PATH=/tools:/task:/usr/bin:/debian"}; !slices.Equal(c.Guest.Env, want) {
		t.Errorf("guest environment %v, want %v", c.Guest.Env, want)
	}
	if c.Guest.Cwd != "/task" || c.Guest.User != "task" || c.Hostname != string(sb.ID[:12]) || c.Resources.Pids != dsec.DefaultPids {
		t.Errorf("machine was started from %+v", c)
	}
	if used := n.Layers(); used["sha256:task"] != 1 {
		t.Errorf("layers in use %v", used)
	}
	if got := r.exec(sb.ID, "echo hello"); got != "hello\n" {
		t.Errorf("echo wrote %q", got)
	}
	nodes, err := n.Nodes(t.Context())
	if err != nil || len(nodes) != 1 || nodes[0].Sandboxes != 1 || nodes[0].CPUs != 2 || !slices.Equal(nodes[0].Kinds, []dsec.Kind{dsec.Container}) {
		t.Errorf("nodes %+v, %v", nodes, err)
	}

	waited := make(chan dsec.Sandbox)
	go func() {
		sb, _ := n.Wait(context.Background(), sb.ID)
		waited <- sb
	}()
	stopped, err := n.Stop(t.Context(), sb.ID)
	if err != nil || stopped.State != dsec.Stopped || stopped.Cause != dsec.CauseUser {
		t.Errorf("stop gave %+v, %v", stopped, err)
	}
	if w := <-waited; w.State != dsec.Stopped {
		t.Errorf("wait gave %+v", w)
	}
	again, err := n.Stop(t.Context(), sb.ID)
	if err != nil || !again.Ended.Equal(stopped.Ended) {
		t.Errorf("second stop gave %+v, %v", again, err)
	}
	r.wantNothing()
	if len(n.Layers()) != 0 {
		t.Errorf("layers %v are in use by nobody", n.Layers())
	}
	_, err = n.Services().Commands.Run(t.Context(), dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: "true"}, nil)
	wantKind(t, "run in a stopped sandbox", err, dsec.Conflict)
	var e *dsec.Error
	if !errors.As(err, &e) || e.Op != "edge.Run" || e.Sandbox != sb.ID || !strings.Contains(err.Error(), "user") {
		t.Errorf("error %v does not say operation, sandbox and cause", err)
	}
	if len(r.created) != 1 || len(r.ended) != 1 || r.ended[0].Cause != dsec.CauseUser {
		t.Errorf("events %v, %v", r.created, r.ended)
	}
}

func TestCreateRefuses(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	edit := func(f func(*dsec.Spec)) dsec.Spec {
		s := spec()
		f(&s)
		return s
	}
	for name, c := range map[string]struct {
		spec dsec.Spec
		kind dsec.ErrorKind
	}{
		"bad spec":      {edit(func(s *dsec.Spec) { s.TTL = 1 }), dsec.Invalid},
		"no such image": {edit(func(s *dsec.Spec) { s.Environment.Base = "nope" }), dsec.NotFound},
		"no toolkit":    {edit(func(s *dsec.Spec) { s.Environment.Toolkits = []string{"nope"} }), dsec.NotFound},
		"base role":     {edit(func(s *dsec.Spec) { s.Environment.Base = "tools" }), dsec.Invalid},
		"workspace":     {edit(func(s *dsec.Spec) { s.Environment.Workspace = "debian" }), dsec.Invalid},
		"toolkit":       {edit(func(s *dsec.Spec) { s.Environment.Toolkits = []string{"task"} }), dsec.Invalid},
		"twice":         {edit(func(s *dsec.Spec) { s.Environment.Toolkits = []string{"tools", "tools"} }), dsec.Invalid},
		"kind":          {edit(func(s *dsec.Spec) { s.Kind = dsec.MicroVM }), dsec.Unsupported},
	} {
		_, err := r.node.Create(t.Context(), c.spec, dsec.CreateOptions{})
		wantKind(t, name, err, c.kind)
	}
	_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{Key: strings.Repeat("k", dsec.MaxKeyBytes+1)})
	wantKind(t, "long key", err, dsec.Invalid)
	if n := r.host.Calls(synthetic.OpStart); n != 0 {
		t.Errorf("%d machines were started for refused creates", n)
	}
	if len(r.refused) != 9 {
		t.Errorf("%d refusals were told, want 9", len(r.refused))
	}
	if c := r.node.Counts(); c.Alive != 0 {
		t.Errorf("counts %+v after refusals", c)
	}
}

// A failure anywhere in a create leaves no machine, no mount, no record, no
// key and no count.
func TestFailedCreateLeavesNothing(t *testing.T) {
	boom := errors.New("boom")
	for name, f := range map[string]struct {
		breakIt func(*rig)
		kind    dsec.ErrorKind
	}{
		"layers":  {func(r *rig) { r.roots.fail = boom }, dsec.Internal},
		"start":   {func(r *rig) { r.host.Fail(synthetic.OpStart, 1, boom) }, dsec.Internal},
		"full":    {func(r *rig) { r.host.Fail(synthetic.OpStart, 1, fmt.Errorf("mkdir: %w", syscall.ENOSPC)) }, dsec.Exhausted},
		"started": {func(r *rig) { r.host.Fail(synthetic.OpStarted, 1, dsec.Errorf(dsec.Exhausted, "boom")) }, dsec.Exhausted},
		"journal": {func(r *rig) { r.mem.setFail(boom) }, dsec.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, synthetic.Options{})
			r.open()
			defer r.close()
			f.breakIt(r)
			_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{Key: "k"})
			wantKind(t, name, err, f.kind)
			r.wantNothing()
			all, _ := r.node.List(t.Context(), dsec.Filter{All: true})
			if len(all) != 0 || r.node.Counts().Alive != 0 {
				t.Errorf("records %v and counts %+v are left", all, r.node.Counts())
			}
			r.mem.setFail(nil)
			r.roots.fail = nil
			if name == "journal" { // refused until a checkpoint has healed it
				_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{Key: "k"})
				wantKind(t, "create on a broken journal", err, dsec.Unavailable)
				eventually(t, "journal heals", func() bool { return !r.node.Counts().Broken })
			}
			other := spec()
			other.Hostname = "x" // the key is free for another spec
			r.create(other, "k")
		})
	}
}

// A folder that no layer has fails the create itself, not every command later.
func TestMissingFolderFailsTheCreate(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	for _, cwd := range []string{"/nowhere", "/nowhere/", "/nowhere/below"} {
		s := spec()
		s.Cwd = cwd
		_, err := r.node.Create(t.Context(), s, dsec.CreateOptions{Key: "k"})
		wantKind(t, cwd, err, dsec.Invalid)
		r.wantNothing()
	}
	s := spec()
	s.Cwd = "/"
	for _, stage := range r.create(s, "k").Stages {
		if stage.Name == edge.StageCheck {
			return
		}
	}
	t.Error("the check is no stage of the create")
}

func TestStopThatFailsIsRepeated(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	r.host.Fail(synthetic.OpStop, 1, errors.New("boom"))
	_, err := r.node.Stop(t.Context(), sb.ID)
	wantKind(t, "stop", err, dsec.Internal)
	eventually(t, "stopped by the retry", func() bool { return r.get(sb.ID).State == dsec.Stopped })
	r.wantNothing()
}

func TestConcurrentStops(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	var wait sync.WaitGroup
	for range 50 {
		wait.Go(func() {
			got, err := r.node.Stop(t.Context(), sb.ID)
			if err != nil || got.State != dsec.Stopped {
				t.Errorf("stop gave %v, %v", got.State, err)
			}
		})
	}
	wait.Wait()
	if n := r.host.Calls(synthetic.OpStop); n != 1 {
		t.Errorf("the machine was stopped %d times", n)
	}
	if len(r.ended) != 1 {
		t.Errorf("%d ends were told", len(r.ended))
	}
}

func TestStopWhileCreating(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	begun := make(chan struct{})
	r.host.Intercept(synthetic.OpStarted, 1, func(ctx context.Context) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	})
	failed := make(chan error)
	go func() {
		_, err := r.node.Create(context.Background(), spec(), dsec.CreateOptions{Key: "k"})
		failed <- err
	}()
	<-begun
	all, err := r.node.List(t.Context(), dsec.Filter{})
	if err != nil || len(all) != 1 || all[0].State != dsec.Creating {
		t.Fatalf("list while creating gave %+v, %v", all, err)
	}
	_, err = r.node.Services().Commands.Run(t.Context(), dsec.Call{Sandbox: all[0].ID}, dsec.Command{Shell: "true"}, nil)
	wantKind(t, "run while creating", err, dsec.Conflict)
	got, err := r.node.Stop(t.Context(), all[0].ID)
	if err != nil || got.State != dsec.Stopped || got.Cause != dsec.CauseUser {
		t.Fatalf("stop gave %+v, %v", got, err)
	}
	wantKind(t, "create", <-failed, dsec.Conflict)
	r.wantNothing()
	// The key stands for what was stopped, also after a restart.
	if again := r.create(spec(), "k"); again.ID != got.ID || again.State != dsec.Stopped {
		t.Errorf("repeated create gave %+v", again)
	}
	r.close()
	r.open()
	if again := r.create(spec(), "k"); again.ID != got.ID || again.State != dsec.Stopped {
		t.Errorf("repeated create after a restart gave %+v", again)
	}
}

func TestKeyedCreateHappensOnce(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	ids := make([]dsec.SandboxID, 100)
	var wait sync.WaitGroup
	for i := range ids {
		wait.Go(func() { ids[i] = r.create(spec(), "k").ID })
	}
	wait.Wait()
	for _, id := range ids {
		if id != ids[0] || id == "" {
			t.Fatalf("one key gave sandboxes %q and %q", ids[0], id)
		}
	}
	if n := r.host.Calls(synthetic.OpStart); n != 1 {
		t.Errorf("%d machines were started", n)
	}
	other := spec()
	other.Hostname = "elsewhere"
	_, err := r.node.Create(t.Context(), other, dsec.CreateOptions{Key: "k"})
	wantKind(t, "same key, other spec", err, dsec.Conflict)
	other.Project = "p2" // keys of projects are apart
	if sb := r.create(other, "k"); sb.ID == ids[0] {
		t.Error("a key reaches into another project")
	}
	// Empty and missing maps are the same spec, and so are defaults spelled out.
	same := spec().WithDefaults()
	same.Env, same.Environment.Toolkits = map[string]string{}, []string{}
	for range 2 { // before and after a kill
		if sb := r.create(same, "k"); sb.ID != ids[0] {
			t.Errorf("repeated create gave %s, want %s", sb.ID, ids[0])
		}
		r.kill()
		r.open()
	}
	if _, err := r.node.Stop(t.Context(), ids[0]); err != nil {
		t.Fatal(err)
	}
	r.close()
	r.open()
	if sb := r.create(spec(), "k"); sb.ID != ids[0] || sb.State != dsec.Stopped {
		t.Errorf("repeated create of an ended sandbox gave %+v", sb)
	}
	r.close()
}

func TestListFiltersAndPages(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	n := r.open()
	defer func() { r.close() }()
	var ids []dsec.SandboxID
	for i := range 10 {
		s := spec()
		s.Job = dsec.JobID(fmt.Sprint("job", i%2))
		s.Labels = map[string]string{"i": fmt.Sprint(i), "all": "yes"}
		ids = append(ids, r.create(s, "").ID)
	}
	slices.Reverse(ids)
	for _, i := range []int{0, 3} {
		if _, err := n.Stop(t.Context(), ids[i]); err != nil {
			t.Fatal(err)
		}
	}
	list := func(f dsec.Filter) []dsec.SandboxID {
		t.Helper()
		all, err := n.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		var got []dsec.SandboxID
		for _, sb := range all {
			got = append(got, sb.ID)
		}
		return got
	}
	pick := func(at ...int) []dsec.SandboxID {
		var want []dsec.SandboxID
		for _, i := range at {
			want = append(want, ids[i])
		}
		return want
	}
	for range 2 { // before and after a restart
		for _, c := range []struct {
			f    dsec.Filter
			want []dsec.SandboxID
		}{
			{dsec.Filter{}, pick(1, 2, 4, 5, 6, 7, 8, 9)},
			{dsec.Filter{All: true}, ids},
			{dsec.Filter{State: dsec.Stopped}, pick(0, 3)},
			{dsec.Filter{Job: "job1"}, pick(2, 4, 6, 8)},
			{dsec.Filter{Job: "job1", All: true}, pick(0, 2, 4, 6, 8)},
			{dsec.Filter{Labels: map[string]string{"i": "7"}}, pick(2)},
			{dsec.Filter{Labels: map[string]string{"i": "7", "all": "no"}}, nil},
			{dsec.Filter{Limit: 3}, pick(1, 2, 4)},
			{dsec.Filter{Limit: 3, After: ids[4]}, pick(5, 6, 7)},
			{dsec.Filter{After: ids[3]}, pick(4, 5, 6, 7, 8, 9)},
			{dsec.Filter{After: ids[9]}, nil},
		} {
			if got := list(c.f); !slices.Equal(got, c.want) {
				t.Errorf("list %+v gave %v, want %v", c.f, got, c.want)
			}
		}
		r.close()
		n = r.open()
	}
	s := spec()
	s.Project = "p"
	own := r.create(s, "").ID
	r.create(spec(), "")
	bound := dsec.WithCaller(t.Context(), dsec.Caller{Project: "p"})
	if all, err := n.List(bound, dsec.Filter{Limit: 1}); err != nil || len(all) != 1 || all[0].ID != own {
		t.Errorf("a caller of project p sees %+v, %v", all, err)
	}
	_, err := n.List(t.Context(), dsec.Filter{Limit: -1})
	wantKind(t, "negative limit", err, dsec.Invalid)
	_, err = n.List(t.Context(), dsec.Filter{After: "sbx"})
	wantKind(t, "after nothing", err, dsec.NotFound)
}

func TestUnknownIDs(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	n := r.open()
	defer r.close()
	at := func(p dsec.Place) dsec.SandboxID { return r.key.New(p) }
	var foreign dsec.IDKey
	for name, c := range map[string]struct {
		id   dsec.SandboxID
		kind dsec.ErrorKind
	}{
		"no id":          {"x", dsec.NotFound},
		"another key's":  {foreign.New(r.place), dsec.NotFound},
		"another node's": {at(dsec.Place{Node: 8, Epoch: 3}), dsec.NotFound},
		"of the future":  {at(dsec.Place{Node: 7, Epoch: 4}), dsec.NotFound},
		"of the past":    {at(dsec.Place{Node: 7, Epoch: 2}), dsec.Lost},
		"power loss":     {at(r.place), dsec.Lost},
	} {
		_, err := n.Get(t.Context(), c.id)
		wantKind(t, name, err, c.kind)
		_, err = n.Stop(t.Context(), c.id)
		wantKind(t, "stop "+name, err, c.kind)
		err = n.Services().Files.Mkdir(t.Context(), dsec.Call{Sandbox: c.id}, dsec.FileOp{Path: "/x"}, 0)
		wantKind(t, "mkdir "+name, err, c.kind)
	}
}

func TestMachineEndsByItself(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	n := r.open()
	defer r.close()
	for cause, state := range map[dsec.Cause]dsec.State{
		dsec.CauseOOM: dsec.Failed, dsec.CauseGuestDied: dsec.Failed, dsec.CauseUser: dsec.Stopped,
	} {
		sb := r.create(spec(), "")
		r.host.SetUsage(sb.ID, dsec.Usage{MemoryPeak: 99, OOMKills: 1})
		seen, inHand := make(chan struct{}, 1), make(chan error, 1)
		on := dsec.Call{Sandbox: sb.ID}
		go func() {
			for _, err := range n.Services().Files.Watch(t.Context(), on, dsec.FileOp{Path: "/"}, dsec.WatchOptions{}) {
				if err == nil {
					select {
					case seen <- struct{}{}:
					default:
					}
					continue
				}
				if b, gerr := n.Get(t.Context(), sb.ID); gerr != nil || b.State != state {
					t.Errorf("told of its end, the sandbox is %s, %v", b.State, gerr)
				}
				inHand <- err
				return
			}
			inHand <- nil
		}()
		eventually(t, "a call in hand", func() bool {
			if err := n.Services().Files.Mkdir(t.Context(), on, dsec.FileOp{Path: "/x"}, 0); err != nil {
				_ = n.Services().Files.Remove(t.Context(), on, dsec.FileOp{Path: "/x"})
			}
			return len(seen) > 0
		})
		r.host.Crash(sb.ID, cause, "just so")
		if err := <-inHand; dsec.KindOf(err) != dsec.Conflict || !strings.Contains(err.Error(), fmt.Sprintf("has ended (%s: just so)", cause)) {
			t.Errorf("the call in hand: %v", err)
		}
		got, err := n.Wait(t.Context(), sb.ID)
		if err != nil || got.State != state || got.Cause != cause || got.Detail != "just so" || got.Usage.MemoryPeak != 99 {
			t.Errorf("after %s: %+v, %v", cause, got, err)
		}
	}
	r.wantNothing()
}

func TestDown(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	n := r.open()
	var ids []dsec.SandboxID
	for range 100 {
		ids = append(ids, r.create(spec(), "").ID)
	}
	if err := n.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.wantNothing()
	r.open()
	defer r.close()
	for _, id := range ids {
		r.wantEnd(id, dsec.Stopped, dsec.CauseNodeDown)
	}
}

func TestCloseWhileCreating(t *testing.T) {
	for _, key := range []string{"", "k"} {
		r := newRig(t, synthetic.Options{})
		r.open()
		begun := make(chan struct{})
		r.host.Intercept(synthetic.OpStarted, 1, func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			return ctx.Err()
		})
		failed := make(chan error)
		go func() {
			_, err := r.node.Create(context.Background(), spec(), dsec.CreateOptions{Key: key})
			failed <- err
		}()
		<-begun
		r.close()
		wantKind(t, "create on a closing node", <-failed, dsec.Unavailable)
		r.wantNothing()
		_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{Key: key})
		wantKind(t, "create on a closed node", err, dsec.Unavailable)
	}
}

// A driver whose machines do not call back is served by waiting for each.
func TestMachineWithoutCallback(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.config = func(c *edge.Config) { c.Drivers = []driver.Driver{plainDriver{c.Drivers[0]}} }
	n := r.open()
	defer r.close()
	a, b := r.create(spec(), ""), r.create(spec(), "")
	r.host.Crash(a.ID, dsec.CauseOOM, "")
	if got, err := n.Wait(t.Context(), a.ID); err != nil || got.Cause != dsec.CauseOOM {
		t.Errorf("wait gave %+v, %v", got, err)
	}
	if got, err := n.Stop(t.Context(), b.ID); err != nil || got.Cause != dsec.CauseUser {
		t.Errorf("stop gave %+v, %v", got, err)
	}
}

// plainDriver hides the extra powers of another's machines.
type plainDriver struct{ driver.Driver }

type plainMachine struct{ driver.Machine }

func (d plainDriver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	m, err := d.Driver.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	return plainMachine{m}, nil
}

// Every call reaches the guest's method of its name, and its errors say which.
func TestEachCallReachesItsMethod(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	sb := r.create(spec(), "")
	ctx, on := t.Context(), dsec.Call{Sandbox: sb.ID}
	c, f := r.node.Services().Commands, r.node.Services().Files
	op := func(p string) dsec.FileOp { return dsec.FileOp{Path: p} }
	exists := func(p string) bool { _, err := f.Stat(ctx, on, op(p)); return err == nil }

	if err := f.Mkdir(ctx, on, op("/a"), 0o700); err != nil || !exists("/a") {
		t.Errorf("mkdir: %v", err)
	}
	if err := f.Move(ctx, on, op("/a"), "/b"); err != nil || exists("/a") || !exists("/b") {
		t.Errorf("move: %v", err)
	}
	if err := f.Chmod(ctx, on, op("/b"), 0o711); err != nil {
		t.Errorf("chmod: %v", err)
	}
	if i, err := f.Stat(ctx, on, op("/b")); err != nil || i.Mode != 0o711 {
		t.Errorf("stat after chmod: %+v, %v", i, err)
	}
	if err := f.Remove(ctx, on, op("/b")); err != nil || exists("/b") {
		t.Errorf("remove: %v", err)
	}
	st, err := c.Start(ctx, on, dsec.Command{Shell: "hang", TTY: &dsec.WinSize{Rows: 1, Cols: 2}})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Resize(ctx, on, st.ID, dsec.WinSize{Rows: 3, Cols: 4}); err != nil {
		t.Errorf("resize: %v", err)
	}
	if all, err := c.List(ctx, on); err != nil || len(all) != 1 || *all[0].Command.TTY != (dsec.WinSize{Rows: 3, Cols: 4}) {
		t.Errorf("list: %+v, %v", all, err)
	}
	if err := c.Signal(ctx, on, st.ID, "TERM"); err != nil {
		t.Errorf("signal: %v", err)
	}
	for o, err := range c.Attach(ctx, on, st.ID, 0) {
		if err != nil || o.Status == nil || o.Status.Outcome != dsec.Signaled {
			t.Errorf("attach: %+v, %v", o, err)
		}
	}
	for want, err := range map[string]error{
		"edge.Chown":   f.Chown(ctx, on, op("/"), "x"),
		"edge.Symlink": f.Symlink(ctx, on, op("/l"), "x"),
		"edge.Unpack":  f.Unpack(ctx, on, op("/"), strings.NewReader("")),
		"edge.Pack":    second(f.Pack(ctx, on, op("/"))),
		"edge.Signal":  c.Signal(ctx, on, "none", "TERM"),
		"edge.Resize":  c.Resize(ctx, on, "none", dsec.WinSize{}),
	} {
		var e *dsec.Error
		if !errors.As(err, &e) || e.Op != want || e.Sandbox != sb.ID || e.Kind != dsec.Unsupported && e.Kind != dsec.NotFound {
			t.Errorf("%s answers %v", want, err)
		}
	}
}

func second[A any](_ A, err error) error { return err }

// A machine that was started in vain and will not stop is stopped again.
func TestDiscardedMachineThatWillNotStop(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	defer r.close()
	r.mem.setFail(errors.New("no space"))
	r.host.Fail(synthetic.OpStop, 1, errors.New("boom"))
	_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
	wantKind(t, "create", err, dsec.Unavailable)
	if len(r.host.Machines()) != 1 {
		t.Fatal("the stop did not fail")
	}
	r.mem.setFail(nil)
	eventually(t, "it is stopped and its layers given back", func() bool {
		return len(r.host.Machines()) == 0 && r.roots.count() == 0
	})
}

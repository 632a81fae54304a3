package edge_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// callers is a driver of kind fncall whose machines answer calls in memory.
type callers struct {
	driver.Driver
	host                       *synthetic.Host
	started, stopped, compiled atomic.Int32

	mu    sync.Mutex
	calls map[string][]string // machine -> projects' sources it ran
}

func newCallers(opt synthetic.Options) *callers {
	opt.Kind = dsec.FnCall
	h := synthetic.New(opt)
	return &callers{Driver: h.Driver(), host: h, calls: map[string][]string{}}
}

func (d *callers) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	m, err := d.Driver.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	d.started.Add(1)
	return &callerMachine{Machine: m, d: d}, nil
}

type callerMachine struct {
	driver.Machine
	d    *callers
	busy atomic.Int32
}

func (m *callerMachine) Stop(ctx context.Context) error {
	m.d.stopped.Add(1)
	return m.Machine.Stop(ctx)
}

func (m *callerMachine) Prepare(context.Context, dsec.Runtime, []string) error { return nil }

func (m *callerMachine) Compile(_ context.Context, f dsec.Function) (*driver.Build, dsec.FunctionResult, error) {
	m.d.compiled.Add(1)
	if string(f.Source) == "bad" {
		return nil, dsec.FunctionResult{Outcome: dsec.FunctionCompile}, nil
	}
	return &driver.Build{Digest: string(f.Source)}, dsec.FunctionResult{}, nil
}

func (m *callerMachine) Call(ctx context.Context, f dsec.Function, b *driver.Build) (dsec.FunctionResult, error) {
	if m.busy.Add(1) > 1 {
		return dsec.FunctionResult{}, errors.New("two calls on one machine")
	}
	defer m.busy.Add(-1)
	m.d.mu.Lock()
	m.d.calls[string(m.ID())] = append(m.d.calls[string(m.ID())], string(f.Source))
	m.d.mu.Unlock()
	switch string(f.Source) {
	case "break":
		return dsec.FunctionResult{}, errors.Join(dsec.Errorf(dsec.Unavailable, "broken"), driver.ErrBroken)
	case "sleep":
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return dsec.FunctionResult{}, ctx.Err()
		case <-m.Done():
			return dsec.FunctionResult{}, errors.Join(dsec.Errorf(dsec.Unavailable, "ended"), driver.ErrBroken)
		}
	}
	return dsec.FunctionResult{Outcome: dsec.FunctionOK, Out: []byte(string(f.Source) + string(f.Stdin))}, nil
}

func function(project, source string) dsec.Function {
	return dsec.Function{
		Environment: dsec.Environment{Base: "debian"}, Project: dsec.ProjectID(project), Runtime: dsec.RuntimeShell, Source: []byte(source),
	}
}

// withFunctions makes a node that calls functions.
func withFunctions(t *testing.T, limits edge.WarmLimits, more ...func(*edge.Config)) (*rig, *callers) {
	t.Helper()
	d := newCallers(synthetic.Options{})
	r := newRig(t, synthetic.Options{})
	r.config = func(c *edge.Config) {
		c.Drivers, c.Warm = append(c.Drivers, d), limits
		for _, f := range more {
			f(c)
		}
	}
	r.open()
	return r, d
}

func (r *rig) call(f dsec.Function) (string, error) {
	res, err := r.node.Services().Functions.Call(r.t.Context(), f)
	return string(res.Out), err
}

func (r *rig) mustCall(f dsec.Function) {
	r.t.Helper()
	if _, err := r.call(f); err != nil {
		r.t.Fatal(err)
	}
}

// over closes the node and fails if a machine of functions is left.
func (r *rig) over(d *callers) {
	r.t.Helper()
	r.close()
	if left := d.host.Machines(); len(left) != 0 || r.roots.count() != 0 || r.node.Machines() != 0 {
		r.t.Errorf("machines %v, %d environments, %d places are left", left, r.roots.count(), r.node.Machines())
	}
}

func TestFunctionsShareNoMachine(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{})
	defer r.over(d)
	other := function("b", "echo")
	workspace := function("a", "echo")
	workspace.Environment.Workspace = "task"
	large := function("a", "echo")
	large.Limits.Memory = 1 << 30
	preload := function("a", "echo")
	preload.Runtime, preload.Preload = dsec.RuntimePython, []string{"json"}
	kinds := []dsec.Function{function("a", "echo"), other, workspace, large, preload}
	for range 3 {
		for _, f := range kinds {
			r.mustCall(f)
		}
	}
	if n := d.started.Load(); n != int32(len(kinds)) {
		t.Errorf("%d machines were started for %d kinds of call", n, len(kinds))
	}
	if list, err := r.node.List(t.Context(), dsec.Filter{All: true}); err != nil || len(list) != 0 {
		t.Errorf("machines of functions are listed as sandboxes: %v, %v", list, err)
	}
	if used := r.node.Layers(); used["sha256:debian"] != len(kinds) || used["sha256:task"] != 1 {
		t.Errorf("layers in use are %v", used)
	}
}

func TestFunctionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, d := withFunctions(t, edge.WarmLimits{Machines: 2, Queue: 2, Idle: time.Minute})
		defer r.over(d)
		var calls sync.WaitGroup
		results := make(chan error, 5)
		for range 5 {
			calls.Go(func() {
				_, err := r.call(function("a", "sleep"))
				results <- err
			})
		}
		synctest.Wait()
		// Two run, two wait, one was refused.
		if err := <-results; dsec.KindOf(err) != dsec.Exhausted {
			t.Errorf("the fifth call: %v", err)
		}
		begin := time.Now()
		calls.Wait()
		if took := time.Since(begin); took != 2*time.Second {
			t.Errorf("four calls of a second on two machines took %v", took)
		}
		if n := d.started.Load(); n != 2 {
			t.Errorf("%d machines were started", n)
		}
		// Machines of others make room.
		r.mustCall(function("b", "echo"))
		if n, m := d.started.Load(), r.node.Machines(); n != 3 || m != 2 {
			t.Errorf("%d machines were started, %d are there", n, m)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if m := r.node.Machines(); m != 0 || len(d.host.Machines()) != 0 {
			t.Errorf("%d machines are there after two idle minutes", m)
		}
		r.mustCall(function("a", "echo"))
	})
}

func TestFunctionsWaitForOthersMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, d := withFunctions(t, edge.WarmLimits{Machines: 1})
		defer r.over(d)
		var calls sync.WaitGroup
		for _, p := range []string{"a", "b", "a"} {
			calls.Go(func() {
				if _, err := r.call(function(p, "sleep")); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		// Whoever goes away does not keep the place that it waited for.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := r.node.Services().Functions.Call(ctx, function("c", "echo")); dsec.KindOf(err) != dsec.Timeout {
			t.Errorf("a call that waited too long: %v", err)
		}
		calls.Wait()
		r.mustCall(function("c", "echo"))
	})
}

func TestFunctionsBrokenMachine(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{})
	defer r.over(d)
	_, err := r.call(function("a", "break"))
	if !errors.Is(err, driver.ErrBroken) || dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("a call that breaks every machine: %v", err)
	}
	if n := d.started.Load(); n != 2 {
		t.Errorf("%d machines were started, want one and its replacement", n)
	}
	eventually(t, "broken machines are stopped", func() bool { return len(d.host.Machines()) == 0 })
	r.mustCall(function("a", "echo"))
	for id := range d.calls { // the machine dies while it is idle
		d.host.Crash(dsec.SandboxID(id), dsec.CauseGuestDied, "")
	}
	r.mustCall(function("a", "echo"))
}

func TestFunctionsAreReplaced(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{Calls: 3})
	defer r.over(d)
	for range 7 {
		r.mustCall(function("a", "echo"))
	}
	if n := d.started.Load(); n != 3 {
		t.Errorf("%d machines were started for 7 calls of 3 each", n)
	}
}

func TestFunctionsAreCounted(t *testing.T) {
	q := &counts{alive: map[dsec.SandboxID]bool{}, limit: 2}
	r, _ := withFunctions(t, edge.WarmLimits{}, func(c *edge.Config) { c.Quota = q })
	r.mustCall(function("a", "echo"))
	r.create(spec(), "")
	if n := q.now(); n != 2 {
		t.Errorf("%d are counted, want a sandbox and a machine", n)
	}
	// What is only kept ready makes room for another kind of call.
	r.mustCall(function("b", "echo"))
	if n := q.now(); n != 2 {
		t.Errorf("%d are counted", n)
	}
	r.close()
	if n := q.now(); n != 1 || len(q.wrong) > 0 {
		t.Errorf("%d are counted at the end, wrongly %v", n, q.wrong)
	}
}

func TestFunctionsEndWithTheNode(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{Machines: 1})
	errs := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := r.call(function("a", "sleep"))
			errs <- err
		}()
	}
	eventually(t, "a call runs", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.calls) == 1 })
	r.over(d)
	for range 2 {
		if err := <-errs; dsec.KindOf(err) != dsec.Unavailable {
			t.Errorf("a call under way when the node closed: %v", err)
		}
	}
	if _, err := r.call(function("a", "echo")); dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("a call on a closed node: %v", err)
	}
}

// TestFunctionsOfAnEarlierProcess stops what a killed edge had.
func TestFunctionsOfAnEarlierProcess(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{})
	r.mustCall(function("a", "echo"))
	if len(d.host.Machines()) != 1 {
		t.Fatal("no machine is kept")
	}
	r.kill()
	again := newCallers(synthetic.Options{})
	again.host, again.Driver = d.host, d.host.Driver()
	r.config = func(c *edge.Config) { c.Drivers = append(c.Drivers, again) }
	r.open()
	defer r.over(again)
	if left := d.host.Machines(); len(left) != 0 {
		t.Errorf("machines %v of the earlier process are left", left)
	}
}

func TestFunctionBatch(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{Machines: 4})
	defer r.over(d)
	b := dsec.FunctionBatch{Function: function("a", "good"), AtATime: 4}
	b.Function.Runtime = dsec.RuntimeC
	for i := range 20 {
		c := dsec.FunctionCase{Stdin: fmt.Append(nil, i)}
		switch i {
		case 7:
			c.Source = []byte("bad")
		case 8:
			c.Source = []byte("break")
		}
		b.Cases = append(b.Cases, c)
	}
	seen := map[int]bool{}
	for item, err := range r.node.Services().Functions.Batch(t.Context(), b) {
		if err != nil {
			t.Fatal(err)
		}
		if seen[item.Index] {
			t.Errorf("case %d came twice", item.Index)
		}
		seen[item.Index] = true
		switch {
		case item.Index == 7 && (item.Err != nil || item.Result.Outcome != dsec.FunctionCompile),
			item.Index == 8 && dsec.KindOf(item.Err) != dsec.Unavailable,
			item.Index != 7 && item.Index != 8 && string(item.Result.Out) != fmt.Sprintf("good%d", item.Index):
			t.Errorf("case %d: %v %s %q", item.Index, item.Err, item.Result.Outcome, item.Result.Out)
		}
	}
	if len(seen) != 20 || d.compiled.Load() != 3 {
		t.Errorf("%d cases came, %d sources were compiled; want 20 and 3", len(seen), d.compiled.Load())
	}
	// A reader who has enough ends it.
	n := 0
	for range r.node.Services().Functions.Batch(t.Context(), b) {
		if n++; n == 3 {
			break
		}
	}
}

func TestFunctionRefusals(t *testing.T) {
	r, d := withFunctions(t, edge.WarmLimits{})
	defer r.over(d)
	change := func(f func(*dsec.Function)) dsec.Function {
		fn := function("a", "echo")
		f(&fn)
		return fn
	}
	for _, c := range []struct {
		f    dsec.Function
		kind dsec.ErrorKind
		says string
	}{
		{change(func(f *dsec.Function) { f.Environment.Base = "none" }), dsec.NotFound, "none"},
		{change(func(f *dsec.Function) { f.Environment.Base = "tools" }), dsec.Invalid, "tools"},
		{change(func(f *dsec.Function) { f.Environment.Base = "" }), dsec.Invalid, "base"},
		{change(func(f *dsec.Function) { f.Runtime = "perl" }), dsec.Invalid, "perl"},
		{change(func(f *dsec.Function) { f.Preload = []string{"json"} }), dsec.Invalid, "python3"},
		{change(func(f *dsec.Function) { f.Files = []dsec.FunctionFile{{Path: "../x"}} }), dsec.Invalid, "../x"},
		{change(func(f *dsec.Function) { f.Files = []dsec.FunctionFile{{Path: "./main.sh"}} }), dsec.Invalid, "main.sh"},
		{change(func(f *dsec.Function) { f.Limits.Memory = 1 }), dsec.Invalid, "memory"},
	} {
		if _, err := r.call(c.f); dsec.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %v that names %s", err, c.kind, c.says)
		}
	}
	r.roots.fail = errors.New("no mounts")
	if _, err := r.call(function("a", "echo")); err == nil || d.started.Load() != 0 {
		t.Errorf("a call without layers: %v, %d machines were started", err, d.started.Load())
	}
	r.roots.fail = nil
	d.host.Fail(synthetic.OpStart, 1, dsec.Errorf(dsec.Exhausted, "full"))
	if _, err := r.call(function("a", "echo")); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("a machine that does not start: %v", err)
	}
}

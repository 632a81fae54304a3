package edge_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// counts is a Quota of one number for all.
type counts struct {
	mu    sync.Mutex
	alive map[dsec.SandboxID]bool
	limit int
	wrong []string
}

func (c *counts) Take(id dsec.SandboxID, _ *dsec.Spec) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.alive) >= c.limit {
		return dsec.Errorf(dsec.Exhausted, "project p has its %d sandboxes", c.limit)
	}
	c.count(id, true)
	return nil
}

func (c *counts) Keep(id dsec.SandboxID, _ *dsec.Spec) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count(id, true)
}

func (c *counts) Give(id dsec.SandboxID, _ *dsec.Spec) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count(id, false)
}

func (c *counts) Extend(s *dsec.Spec) error {
	if s.TTL > 2*time.Hour {
		return dsec.Errorf(dsec.Invalid, "too long")
	}
	return nil
}

func (c *counts) count(id dsec.SandboxID, alive bool) {
	if c.alive[id] == alive {
		c.wrong = append(c.wrong, string(id))
	}
	if c.alive[id] = alive; !alive {
		delete(c.alive, id)
	}
}

func (c *counts) now() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.alive)
}

// door is a Door that nothing comes through.
type door struct{}

func (door) Token(id dsec.SandboxID) string          { return "secret-of-" + string(id) }
func (door) Serve(_ dsec.SandboxID, c dsec.PortConn) { c.Close() }

func quotaRig(t *testing.T, limit int) (*rig, func() *counts) {
	r := newRig(t, synthetic.Options{})
	var q *counts
	r.config = func(c *edge.Config) {
		q = &counts{alive: map[dsec.SandboxID]bool{}, limit: limit} // of this process
		c.Quota, c.Door = q, door{}
		c.Limits.Starts, c.Limits.Queue = 16, 2000
	}
	r.open()
	return r, func() *counts { return q }
}

// TestQuotaIsExact has a thousand creates at once, failures among them, and a
// crash of the node in between.
func TestQuotaIsExact(t *testing.T) {
	r, q := quotaRig(t, 100)
	burst := func(n int) (got int64) {
		var ok atomic.Int64
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				s, key := spec(), ""
				if i%3 == 0 {
					s.Environment.Base = "missing" // is counted and given back
				}
				if i%5 == 0 {
					key = string(rune('a' + i%7)) // several wait for one
				}
				_, err := r.node.Create(t.Context(), s, dsec.CreateOptions{Key: key})
				switch kind := dsec.KindOf(err); {
				case err == nil && key == "":
					ok.Add(1)
				case err != nil && kind != dsec.Exhausted && kind != dsec.NotFound && kind != dsec.Conflict:
					t.Error(err)
				}
			})
		}
		all.Wait()
		return ok.Load()
	}
	burst(1000)
	for q().now() < 100 { // what had failed may have been in the way at the end
		r.create(spec(), "")
	}
	_, err := r.node.Create(t.Context(), spec(), dsec.CreateOptions{})
	wantKind(t, "one more", err, dsec.Exhausted)
	if n := r.node.Counts().Alive; n != 100 {
		t.Errorf("%d are alive, want 100", n)
	}

	r.kill()
	r.open()
	defer r.close()
	if n := q().now(); n != 100 {
		t.Errorf("after a crash %d are counted, want 100", n)
	}
	if n := burst(50); n != 0 {
		t.Errorf("after a crash %d more were made", n)
	}
	list, err := r.node.List(t.Context(), dsec.Filter{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		if _, err := r.node.Stop(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		r.create(spec(), "")
	}
	_, err = r.node.Extend(t.Context(), list[0].ID, 3*time.Hour)
	wantKind(t, "extend", err, dsec.Conflict)
	if err := r.node.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := q().now(); n != 0 || len(q().wrong) > 0 {
		t.Errorf("%d are counted after all has ended; counted twice: %v", n, q().wrong)
	}
}

// TestWhatAnAgentMadeEndsWithIt also when the node is down at that moment.
func TestWhatAnAgentMadeEndsWithIt(t *testing.T) {
	r, q := quotaRig(t, 1000)
	agent := func(p dsec.ProjectID) dsec.Sandbox {
		s := spec()
		s.Project, s.API = p, &dsec.Delegation{}
		return r.create(s, "")
	}
	child := func(of dsec.Sandbox) dsec.Spec {
		s := spec()
		s.Project = dsec.SandboxProject(of.Spec.Project, of.ID)
		return s
	}
	a, b, c := agent("p"), agent("p"), agent("p")
	tok, err := r.node.Delegate(a.ID)
	if err != nil || tok.Project != child(a).Project || len(tok.Rights) != 1 {
		t.Errorf("delegate: %+v, %v", tok, err)
	}
	below := agent(child(a).Project)
	kids := map[string]dsec.Sandbox{"a": r.create(child(a), ""), "below": r.create(child(below), ""), "b": r.create(child(b), ""), "c": r.create(child(c), "")}

	// Creates race with the end of their owner: none is left.
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			_, err := r.node.Create(t.Context(), child(a), dsec.CreateOptions{})
			if k := dsec.KindOf(err); err != nil && k != dsec.Conflict {
				t.Error(err)
			}
		})
	}
	if _, err := r.node.Stop(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	left := func(want int) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); r.node.Counts().Alive != want; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d are alive, want %d", r.node.Counts().Alive, want)
			}
		}
	}
	left(4) // b and c with one each
	for _, name := range []string{"a", "below"} {
		r.wantEnd(kids[name].ID, dsec.Stopped, dsec.CauseOwner)
	}
	_, err = r.node.Delegate(a.ID)
	wantKind(t, "delegate of an ended one", err, dsec.Unauthenticated)

	// One goes while nobody looks.
	r.kill()
	r.host.Crash(b.ID, dsec.CauseOOM, "")
	r.open()
	defer r.close()
	left(2)
	r.wantEnd(kids["b"].ID, dsec.Stopped, dsec.CauseOwner)
	if sb := r.get(kids["c"].ID); sb.State != dsec.Running {
		t.Errorf("the child of a living one is %s", sb.State)
	}
	if n := q().now(); n != 2 || len(q().wrong) > 0 {
		t.Errorf("%d are counted, want 2; counted twice: %v", n, q().wrong)
	}
}

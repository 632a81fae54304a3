package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestTimeToLive ends sandboxes when their time is over, and not before it.
func TestTimeToLive(t *testing.T) {
	n := shared(t)
	id := dsec.SandboxID(n.dsec(t, "create", "--image", busybox, "--ttl", "1s", "--label", "test=ttl"))
	longer := plain()
	longer.TTL = time.Second
	extended := n.create(t, longer)
	if got, err := n.Sandboxes.Extend(ctx(t), extended.ID, time.Hour); err != nil || got.Expires.Before(extended.Expires.Add(30*time.Minute)) {
		t.Errorf("extended to %v, %v", got.Expires, err)
	}
	st := n.begin(t, id, dsec.Command{Shell: "trap '' TERM; while :; do sleep 1; done"}) // work is no reason to stay
	got, err := n.Sandboxes.Wait(ctx(t), id)
	must(t, err)
	if got.Cause != dsec.CauseTTL || got.Ended.Before(got.Expires) || got.Spec.Labels["test"] != "ttl" {
		t.Errorf("%s %s, expires %v, ended %v", got.State, got.Cause, got.Expires, got.Ended)
	}
	if end, err := n.Commands.Wait(ctx(t), on(id), st.ID); err != nil || end.Outcome != dsec.Interrupted {
		t.Errorf("a command of it: %+v, %v", end, err) // the record says it
	}
	_, err = n.Sandboxes.Extend(ctx(t), id, time.Hour)
	wantKind(t, "extend it", err, dsec.Conflict)
	if got, err := n.Sandboxes.Get(ctx(t), extended.ID); err != nil || got.State != dsec.Running {
		t.Errorf("the extended one is %s, %v", got.State, err)
	}
	var listed []struct{ ID, Cause string }
	must(t, json.Unmarshal([]byte(n.dsec(t, "ls", "--all", "--json", "--label", "test=ttl")), &listed))
	if len(listed) != 1 || listed[0].ID != string(id) || listed[0].Cause != string(dsec.CauseTTL) {
		t.Errorf("listed %+v", listed)
	}
}

// TestIdleTime ends what nobody uses. A running command is use, though nobody
// calls.
func TestIdleTime(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Idle = time.Second
	unused, busy := n.create(t, spec), n.create(t, spec)
	n.begin(t, busy.ID, dsec.Command{Argv: []string{"sleep", "2"}})
	var wg sync.WaitGroup
	var ends [2]dsec.Sandbox
	for i, id := range []dsec.SandboxID{unused.ID, busy.ID} {
		wg.Go(func() {
			var err error
			if ends[i], err = n.Sandboxes.Wait(ctx(t), id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, least := range []time.Duration{time.Second, 3 * time.Second} {
		if sb := ends[i]; sb.Cause != dsec.CauseIdle || sb.Ended.Sub(sb.Created) < least {
			t.Errorf("%d: %s after %v, want idle after %v at least", i, sb.Cause, sb.Ended.Sub(sb.Created), least)
		}
	}
}

// TestKeyUnderConcurrency repeats one create from many clients at once.
func TestKeyUnderConcurrency(t *testing.T) {
	n := shared(t)
	const many = 16
	spec := plain()
	spec.Labels = map[string]string{"test": "key"}
	ids := make([]dsec.SandboxID, many)
	var wg sync.WaitGroup
	for i := range many {
		s := n.another(t)
		wg.Go(func() {
			sb, err := s.Sandboxes.Create(ctx(t), spec, dsec.CreateOptions{Key: "concurrent"})
			if err != nil {
				t.Error(err)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	t.Cleanup(func() { n.stop(t, ids[0]) })
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("%s and %s have one key", id, ids[0])
		}
	}
	if l, err := n.Sandboxes.List(ctx(t), dsec.Filter{Labels: spec.Labels}); err != nil || len(l) != 1 {
		t.Errorf("%d sandboxes, %v", len(l), err)
	}
	if got := n.dsec(t, "create", "--image", busybox, "--cpu", "2", "--memory", "256M", "--pids", "256", "--label", "test=key", "--key", "concurrent"); got != string(ids[0]) {
		t.Errorf("the command line gets %s, want %s", got, ids[0])
	}
	r := n.run(nil, "create", "--image", busybox, "--key", "concurrent")
	if r.code != 1 || !strings.Contains(r.err, "another spec") {
		t.Errorf("another spec: status %d, %q", r.code, r.err)
	}
}

// TestChurn makes and ends many sandboxes from many clients; the node's memory,
// descriptors and goroutines come back to what they were.
func TestChurn(t *testing.T) {
	n := shared(t)
	round := func(each int) {
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for i := range each {
					sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
					if err != nil {
						t.Error(err)
						return
					}
					want := fmt.Sprintf("%d.%d\n", w, i)
					if r := n.sh(t, sb.ID, "echo -n "+want); string(r.Out)+"\n" != want {
						t.Errorf("it says %q, want %q", r.Out, want)
					}
					n.stop(t, sb.ID)
				}
			})
		}
		wg.Wait()
		n.transport.CloseIdleConnections()
	}
	round(2)
	n.settle(t)
	fds, routines, memory := n.metric(t, "process_open_fds"), n.metric(t, "go_goroutines"), n.anonymous(t)
	round(8)
	eventually(t, "descriptors and goroutines as before", func() bool {
		return n.metric(t, "process_open_fds") <= fds && n.metric(t, "go_goroutines") <= routines
	})
	if now := n.anonymous(t); now > memory+32<<20 {
		t.Errorf("the node grew from %d to %d bytes", memory, now)
	}
}

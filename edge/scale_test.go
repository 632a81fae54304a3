package edge_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// createMany makes n sandboxes of one job, ten callers at a time.
func createMany(tb testing.TB, r *rig, n int) []dsec.SandboxID {
	ids := make([]dsec.SandboxID, n)
	s := spec()
	s.Job, s.Labels = "job", map[string]string{"task": "swe"}
	var wait sync.WaitGroup
	for w := range 10 {
		wait.Go(func() {
			for i := w; i < n; i += 10 {
				sb, err := r.node.Create(tb.Context(), s, dsec.CreateOptions{Key: fmt.Sprint("key-", i)})
				if err != nil {
					tb.Errorf("create: %v", err)
					return
				}
				ids[i] = sb.ID
			}
		})
	}
	wait.Wait()
	return ids
}

// Five thousand idle sandboxes need no goroutine each, answer, survive a
// restart, and end without a trace.
func TestFiveThousand(t *testing.T) {
	const many = 5000
	r := newRig(t, synthetic.Options{})
	r.open()
	before := runtime.NumGoroutine()
	ids := createMany(t, r, many)
	if t.Failed() {
		return
	}
	if n := runtime.NumGoroutine() - before; n > 20 {
		t.Errorf("%d sandboxes brought %d goroutines", many, n)
	}
	r.kill()
	r.open()
	if r.adopted.Adopted != many {
		t.Fatalf("adopted %+v", r.adopted)
	}
	all, err := r.node.List(t.Context(), dsec.Filter{Job: "job"})
	if err != nil || len(all) != many {
		t.Fatalf("%d are listed, %v", len(all), err)
	}
	for _, id := range ids[:100] {
		if got := r.exec(id, "echo x"); got != "x\n" {
			t.Fatalf("echo wrote %q", got)
		}
	}
	if err := r.node.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.stop()
	if m := r.host.Machines(); len(m) != 0 {
		t.Errorf("%d machines are left", len(m))
	}
}

// BenchmarkIdle reports the heap of an idle sandbox on the edge, with what the
// synthetic machine takes beside it.
func BenchmarkIdle(b *testing.B) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		const many = 5000
		r := newRig(b, synthetic.Options{})
		// The records are on a disk, not in memory.
		r.journal = discard{}
		r.open()
		empty := heap()
		createMany(b, r, many)
		r.note(func() { r.created = nil })
		full := heap()
		machines := r.host
		if err := r.node.Close(); err != nil {
			b.Fatal(err)
		}
		r.stop()
		r.driver.Detach()
		r.node, r.stop = nil, nil
		r.created, r.ended = nil, nil
		bare := heap() // the machines alone, which the host holds
		b.ReportMetric(float64(full-bare)/many, "B/sandbox")
		b.ReportMetric(float64(bare-empty)/many, "B/machine")
		runtime.KeepAlive(machines)
	}
}

func BenchmarkCreateStop(b *testing.B) {
	r := newRig(b, synthetic.Options{})
	r.journal = discard{}
	r.open()
	for b.Loop() {
		sb, err := r.node.Create(b.Context(), spec(), dsec.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.node.Stop(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
	r.stop()
	r.node.Close()
}

func BenchmarkCall(b *testing.B) {
	r := newRig(b, synthetic.Options{})
	r.open()
	sb, err := r.node.Create(b.Context(), spec(), dsec.CreateOptions{})
	if err != nil {
		b.Fatal(err)
	}
	files := r.node.Services().Files
	for b.Loop() {
		if _, err := files.Stat(b.Context(), dsec.Call{Sandbox: sb.ID}, dsec.FileOp{Path: "/"}); err != nil {
			b.Fatal(err)
		}
	}
	r.stop()
	r.node.Close()
}

// discard is a Journal that keeps nothing.
type discard struct{}

func (discard) Own(func(func([]byte) error) error, func()) error { return nil }
func (discard) Append([]byte) error                              { return nil }
func (discard) Replay(func([]byte) error) error                  { return nil }
func (discard) Checkpoint() error                                { return nil }

var _ edge.Journal = discard{}

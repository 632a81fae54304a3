package e2e_test

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

var kills = flag.Int("kills", 24, "how often TestRandomKills kills")

// worker is one trainer: a process for each step, begun again with the same
// step until it has an answer.
type worker struct {
	n  *node
	id dsec.SandboxID

	mu  sync.Mutex
	cmd *exec.Cmd // of the step under way
}

// step runs step k until some process of it has its answer.
func (w *worker) step(k int) error {
	line := fmt.Sprintf("echo %d >>/steps; usleep 20000; echo done %d", k, k)
	args := []string{"exec", "--step", fmt.Sprintf("s:%d", k), string(w.id), "--", "sh", "-c", line}
	for {
		cmd, cancel := w.n.command(args...)
		w.mu.Lock()
		w.cmd = cmd
		w.mu.Unlock()
		r := finish(cmd, nil)
		cancel()
		switch {
		case r.code == 0:
			if want := fmt.Sprintf("done %d\n", k); r.out != want {
				return fmt.Errorf("step %d printed %q, want %q", k, r.out, want)
			}
			return nil
		case r.code == -1: // it was killed
		case r.code == 125 && (strings.Contains(r.err, "refused") || strings.Contains(r.err, "reset") ||
			strings.Contains(r.err, "EOF") || strings.Contains(r.err, "closing") || strings.Contains(r.err, "unavailable")): // the server was killed
		default:
			return fmt.Errorf("step %d: %w", k, r.fault())
		}
	}
}

func (w *worker) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd != nil && w.cmd.Process != nil {
		w.cmd.Process.Kill()
	}
}

// TestRandomKills has trainers work in sandboxes while somebody kills them and
// the node's process at random. In the end every step was carried out once, in
// order, as the sandboxes' own files tell, and the record tells the same.
func TestRandomKills(t *testing.T) {
	n := own(t)
	const trainers = 3
	workers := make([]*worker, trainers)
	for i := range workers {
		sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
		must(t, err)
		workers[i] = &worker{n: n, id: sb.ID}
	}
	over := make(chan struct{})
	var wg sync.WaitGroup
	done := make([]int, trainers)
	for i, w := range workers {
		wg.Go(func() {
			for {
				if err := w.step(done[i] + 1); err != nil {
					t.Errorf("trainer %d: %v", i, err)
					return
				}
				done[i]++
				select {
				case <-over:
					return
				default:
				}
			}
		})
	}
	r := rand.New(rand.NewPCG(uint64(*kills), 7))
	begin := time.Now()
	for k := range *kills {
		time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond) // a kill at any instant is the test
		if r.IntN(3) > 0 {
			workers[r.IntN(trainers)].kill()
			continue
		}
		n.kill()
		if err := n.start(); err != nil {
			t.Errorf("kill %d: %v", k, err)
			break
		}
	}
	close(over)
	wg.Wait()
	total := 0
	for i, w := range workers {
		total += done[i]
		var want strings.Builder
		for k := range done[i] {
			fmt.Fprintln(&want, k+1)
		}
		if got := string(n.sh(t, w.id, "cat /steps").Out); got != want.String() {
			t.Errorf("trainer %d had %d steps answered; the sandbox tells of\n%s", i, done[i], got)
		}
		checkRecord(t, n, w.id, done[i])
		n.stop(t, w.id)
	}
	t.Logf("%d kills in %v, %d steps", *kills, time.Since(begin).Round(time.Second), total)
}

// checkRecord verifies a trajectory and finds each step answered once.
func checkRecord(t *testing.T, n *node, id dsec.SandboxID, steps int) {
	t.Helper()
	end, err := n.Trajectories.Head(ctx(t), id)
	must(t, err)
	v := trajectory.NewVerifier(id)
	answers := map[uint64]int{}
	for rec, err := range n.Trajectories.Records(ctx(t), id, 0) {
		must(t, err)
		must(t, v.Add(rec.Raw))
		if rec.Op == dsec.RecordCommand && rec.Of != 0 && rec.Step.Session == "s" && rec.Error == nil {
			answers[rec.Step.Number]++
		}
		if rec.Seq == end.Seq {
			break
		}
	}
	must(t, v.End(end))
	for k := range uint64(steps) {
		if answers[k+1] != 1 {
			t.Errorf("step %d has %d answers", k+1, answers[k+1])
		}
	}
}

// TestLongInputIsRecorded runs a step whose input takes several messages, twice.
func TestLongInputIsRecorded(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	in := bytes.Repeat([]byte("0123456789abcde\n"), 1<<19)
	call := dsec.Call{Sandbox: sb.ID, Step: dsec.Step{Session: "s", Number: 1}}
	for _, replayed := range []bool{false, true} {
		r, err := n.Commands.Run(ctx(t), call, dsec.Command{Shell: "wc -c", Stdin: dsec.StdinPipe}, in)
		must(t, err)
		if string(bytes.TrimSpace(r.Out)) != strconv.Itoa(len(in)) || r.Replayed && !replayed {
			t.Fatalf("%q, replayed %v", r.Out, r.Replayed)
		}
	}
}

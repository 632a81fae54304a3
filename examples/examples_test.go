package examples_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/job"
	"github.com/dsec-go/dsec/trajectory"
)

// TestExamples runs all of them against one node.
func TestExamples(t *testing.T) {
	n := start(t)
	t.Run("adapters", n.adapters)
	t.Run("asleep", n.asleep)
	t.Run("trainer", n.trainer)
}

// asleep has a trainer die within a call whose sandbox then pauses: who comes
// back for the command wakes it.
func (n *node) asleep(t *testing.T) {
	ctx := limited(t)
	sb, err := n.Sandboxes.Create(ctx, dsec.Spec{Environment: dsec.Environment{Base: "busybox"}}, dsec.CreateOptions{})
	must(t, err)
	on := dsec.Call{Sandbox: sb.ID, Step: dsec.Step{Session: "asleep", Number: 1}}
	// Long enough to be in the middle when the pause comes; a pause stops its clock.
	cmd := dsec.Command{Shell: "echo once >>/ran; touch /begun; for i in 1 2 3 4 5 6 7 8 9 10; do usleep 150000; done; cat /ran"}
	dying, die := context.WithCancel(ctx)
	died := make(chan error, 1)
	go func() {
		_, err := n.Commands.Run(dying, on, cmd, nil)
		died <- err
	}()
	for {
		if _, err := n.Files.Stat(ctx, dsec.Call{Sandbox: sb.ID}, dsec.FileOp{Path: "/begun"}); err == nil {
			break
		} else if dsec.KindOf(err) != dsec.NotFound {
			t.Fatal(err)
		}
	}
	die()
	<-died
	_, err = n.Sandboxes.Pause(ctx, sb.ID)
	must(t, err)
	r, err := n.Commands.Run(ctx, on, cmd, nil)
	if err != nil || string(r.Out) != "once\n" {
		t.Errorf("the command answers %q, %v", r.Out, err)
	}
	_, err = n.Sandboxes.Stop(ctx, sb.ID)
	must(t, err)
}

// adapters runs the adapters against the interfaces that they are for.
func (n *node) adapters(t *testing.T) {
	out, err := n.script(limited(t), "-W", "error::ResourceWarning", "-m", "unittest", "discover", "-s", "adapters", "-t", "adapters").CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("skipped=")) {
		t.Errorf("%v\n%s", err, out)
	}
	files, err := filepath.Glob("adapters/dsec_*.py")
	must(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		must(t, err)
		if lines := bytes.Count(b, []byte("\n")); lines > 100 {
			t.Errorf("%s has %d lines; whoever copies it wants no more than 100", f, lines)
		}
	}
}

// The size of the training that is tested, and what is done to it.
const (
	steps = 4
	group = 2
	tasks = 2
	kills = 20
	// callsOfStep is a little less than the calls of the shortest step.
	callsOfStep = group * tasks * 10
)

// trainer trains once in peace, and once with a trainer that is killed again and
// again. Nobody can tell the outcomes apart.
func (n *node) trainer(t *testing.T) {
	begin := time.Now()
	peace := n.training(t, "peace")
	if err := peace.live(limited(t), nil); err != nil {
		t.Fatal(err)
	}
	quiet := time.Since(begin)

	begin = time.Now()
	war := n.training(t, "war")
	within := map[string]int{}
	for k := range kills {
		call, err := war.killed(limited(t), k)
		if err != nil {
			t.Fatalf("life %d, after %v: %v", k+1, within, err)
		}
		within[call]++
		if k == kills/2 {
			n.abandoned(t, war.job)
		}
	}
	if err := war.live(limited(t), nil); err != nil {
		t.Fatal(err)
	}
	t.Logf("%v in peace; %v with %d kills, by what they hit: %v", quiet.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond), kills, within)
	if inside := kills - within[""]; inside < 15 {
		t.Errorf("%d of %d kills hit a call, want 15", inside, kills)
	}

	want, got := peace.read(t), war.read(t)
	if !bytes.Equal(want, got) {
		t.Errorf("the checkpoint of the killed trainer\n%s\ndiffers from that of the other\n%s", got, want)
	}
	if bytes.Contains(want, []byte(`"failed": "l`)) {
		t.Errorf("rollouts failed: %s", want)
	}
	ofPeace, ofWar := n.rollouts(t, peace.job), n.rollouts(t, war.job)
	if len(ofPeace) != steps*tasks*group {
		t.Errorf("%d rollouts are on record, want %d", len(ofPeace), steps*tasks*group)
	}
	if !maps.Equal(ofPeace, ofWar) {
		for key, sum := range ofPeace {
			if ofWar[key] != sum {
				t.Errorf("rollout %s\n%s\nof the killed trainer\n%s", key, sum, ofWar[key])
			}
		}
	}
}

// training is one run of the trainer, over all its lives.
type training struct {
	n                      *node
	job, checkpoint, calls string
	read                   func(t *testing.T) []byte
}

func (n *node) training(t *testing.T, name string) *training {
	dir := t.TempDir()
	tr := &training{n: n, job: name, checkpoint: filepath.Join(dir, "checkpoint"), calls: filepath.Join(dir, "calls")}
	tr.read = func(t *testing.T) []byte {
		t.Helper()
		b, err := os.ReadFile(tr.checkpoint)
		must(t, err)
		return b
	}
	return tr
}

// live runs the trainer to its end, or until kill says so.
func (tr *training) live(ctx context.Context, kill <-chan struct{}) error {
	cmd := tr.n.script(ctx, "trainer/trainer.py", "--job", tr.job, "--image", "busybox", "--checkpoint", tr.checkpoint, "--calls", tr.calls,
		"--lease", "2", "--seed", "7", "--steps", fmt.Sprint(steps), "--group", fmt.Sprint(group))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			notes, _ := os.ReadFile(tr.calls)
			err = fmt.Errorf("the trainer: %w\n%s\nits calls:\n%s", err, out.Bytes(), notes[max(0, len(notes)-2000):])
		}
		return err
	case <-kill:
		if err := cmd.Process.Kill(); err != nil {
			return fmt.Errorf("kill the trainer: %w\n%s", err, out.Bytes())
		}
		<-ended
		return nil
	}
}

// killed lets the trainer live until some call of the step that this kill is
// meant for, so that the kills are spread over all of the training. Each seventh
// is for where the checkpoint is written. It says in which call the trainer died.
func (tr *training) killed(ctx context.Context, k int) (string, error) {
	if err := os.Remove(tr.calls); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := rand.New(rand.NewPCG(uint64(k), 11))
	kill := make(chan struct{})
	go func() {
		step, calls := k*steps/kills, r.IntN(callsOfStep)
		if k == 0 {
			calls = 0 // the making of the sandboxes
		}
		there := func(notes string) bool {
			rest, begun := "", false
			for s := step; s < steps && !begun; s++ { // the kill before may have come just behind the checkpoint
				_, rest, begun = strings.Cut(notes, fmt.Sprintf("# %d\n", s))
			}
			if k%7 == 6 {
				return strings.Contains(rest, "# checkpoint\n")
			}
			return begun && strings.Count("\n"+rest, "\n+ ") > calls && under(notes) != ""
		}
		for {
			notes, _ := os.ReadFile(tr.calls)
			if there(string(notes)) {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Millisecond):
			}
		}
		if k > 0 && k%7 != 6 {
			<-time.After(time.Duration(r.IntN(8)) * time.Millisecond) // any instant is the right one
		}
		close(kill)
	}()
	if err := tr.live(ctx, kill); err != nil {
		return "", err
	}
	select {
	case <-kill:
	default:
		return "", errors.New("the trainer came to its end before it could be killed")
	}
	notes, err := os.ReadFile(tr.calls)
	return under(string(notes)), err
}

// under names a call that is begun and not ended.
func under(notes string) string {
	open := map[string]int{}
	for line := range strings.Lines(notes) {
		switch name := strings.TrimSpace(line[1:]); line[0] {
		case '+':
			open[name]++
		case '-':
			open[name]--
		}
	}
	for _, name := range slices.Sorted(maps.Keys(open)) {
		if open[name] > 0 {
			return name
		}
	}
	return ""
}

// abandoned waits until the node has paused what a dead trainer left.
func (n *node) abandoned(t *testing.T, id string) {
	t.Helper()
	ctx := limited(t)
	for {
		j, err := n.Jobs.Get(ctx, dsec.JobID(id))
		must(t, err)
		if j.State == dsec.JobDisconnected && j.Counts[dsec.Running] == 0 {
			if j.Counts[dsec.Paused] == 0 {
				t.Errorf("nothing is paused: %+v", j)
			}
			return
		}
		<-time.After(20 * time.Millisecond)
	}
}

// rollouts sums up the trajectory of each sandbox of a job, by its key: what must
// be the same however often the trainer died. Hashes of records are not, as they
// cover times, IDs and pauses; so each line is a step, its request, its outcome
// and digests of its output. It also verifies the chain, and that no step ran
// twice, both by the record and by what the sandbox counted itself.
func (n *node) rollouts(t *testing.T, of string) map[string]string {
	t.Helper()
	ctx := limited(t)
	boxes, err := n.Sandboxes.List(ctx, dsec.Filter{All: true, Job: dsec.JobID(of)})
	must(t, err)
	sums := map[string]string{}
	for _, sb := range boxes {
		if sb.State != dsec.Stopped {
			t.Errorf("sandbox %s of %s is %s", sb.ID, of, sb.State)
		}
		key := job.ItemKey(dsec.JobID(of), sb.Key)
		if _, twice := sums[key]; twice {
			t.Errorf("rollout %q of %s has two sandboxes", key, of)
		}
		sums[key] = n.summary(t, sb.ID)
	}
	return sums
}

// request is what of a record's request and answer is compared.
type request struct {
	Argv  []string
	Shell string
	Cwd   string
	Path  string
}

type answer struct {
	Outcome string
	Code    int
	Content string
}

func (n *node) summary(t *testing.T, id dsec.SandboxID) string {
	t.Helper()
	ctx := limited(t)
	var sum strings.Builder
	v := trajectory.NewVerifier(id)
	asked := map[uint64]dsec.Record{}
	answered := map[uint64]bool{}
	var ran []string // as the record has it
	for rec, err := range n.Trajectories.Records(ctx, id, 0) {
		must(t, err)
		must(t, v.Add(rec.Raw))
		if rec.Of == 0 {
			asked[rec.Seq] = rec
			continue
		}
		if rec.Step.IsZero() || rec.Error != nil { // a call that failed changed nothing and was made again
			continue
		}
		if answered[rec.Step.Number] {
			t.Errorf("step %d of %s ran twice", rec.Step.Number, id)
		}
		answered[rec.Step.Number] = true
		var q request
		var a answer
		must(t, errors.Join(json.Unmarshal(asked[rec.Of].Request, &q), json.Unmarshal(rec.Answer, &a)))
		out, errs := n.output(t, id, rec)
		fmt.Fprintf(&sum, "%s:%d %s %+v %+v %x %x\n", rec.Step.Session, rec.Step.Number, rec.Op, q, a, sha256.Sum256(out), sha256.Sum256(errs))
		if len(q.Argv) > 0 && q.Argv[0] == "cat" {
			if want := strings.Join(ran, ""); string(out) != want {
				t.Errorf("sandbox %s counted\n%s\nits record says\n%s", id, out, want)
			}
		} else if rec.Op == dsec.RecordCommand {
			ran = append(ran, fmt.Sprintf("%d\n", rec.Step.Number))
		}
	}
	end, err := n.Trajectories.Head(ctx, id)
	must(t, errors.Join(err, v.End(end)))
	return sum.String()
}

// output gives the two streams of a command's record.
func (n *node) output(t *testing.T, id dsec.SandboxID, rec dsec.Record) (out, errs []byte) {
	t.Helper()
	if rec.Body != dsec.BodyOutput {
		return nil, nil
	}
	body, err := n.Trajectories.Body(limited(t), id, rec.Seq)
	must(t, err)
	defer body.Close() //nolint:errcheck // it was read
	for o, err := range dsec.ReadOutput(body) {
		must(t, err)
		if o.Stream == dsec.Stderr {
			errs = append(errs, o.Data...)
		} else {
			out = append(out, o.Data...)
		}
	}
	return out, errs
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// await runs a command line until it prints what is wanted, however it is spaced.
func (w *world) await(want string, args ...string) string {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		out := w.run(args...)
		if strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			return out
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("dsec %s never had %q: %s", strings.Join(args, " "), want, out)
		}
	}
}

// refused runs a command line that fails with status 1 and gives what it says.
func (w *world) refused(args ...string) string {
	w.t.Helper()
	s := w.start(args...)
	if code := <-s.code; code != 1 {
		w.t.Errorf("dsec %s: status %d, want 1", strings.Join(args, " "), code)
	}
	return s.err.String()
}

// services gives the services of the node, as the operator.
func (w *world) services() dsec.Services {
	w.t.Helper()
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := connect(c.URL, c.Token)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// TestJobs goes through the life of a job on a real node: made, filled, its
// owner gone, opened anew, stopped, all by the command line.
func TestJobs(t *testing.T) {
	w := newWorld(t)
	up := w.up()
	w.run("image", "import", w.rootfs(), "--name", "base")
	if id := w.run("job", "create"); !strings.HasPrefix(id, "job-") {
		t.Errorf("made id %q", id)
	}
	if id := w.run("job", "create", "train", "--on-disconnect", "pause", "--lease", "1h", "--label", "a=b"); id != "train" {
		t.Fatalf("made %q", id)
	}
	for args, want := range map[string]string{
		"job create train":                     "exists",
		"job create x --lease 0":               "lease 0s",
		"job create x --lease 25h":             "lease 25h",
		"job create x --on-disconnect explode": "explode",
		"job inspect nowhere":                  "no job",
		"job stop nowhere":                     "no job",
		"job renew train 7":                    "future",
		"events --job train --after 99":        "not happened yet",
	} {
		if said := w.refused(strings.Fields(args)...); !strings.Contains(said, want) {
			t.Errorf("dsec %s says %q, want %q", args, said, want)
		}
	}
	var boxes []string
	for range 3 {
		boxes = append(boxes, w.run("create", "--image", "base", "--job", "train"))
	}
	free := w.run("create", "--image", "base", "--job", "a free word")
	w.await("running 3", "job", "inspect", "train")
	if out := w.run("job", "ls"); !strings.Contains(out, "a free word") || !strings.Contains(out, "1h0m0s, pause") {
		t.Errorf("jobs: %s", out)
	}
	var results []struct {
		Sandbox, State string
		Error          *struct{ Kind, Message string }
	}
	if err := json.Unmarshal([]byte(w.run("job", "pause", "train", "--json")), &results); err != nil || len(results) != 3 || results[0].State != "paused" {
		t.Errorf("pause: %+v, %v", results, err)
	}
	if n := len(strings.Fields(w.run("ls", "-q", "--state", "paused"))); n != 3 {
		t.Errorf("%d are paused", n)
	}
	w.run("job", "resume", "train")
	w.run("job", "label", "train", "round=2")
	if n := len(strings.Fields(w.run("ls", "-q", "--label", "round=2"))); n != 3 {
		t.Errorf("%d are labeled", n)
	}
	// Another opens it; the first is refused.
	if epoch := w.run("job", "open", "train"); epoch != "2" {
		t.Errorf("epoch %q", epoch)
	}
	if said := w.refused("job", "renew", "train", "1"); !strings.Contains(said, "fenced") {
		t.Errorf("the first owner hears %q", said)
	}
	s := w.services()
	on := dsec.Call{Sandbox: dsec.SandboxID(boxes[0]), Epoch: 1}
	_, err := s.Commands.Run(t.Context(), on, dsec.Command{Argv: []string{"/bin/hello", "version"}}, nil)
	if dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("a command of the first owner: %v, want Conflict", err)
	}
	on.Epoch = 2
	if _, err := s.Commands.Run(t.Context(), on, dsec.Command{Argv: []string{"/bin/hello", "version"}}, nil); err != nil {
		t.Errorf("a command of the owner: %v", err)
	}
	on.Epoch = 3
	if _, err = s.Commands.Run(t.Context(), on, dsec.Command{Argv: []string{"/bin/hello", "version"}}, nil); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("a command of the future: %v, want Invalid", err)
	}
	for id, want := range map[dsec.SandboxID]string{dsec.SandboxID(boxes[1]): "fenced", dsec.SandboxID(free): ""} {
		if _, err := s.Sandboxes.Get(dsec.WithEpoch(t.Context(), 1), id); (err == nil) != (want == "") || err != nil && want == "" {
			// The free one's job has had no owner, so epoch 1 is of the future.
			if id != dsec.SandboxID(free) || dsec.KindOf(err) != dsec.Invalid {
				t.Errorf("get %s: %v, want %q", id, err, want)
			}
		}
	}

	// kill -9 is tested below; here the node restarts in order.
	before := w.run("events", "--job", "train", "--json")
	up.signals <- os.Interrupt
	<-up.code
	up = w.up()
	if after := w.run("events", "--job", "train", "--json"); after != before {
		t.Errorf("events\n%s\nbecame\n%s", before, after)
	}
	if out := w.run("job", "inspect", "train", "--json"); !strings.Contains(out, `"epoch": 2`) || !strings.Contains(out, `"round": "2"`) {
		t.Errorf("after a restart: %s", out)
	}
	w.run("job", "stop", "train")
	if n := len(strings.Fields(w.run("ls", "-q"))); n != 1 {
		t.Errorf("%d run on", n)
	}
	out := w.run("events", "--job", "train", "--follow") // ends, since the job has
	for _, want := range []string{"created", "paused", "resumed", "owner-changed", "stopped", "the job was stopped"} {
		if !strings.Contains(out, want) {
			t.Errorf("events have no %q:\n%s", want, out)
		}
	}
	if out := w.run("events", "--job", "train", "--after", "1"); !strings.HasPrefix(out, "2 ") {
		t.Errorf("events behind 1:\n%s", out)
	}
	if all := w.run("events"); !strings.Contains(all, "a free word") || !strings.Contains(all, boxes[2]) {
		t.Errorf("events of all jobs:\n%s", all)
	}
	if said := w.refused("create", "--image", "base", "--job", "train"); !strings.Contains(said, "was stopped") {
		t.Errorf("a create in a stopped job: %q", said)
	}
	w.run("down", "--data", w.data)
	<-up.code
}

// TestLeaseOnANode lets leases end on a real node: those of nobody, and one
// that a client holds until it closes it.
func TestLeaseOnANode(t *testing.T) {
	w := newWorld(t)
	up := w.up()
	w.run("image", "import", w.rootfs(), "--name", "base")
	for _, policy := range []string{"pause", "stop", "keep"} {
		w.run("job", "create", policy, "--on-disconnect", policy, "--lease", "1s")
		w.run("create", "--image", "base", "--job", policy)
	}
	w.await("disconnected", "job", "inspect", "keep")
	w.await("paused 1", "job", "inspect", "pause")
	w.await("stopped 1", "job", "inspect", "stop")
	w.await("running 1", "job", "inspect", "keep")
	paused := w.run("ls", "-q", "--job", "pause")
	if state := w.run("inspect", paused); !strings.Contains(state, "paused") {
		t.Errorf("the paused one is %s", state)
	}

	s, ctx := w.services(), t.Context()
	lease, err := client.OpenJob(ctx, s, "pause")
	if err != nil {
		t.Fatal(err)
	}
	items := make([]dsec.JobItem, 4)
	for i := range items {
		items[i] = dsec.JobItem{Key: fmt.Sprint("k", i), Spec: dsec.Spec{Environment: dsec.Environment{Base: "base"}}}
	}
	made := map[int]dsec.SandboxID{}
	for range 2 {
		for r, err := range s.Jobs.CreateMany(lease.Context(), "pause", lease.Job().Epoch, items) {
			if err != nil || r.Err != nil {
				t.Fatalf("create many: %+v, %v", r, err)
			}
			if old, ok := made[r.Index]; ok && old != r.Sandbox.ID {
				t.Errorf("item %d is %s and %s", r.Index, old, r.Sandbox.ID)
			}
			made[r.Index] = r.Sandbox.ID
		}
	}
	// A paused one wakes at its first request, and nothing else of it.
	on := dsec.Call{Sandbox: dsec.SandboxID(paused)}
	if _, err := s.Commands.Run(lease.Context(), on, dsec.Command{Argv: []string{"/bin/hello", "version"}}, nil); err != nil {
		t.Errorf("a request of the owner: %v", err)
	}
	// It holds longer than a lease lasts.
	for begin := time.Now(); time.Since(begin) < 1500*time.Millisecond; {
		if _, err := s.Jobs.Get(lease.Context(), "pause"); err != nil {
			t.Fatal(err)
		}
	}
	if j, err := s.Jobs.Get(ctx, "pause"); err != nil || j.State != dsec.JobActive || j.Counts[dsec.Running] != 5 {
		t.Errorf("a held job: %+v, %v", j, err)
	}
	// Another takes it: the holder's context ends.
	other, err := client.OpenJob(ctx, s, "pause")
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-lease.Context().Done():
		if err := context.Cause(lease.Context()); dsec.KindOf(err) != dsec.Conflict {
			t.Errorf("the holder's context ends with %v, want Conflict", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the holder's context did not end")
	}
	// The command line acts as an owner too, and a later one fences it.
	w.epoch = "1"
	old := w.start("job", "pause", "pause")
	if code := <-old.code; code != statusFailed || !strings.Contains(old.err.String(), "epoch") {
		t.Errorf("an earlier owner's command line: status %d, %s", code, old.err)
	}
	w.epoch = "one"
	wrong := w.start("job", "pause", "pause")
	if code := <-wrong.code; code != statusFailed || !strings.Contains(wrong.err.String(), "DSEC_JOB_EPOCH") {
		t.Errorf("no epoch: status %d, %s", code, wrong.err)
	}
	w.epoch = ""
	lease.Close()
	other.Close()
	w.await("paused 5", "job", "inspect", "pause")

	// A project sees its own jobs alone.
	w.run("project", "create", "pa")
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := connect(c.URL, w.run("token", "create", "of-pa", "--project", "pa", "--right", "sandboxes"))
	if err != nil {
		t.Fatal(err)
	}
	if list, err := theirs.Jobs.List(ctx); err != nil || len(list) != 0 {
		t.Errorf("the other project lists %+v, %v", list, err)
	}
	if _, err := theirs.Jobs.Open(ctx, "pause"); dsec.KindOf(err) != dsec.NotFound || err == nil {
		t.Errorf("the other project opens it: %v, want NotFound", err)
	}
	if j, err := theirs.Jobs.Create(ctx, dsec.JobSpec{ID: "pause", Lease: time.Minute}, dsec.CreateOptions{}); err != nil || j.Project != "pa" {
		t.Errorf("the other project has the name for itself: %+v, %v", j, err)
	}
	if _, err := theirs.Jobs.Create(ctx, dsec.JobSpec{Project: "default", Lease: time.Minute}, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Denied || err == nil {
		t.Errorf("a job in another project: %v, want Denied", err)
	}
	w.run("down", "--data", w.data)
	<-up.code
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// createsAtOnce is how many creates are under way at a time, as a trainer's
// burst would have it.
const createsAtOnce = 16

// patch is one change of the project and what it must do to the results.
type patch struct {
	file   string
	more   int      // tests run more than before
	failed []string // tests that fail after it, of 0 before
}

// patches are dealt to the sandboxes in turn, so that neighbours differ.
var patches = []patch{
	{file: "html.patch", failed: []string{
		"simplejson.tests.test_encode_for_html.TestEncodeForHTML.test_basic_encode",
		"simplejson.tests.test_encode_for_html.TestEncodeForHTML.test_non_ascii_basic_encode",
	}},
	{file: "column.patch", failed: []string{
		"simplejson.tests.test_errors.TestErrors.test_scan_error",
		"simplejson.tests.test_fail.TestFail.test_array_decoder_issue46",
	}},
	{file: "test.patch", more: 1},
}

// task is what one sandbox does and how it went.
type task struct {
	sandbox dsec.Sandbox
	patch   patch
	create  time.Duration
	execs   []time.Duration
	runs    []time.Duration // of the test suite: before and after the patch
	cpu     []time.Duration
	fault   string // why it is not as expected
}

// results are what the toolkit's runner prints.
type results struct {
	Ran    int
	Failed []string
}

// work creates the sandboxes, looks at them while they idle, and lets all of
// them do their task at once.
func (d *demo) work(ctx context.Context, s dsec.Services, r *report) ([]*task, error) {
	tasks := make([]*task, d.sandboxes)
	for i := range tasks {
		tasks[i] = &task{patch: patches[i%len(patches)]}
	}
	free := availableMemory()
	begin := time.Now()
	err := d.each(ctx, "creating sandboxes", tasks, createsAtOnce, func(ctx context.Context, t *task) (err error) {
		start := time.Now()
		t.sandbox, err = s.Sandboxes.Create(ctx, dsec.Spec{
			Environment: dsec.Environment{Base: "debian", Workspace: "simplejson", Toolkits: []string{"testkit"}},
			Resources:   dsec.Resources{Memory: 512 << 20},
			Cwd:         "/" + workDir,
			Labels:      map[string]string{"demo": t.patch.file},
		}, dsec.CreateOptions{})
		t.create = time.Since(start)
		return err
	})
	if err != nil {
		return nil, err
	}
	r.creating = time.Since(begin)
	r.hostMemory = (free - availableMemory()) / int64(len(tasks))
	for _, t := range tasks {
		now, err := s.Sandboxes.Get(ctx, t.sandbox.ID)
		if err != nil {
			return nil, err
		}
		r.charged += now.Usage.Memory / int64(len(tasks))
	}

	// One at a time: what a call costs, not what waiting for a core costs.
	err = d.each(ctx, "running true", tasks, 1, func(ctx context.Context, t *task) error {
		for range 3 {
			start := time.Now()
			res, err := s.Commands.Run(ctx, dsec.Call{Sandbox: t.sandbox.ID}, dsec.Command{Argv: []string{"true"}}, nil)
			if err != nil {
				return err
			}
			if res.Code != 0 {
				return fmt.Errorf("true ended with %d %s", res.Code, res.Detail)
			}
			t.execs = append(t.execs, time.Since(start))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}

	begin = time.Now()
	err = d.each(ctx, "tasks, all at once", tasks, len(tasks), func(ctx context.Context, t *task) error {
		return t.do(ctx, s)
	})
	r.working = time.Since(begin)
	return tasks, err
}

// each calls f for every task, n at a time. The first error ends it.
func (d *demo) each(ctx context.Context, what string, tasks []*task, n int, f func(context.Context, *task) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begin := time.Now()
	var wg sync.WaitGroup
	slots := make(chan struct{}, n)
	ended := make(chan struct{}, len(tasks))
	wg.Go(func() {
		for i := range tasks {
			<-ended
			d.count(what, i+1, len(tasks), begin)
		}
	})
	for _, t := range tasks {
		slots <- struct{}{}
		wg.Go(func() {
			if ctx.Err() == nil {
				if err := f(ctx, t); err != nil {
					cancel(fmt.Errorf("%s: %w", what, err))
				}
			}
			ended <- struct{}{}
			<-slots
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// do runs the tests, applies the patch and runs them again. What the sandbox
// answers wrongly is the task's fault; an error is the server's.
func (t *task) do(ctx context.Context, s dsec.Services) error {
	before, err := t.test(ctx, s)
	if err != nil || t.fault != "" {
		return err
	}
	diff, err := fs.ReadFile(assets, path.Join("patches", t.patch.file))
	if err != nil {
		return err
	}
	res, err := s.Commands.Run(ctx, dsec.Call{Sandbox: t.sandbox.ID}, dsec.Command{
		Argv: []string{"git", "apply", "-"}, Stdin: dsec.StdinPipe, Timeout: time.Minute,
	}, diff)
	switch {
	case err != nil:
		return err
	case res.Code != 0:
		t.fault = fmt.Sprintf("git apply: %s, status %d: %s", res.Outcome, res.Code, res.Err)
		return nil
	}
	after, err := t.test(ctx, s)
	if err != nil || t.fault != "" {
		return err
	}
	switch {
	case before.Ran == 0 || len(before.Failed) > 0:
		t.fault = fmt.Sprintf("before the patch %d tests ran, %v failed", before.Ran, before.Failed)
	case after.Ran != before.Ran+t.patch.more || !slices.Equal(after.Failed, t.patch.failed):
		t.fault = fmt.Sprintf("after %s %d tests ran (%d before), %v failed, want %v",
			t.patch.file, after.Ran, before.Ran, after.Failed, t.patch.failed)
	}
	return nil
}

// test runs the project's test suite with the toolkit.
func (t *task) test(ctx context.Context, s dsec.Services) (results, error) {
	start := time.Now()
	res, err := s.Commands.Run(ctx, dsec.Call{Sandbox: t.sandbox.ID}, dsec.Command{
		Argv: []string{"python3", "/" + toolDir + "/runtests.py"}, Timeout: 5 * time.Minute,
	}, nil)
	if err != nil {
		return results{}, err
	}
	t.runs = append(t.runs, time.Since(start))
	t.cpu = append(t.cpu, res.CPU)
	var got results
	if err := json.Unmarshal(res.Out, &got); err != nil || res.Code != 0 {
		t.fault = fmt.Sprintf("the tests ended with %s, status %d: %s", res.Outcome, res.Code,
			strings.TrimSpace(string(res.Err)))
	}
	return got, nil
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/dsec-go/dsec"
)

// task is one rollout: steps in a fresh sandbox.
type task struct {
	ID    string   `json:"id"`
	Image string   `json:"image"`
	Steps []string `json:"steps"`
}

// result is how one step went; the last of a task says so.
type result struct {
	Seq   uint64 `json:"seq"`
	Task  string `json:"task"`
	Step  int    `json:"step"` // from 1
	Code  int    `json:"code"`
	Out   string `json:"out"`
	Done  bool   `json:"done,omitempty"`
	Error string `json:"error,omitempty"` // the rollout failed; it is done
}

// ask is what a trainer sends. A task that is known by its ID is not begun again.
type ask struct {
	Submit []task `json:"submit"`
	After  uint64 `json:"after"` // the results that the trainer has
}

// entry is one line of the log.
type entry struct {
	Task   *task   `json:"task,omitempty"`
	Result *result `json:"result,omitempty"`
}

// worker owns the rollouts. Everything in it is in its log as well.
type worker struct {
	s     dsec.Services
	slots chan struct{}

	mu      sync.Mutex
	log     *os.File
	tasks   map[string]task
	steps   map[string]int // that are done, by task
	order   []string       // of tasks that nobody works on
	results []result
	news    chan struct{} // closed at each change
}

func openWorker(s dsec.Services, path string, parallel int) (*worker, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	w := &worker{
		s: s, slots: make(chan struct{}, parallel), log: f, tasks: map[string]task{}, steps: map[string]int{}, news: make(chan struct{}),
	}
	var size int64
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break // half a line is what a crash left: it never happened
		}
		if err != nil {
			return nil, err
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("read %s at %d: %w", path, size, err)
		}
		w.apply(e)
		size += int64(len(line))
	}
	return w, f.Truncate(size)
}

func (w *worker) close() { w.log.Close() }

// record makes e durable and then true.
func (w *worker) record(e entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Task != nil {
		if _, known := w.tasks[e.Task.ID]; known {
			return nil
		}
	}
	if e.Result != nil {
		e.Result.Seq = uint64(len(w.results)) + 1
	}
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if _, err := w.log.Write(append(b, '\n')); err != nil {
		return err
	}
	w.apply(e)
	close(w.news)
	w.news = make(chan struct{})
	return nil
}

// apply changes the state. Requires: w.mu held, or nobody else has w.
func (w *worker) apply(e entry) {
	switch {
	case e.Task != nil:
		w.tasks[e.Task.ID] = *e.Task
		w.order = append(w.order, e.Task.ID)
	case e.Result != nil:
		w.results = append(w.results, *e.Result)
		w.steps[e.Result.Task] = e.Result.Step
		if e.Result.Done {
			w.steps[e.Result.Task] = len(w.tasks[e.Result.Task].Steps)
		}
	}
}

// run works on tasks until ctx ends.
func (w *worker) run(ctx context.Context) {
	for {
		w.mu.Lock()
		news := w.news
		var next string
		if len(w.order) > 0 {
			next, w.order = w.order[0], w.order[1:]
		}
		t, done := w.tasks[next], w.steps[next]
		w.mu.Unlock()
		if next == "" {
			select {
			case <-news:
				continue
			case <-ctx.Done():
				return
			}
		}
		if done >= len(t.Steps) {
			continue
		}
		select {
		case w.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		go func() {
			defer func() { <-w.slots }()
			if err := w.rollout(ctx, t, done); err != nil && ctx.Err() == nil {
				w.record(entry{Result: &result{Task: t.ID, Step: len(t.Steps), Done: true, Error: err.Error()}}) //nolint:errcheck // the disk is full
			}
		}()
	}
}

// rollout goes on with a task after so many steps. The key of the sandbox and
// the steps of commands are the task's: what an earlier process of this worker
// did is found again and not done twice.
func (w *worker) rollout(ctx context.Context, t task, done int) error {
	sb, err := w.s.Sandboxes.Create(ctx, dsec.Spec{
		Environment: dsec.Environment{Base: t.Image}, Resources: dsec.Resources{Memory: 256 << 20}, Labels: map[string]string{"task": t.ID},
	}, dsec.CreateOptions{Key: "rollout/" + t.ID})
	if err != nil {
		return err
	}
	for i := done; i < len(t.Steps); i++ {
		on := dsec.Call{Sandbox: sb.ID, Step: dsec.Step{Session: t.ID, Number: uint64(i + 1)}}
		r, err := w.s.Commands.Run(ctx, on, dsec.Command{Shell: t.Steps[i]}, nil)
		if err != nil {
			return err
		}
		last := i+1 == len(t.Steps)
		if last {
			// Before the result is told: whoever has it need not care any more.
			if _, err := w.s.Sandboxes.Stop(ctx, sb.ID); err != nil {
				return err
			}
		}
		if err := w.record(entry{Result: &result{Task: t.ID, Step: i + 1, Code: r.Code, Out: string(r.Out), Done: last}}); err != nil {
			return err
		}
	}
	return nil
}

// serve answers one trainer until it goes.
func (w *worker) serve(ctx context.Context, c io.ReadWriter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := json.NewDecoder(c)
	var a ask
	if err := in.Decode(&a); err != nil {
		return fmt.Errorf("read what is asked: %w", err)
	}
	for _, t := range a.Submit {
		if t.ID == "" || len(t.Steps) == 0 {
			return fmt.Errorf("task %q has no id or no steps", t.ID)
		}
		if err := w.record(entry{Task: &t}); err != nil {
			return err
		}
	}
	go func() { // the end of the connection, or another line, which is not expected
		_ = in.Decode(&ask{})
		cancel()
	}()
	out := json.NewEncoder(c)
	for at := a.After; ; {
		w.mu.Lock()
		news := w.news
		var more []result
		if at < uint64(len(w.results)) {
			more = w.results[at:]
		}
		w.mu.Unlock()
		for _, r := range more {
			if err := out.Encode(r); err != nil {
				return err
			}
			at = r.Seq
		}
		if len(more) > 0 {
			continue
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil
		}
	}
}

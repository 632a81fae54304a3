package job

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// work is a call on many sandboxes.
type work struct {
	ctx  context.Context // of the work, not of the caller
	n    int
	each func(ctx context.Context, i int) dsec.JobResult // also once ctx has ended
	done func()                                          // at the end; may be nil
}

// many carries out what begin gives and yields the results as they come. The
// work goes on when the caller stops to listen.
func (j *Jobs) many(ctx context.Context, op string, begin func() (work, error)) iter.Seq2[dsec.JobResult, error] {
	return func(yield func(dsec.JobResult, error) bool) {
		w, err := begin()
		if err != nil {
			yield(dsec.JobResult{}, dsec.WithOp(op, "", err))
			return
		}
		results := make(chan dsec.JobResult, w.n) // nobody ever waits for a reader
		run := func() {
			j.forEach(w.ctx, w.n, func(ctx context.Context, i int) {
				r := w.each(ctx, i)
				r.Index, r.Err = i, dsec.WithOp(op, r.Sandbox.ID, r.Err)
				results <- r
			})
			close(results)
			if w.done != nil {
				w.done()
			}
		}
		if !j.spawn(run) {
			if w.done != nil {
				w.done()
			}
			yield(dsec.JobResult{}, dsec.WithOp(op, "", errClosing))
			return
		}
		for {
			select {
			case r, ok := <-results:
				if !ok || !yield(r, nil) {
					return
				}
			case <-ctx.Done():
				yield(dsec.JobResult{}, dsec.WithOp(op, "", context.Cause(ctx)))
				return
			}
		}
	}
}

// forEach calls f for 0 to n-1, as many at once as the slots of all jobs allow,
// and returns when all are done. f is called for each of them also after ctx has
// ended, and looks by itself.
func (j *Jobs) forEach(ctx context.Context, n int, f func(ctx context.Context, i int)) {
	var next atomic.Int64
	var wait sync.WaitGroup
	for range min(n, cap(j.slots)) {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				select {
				case j.slots <- struct{}{}:
					f(ctx, i)
					<-j.slots
				case <-ctx.Done():
					f(ctx, i)
				}
			}
		})
	}
	wait.Wait()
}

// detach gives a context for work that outlives the call of ctx: it knows who
// called and ends with the jobs, or with until.
func (j *Jobs) detach(ctx context.Context, until context.Context) (context.Context, func()) {
	return bound(context.WithoutCancel(ctx), until)
}

// bound gives a context that ends with either, for the reason of until if that
// is why.
func bound(ctx, until context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(until, func() { cancel(context.Cause(until)) })
	return ctx, func() { stop(); cancel(nil) }
}

// node gives the sandboxes; Unavailable before Bind.
func (j *Jobs) node() (dsec.Sandboxes, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.sandboxes == nil {
		return nil, dsec.Errorf(dsec.Unavailable, "the node is starting")
	}
	return j.sandboxes, nil
}

// alive gives the members that have not ended, by ID.
func (j *Jobs) alive(e *entry) []member {
	j.mu.Lock()
	defer j.mu.Unlock()
	var list []member
	for _, m := range e.members {
		if !m.state.Ended() {
			list = append(list, *m)
		}
	}
	slices.SortFunc(list, func(a, b member) int { return cmp.Compare(a.id, b.id) })
	return list
}

// own finds a job for a call that may carry an epoch.
func (j *Jobs) own(ctx context.Context, id dsec.JobID) (*entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.find(ctx, id)
	if err == nil {
		err = e.fence(dsec.EpochFrom(ctx))
	}
	return e, err
}

// all makes a call on all living sandboxes of a job.
func (j *Jobs) all(ctx context.Context, op string, id dsec.JobID, f func(context.Context, dsec.Sandboxes, dsec.SandboxID) (dsec.Sandbox, error)) iter.Seq2[dsec.JobResult, error] {
	return j.many(ctx, op, func() (work, error) {
		e, err := j.own(ctx, id)
		if err != nil {
			return work{}, err
		}
		return j.workOn(ctx, e, f)
	})
}

func (j *Jobs) workOn(ctx context.Context, e *entry, f func(context.Context, dsec.Sandboxes, dsec.SandboxID) (dsec.Sandbox, error)) (work, error) {
	s, err := j.node()
	if err != nil {
		return work{}, err
	}
	if !j.flush(ctx) {
		return work{}, cmp.Or(context.Cause(ctx), error(errClosing))
	}
	list := j.alive(e)
	wctx, done := j.detach(ctx, j.life)
	return work{ctx: wctx, n: len(list), done: done, each: func(ctx context.Context, i int) dsec.JobResult {
		r := dsec.JobResult{Key: list[i].key}
		r.Sandbox, r.Err = f(ctx, s, list[i].id)
		if r.Err != nil {
			r.Sandbox = dsec.Sandbox{ID: list[i].id}
		}
		return r
	}}, nil
}

// Pause pauses all that run.
func (j *Jobs) Pause(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	return j.all(ctx, "job.Pause", id, func(ctx context.Context, s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
		return s.Pause(ctx, id)
	})
}

// Resume lets all go on.
func (j *Jobs) Resume(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	return j.all(ctx, "job.Resume", id, func(ctx context.Context, s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
		return s.Resume(ctx, id)
	})
}

// Stop ends all and the job. What the caller's results leave out, and what a
// restart interrupts, is stopped behind it.
func (j *Jobs) Stop(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	return j.many(ctx, "job.Stop", func() (work, error) {
		e, err := j.own(ctx, id)
		if err != nil {
			return work{}, err
		}
		var owner, base *tenure
		var n uint64
		seq, err := j.append(func() (change, error) {
			if e.state == dsec.JobStopped || j.jobs[e.key] != e {
				return change{}, nil
			}
			n = e.log.last + 1
			return change{Op: opStopped, Project: e.project, Job: e.id, Events: []event{
				{Seq: n, At: time.Now().UnixNano(), Type: dsec.EventStopped, Cause: dsec.CauseUser, Detail: "the job was stopped"},
			}}, nil
		}, func() {
			owner, base = e.revoke(errStopped(e)), e.base
			e.base = nil
			if base != nil {
				base.end(errStopped(e))
			}
		})
		if err == nil && seq != 0 {
			err = j.sync(seq, e, n)
		}
		if err != nil {
			return work{}, err
		}
		for _, t := range []*tenure{owner, base} {
			if t != nil {
				t.work.Wait() // creates that were under way end soon
			}
		}
		w, err := j.workOn(ctx, e, func(ctx context.Context, s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
			return s.Stop(ctx, id)
		})
		if err != nil {
			j.spawn(func() { j.settle(e, nil) })
			return work{}, err
		}
		done := w.done
		w.done = func() { done(); j.settle(e, nil) }
		return w, nil
	})
}

// Label sets labels of the job and of all that live.
func (j *Jobs) Label(ctx context.Context, id dsec.JobID, labels map[string]string) iter.Seq2[dsec.JobResult, error] {
	const op = "job.Label"
	return j.many(ctx, op, func() (work, error) {
		if j.cfg.Label == nil {
			return work{}, dsec.Errorf(dsec.Unsupported, "this node cannot change labels")
		}
		e, err := j.own(ctx, id)
		if err != nil {
			return work{}, err
		}
		if err := (dsec.JobSpec{Lease: dsec.MinLease, Labels: labels}).Check(); err != nil {
			return work{}, err
		}
		seq, err := j.append(func() (change, error) {
			c := change{Op: opLabeled, Project: e.project, Job: e.id, Labels: withLabels(e.labels, labels)}
			if len(c.Labels) > dsec.MaxLabels {
				return change{}, dsec.Errorf(dsec.Invalid, "job %q would have %d labels, more than %d", e.id, len(c.Labels), dsec.MaxLabels)
			}
			return c, nil
		}, nil)
		if err == nil {
			err = j.sync(seq, e, 0)
		}
		if err != nil {
			return work{}, err
		}
		return j.workOn(ctx, e, func(ctx context.Context, _ dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
			return j.cfg.Label(ctx, id, labels)
		})
	})
}

// enter lets a create of an owner in, or of an operator if epoch is 0. The
// create runs under the tenure's context and calls leave at its end.
func (j *Jobs) enter(e *entry, epoch uint64) (t *tenure, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.closed:
		return nil, errClosing
	case e.state == dsec.JobStopped:
		return nil, errStopped(e)
	}
	if err := e.fence(epoch); err != nil {
		return nil, err
	}
	j.resume(e)
	switch {
	case epoch == 0:
		if e.base == nil {
			e.base = j.tenure()
		}
		t = e.base
	case e.owner == nil || e.owner.ctx.Err() != nil:
		return nil, errLease(e)
	default:
		t = e.owner
	}
	t.work.Add(1)
	return t, nil
}

// CreateMany creates sandboxes, many at a time.
func (j *Jobs) CreateMany(ctx context.Context, id dsec.JobID, epoch uint64, items []dsec.JobItem) iter.Seq2[dsec.JobResult, error] {
	return j.many(ctx, "job.CreateMany", func() (work, error) {
		if err := checkItems(items); err != nil {
			return work{}, err
		}
		if epoch == 0 {
			epoch = dsec.EpochFrom(ctx)
		}
		s, err := j.node()
		if err != nil {
			return work{}, err
		}
		j.mu.Lock()
		e, err := j.find(ctx, id)
		j.mu.Unlock()
		if err != nil {
			return work{}, err
		}
		t, err := j.enter(e, epoch)
		if err != nil {
			return work{}, err
		}
		wctx, end := j.detach(ctx, t.ctx)
		return work{ctx: wctx, n: len(items), done: func() { end(); t.work.Done() }, each: func(ctx context.Context, i int) dsec.JobResult {
			return j.create(ctx, s, e, items[i])
		}}, nil
	})
}

// checkItems is Invalid for what is wrong with a bulk create as a whole.
func checkItems(items []dsec.JobItem) error {
	if len(items) > dsec.MaxJobItems {
		return dsec.Errorf(dsec.Invalid, "%d items are more than %d", len(items), dsec.MaxJobItems)
	}
	at := make(map[string]int, len(items))
	for i, it := range items {
		if len(it.Key) > dsec.MaxItemKey {
			return dsec.Errorf(dsec.Invalid, "key of item %d has %d bytes, more than %d", i, len(it.Key), dsec.MaxItemKey)
		}
		if first, twice := at[it.Key]; twice && it.Key != "" {
			return dsec.Errorf(dsec.Invalid, "items %d and %d have the same key %q", first, i, clip(it.Key))
		}
		at[it.Key] = i
	}
	return nil
}

// create makes one item. What it fails of is an event, since the caller may be
// gone.
func (j *Jobs) create(ctx context.Context, s dsec.Sandboxes, e *entry, it dsec.JobItem) dsec.JobResult {
	r := dsec.JobResult{Key: it.Key}
	spec, opt := it.Spec, dsec.CreateOptions{}
	if it.Key != "" {
		opt.Key = SandboxKey(e.id, it.Key)
	}
	switch {
	case ctx.Err() != nil:
		r.Err = context.Cause(ctx)
		return r
	case spec.Job != "" && spec.Job != e.id:
		r.Err = dsec.Errorf(dsec.Invalid, "the item is of job %q, not %q", clip(string(spec.Job)), e.id)
	case spec.Project != "" && spec.Project != e.project:
		r.Err = dsec.Errorf(dsec.Invalid, "the item is of project %q, its job of %q", clip(string(spec.Project)), e.project)
	default:
		spec.Job, spec.Project = e.id, e.project
		r.Sandbox, r.Err = s.Create(ctx, spec, opt)
	}
	if r.Err != nil && ctx.Err() == nil {
		again := dsec.KindOf(r.Err)
		j.Note(Change{
			Project: e.project, Job: e.id, Key: opt.Key, State: dsec.Failed, Cause: dsec.CauseAdmission, Detail: r.Err.Error(),
			retry: again == dsec.Unavailable || again == dsec.Exhausted || again == dsec.Timeout,
		})
	}
	return r
}

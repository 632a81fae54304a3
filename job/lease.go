package job

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// tenure is the time of one owner: what it creates runs under ctx, and is waited
// for once that has ended. An owner whose lease ended and who comes back has
// another.
type tenure struct {
	ctx  context.Context
	end  context.CancelCauseFunc
	work sync.WaitGroup // Add with Jobs.mu held, and only while it is its entry's
	once sync.Once      // the policy, where the journal could not be written
}

func (j *Jobs) tenure() *tenure {
	t := &tenure{}
	t.ctx, t.end = context.WithCancelCause(j.life)
	return t
}

// grant begins a tenure and its lease. Requires: mu held.
func (j *Jobs) grant(e *entry) {
	e.stopTimer()
	t := j.tenure()
	e.owner = t
	if e.lease == 0 {
		return
	}
	e.leaseEnd = time.Now().Add(e.lease)
	e.timer = time.AfterFunc(e.lease, func() { j.spawn(func() { j.expire(e, t) }) })
}

// resume gives an owner its tenure after a restart, whoever comes first: its own
// call or Run. Requires: mu held.
func (j *Jobs) resume(e *entry) {
	if e.state == dsec.JobActive && e.epoch > 0 && e.owner == nil {
		j.grant(e)
	}
}

// revoke ends the owner's tenure and gives it. Requires: mu held.
func (e *entry) revoke(cause error) *tenure {
	e.stopTimer()
	t := e.owner
	if t != nil {
		t.end(cause)
	}
	e.owner = nil
	return t
}

// Requires: Jobs.mu held.
func (e *entry) stopTimer() {
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
}

func errLease(e *entry) error {
	return dsec.Errorf(dsec.Conflict, "the lease of job %q has ended", e.id)
}

func errFenced(e *entry, epoch uint64) error {
	return dsec.Errorf(dsec.Conflict, "fenced: job %q has another owner, of epoch %d; this call is of epoch %d", e.id, e.epoch, epoch)
}

func errStopped(e *entry) error { return dsec.Errorf(dsec.Conflict, "job %q was stopped", e.id) }

// fence refuses an epoch that is not the present one; 0 is nobody's, and passes.
// Requires: mu held.
func (e *entry) fence(epoch uint64) error {
	switch {
	case epoch == 0 || epoch == e.epoch:
		return nil
	case epoch > e.epoch:
		return dsec.Errorf(dsec.Invalid, "epoch %d is from the future: job %q is at %d", epoch, e.id, e.epoch)
	}
	return errFenced(e, epoch)
}

// Open makes the caller the owner.
func (j *Jobs) Open(ctx context.Context, id dsec.JobID) (dsec.Job, error) {
	var e *entry
	var n uint64
	seq, err := j.append(func() (c change, err error) {
		if e, err = j.find(ctx, id); err != nil {
			return change{}, err
		}
		if e.state == dsec.JobStopped {
			return change{}, errStopped(e)
		}
		n = e.log.last + 1
		return change{Op: opOpened, Project: e.project, Job: e.id, Epoch: e.epoch + 1, Events: []event{
			{Seq: n, At: time.Now().UnixNano(), Type: dsec.EventOwner, Epoch: e.epoch + 1},
		}}, nil
	}, func() {
		e.revoke(errFenced(e, e.epoch-1))
		j.grant(e)
	})
	if err == nil {
		err = j.sync(seq, e, n)
	}
	if err != nil {
		return dsec.Job{}, dsec.WithOp("job.Open", "", err)
	}
	return j.view(e), nil
}

// Renew begins the lease anew. The record of a lease that runs on is not
// written.
func (j *Jobs) Renew(ctx context.Context, id dsec.JobID, epoch uint64) (dsec.Job, error) {
	const op = "job.Renew"
	var e *entry
	var n uint64
	seq, err := j.append(func() (c change, err error) {
		if e, err = j.find(ctx, id); err != nil {
			return change{}, err
		}
		switch {
		case e.state == dsec.JobStopped:
			return change{}, errStopped(e)
		case epoch == 0:
			return change{}, dsec.Errorf(dsec.Invalid, "epoch 0 is nobody's")
		}
		if err := e.fence(epoch); err != nil {
			return change{}, err
		}
		j.resume(e)
		if t := e.owner; e.state == dsec.JobActive && t != nil && t.ctx.Err() == nil {
			if e.timer != nil {
				e.leaseEnd = time.Now().Add(e.lease)
				e.timer.Reset(e.lease)
			}
			return change{}, nil
		}
		n = e.log.last + 1
		return change{Op: opOpened, Project: e.project, Job: e.id, Epoch: epoch, Events: []event{
			{Seq: n, At: time.Now().UnixNano(), Type: dsec.EventOwner, Epoch: epoch, Detail: "the owner is back"},
		}}, nil
	}, func() {
		e.revoke(errLease(e))
		j.grant(e)
	})
	if err == nil && seq != 0 {
		err = j.sync(seq, e, n)
	}
	if err != nil {
		return dsec.Job{}, dsec.WithOp(op, "", err)
	}
	return j.view(e), nil
}

// expireRetry is the pause before the end of a lease is written again.
const expireRetry = time.Second

// expire ends a lease whose time has come. The policy is carried out also when
// the journal cannot be written; its record follows.
func (j *Jobs) expire(e *entry, t *tenure) {
	var n uint64
	due := func() bool { return e.owner == t && !time.Now().Before(e.leaseEnd) }
	seq, err := j.append(func() (change, error) {
		if !due() {
			return change{}, nil // renewed, or another's
		}
		n = e.log.last + 1
		return change{Op: opExpired, Project: e.project, Job: e.id, At: time.Now().UnixNano(), Events: []event{
			{Seq: n, At: time.Now().UnixNano(), Type: dsec.EventLease, Epoch: e.epoch, Detail: "policy " + string(e.policy)},
		}}, nil
	}, func() { e.revoke(errLease(e)) })
	switch {
	case err != nil:
		j.cfg.Error(err)
		j.mu.Lock()
		again := due() && !j.closed
		if again {
			t.end(errLease(e))
			e.timer = time.AfterFunc(expireRetry, func() { j.spawn(func() { j.expire(e, t) }) })
		}
		j.mu.Unlock()
		if again {
			t.once.Do(func() { j.spawn(func() { t.work.Wait(); j.carryOut(e) }) })
		}
		return
	case seq == 0:
		return
	}
	if err := j.sync(seq, e, n); err != nil {
		j.cfg.Error(err)
	}
	j.settle(e, t)
}

// settle carries out what a job without an owner is to have done, and notes that
// it was. t is the tenure before, nil after a restart.
func (j *Jobs) settle(e *entry, t *tenure) {
	if t != nil {
		t.work.Wait()
	}
	if !j.carryOut(e) {
		return
	}
	seq, err := j.append(func() (change, error) {
		if e.state == dsec.JobActive || e.settled || j.jobs[e.key] != e {
			return change{}, nil
		}
		return change{Op: opSettled, Project: e.project, Job: e.id}, nil
	}, nil)
	if err == nil && seq != 0 {
		err = j.sync(seq, e, 0)
	}
	if err != nil {
		j.cfg.Error(err) // the next start does it again
	}
}

// Pauses between two rounds over sandboxes that could not be paused or stopped.
const (
	firstRound = time.Second
	lastRound  = time.Minute
)

// carryOut pauses or stops what lives, as the state and the policy say, until
// nothing is left to do. It reports false if the job has an owner again, or the
// node closes.
func (j *Jobs) carryOut(e *entry) bool {
	for pause := firstRound; ; pause = min(2*pause, lastRound) {
		if !j.flush(j.life) {
			return false
		}
		left := 0
		for _, r := range j.sweep(e) {
			if r.Err != nil && dsec.KindOf(r.Err) != dsec.NotFound && dsec.KindOf(r.Err) != dsec.Unsupported {
				left++
			}
		}
		j.mu.Lock()
		owned := e.wants() == "" && e.policy != dsec.DisconnectKeep
		j.mu.Unlock()
		switch {
		case owned:
			return false
		case left == 0:
			return j.life.Err() == nil
		}
		select {
		case <-time.After(pause):
		case <-j.life.Done():
			return false
		}
	}
}

// unlessOwned resumes a sandbox that was being paused while an owner came back:
// he may wait already for what stands still in it.
func (j *Jobs) unlessOwned(ctx context.Context, s dsec.Sandboxes, e *entry, id dsec.SandboxID) error {
	j.mu.Lock()
	want := e.wants()
	j.mu.Unlock()
	if want == dsec.DisconnectPause {
		return nil
	}
	_, err := s.Resume(ctx, id)
	return err
}

// wants is what is to be done with what lives: "pause", "stop" or nothing.
// Requires: Jobs.mu held.
func (e *entry) wants() dsec.OnDisconnect {
	switch {
	case e.state == dsec.JobStopped:
		return dsec.DisconnectStop
	case e.owner != nil && e.owner.ctx.Err() == nil || e.policy == dsec.DisconnectKeep:
		return ""
	}
	return e.policy
}

// reason says why what lives is paused or stopped. Requires: Jobs.mu held.
func (e *entry) reason() dsec.Reason {
	if e.state == dsec.JobStopped {
		return dsec.Reason{Cause: dsec.CauseUser, Detail: fmt.Sprintf("job %s was stopped", e.id)}
	}
	return dsec.Reason{Cause: dsec.CauseLease, Detail: fmt.Sprintf("nobody holds the lease of job %s, epoch %d: its policy is %s", e.id, e.epoch, e.policy)}
}

// sweep does what is wanted with each member, and gives the results once all
// are there. An owner who comes back ends it between two sandboxes.
func (j *Jobs) sweep(e *entry) []dsec.JobResult {
	s, err := j.node()
	if err != nil {
		return []dsec.JobResult{{Err: err}}
	}
	ids := j.alive(e)
	results := make([]dsec.JobResult, len(ids))
	j.forEach(j.life, len(ids), func(ctx context.Context, i int) {
		j.mu.Lock()
		want := e.wants()
		ctx = dsec.WithReason(ctx, e.reason())
		state := dsec.Running
		if m := j.members[ids[i].id]; m != nil {
			state = m.state
		}
		j.mu.Unlock()
		var err error
		switch {
		case want == dsec.DisconnectPause && state != dsec.Paused:
			if _, err = s.Pause(ctx, ids[i].id); err == nil {
				err = j.unlessOwned(ctx, s, e, ids[i].id)
			}
		case want == dsec.DisconnectStop:
			_, err = s.Stop(ctx, ids[i].id)
		}
		if err != nil && dsec.KindOf(err) == dsec.Conflict {
			err = nil // it has ended
		}
		results[i] = dsec.JobResult{Index: i, Key: ids[i].key, Sandbox: dsec.Sandbox{ID: ids[i].id}, Err: err}
	})
	return results
}

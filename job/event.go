package job

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

// event is a dsec.JobEvent as it is kept, in memory and in the journal.
type event struct {
	Seq     uint64            `json:"n"`
	At      int64             `json:"t"`
	Type    dsec.JobEventType `json:"e"`
	Sandbox dsec.SandboxID    `json:"s,omitempty"`
	Key     string            `json:"k,omitempty"`
	Cause   dsec.Cause        `json:"c,omitempty"`
	Detail  string            `json:"d,omitempty"`
	Retry   bool              `json:"r,omitempty"`
	Epoch   uint64            `json:"o,omitempty"`
}

func (ev event) contract() dsec.JobEvent {
	return dsec.JobEvent{
		Seq: ev.Seq, Time: time.Unix(0, ev.At).UTC(), Type: ev.Type, Sandbox: ev.Sandbox, Key: ev.Key,
		Cause: ev.Cause, Detail: ev.Detail, Retry: ev.Retry, Epoch: ev.Epoch,
	}
}

// maxDetail bounds the sentence that an event keeps.
const maxDetail = 512

// events are the newest events of a job. Guarded by Jobs.mu.
type events struct {
	max     int
	list    []event // without gaps, up to last
	last    uint64
	shown   uint64        // up to here they are on the disk
	changed chan struct{} // closed when shown grows, or the job ends
}

func newEvents(max int) events { return events{max: max, changed: make(chan struct{})} }

// add keeps an event, and drops the oldest a quarter of them at a time.
func (l *events) add(ev event) {
	l.list = append(l.list, ev)
	l.last = ev.Seq
	if len(l.list) > l.max+l.max/4 {
		l.list = slices.Clone(l.list[len(l.list)-l.max:])
	}
}

// show makes the events up to number n visible, and wakes those who wait.
func (l *events) show(n uint64) {
	l.shown = max(l.shown, n)
	l.wake()
}

func (l *events) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// batch is how many events a reader takes at a time.
const batch = 256

// after gives visible events behind number n, after a gap if the first are not
// kept.
func (l *events) after(n uint64) (gap uint64, found []event) {
	if len(l.list) == 0 || n >= l.shown {
		return 0, nil
	}
	first := l.list[0].Seq
	if n+1 < first {
		gap, n = first-1-n, first-1
	}
	from := int(n + 1 - first)
	to := int(l.shown + 1 - first)
	return gap, slices.Clone(l.list[from:min(to, from+batch)])
}

// Events yields what happened.
func (j *Jobs) Events(ctx context.Context, id dsec.JobID, opt dsec.JobEventOptions) iter.Seq2[dsec.JobEvent, error] {
	return func(yield func(dsec.JobEvent, error) bool) {
		const op = "job.Events"
		j.flush(ctx)
		j.mu.Lock()
		e, err := j.find(ctx, id)
		if err == nil && opt.After > e.log.shown {
			err = dsec.Errorf(dsec.Invalid, "event %d has not happened yet, the last of job %q is %d", opt.After, e.id, e.log.shown)
		}
		j.mu.Unlock()
		if err != nil {
			yield(dsec.JobEvent{}, dsec.WithOp(op, "", err))
			return
		}
		for n := opt.After; ; {
			j.mu.Lock()
			gap, found := e.log.after(n)
			changed, over := e.log.changed, !opt.Follow || e.over() || j.jobs[e.key] != e
			if j.closed && len(found) == 0 {
				err = errClosing
			}
			j.mu.Unlock()
			if gap > 0 {
				n += gap
				if !yield(dsec.JobEvent{Seq: n, Type: dsec.EventGap, Missed: gap}, nil) {
					return
				}
			}
			for _, ev := range found {
				n = ev.Seq
				if !yield(ev.contract(), nil) {
					return
				}
			}
			switch {
			case len(found) > 0:
				continue
			case over:
				return
			case err != nil:
				yield(dsec.JobEvent{}, dsec.WithOp(op, "", err))
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(dsec.JobEvent{}, dsec.WithOp(op, "", context.Cause(ctx)))
				return
			case <-j.life.Done():
				// What was closed with it is looked at once more.
			}
		}
	}
}

// over reports that nothing more will happen. Requires: Jobs.mu held.
func (e *entry) over() bool {
	return e.state == dsec.JobStopped && e.settled && e.living() == 0 && e.log.shown == e.log.last
}

// living counts the members that have not ended. Requires: Jobs.mu held.
func (e *entry) living() int {
	return e.counts[dsec.Running] + e.counts[dsec.Paused] + e.counts[dsec.Creating]
}

// worthAgain says whether a sandbox that ended so may do better when it is
// created again: the fault was around it, not in what it was asked to do.
func worthAgain(c dsec.Cause) bool {
	switch c {
	case dsec.CauseGuestDied, dsec.CauseNodeLost, dsec.CauseEvicted, dsec.CauseNodeDown, dsec.CauseLease:
		return true
	}
	return false
}

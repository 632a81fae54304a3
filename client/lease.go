package client

import (
	"context"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Lease is the ownership of a job. It is renewed in the background until it is
// given up or another owner takes the job.
type Lease struct {
	jobs   dsec.Jobs
	job    dsec.Job // as it was opened
	ctx    context.Context
	cancel context.CancelCauseFunc
	ended  chan struct{}

	mu   sync.Mutex
	last time.Time // of the last renewal that was answered
}

// unleased is how often the owner of a job without a lease looks whether it is
// the owner still.
const unleased = 10 * time.Second

// OpenJob makes this program the owner of a job and keeps it so. Calls that are
// made with Lease.Context are refused once there is another owner.
func OpenJob(ctx context.Context, s dsec.Services, id dsec.JobID) (*Lease, error) {
	j, err := s.Jobs.Open(ctx, id)
	if err != nil {
		return nil, err
	}
	return HoldJob(ctx, s, j), nil
}

// HoldJob keeps a job that this program has just created or opened.
func HoldJob(ctx context.Context, s dsec.Services, j dsec.Job) *Lease {
	l := &Lease{jobs: s.Jobs, job: j, ended: make(chan struct{}), last: time.Now()}
	l.ctx, l.cancel = context.WithCancelCause(dsec.WithEpoch(ctx, j.Epoch))
	go l.renew()
	return l
}

// Job gives the job as it was when it was opened.
func (l *Lease) Job() dsec.Job { return l.job }

// Context carries the epoch for all calls that are made with it. It ends with
// the context of OpenJob, at Close, and when the job has another owner or is
// stopped; its cause is then the server's Conflict.
func (l *Lease) Context() context.Context { return l.ctx }

// Renewed is when the server last confirmed the lease. Without an answer for
// longer than Job.Lease the job's policy is being carried out; a later answer
// makes it whole again.
func (l *Lease) Renewed() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// Close ends the renewals. The lease itself runs out, and the job's policy
// follows; stop the job if its sandboxes are not wanted any more.
func (l *Lease) Close() {
	l.cancel(context.Canceled)
	<-l.ended
}

// renew asks three times in each lease, and oftener while there is no answer.
func (l *Lease) renew() {
	defer close(l.ended)
	every := l.job.Lease / 3
	if every == 0 {
		every = unleased
	}
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.ctx.Done():
			return
		}
		ctx, cancel := context.WithTimeout(l.ctx, max(every, time.Second))
		_, err := l.jobs.Renew(ctx, l.job.ID, l.job.Epoch)
		cancel()
		next := every
		switch {
		case err == nil:
			l.mu.Lock()
			l.last = time.Now()
			l.mu.Unlock()
		case l.ctx.Err() != nil:
			return
		default:
			switch dsec.KindOf(err) {
			case dsec.Conflict, dsec.NotFound, dsec.Denied, dsec.Unauthenticated, dsec.Invalid:
				l.cancel(err)
				return
			}
			next = min(every/4, time.Second)
		}
		timer.Reset(next)
	}
}

package client

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"iter"
	"slices"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type jobs struct {
	*core
	rpc dsecv1.JobsClient
}

func (s *jobs) Create(ctx context.Context, spec dsec.JobSpec, opt dsec.CreateOptions) (dsec.Job, error) {
	t := to{op: "client.Create", key: opt.Key}
	if t.key == "" {
		t.key = rand.Text() // a repeated create gives the same job
	}
	return job(unary(ctx, s.core, t, s.rpc.Create, rpc.JobSpecToWire(spec)))
}

// Open may be repeated: the epoch grows once more, and nobody has the one
// before.
func (s *jobs) Open(ctx context.Context, id dsec.JobID) (dsec.Job, error) {
	return job(unary(ctx, s.core, to{op: "client.Open", again: true}, s.rpc.Open, &dsecv1.JobsOpenRequest{Job: string(id)}))
}

func (s *jobs) Renew(ctx context.Context, id dsec.JobID, epoch uint64) (dsec.Job, error) {
	return job(unary(ctx, s.core, to{op: "client.Renew", again: true}, s.rpc.Renew, &dsecv1.JobsRenewRequest{Job: string(id), Epoch: epoch}))
}

func (s *jobs) Get(ctx context.Context, id dsec.JobID) (dsec.Job, error) {
	return job(unary(ctx, s.core, to{op: "client.Get", again: true}, s.rpc.Get, &dsecv1.JobsGetRequest{Job: string(id)}))
}

func (s *jobs) List(ctx context.Context) ([]dsec.Job, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, &dsecv1.JobsListRequest{})
	return each(a.GetJobs(), rpc.JobFromWire), err
}

func (s *jobs) Pause(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	q := &dsecv1.JobsPauseRequest{Job: string(id)}
	return s.results(ctx, "client.Pause", bySandbox, func(ctx context.Context) (receiver[dsecv1.JobResult], error) { return s.rpc.Pause(ctx, q) })
}

func (s *jobs) Resume(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	q := &dsecv1.JobsResumeRequest{Job: string(id)}
	return s.results(ctx, "client.Resume", bySandbox, func(ctx context.Context) (receiver[dsecv1.JobResult], error) { return s.rpc.Resume(ctx, q) })
}

func (s *jobs) Stop(ctx context.Context, id dsec.JobID) iter.Seq2[dsec.JobResult, error] {
	q := &dsecv1.JobsStopRequest{Job: string(id)}
	return s.results(ctx, "client.Stop", bySandbox, func(ctx context.Context) (receiver[dsecv1.JobResult], error) { return s.rpc.Stop(ctx, q) })
}

func (s *jobs) Label(ctx context.Context, id dsec.JobID, labels map[string]string) iter.Seq2[dsec.JobResult, error] {
	q := &dsecv1.JobsLabelRequest{Job: string(id), Labels: labels}
	return s.results(ctx, "client.Label", bySandbox, func(ctx context.Context) (receiver[dsecv1.JobResult], error) { return s.rpc.Label(ctx, q) })
}

// CreateMany gives keys to items that have none, so that it can be repeated when
// the connection breaks. The results have the keys as they were given.
func (s *jobs) CreateMany(ctx context.Context, id dsec.JobID, epoch uint64, items []dsec.JobItem) iter.Seq2[dsec.JobResult, error] {
	keyed := slices.Clone(items)
	for i := range keyed {
		if keyed[i].Key == "" {
			keyed[i].Key = rand.Text()
		}
	}
	q := rpc.JobItemsToWire(id, epoch, keyed)
	byIndex := func(r dsec.JobResult) any { return r.Index }
	all := s.results(ctx, "client.CreateMany", byIndex, func(ctx context.Context) (receiver[dsecv1.JobResult], error) { return s.rpc.CreateMany(ctx, q) })
	return func(yield func(dsec.JobResult, error) bool) {
		for r, err := range all {
			if err == nil && r.Index >= 0 && r.Index < len(items) {
				r.Key = items[r.Index].Key
			}
			if !yield(r, err) {
				return
			}
		}
	}
}

func bySandbox(r dsec.JobResult) any { return r.Sandbox.ID }

// results yields the results of a call on many. When the connection breaks the
// call is made again; what was yielded before is not yielded twice.
func (s *jobs) results(ctx context.Context, op string, name func(dsec.JobResult) any, open func(context.Context) (receiver[dsecv1.JobResult], error)) iter.Seq2[dsec.JobResult, error] {
	return func(yield func(dsec.JobResult, error) bool) {
		seen := map[any]bool{}
		s.stream(ctx, op, func(ctx context.Context) (func() (bool, error), io.Closer, error) {
			r, err := open(ctx)
			if err != nil {
				return nil, nil, err
			}
			return func() (bool, error) {
				w, err := r.Receive()
				if err != nil {
					return true, err
				}
				result := rpc.JobResultFromWire(w)
				if n := name(result); seen[n] {
					return true, nil
				} else {
					seen[n] = true
				}
				return yield(result, nil), nil
			}, r, nil
		}, func(err error) { yield(dsec.JobResult{}, err) })
	}
}

// Events goes on behind the last event when the connection breaks.
func (s *jobs) Events(ctx context.Context, id dsec.JobID, opt dsec.JobEventOptions) iter.Seq2[dsec.JobEvent, error] {
	return func(yield func(dsec.JobEvent, error) bool) {
		q := &dsecv1.JobsEventsRequest{Job: string(id), After: opt.After, Follow: opt.Follow}
		s.stream(ctx, "client.Events", func(ctx context.Context) (func() (bool, error), io.Closer, error) {
			r, err := s.rpc.Events(ctx, q)
			if err != nil {
				return nil, nil, err
			}
			return func() (bool, error) {
				w, err := r.Receive()
				if err != nil {
					return true, err
				}
				e := rpc.JobEventFromWire(w)
				q.After = e.Seq
				return yield(e, nil), nil
			}, r, nil
		}, func(err error) { yield(dsec.JobEvent{}, err) })
	}
}

// stream reads a stream to its end, over broken connections. open gives what
// receives and yields one message, and reports false once the caller has enough.
func (s *jobs) stream(ctx context.Context, op string, open func(context.Context) (next func() (bool, error), end io.Closer, err error), fail func(error)) {
	t := to{op: op, again: true}
	p := s.patience(t)
	one := func() (done bool, err error) {
		sctx, cancel := context.WithCancel(ctx)
		defer cancel()
		next, end, err := open(s.headers(sctx, t))
		if err != nil {
			return false, rpc.CallError(ctx, op, "", err)
		}
		defer end.Close()
		defer cancel() // else Close reads on to the end
		for {
			more, err := next()
			switch {
			case errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
				return true, nil
			case err != nil:
				return false, rpc.CallError(ctx, op, "", err)
			case !more:
				return true, nil
			}
			p.answered(s.core)
		}
	}
	for {
		done, err := one()
		if done {
			return
		}
		p.broken(s.core, err)
		if !p.again(ctx, err) {
			fail(err)
			return
		}
	}
}

func job(w *dsecv1.Job, err error) (dsec.Job, error) {
	if err != nil {
		return dsec.Job{}, err
	}
	return rpc.JobFromWire(w), nil
}

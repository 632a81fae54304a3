package trajectory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Guests reaches the guests of a node beside their services.
type Guests interface {
	// Forget tells a guest that the answers of steps are safe. It does not
	// count as use of the sandbox, and does not wake a paused one.
	Forget(ctx context.Context, id dsec.SandboxID, steps []dsec.Step) error

	// Fetched gives the bytes of its images that a sandbox has waited for so far.
	Fetched(id dsec.SandboxID) int64
}

// Recorder is a node's services with every change recorded, and repeated steps
// answered from the record.
type Recorder struct {
	log    *Log
	inner  dsec.Services
	guests Guests

	life context.Context // of calls whose callers have gone
	stop context.CancelFunc
	work sync.WaitGroup
}

// NewRecorder wraps the services of a node. Close ends what runs in it.
func NewRecorder(l *Log, inner dsec.Services, guests Guests) *Recorder {
	r := &Recorder{log: l, inner: inner, guests: guests}
	r.life, r.stop = context.WithCancel(context.Background())
	return r
}

// Services are those of the node, recorded.
func (r *Recorder) Services() dsec.Services {
	s := r.inner
	s.Sandboxes, s.Commands, s.Files, s.Ports = sandboxes{r.inner.Sandboxes, r}, commands{r}, files{r.inner.Files, r}, ports{r}
	s.Trajectories = r.log
	if s.Snapshots != nil {
		s.Snapshots = snapshots{r.inner.Snapshots, r}
	}
	if s.Screens != nil {
		s.Screens = screens{r.inner.Screens, r}
	}
	return s
}

// Close ends what the recorder does for callers that have gone. The guests go on,
// and the next process finds their answers.
func (r *Recorder) Close() error {
	r.stop()
	r.work.Wait()
	return nil
}

// Note records a change that nobody asked for: a pause under pressure, a
// resumption by a request.
func (l *Log) Note(id dsec.SandboxID, op dsec.RecordOp, detail string) {
	c := l.chain(id)
	if c == nil {
		return
	}
	p, err := marshal(noteParam{detail})
	if err == nil {
		err = l.note(c, &head{Op: op, Request: p})
	}
	if err != nil {
		l.cfg.Fault(err)
	}
}

type noteParam struct {
	Detail string `json:"detail"`
}

func whoOf(ctx context.Context) dsec.Who {
	c, _ := dsec.CallerFrom(ctx)
	return dsec.Who{Project: c.Project, Token: c.Token}
}

// do records one call. f is carried out by the first caller of a step, apart
// from him: it goes on when he goes away.
func do[T any](ctx context.Context, r *Recorder, on dsec.Call, op dsec.RecordOp, param any, bod body, f func(ctx context.Context) (T, error)) (T, error) {
	var zero T
	p, err := marshal(param)
	if err != nil {
		return zero, err
	}
	b, err := r.log.begin(ctx, request{on: on, who: whoOf(ctx), op: op, param: p, body: bod})
	switch {
	case errors.Is(err, errNoChain):
		return f(ctx)
	case err != nil:
		return zero, dsec.WithOp("trajectory."+string(op), on.Sandbox, err)
	case b.answer != 0:
		return replayed[T](ctx, r.log, on.Sandbox, b.answer)
	case b.first:
		r.work.Go(func() {
			v, err := f(r.carry(ctx))
			r.finish(b, v, body{}, err)
		})
	}
	select {
	case <-b.flight.done:
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
	if err := b.flight.err; err != nil {
		return zero, err
	}
	if v, ok := b.flight.live.(T); ok {
		return v, nil
	}
	return replayed[T](ctx, r.log, on.Sandbox, b.flight.answer)
}

// inline is do for what cannot go on without its caller, who feeds it.
func inline[T any](ctx context.Context, r *Recorder, on dsec.Call, op dsec.RecordOp, param any, bod body, f func(ctx context.Context) (T, error)) (T, error) {
	var zero T
	p, err := marshal(param)
	if err != nil {
		return zero, err
	}
	for {
		b, err := r.log.begin(ctx, request{on: on, who: whoOf(ctx), op: op, param: p, body: bod})
		switch {
		case errors.Is(err, errNoChain):
			return f(ctx)
		case err != nil:
			return zero, dsec.WithOp("trajectory."+string(op), on.Sandbox, err)
		case b.answer != 0:
			return replayed[T](ctx, r.log, on.Sandbox, b.answer)
		case b.first:
			v, err := f(ctx)
			if e := r.finish(b, v, body{}, err); e != nil && err == nil {
				err = e
			}
			return v, err
		}
		select {
		case <-b.flight.done: // then its answer, or another try
		case <-ctx.Done():
			return zero, context.Cause(ctx)
		}
	}
}

// finish records how a call ended. One that the end of the recorder broke off
// is left as it is: the next process finds out what became of it.
func (r *Recorder) finish(b begun, v any, bod body, err error) error {
	if r.life.Err() != nil && err != nil {
		err = dsec.Errorf(dsec.Unavailable, "the node is closing")
		r.log.settle(b.chain, b.flight, nil, 0, err)
		return err
	}
	var answer json.RawMessage
	if _, nothing := v.(struct{}); err == nil && !nothing {
		answer, err = marshal(v)
	}
	return r.log.end(r.life, b.chain, b.flight, answer, v, bod, err)
}

// carry gives a context that has the values of a caller's and the life of the
// recorder.
func (r *Recorder) carry(ctx context.Context) context.Context { return dsec.Carry(r.life, ctx) }

// What guests are told at once of steps whose answers are durable.
const (
	forgetMany  = 64      // steps
	forgetBytes = 1 << 20 // output of a command that is worth telling of it alone
)

// forget lets a guest forget a step, soon.
func (r *Recorder) forget(c *chain, step dsec.Step, output int64) {
	c.mu.Lock()
	c.safe = append(c.safe, step)
	var steps []dsec.Step
	if len(c.safe) >= forgetMany || output >= forgetBytes {
		steps, c.safe = c.safe, nil
	}
	c.mu.Unlock()
	if steps == nil {
		return
	}
	r.work.Go(func() {
		// What it does not hear of costs memory in that sandbox, no more.
		r.guests.Forget(r.life, c.id, steps) //nolint:errcheck
	})
}

// Recover finds out what became of requests that an earlier process left
// without an answer, and closes the trajectories of sandboxes that are gone.
// It is called once, when the node has adopted what it found.
func (r *Recorder) Recover(ctx context.Context) error {
	r.log.mu.RLock()
	var all []*chain
	for _, c := range r.log.chains {
		c.mu.Lock()
		if !c.over {
			all = append(all, c)
		}
		c.mu.Unlock()
	}
	r.log.mu.RUnlock()
	for _, c := range all {
		sb, err := r.inner.Sandboxes.Get(ctx, c.id)
		switch k := dsec.KindOf(err); {
		case err == nil && sb.State.Ended():
			r.log.Ended(c.id, sb.State, sb.Cause, sb.Detail)
		case err == nil && sb.State != dsec.Paused:
			r.Awake(c.id)
		case err == nil: // it is looked at when it awakes
		case k == dsec.Lost || k == dsec.NotFound:
			r.log.Ended(c.id, dsec.LostGone, dsec.CauseNodeLost, err.Error())
		default:
			return fmt.Errorf("look for sandbox %s: %w", c.id, err)
		}
	}
	return nil
}

// Awake takes up what an earlier process left open in a sandbox that runs
// again. It does not block.
func (r *Recorder) Awake(id dsec.SandboxID) {
	c := r.log.chain(id)
	if c == nil {
		return
	}
	if len(c.left()) > 0 {
		r.work.Go(func() {
			if err := r.takeUp(r.life, c); err != nil && r.life.Err() == nil {
				r.log.cfg.Fault(fmt.Errorf("take up the commands of sandbox %s: %w", id, err))
			}
		})
	}
}

// left gives the requests without an answer that nobody follows.
func (c *chain) left() map[uint64]bool {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var left map[uint64]bool
	for seq, o := range c.open {
		if o.flight == nil {
			if left == nil {
				left = map[uint64]bool{}
			}
			left[seq] = true
		}
	}
	return left
}

// How long lookAgain waits.
const (
	lookSoon = time.Second
	lookLate = time.Minute
)

// lookAgain takes up, in a while, a command whose call broke off, unless somebody
// else does. A sandbox that stands still is not woken for it.
func (r *Recorder) lookAgain(c *chain) {
	c.mu.Lock()
	looks := c.looks
	c.looks = true
	c.mu.Unlock()
	if looks {
		return
	}
	r.work.Go(func() {
		defer func() {
			c.mu.Lock()
			c.looks = false
			c.mu.Unlock()
		}()
		for wait := lookSoon; ; wait = min(2*wait, lookLate) {
			select {
			case <-r.life.Done():
				return
			case <-time.After(wait):
			}
			sb, err := r.inner.Sandboxes.Get(r.life, c.id)
			switch {
			case err != nil || sb.State.Ended() || len(c.left()) == 0:
				return
			case sb.State != dsec.Running:
				return // Awake does it
			}
			r.takeUp(r.life, c) //nolint:errcheck // there is a next time
		}
	})
}

// takeUp follows the commands that the guest knows and nobody follows.
func (r *Recorder) takeUp(ctx context.Context, c *chain) error {
	left := c.left() // before the list: what is begun behind it may not be in it
	if len(left) == 0 {
		return nil
	}
	known, err := r.inner.Commands.List(ctx, dsec.Call{Sandbox: c.id})
	if err != nil {
		return err
	}
	return r.adopt(c, left, known)
}

// adopt follows those commands left that the guest knows. One that it does not
// know was never begun: if its caller named it, the next call with that name
// begins it, otherwise nobody will. Of other calls the guest knows those with a
// name.
func (r *Recorder) adopt(c *chain, left map[uint64]bool, known []dsec.CommandStatus) error {
	byStep := map[dsec.Step]dsec.CommandStatus{}
	for _, st := range known {
		byStep[st.Step] = st
	}
	type found struct {
		f  *flight
		o  openRef
		st dsec.CommandStatus
	}
	var running []found
	c.mu.Lock()
	for seq, o := range c.open {
		if o.flight != nil || !left[seq] {
			continue
		}
		hidden := o.step.Session == hiddenSession
		st, ok := byStep[o.step]
		if ok && o.op == dsec.RecordCommand {
			f := &flight{request: seq, op: o.op, done: make(chan struct{})}
			if !hidden {
				f.step = o.step
				ref := c.steps[o.step]
				ref.flight = f
				c.steps[o.step] = ref
			}
			o.flight = f
			c.open[seq] = o
			running = append(running, found{f, o, st})
			continue
		}
		if !hidden {
			continue
		}
		h := &head{Op: o.op, Of: seq, Error: &dsec.RecordError{
			Kind: dsec.Unavailable.String(), Text: "the node's process ended meanwhile; whether it happened is not known",
		}}
		if o.op == dsec.RecordCommand {
			h.Error.Text = "the node's process ended before it was begun"
			if o.broke {
				h.Error.Text = "its call broke off, and the guest does not know it"
			}
		}
		if _, err := r.log.append(c, h, nil); err != nil {
			c.mu.Unlock()
			return err
		}
	}
	c.mu.Unlock()
	for _, x := range running {
		r.work.Go(func() {
			commands{r}.follow(begun{chain: c, flight: x.f, first: true}, dsec.Call{Sandbox: c.id, Step: x.o.step}, x.st.ID)
		})
	}
	return nil
}

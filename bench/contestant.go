package bench

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// contestant is one way to run sandboxes. Boxes are named by the caller's
// numbers. It is safe for concurrent use with different numbers.
type contestant interface {
	// name is what reports call it.
	name() string

	// prepare does what is not timed: images, files and mounts of boxes from
	// to to-1.
	prepare(ctx context.Context, from, to int) error

	// create returns when a command can be run in the box, with the steps that
	// it knows of.
	create(ctx context.Context, n int) ([]dsec.Stage, error)

	// exec runs a program of the base image, hands its output to out, which
	// may be nil, and returns once it has exited with 0.
	exec(ctx context.Context, n int, out io.Writer, argv ...string) error

	// destroy returns when nothing of the box is left.
	destroy(ctx context.Context, n int) error

	// close destroys what is left.
	close() error
}

// numbers gives out box numbers; none is given twice in a run, so that no box
// has the limits or the workspace of an earlier one.
type numbers struct{ next atomic.Int64 }

func (n *numbers) take(count int) (from, to int) {
	end := int(n.next.Add(int64(count)))
	return end - count, end
}

// stageDestroy is the stage of a creation's sample that its sum leaves out.
const stageDestroy = "destroy, not in the sum"

// creates times n boxes of c one after another, each from the request to the
// answer of its first command, with a pause before each. What ends them is not
// timed.
func creates(ctx context.Context, c contestant, num *numbers, n int, gap time.Duration) (*Sample, error) {
	from, to := num.take(n)
	if err := c.prepare(ctx, from, to); err != nil {
		return nil, err
	}
	s := Millis()
	for i := from; i < to; i++ {
		if err := rest(ctx, gap); err != nil {
			return nil, err
		}
		begin := time.Now()
		stages, err := c.create(ctx, i)
		if err != nil {
			return nil, err
		}
		created := time.Since(begin)
		if err := c.exec(ctx, i, nil, binTrue); err != nil {
			return nil, err
		}
		total := time.Since(begin)
		s.Took(total)
		s.Stage("create").Took(created)
		for _, st := range stages {
			s.Stage("create: " + st.Name).Took(st.Took)
		}
		s.Stage("first exec").Took(total - created)
		begin = time.Now()
		if err := c.destroy(ctx, i); err != nil {
			return nil, err
		}
		s.Stage(stageDestroy).Took(time.Since(begin))
	}
	return s, nil
}

// execs times n commands in box i.
func execs(ctx context.Context, c contestant, i, n int, gap time.Duration) (*Sample, error) {
	s := Millis()
	for range n {
		if err := rest(ctx, gap); err != nil {
			return nil, err
		}
		begin := time.Now()
		if err := c.exec(ctx, i, nil, binTrue); err != nil {
			return nil, err
		}
		s.Took(time.Since(begin))
	}
	return s, nil
}

// job is what a rate counts.
type job int

const (
	createDestroy job = iota
	createExecDestroy
)

// rate creates and destroys n boxes, many at a time, and gives how many it did
// a second.
func rate(ctx context.Context, c contestant, num *numbers, what job, n, many int) (float64, error) {
	from, to := num.take(n)
	if err := c.prepare(ctx, from, to); err != nil {
		return 0, err
	}
	begin := time.Now()
	err := parallel(ctx, many, from, to, func(ctx context.Context, i int) error {
		if _, err := c.create(ctx, i); err != nil {
			return err
		}
		if what == createExecDestroy {
			if err := c.exec(ctx, i, nil, binTrue); err != nil {
				return err
			}
		}
		return c.destroy(ctx, i)
	})
	return float64(n) / time.Since(begin).Seconds(), err
}

// parallel calls f for all numbers from from to to-1, many at a time, and
// returns the first error, after which it begins no other call.
func parallel(ctx context.Context, many, from, to int, f func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	next.Store(int64(from))
	var wg sync.WaitGroup
	for range min(many, to-from) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= to {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// rest pauses for d or until ctx ends.
func rest(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

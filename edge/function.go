package edge

import (
	"context"
	"crypto/sha256"
	"errors"
	"iter"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// functions is dsec.Functions over the machines that warm keeps. A call is not
// in the table, not in the journal and not recorded: it has no effect outside
// of itself, so a call whose end nobody heard of is made again.
type functions struct {
	n *Node
	*warm
}

var _ dsec.Functions = (*functions)(nil)

// Call implements dsec.Functions.
func (f *functions) Call(ctx context.Context, fn dsec.Function) (dsec.FunctionResult, error) {
	r, err := f.callOne(ctx, fn)
	return r, dsec.WithOp("edge.Call", "", err)
}

func (f *functions) callOne(ctx context.Context, fn dsec.Function) (dsec.FunctionResult, error) {
	if err := fn.Check(); err != nil {
		return dsec.FunctionResult{}, err
	}
	env, err := f.resolve(ctx, fn)
	if err != nil {
		return dsec.FunctionResult{}, err
	}
	var b *driver.Build
	if fn.Runtime.Compiled() {
		var r dsec.FunctionResult
		if b, r, err = f.compile(ctx, env, fn); b == nil {
			return r, err
		}
	}
	return f.run(ctx, env, fn, b)
}

// resolve finds the images that a function's environment names.
func (f *functions) resolve(ctx context.Context, fn dsec.Function) (environment, error) {
	return f.n.resolve(ctx, dsec.Spec{Kind: dsec.FnCall, Environment: fn.Environment, Project: fn.Project})
}

// compile builds the source of fn on a machine of its kind.
func (f *functions) compile(ctx context.Context, env environment, fn dsec.Function) (b *driver.Build, r dsec.FunctionResult, err error) {
	err = f.with(ctx, env, fn, func(m driver.Caller) (err error) {
		b, r, err = m.Compile(ctx, fn)
		return err
	})
	return b, r, err
}

// run calls fn on a machine of its kind.
func (f *functions) run(ctx context.Context, env environment, fn dsec.Function, b *driver.Build) (r dsec.FunctionResult, err error) {
	err = f.with(ctx, env, fn, func(m driver.Caller) (err error) {
		r, err = m.Call(ctx, fn, b)
		return err
	})
	return r, err
}

// with lends a machine to do. A machine that breaks under it is replaced once:
// what a call did there is gone with it.
func (f *functions) with(ctx context.Context, env environment, fn dsec.Function, do func(driver.Caller) error) error {
	if err := f.enter(); err != nil {
		return err
	}
	defer f.leave()
	for try := 0; ; try++ {
		m, err := f.acquire(ctx, env, fn)
		if err != nil {
			return err
		}
		err = do(m.caller)
		broken := errors.Is(err, driver.ErrBroken)
		f.giveBack(m, broken)
		if !broken || try > 0 || ctx.Err() != nil {
			return err
		}
	}
}

// built is the build of one source of a batch, made by the first case that
// needs it.
type built struct {
	once sync.Once
	b    *driver.Build
	r    dsec.FunctionResult
	err  error
}

// Batch implements dsec.Functions.
func (f *functions) Batch(ctx context.Context, b dsec.FunctionBatch) iter.Seq2[dsec.FunctionItem, error] {
	return func(yield func(dsec.FunctionItem, error) bool) {
		if err := b.Check(); err != nil {
			yield(dsec.FunctionItem{}, dsec.WithOp("edge.Batch", "", err))
			return
		}
		env, err := f.resolve(ctx, b.Function)
		if err != nil {
			yield(dsec.FunctionItem{}, dsec.WithOp("edge.Batch", "", err))
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		var workers sync.WaitGroup
		defer workers.Wait()
		defer cancel()
		items := make(chan dsec.FunctionItem)
		next := make(chan int)
		builds := map[[sha256.Size]byte]*built{}
		sums := make([]*built, len(b.Cases))
		if b.Function.Runtime.Compiled() {
			for i := range b.Cases {
				sum := sha256.Sum256(b.Case(i).Source)
				if builds[sum] == nil {
					builds[sum] = &built{}
				}
				sums[i] = builds[sum]
			}
		}
		atATime := b.AtATime
		if atATime == 0 {
			atATime = f.atATime()
		}
		for range min(atATime, len(b.Cases)) {
			workers.Go(func() {
				for i := range next {
					item := dsec.FunctionItem{Index: i}
					item.Result, item.Err = f.runCase(ctx, env, b.Case(i), sums[i])
					select {
					case items <- item:
					case <-ctx.Done():
						return
					}
				}
			})
		}
		workers.Go(func() {
			defer close(next)
			for i := range b.Cases {
				select {
				case next <- i:
				case <-ctx.Done():
					return
				}
			}
		})
		for range b.Cases {
			select {
			case item := <-items:
				if !yield(item, nil) {
					return
				}
			case <-ctx.Done():
				yield(dsec.FunctionItem{}, dsec.WithOp("edge.Batch", "", context.Cause(ctx)))
				return
			}
		}
	}
}

// runCase runs one case of a batch, whose source is built once.
func (f *functions) runCase(ctx context.Context, env environment, fn dsec.Function, s *built) (dsec.FunctionResult, error) {
	if s == nil {
		return f.run(ctx, env, fn, nil)
	}
	s.once.Do(func() { s.b, s.r, s.err = f.compile(ctx, env, fn) })
	if s.b == nil {
		return s.r, s.err
	}
	return f.run(ctx, env, fn, s.b)
}

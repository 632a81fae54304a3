package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// What an agent at work does: nine in ten use at most 5% of the one CPU that
// they asked for, in short bursts between long waits for their model.
const (
	burst      = 50 * time.Millisecond
	thinkLeast = time.Second
	thinkMost  = 2 * time.Second

	agentsPerCore = 12  // the budget
	agentsSlower  = 2.0 // how much slower the others' commands may get
)

// AgentsOptions size a run of Agents. Zero fields have defaults.
type AgentsOptions struct {
	Levels []int         // agents for each core, rising; default 6, 12, 16, 20, 24, 32
	Period time.Duration // that each level is watched; default 15 s
	Pace   time.Duration // between two probes; default 10 ms
}

func (o AgentsOptions) withDefaults() AgentsOptions {
	if len(o.Levels) == 0 {
		o.Levels = []int{6, 12, 16, 20, 24, 32}
	}
	def(&o.Period, 15*time.Second)
	def(&o.Pace, 10*time.Millisecond)
	return o
}

// Agents adds to r how many agents at work a core carries before the commands
// of a further sandbox take twice as long, at the 99th percentile, as on a
// quiet host.
func (w *World) Agents(ctx context.Context, r *Report, o AgentsOptions) error {
	o = o.withDefaults()
	cores := runtime.NumCPU()
	most := o.Levels[len(o.Levels)-1] * cores
	from, to := w.num.take(most)
	if err := w.ours.prepare(ctx, from, to); err != nil {
		return err
	}
	w.say("%d agents", most)
	err := parallel(ctx, 16, from, to, func(ctx context.Context, i int) error {
		_, err := w.ours.create(ctx, i)
		return err
	})
	if err != nil {
		return err
	}
	probe, err := w.boxOf(ctx, w.ours)
	if err != nil {
		return err
	}
	watch := func(ctx context.Context) (*Sample, error) { return w.watch(ctx, probe, o) }
	quiet, err := watch(ctx)
	if err != nil {
		return err
	}
	best := 0
	for _, level := range o.Levels {
		s, bursts, err := w.level(ctx, from, level*cores, watch)
		if err != nil {
			return err
		}
		// A quiet period after each level: a host gets slower and faster.
		after, err := watch(ctx)
		if err != nil {
			return err
		}
		quiet.Merge(after)
		name := strconv.Itoa(level) + " agents a core: exec true of another"
		r.Add(name, s)
		r.Add(strconv.Itoa(level)+" agents a core: their own bursts", bursts)
		if s.P99() > agentsSlower*quiet.P99() {
			break
		}
		best = level
	}
	r.Add("no agents: exec true", quiet)
	r.Hold("agents at work, exec p99 at most twice quiet", float64(best), AtLeast, agentsPerCore, "agents/core")
	r.Note("An agent runs %v of CPU, waits %v to %v, and so on; its commands come through the API. The levels tried are %v; the first that is too slow is the last.", burst, thinkLeast, thinkMost, o.Levels)
	return nil
}

// level lets n agents work while watch measures, and returns what it measured
// and how long the agents' own commands took.
func (w *World) level(ctx context.Context, from, n int, watch func(context.Context) (*Sample, error)) (seen, bursts *Sample, err error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	bursts = Millis()
	for i := range n {
		wg.Go(func() {
			dice := rand.New(rand.NewPCG(uint64(i), 1))
			think := func(least time.Duration) error {
				return rest(ctx, least+time.Duration(dice.Int64N(int64(thinkMost-thinkLeast))))
			}
			for err := think(0); err == nil; err = think(thinkLeast) {
				begin := time.Now()
				err := w.ours.exec(ctx, from+i, nil, binBurn, strconv.FormatInt(burst.Milliseconds(), 10))
				if err != nil {
					stop(err)
					return
				}
				mu.Lock()
				bursts.Took(time.Since(begin))
				mu.Unlock()
			}
		})
	}
	err = rest(ctx, thinkMost-thinkLeast) // until all have begun
	if err == nil {
		seen, err = watch(ctx)
	}
	stop(errLevelOver)
	wg.Wait()
	if cause := context.Cause(ctx); cause != errLevelOver {
		err = cause // of an agent, or of the run's end
	}
	return seen, bursts, err
}

var errLevelOver = errors.New("the level is over")

// watch runs true in a box at a steady pace.
func (w *World) watch(ctx context.Context, box int, o AgentsOptions) (*Sample, error) {
	s := Millis()
	for end := time.Now().Add(o.Period); time.Now().Before(end); {
		one, err := execs(ctx, w.ours, box, 1, o.Pace)
		if err != nil {
			return nil, err
		}
		s.Merge(one)
	}
	return s, nil
}

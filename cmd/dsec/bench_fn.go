package main

import (
	"context"

	"github.com/dsec-go/dsec/bench"
)

func init() { benchPlugins = append(benchPlugins, &fnBenchmarks{}) }

// fnBenchmarks are those of function calls.
type fnBenchmarks struct {
	Fn benchFnCmd `cmd:"" help:"Function calls of warm Python, against a bare fork into namespaces."`
}

// benchFnCmd measures function calls.
type benchFnCmd struct {
	benchFlags
	N    int    `short:"n" help:"Calls in a round (default 100)." placeholder:"N"`
	Root string `help:"A root file system with python3, as a tar; make debian makes one." default:".cache/demo/base.tar" placeholder:"FILE"`
}

// Run measures them.
func (c *benchFnCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (printer, error) {
		return w.Fn(ctx, bench.FnOptions{Root: a.local(c.Root), Rounds: c.Rounds, N: c.N})
	})
}

package main

import (
	"context"
	"strconv"

	"github.com/dsec-go/dsec/bench"
)

func init() { benchPlugins = append(benchPlugins, &pauseBenchmarks{}) }

// pauseBenchmarks are those of sandboxes that nobody uses.
type pauseBenchmarks struct {
	Pause benchPauseCmd `cmd:"" help:"Pausing many sandboxes, the memory that comes back, and their resume."`
}

// benchPauseCmd measures pauses.
type benchPauseCmd struct {
	benchFlags
	N    int      `short:"n" help:"Sandboxes (default 500)." placeholder:"N"`
	Size byteSize `help:"Memory that each holds (default 20M)." placeholder:"SIZE"`
}

// Run measures them on a private server with swap of its own.
func (c *benchPauseCmd) Run(ctx context.Context, a *app) error {
	o := bench.PauseOptions{N: c.N, Size: int64(c.Size)}
	c.up = []string{"--swap", strconv.FormatInt(bench.PauseSwap(o), 10)}
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (printer, error) {
		return w.Pause(ctx, o)
	})
}

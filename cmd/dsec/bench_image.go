package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/bench"
	"github.com/dsec-go/dsec/client"
)

func init() { benchPlugins = append(benchPlugins, &imageBenchmarks{}) }

// imageBenchmarks are those of environments that come from a store.
type imageBenchmarks struct {
	Image benchImagesCmd `cmd:"" help:"Environments that a node has never seen, read from a slow store: lazily, cached, pulled first, unpacked for each sandbox."`
}

type benchImagesCmd struct {
	Burst benchImageCmd `cmd:"" default:"withargs" help:"Many sandboxes over many environments."`
	Cold  benchColdCmd  `cmd:"" help:"One sandbox in one large environment."`
	Steps benchStepsCmd `cmd:"" help:"Import against tar -x, warm reads against a plain mount, a commit of 100 MB."`
}

// benchImageCmd measures a burst.
type benchImageCmd struct {
	benchFlags
	N       int      `short:"n" help:"Sandboxes (default 256)." placeholder:"N"`
	Envs    int      `help:"Environments (default 64)." placeholder:"N"`
	Many    int      `help:"Sandboxes at a time (default 16)." placeholder:"N"`
	Size    byteSize `help:"Files of an environment (default 64M)." placeholder:"SIZE"`
	Debian  string   `help:"A root file system as a tar, which lies under the files of each environment; make debian makes one at .cache/demo/base.tar (default a static shell)." placeholder:"FILE"`
	Latency span     `help:"Of the store, for each call (default 1ms)." placeholder:"TIME"`
	Rate    byteSize `help:"Of the store, a second (default 200 MB)." placeholder:"SIZE"`
	Packed  bool     `help:"The store has chunks compressed, as a bucket has by default."`
	Unpacks int      `help:"Sandboxes of the variant that unpacks, counted up to all (default at most 32)." placeholder:"N"`
}

// Help says what is compared.
func (c *benchImageCmd) Help() string {
	return `Each variant is a private node with an empty folder; the store is a folder whose
calls are delayed and whose bytes are paced. The page cache of the host is dropped
before each variant.`
}

// Run measures it.
func (c *benchImageCmd) Run(ctx context.Context, a *app) error {
	return c.measure(ctx, a, bench.Images, bench.ImageOptions{
		Envs: c.Envs, N: c.N, Many: c.Many, Size: int64(c.Size), Debian: c.Debian,
		Latency: time.Duration(c.Latency), Rate: int64(c.Rate), Packed: c.Packed, Unpacks: c.Unpacks,
	})
}

// benchColdCmd measures one large environment.
type benchColdCmd struct {
	benchFlags
	Size   byteSize `help:"Its files (default 2G)." placeholder:"SIZE"`
	Packed bool     `help:"The store has chunks compressed, as a bucket has by default."`
	Debian string   `help:"A root file system as a tar, which lies under them (default a static shell)." placeholder:"FILE"`
}

// Run measures it.
func (c *benchColdCmd) Run(ctx context.Context, a *app) error {
	size := int64(c.Size)
	if size == 0 {
		size = 2 << 30
	}
	return c.measure(ctx, a, bench.Images, bench.ImageOptions{Envs: 1, N: 1, Many: 1, Size: size, Packed: c.Packed, Debian: c.Debian})
}

// benchStepsCmd measures single steps.
type benchStepsCmd struct {
	benchFlags
	Size   byteSize `help:"Files of the environment (default 256M)." placeholder:"SIZE"`
	Debian string   `help:"A root file system as a tar, which lies under them (default a static shell)." placeholder:"FILE"`
}

// Run measures them.
func (c *benchStepsCmd) Run(ctx context.Context, a *app) error {
	return c.measure(ctx, a, bench.ImageSteps, bench.ImageOptions{N: c.Rounds, Size: int64(c.Size), Debian: c.Debian})
}

// measure runs a benchmark that starts its servers itself.
func (f *benchFlags) measure(ctx context.Context, a *app, what func(context.Context, bench.ImageOptions) (*bench.Report, error), o bench.ImageOptions) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	o.Program, o.Guest = self, f.Guest
	o.Connect = func(url, token string) (dsec.Services, error) {
		return a.Connect(client.Config{URL: url, Token: token})
	}
	if o.Debian != "" {
		o.Debian = a.local(o.Debian)
	}
	o.Log = func(format string, args ...any) { fmt.Fprintf(a.Stderr, "bench: "+format+"\n", args...) }
	return f.inFolder(ctx, a, func(ctx context.Context, dir string) (printer, error, error) {
		o.Dir = dir
		report, err := what(ctx, o)
		return report, err, nil
	})
}

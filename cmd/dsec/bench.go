package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/bench"
	"github.com/dsec-go/dsec/client"
)

func init() { benchPlugins = append(benchPlugins, &nodeBenchmarks{}) }

// nodeBenchmarks are those that measure one node with containers.
type nodeBenchmarks struct {
	Create  benchCreateCmd  `cmd:"" help:"Creation: one at a time against the floor and runc, and many at a time."`
	Exec    benchExecCmd    `cmd:"" help:"Commands: against bare fork and exec, and the speed of output."`
	Density benchDensityCmd `cmd:"" help:"Memory of idle sandboxes, and how many agents at work a core carries."`
	Compare benchCompareCmd `cmd:"" help:"The same jobs on DSec, runc and podman, losses included."`

	Trajectory benchTrajectoryCmd `cmd:"" help:"What recording costs, and how fast steps are answered from the record."`
}

// benchFlags are common to the benchmarks of a node.
type benchFlags struct {
	outputFlags
	URL    string `name:"url" help:"Measure this server (default: a private one, ended with the run)." placeholder:"URL"`
	Dir    string `help:"Where the run's own folder is made, on the disk to measure (default the temporary folder)." placeholder:"DIR"`
	Guest  string `help:"The dsec-guest program of the private server (default the one beside this program)." placeholder:"FILE" not:"url"`
	Rounds int    `help:"Rounds of the floor, DSec and the others in turn." placeholder:"N"`

	up []string // flags for the private server
}

// printer is a report.
type printer interface{ Print(io.Writer) error }

// run measures with a world and prints the report that measure returns. node
// is the process of a private server, else 0.
func (f *benchFlags) run(ctx context.Context, a *app, measure func(ctx context.Context, w *bench.World, node int) (printer, error)) error {
	return f.inFolder(ctx, a, func(ctx context.Context, dir string) (report printer, err, left error) {
		services, node, closeServer, err := f.server(ctx, a, dir)
		if err != nil {
			return nil, err, nil
		}
		defer func() { left = errors.Join(left, closeServer()) }()
		w, err := bench.Open(ctx, bench.Config{Dir: dir, Services: services, Log: a.Stderr})
		if err != nil {
			return nil, err, nil
		}
		defer func() { left = errors.Join(left, w.Close()) }()
		report, err = measure(ctx, w, node)
		return report, err, nil
	})
}

// inFolder measures in a folder of the run's own and prints the report that
// measure returns. left is what could not be ended: its files say why, so the
// folder stays.
func (f *benchFlags) inFolder(ctx context.Context, a *app, measure func(ctx context.Context, dir string) (report printer, err, left error)) (err error) {
	if os.Geteuid() != 0 {
		return dsec.Errorf(dsec.Denied, "a benchmark makes namespaces and mounts: run it as root")
	}
	// A second signal ends the process at once, whatever it leaves.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case <-signals:
			cancel(errors.New("interrupted"))
		case <-ctx.Done():
		}
		unnotify()
	}()
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()

	dir, err := os.MkdirTemp(f.Dir, "dsec-bench-")
	if err != nil {
		return err
	}
	var left error
	defer func() {
		if left == nil {
			left = os.RemoveAll(dir)
		}
		err = errors.Join(err, left)
	}()
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	var report printer
	if report, err, left = measure(ctx, dir); err != nil {
		return err
	}
	if f.JSON {
		return a.json(report)
	}
	return report.Print(a.Stdout)
}

// server connects to the server that is measured, and starts it unless the
// flags name one.
func (f *benchFlags) server(ctx context.Context, a *app, dir string) (s dsec.Services, node int, done func() error, err error) {
	if f.URL != "" {
		c, err := a.readContext()
		if err != nil {
			return s, 0, nil, err
		}
		token := a.Getenv("DSEC_TOKEN")
		if token == "" && f.URL == c.URL {
			token = c.Token
		}
		s, err = a.Connect(client.Config{URL: f.URL, Token: token})
		return s, 0, func() error { return nil }, err
	}
	self, err := os.Executable()
	if err != nil {
		return s, 0, nil, fmt.Errorf("find this program: %w", err)
	}
	server, err := bench.StartServer(ctx, bench.ServerConfig{Program: self, Guest: f.Guest, Dir: filepath.Join(dir, "server"), Up: f.up})
	if err != nil {
		return s, 0, nil, err
	}
	s, err = a.Connect(client.Config{URL: server.URL, Token: server.Token})
	if err != nil {
		return s, 0, nil, errors.Join(err, server.Close())
	}
	return s, server.Pid(), server.Close, nil
}

// benchCreateCmd measures creation.
type benchCreateCmd struct {
	benchFlags
	N     int `short:"n" help:"Creates in a round." placeholder:"N"`
	Many  int `help:"Creates at a time, for the rate." placeholder:"N"`
	RateN int `name:"rate-n" help:"Creates in a round of the rate." placeholder:"N"`

	benchKind
}

// Run measures it.
func (c *benchCreateCmd) Run(ctx context.Context, a *app) error {
	if c.Kind == dsec.MicroVM {
		return c.runVM(ctx, a, c.benchKind, func(ctx context.Context, o bench.VMOptions) (*bench.Report, error) {
			o.Rounds, o.Execs = c.Rounds, c.N
			return bench.VM(ctx, o)
		})
	}
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (printer, error) {
		return w.Create(ctx, bench.CreateOptions{Rounds: c.Rounds, N: c.N, Many: c.Many, RateN: c.RateN})
	})
}

// benchExecCmd measures commands.
type benchExecCmd struct {
	benchFlags
	N     int      `short:"n" help:"Commands in a round." placeholder:"N"`
	Bytes byteSize `help:"Output whose speed is measured." placeholder:"SIZE"`
}

// Run measures them.
func (c *benchExecCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (printer, error) {
		return w.Exec(ctx, bench.ExecOptions{Rounds: c.Rounds, N: c.N, Bytes: int64(c.Bytes)})
	})
}

// benchDensityCmd measures memory, and agents at work.
type benchDensityCmd struct {
	benchFlags
	N      int   `short:"n" help:"Idle sandboxes." default:"1000" placeholder:"N"`
	Settle span  `help:"How long the host rests before its memory is read." placeholder:"TIME"`
	Agents []int `help:"Agents for each core, rising levels; 0 leaves them out." placeholder:"N,..."`
	Period span  `help:"How long each level of agents is watched." placeholder:"TIME"`

	benchKind
}

// Run measures them. The idle sandboxes are gone before the agents come.
func (c *benchDensityCmd) Run(ctx context.Context, a *app) error {
	if c.Kind == dsec.MicroVM {
		return c.runVM(ctx, a, c.benchKind, func(ctx context.Context, o bench.VMOptions) (*bench.Report, error) {
			return bench.VMDensity(ctx, o, c.N)
		})
	}
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, node int) (printer, error) {
		r, err := w.Density(ctx, bench.DensityOptions{N: c.N, Settle: time.Duration(c.Settle)}, node)
		if err != nil || len(c.Agents) == 1 && c.Agents[0] == 0 {
			return r, err
		}
		return r, w.Agents(ctx, r, bench.AgentsOptions{Levels: c.Agents, Period: time.Duration(c.Period)})
	})
}

// benchTrajectoryCmd measures recording.
type benchTrajectoryCmd struct {
	benchFlags
	N     int `short:"n" help:"Commands in a round." placeholder:"N"`
	Steps int `help:"Steps that are recorded and repeated." placeholder:"N"`
}

// Run measures it against a second private server that records nothing.
func (c *benchTrajectoryCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (_ printer, err error) {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		dir, err := os.MkdirTemp(c.Dir, "dsec-bench-")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		if err := os.Chmod(dir, 0o711); err != nil {
			return nil, err
		}
		server, err := bench.StartServer(ctx, bench.ServerConfig{
			Program: self, Guest: c.Guest, Dir: filepath.Join(dir, "server"), Up: []string{"--no-record"},
		})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		bare, err := a.Connect(client.Config{URL: server.URL, Token: server.Token})
		if err != nil {
			return nil, err
		}
		return w.Trajectory(ctx, bench.TrajectoryOptions{Rounds: c.Rounds, N: c.N, Steps: c.Steps}, bare)
	})
}

// benchCompareCmd compares.
type benchCompareCmd struct {
	benchFlags
	N    int `short:"n" help:"Creates of each in a round." placeholder:"N"`
	Idle int `help:"Idle boxes whose memory is read." placeholder:"N"`
}

// Run compares.
func (c *benchCompareCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(ctx context.Context, w *bench.World, _ int) (printer, error) {
		return w.Compare(ctx, bench.CompareOptions{Rounds: c.Rounds, N: c.N, Idle: c.Idle})
	})
}

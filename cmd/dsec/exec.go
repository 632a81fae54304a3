package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

// execCmd runs a command in a sandbox.
type execCmd struct {
	commandFlags
	Step    stepFlag `help:"Name of this step: repeating it gives the recorded answer (default none)." placeholder:"SESSION:N"`
	JSON    bool     `name:"json" help:"Print one JSON object when it has ended: status, both streams, and whether the answer was recorded by an earlier call."`
	Sandbox string   `arg:"" help:"Sandbox ID."`
	Argv    []string `arg:"" passthrough:"partial" name:"command" help:"Program and arguments, found in the sandbox's PATH; no shell is involved."`
}

// Help explains the exit status.
func (c *execCmd) Help() string {
	return `The exit status is the command's own; 124 when it was killed at its timeout,
125 when dsec itself failed, 126 or 127 when the program cannot be executed.
Standard input is read only with -i. Ctrl-C is passed to the command; a second
one kills it, a third leaves it running. When nobody reads the output any more, as
behind head, the command gets SIGPIPE, a second later SIGKILL, and the status is
141; so too when a disk is full, with status 125. A dsec that is itself killed leaves the command running.

  dsec exec sb... -- make check
  tar c . | dsec exec -i sb... -- tar x
  dsec exec -it sb... -- bash`
}

// Run runs it, copying its output as it comes.
func (c *execCmd) Run(ctx context.Context, a *app) error {
	if len(c.Argv) > 0 && c.Argv[0] == "--" {
		c.Argv = c.Argv[1:]
	}
	cmd, err := c.command(a, c.Argv)
	if err != nil {
		return err
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	run := execution{
		a: a, s: s,
		on:          dsec.Call{Sandbox: dsec.SandboxID(c.Sandbox), Step: dsec.Step(c.Step)},
		interactive: c.Interactive, tty: c.TTY, forward: true,
	}
	if c.JSON {
		run.result = &dsec.Result{}
	}
	return run.do(ctx, cmd)
}

// command gives the dsec.Command that the flags describe.
func (f *commandFlags) command(a *app, argv []string) (dsec.Command, error) {
	env, err := pairs("environment variable", f.Env, a.Getenv)
	if err != nil {
		return dsec.Command{}, err
	}
	cmd := dsec.Command{
		Argv: argv, Cwd: f.Cwd, User: f.User, Env: env,
		Timeout: time.Duration(f.Timeout), Idle: time.Duration(f.Quiet), Output: int64(f.Output),
	}
	if f.Interactive {
		cmd.Stdin = dsec.StdinPipe
	}
	if f.TTY {
		size := a.terminalSize()
		cmd.TTY = &size
		if _, set := env["TERM"]; !set {
			if t := a.Getenv("TERM"); t != "" {
				cmd.Env = withVariable(env, "TERM", t)
			}
		}
	}
	return cmd, cmd.Check()
}

func withVariable(env map[string]string, name, value string) map[string]string {
	if env == nil {
		env = make(map[string]string, 1)
	}
	env[name] = value
	return env
}

// execution is one command being run on behalf of this terminal.
type execution struct {
	a           *app
	s           dsec.Services
	on          dsec.Call
	interactive bool
	tty         bool
	forward     bool // signals go to the command; else they end ctx elsewhere

	// result takes what the command printed instead of this program's streams,
	// and is printed at its end; nil for neither.
	result *dsec.Result
}

// write passes a piece of output on.
func (x *execution) write(s dsec.Stream, data []byte) error {
	if x.result == nil {
		w := x.a.Stdout
		if s == dsec.Stderr {
			w = x.a.Stderr
		}
		_, err := w.Write(data)
		return err
	}
	to := &x.result.Out
	if s == dsec.Stderr {
		to = &x.result.Err
	}
	*to = append(*to, data[:min(len(data), dsec.MaxRunOutput-len(*to))]...)
	return nil
}

// do starts cmd, copies its streams until it ends, and returns its status as
// the program's.
func (x *execution) do(ctx context.Context, cmd dsec.Command) error {
	st, err := x.s.Commands.Start(ctx, x.on, cmd)
	if err != nil {
		return err
	}
	x.on.Step = dsec.Step{} // it was the name of the start; what follows names the command
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	restore := func() {}
	if x.tty && x.interactive {
		if restore, err = x.a.rawInput(); err != nil {
			return err
		}
		defer restore()
	}
	if x.forward {
		defer x.forwardSignals(ctx, cancel, st.ID)()
	}
	if x.tty {
		defer x.followSize(ctx, st.ID)()
	}
	// A write to a closed pipe is an error, not the end of this program.
	_, unnotify := x.a.Notify(syscall.SIGPIPE)
	defer unnotify()
	if x.interactive {
		// The goroutine may stay in a Read of standard input; the process
		// ends without it.
		go x.feed(ctx, st.ID)
	}
	end, err := x.copyOutput(ctx, st.ID)
	restore()
	if err != nil {
		if errors.Is(err, errOutput) {
			x.breakPipe(ctx, st.ID)
		}
		if errors.Is(err, syscall.EPIPE) {
			return exitStatus(128 + int(syscall.SIGPIPE))
		}
		if errors.Is(context.Cause(ctx), errDetached) {
			fmt.Fprintf(x.a.Stderr, "dsec: command %s goes on; see: dsec wait %s %s\n", st.ID, x.on.Sandbox, st.ID)
			return exitStatus(128 + int(syscall.SIGINT))
		}
		return err
	}
	if x.result != nil {
		x.result.CommandStatus = end
		x.result.Replayed = end.Replayed || st.Replayed
		if err := x.a.json(x.result); err != nil {
			return err
		}
	}
	return x.a.exit(end)
}

// errOutput says that the output could not be written here.
var errOutput = errors.New("write output")

// pipeGrace is how long a command may live on without a reader of its output.
const pipeGrace = time.Second

// breakPipe ends a command as a write to a pipe that nobody reads would.
func (x *execution) breakPipe(ctx context.Context, id dsec.CommandID) {
	end := func(sig string) error {
		ctx, cancel := context.WithTimeout(ctx, pipeGrace)
		defer cancel()
		err := x.s.Commands.Signal(ctx, x.on, id, sig)
		if err == nil {
			_, err = x.s.Commands.Wait(ctx, x.on, id)
		}
		return err
	}
	if err := end("PIPE"); err == nil || dsec.KindOf(err) == dsec.Conflict { // it has ended by itself
		return
	}
	if err := end("KILL"); err != nil && dsec.KindOf(err) != dsec.Conflict {
		x.a.warn(fmt.Errorf("command %s may still run: %w", id, err))
	}
}

// exit reports what the status alone does not say, and returns it.
func (a *app) exit(st dsec.CommandStatus) error {
	say := func(format string, args ...any) { fmt.Fprintf(a.Stderr, "dsec: "+format+"\n", args...) }
	switch st.Outcome {
	case dsec.TimedOut:
		say("killed at its timeout of %v", st.Command.Timeout)
		return exitStatus(statusTimedOut)
	case dsec.Inactive:
		say("killed after %v without output", st.Command.Idle)
		return exitStatus(statusTimedOut)
	case dsec.NotStarted:
		say("%s", or(st.Detail))
	case dsec.OutOfMemory:
		say("killed by the kernel at the sandbox's memory limit")
	case dsec.Interrupted:
		why := st.Detail
		if why == "" {
			why = "the sandbox's guest is gone"
		}
		say("%s; whether the command ran to its end is not known", why)
		return exitStatus(statusExec)
	}
	if st.Code == 0 {
		return nil
	}
	return exitStatus(st.Code)
}

// reattachFor is how long copyOutput goes on asking a server that does not
// answer, as while it restarts.
const reattachFor = 30 * time.Second

// copyOutput writes both streams, byte for byte, until the command has ended.
// A broken connection is taken up again where it broke.
func (x *execution) copyOutput(ctx context.Context, id dsec.CommandID) (dsec.CommandStatus, error) {
	var offset, lost int64
	var broken time.Time
	defer func() {
		if lost > 0 {
			fmt.Fprintf(x.a.Stderr, "dsec: %d bytes of output were not kept\n", lost)
		}
	}()
	for {
		var end *dsec.CommandStatus
		var failure error
		for out, err := range x.s.Commands.Attach(ctx, x.on, id, offset) {
			if err != nil {
				failure = err
				break
			}
			broken = time.Time{}
			lost += out.Gap
			if len(out.Data) > 0 {
				if err := x.write(out.Stream, out.Data); err != nil {
					return dsec.CommandStatus{}, fmt.Errorf("%w: %w", errOutput, err)
				}
				offset = out.Offset + int64(len(out.Data))
			}
			if out.Status != nil {
				end = out.Status
			}
		}
		switch {
		case end != nil:
			return *end, nil
		case failure != nil && dsec.KindOf(failure) != dsec.Unavailable || ctx.Err() != nil:
			return dsec.CommandStatus{}, errors.Join(failure, ctx.Err())
		}
		if broken.IsZero() {
			broken = time.Now()
		} else if time.Since(broken) > reattachFor {
			return dsec.CommandStatus{}, failure
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// feed passes standard input on until its end or the command's.
func (x *execution) feed(ctx context.Context, id dsec.CommandID) {
	buf := make([]byte, 64<<10)
	var offset int64
	for {
		n, err := x.a.Stdin.Read(buf)
		end := err != nil
		if n > 0 || end {
			next, werr := x.s.Commands.Write(ctx, x.on, id, dsec.StdinWrite{Offset: offset, Data: buf[:n], Close: end})
			if werr != nil {
				// The command ended or closed its input: as with a pipe,
				// nothing the user must know. Anything else is.
				if k := dsec.KindOf(werr); k != dsec.Conflict && k != dsec.Canceled && ctx.Err() == nil {
					fmt.Fprintf(x.a.Stderr, "dsec: standard input: %s\n", explain(werr))
				}
				return
			}
			offset = next
		}
		if end {
			if err != io.EOF {
				fmt.Fprintf(x.a.Stderr, "dsec: read standard input: %v\n", err)
			}
			return
		}
	}
}

// errDetached ends the wait for a command that is left running.
var errDetached = errors.New("detached")

// forwardSignals passes signals to the command: what was asked first, a kill
// at the second, and at the third this program leaves.
func (x *execution) forwardSignals(ctx context.Context, cancel context.CancelCauseFunc, id dsec.CommandID) (stop func()) {
	ch, unnotify := x.a.Notify(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	done := make(chan struct{})
	var count atomic.Int32
	go func() {
		for {
			select {
			case sig := <-ch:
				name := "KILL"
				switch count.Add(1) {
				case 1:
					name = signalName(sig)
				case 2:
				default:
					cancel(errDetached)
					return
				}
				// Not waited for: a server that hangs must not take the
				// third Ctrl-C away.
				go func() {
					if err := x.s.Commands.Signal(ctx, x.on, id, name); err != nil && dsec.KindOf(err) != dsec.Conflict && ctx.Err() == nil {
						fmt.Fprintf(x.a.Stderr, "dsec: %s\n", explain(err))
					}
				}()
			case <-done:
				return
			}
		}
	}()
	return func() { unnotify(); close(done) }
}

func signalName(sig os.Signal) string {
	switch sig {
	case syscall.SIGTERM:
		return "TERM"
	case syscall.SIGHUP:
		return "HUP"
	case syscall.SIGQUIT:
		return "QUIT"
	}
	return "INT"
}

// followSize keeps the command's terminal at the size of this one.
func (x *execution) followSize(ctx context.Context, id dsec.CommandID) (stop func()) {
	ch, unnotify := x.a.Notify(syscall.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-ch:
				// A failure shows in the output stream soon enough.
				_ = x.s.Commands.Resize(ctx, x.on, id, x.a.terminalSize())
			case <-done:
				return
			}
		}
	}()
	return func() { unnotify(); close(done) }
}

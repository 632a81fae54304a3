package guest

import (
	"context"
	"errors"
	"iter"
	"maps"
	"os"
	"slices"
	"strconv"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// commands is the agent as dsec.Commands.
type commands struct{ a *Agent }

// digest gives the parts of a request that a repetition must have in common.
func (a *Agent) digest(c dsec.Command, stdin []byte) []field {
	s := &a.steps
	argv := make([]byte, 0, 256)
	for _, x := range c.Argv {
		argv = append(append(argv, x...), 0)
	}
	var env []byte
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		env = append(append(append(append(env, k...), '='), c.Env[k]...), 0)
	}
	tty := ""
	if c.TTY != nil {
		tty = strconv.Itoa(int(c.TTY.Rows)) + "x" + strconv.Itoa(int(c.TTY.Cols))
	}
	return []field{
		s.text("arguments", string(argv)),
		s.text("shell line", c.Shell),
		s.text("working directory", c.Cwd),
		s.text("user", c.User),
		s.text("environment", string(env)),
		s.text("standard input mode", string(c.Stdin)),
		s.text("terminal", tty),
		s.number("timeout", int64(c.Timeout)),
		s.number("idle timeout", int64(c.Idle)),
		s.number("output limit", c.Output),
		s.text("standard input", string(stdin)),
	}
}

// begin starts a command, or finds the one that its step started.
func (s commands) begin(ctx context.Context, step dsec.Step, c dsec.Command, stdin []byte) (cmd *command, replayed bool, err error) {
	if err := c.Check(); err != nil {
		return nil, false, err
	}
	if step.IsZero() {
		cmd, err = s.a.start(step, c, stdin)
		return cmd, false, err
	}
	o, first, err := s.a.steps.begin(ctx, step, "command", s.a.digest(c, stdin))
	if err != nil {
		return nil, false, err
	}
	if !first {
		return o.result.(*command), true, nil
	}
	cmd, err = s.a.start(step, c, stdin)
	s.a.steps.end(step, o, cmd, err)
	return cmd, false, err
}

func (s commands) Start(ctx context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	cmd, replayed, err := s.begin(ctx, on.Step, c, nil)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	st := cmd.snapshot()
	st.Replayed = replayed
	return st, nil
}

func (s commands) Run(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	if len(stdin) == 0 && c.Stdin == dsec.StdinPipe {
		c.Stdin = dsec.StdinNone // at its end from the start
	}
	cmd, replayed, err := s.begin(ctx, on.Step, c, stdin)
	if err != nil {
		return dsec.Result{}, err
	}
	if err := cmd.await(ctx); err != nil {
		return dsec.Result{}, err
	}
	r := dsec.Result{CommandStatus: cmd.snapshot()}
	r.Replayed = replayed
	if r.Out, err = cmd.out.beginning(0); err == nil {
		r.Err, err = cmd.out.beginning(1)
	}
	return r, err
}

func (c *command) await(ctx context.Context) error {
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// beginning gives what Run returns of a stream.
func (r *record) beginning(stream int) ([]byte, error) {
	r.mu.Lock()
	n := min(r.kept[stream], dsec.MaxRunOutput)
	r.mu.Unlock()
	if n == 0 {
		return nil, nil
	}
	return r.read(stream, 0, int(n))
}

// read gives bytes of one stream that are next to each other.
func (r *record) read(stream int, offset int64, n int) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if offset >= r.total[stream] {
		return nil, nil
	}
	r.refs++
	defer r.unref()
	out := make([]byte, 0, min(int64(n), r.total[stream]-offset))
	var hint mark
	for len(out) < cap(out) {
		at := offset + int64(len(out))
		p, ok := r.find(stream, at, hint)
		if !ok || p.str != at {
			break
		}
		hint = p.at
		b, err := r.fetch(p, out[len(out):cap(out)])
		if err != nil {
			return nil, dsec.Errorf(dsec.Internal, "read recorded output: %w", err)
		}
		out = out[:len(out)+len(b)]
	}
	return out, nil
}

func (s commands) Read(_ context.Context, _ dsec.Call, id dsec.CommandID, stream dsec.Stream, offset int64, n int) ([]byte, error) {
	c, err := s.a.find(id)
	if err != nil {
		return nil, err
	}
	switch {
	case stream != dsec.Stdout && stream != dsec.Stderr:
		return nil, dsec.Errorf(dsec.Invalid, "stream %d is neither standard output nor standard error", stream)
	case offset < 0 || n < 0:
		return nil, dsec.Errorf(dsec.Invalid, "offset %d or length %d is negative", offset, n)
	}
	return c.out.read(int(stream-dsec.Stdout), offset, min(n, dsec.MaxRunOutput))
}

func (s commands) Attach(ctx context.Context, _ dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		c, err := s.a.find(id)
		if err == nil && offset < 0 {
			err = dsec.Errorf(dsec.Invalid, "offset %d is negative", offset)
		}
		if err == nil {
			err = c.attach(ctx, offset, yield)
		}
		if err != nil {
			yield(dsec.Output{}, err)
		}
	}
}

// attach yields output, then the status. It is nil too when yield wants no
// more.
func (c *command) attach(ctx context.Context, offset int64, yield func(dsec.Output, error) bool) error {
	r := c.out
	var hint mark
	r.mu.Lock()
	r.refs++
	defer func() {
		r.unref()
		r.mu.Unlock()
	}()
	for {
		p, ok := r.find(-1, offset, hint)
		if !ok {
			if r.ended {
				total := r.total[0] + r.total[1]
				r.mu.Unlock()
				err := c.await(ctx)
				if err == nil {
					st := c.snapshot()
					yield(dsec.Output{Offset: total, Gap: max(0, total-offset), Status: &st}, nil)
				}
				r.mu.Lock()
				return err
			}
			news := r.changed()
			r.mu.Unlock()
			select {
			case <-news:
			case <-ctx.Done():
			}
			r.mu.Lock()
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		hint = p.at
		more, err := c.give(p, offset, yield)
		if err != nil || !more {
			return err
		}
		offset = p.off + min(p.n, pumpBuffer)
	}
}

// give yields one piece. It drops the record's lock around yield. Requires:
// c.out.mu held.
func (c *command) give(p piece, offset int64, yield func(dsec.Output, error) bool) (bool, error) {
	buf := pumpBuffers.Get().(*[pumpBuffer]byte)
	defer pumpBuffers.Put(buf)
	b, err := c.out.fetch(p, buf[:])
	if err != nil {
		return false, dsec.Errorf(dsec.Internal, "read recorded output: %w", err)
	}
	c.out.mu.Unlock()
	defer c.out.mu.Lock()
	return yield(dsec.Output{
		Stream: dsec.Stdout + dsec.Stream(p.stream),
		Offset: p.off,
		Data:   b,
		Gap:    p.off - max(offset, 0),
	}, nil), nil
}

func (s commands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	c, err := s.a.find(id)
	if err != nil {
		return 0, err
	}
	if len(in.Data) > dsec.MaxChunk {
		return 0, dsec.Errorf(dsec.Invalid, "input of %d bytes is more than %d", len(in.Data), dsec.MaxChunk)
	}
	if c.in == nil {
		if c.isDone() {
			return 0, dsec.Errorf(dsec.Conflict, "the command has ended")
		}
		return 0, dsec.Errorf(dsec.Conflict, "the command has no input")
	}
	end := int64(0)
	if in.Close {
		end = 1
	}
	fields := []field{
		s.a.steps.text("command", string(id)),
		s.a.steps.number("offset", in.Offset),
		s.a.steps.text("data", string(in.Data)),
		s.a.steps.number("close", end),
	}
	n, err := s.a.once(ctx, on.Step, "input", fields, func() (any, error) { return c.in.write(ctx, in) })
	off, _ := n.(int64)
	return off, err
}

func (s commands) Resize(_ context.Context, _ dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	c, err := s.a.find(id)
	if err != nil {
		return err
	}
	switch {
	case c.spec.TTY == nil:
		return dsec.Errorf(dsec.Invalid, "the command has no terminal")
	case c.isDone():
		return dsec.Errorf(dsec.Conflict, "the command has ended")
	}
	conn, err := c.tty.SyscallConn()
	if err == nil {
		cerr := conn.Control(func(fd uintptr) { err = setSize(int(fd), size) })
		if cerr != nil {
			return dsec.Errorf(dsec.Conflict, "the command has ended")
		}
	}
	if err != nil {
		return dsec.Errorf(dsec.Internal, "set the terminal's size: %w", err)
	}
	return nil
}

func (s commands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	c, err := s.a.find(id)
	if err != nil {
		return err
	}
	num, err := parseSignal(sig)
	if err != nil {
		return err
	}
	fields := []field{s.a.steps.text("command", string(id)), s.a.steps.number("signal", int64(num))}
	_, err = s.a.once(ctx, on.Step, "signal", fields, func() (any, error) {
		var err error
		if num == unix.SIGKILL {
			err = c.kill(dsec.Signaled)
		} else {
			err = c.use(func(r Running) error { return r.Signal(num) })
		}
		return nil, signalError(err)
	})
	return err
}

func signalError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrProcessDone), errors.Is(err, unix.ESRCH):
		return dsec.Errorf(dsec.Conflict, "the command has ended")
	}
	return dsec.Errorf(dsec.Internal, "send the signal: %w", err)
}

func (s commands) Wait(ctx context.Context, _ dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	c, err := s.a.find(id)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	if err := c.await(ctx); err != nil {
		return dsec.CommandStatus{}, err
	}
	return c.snapshot(), nil
}

func (s commands) List(context.Context, dsec.Call) ([]dsec.CommandStatus, error) {
	s.a.mu.Lock()
	all := slices.Collect(maps.Values(s.a.commands))
	s.a.mu.Unlock()
	slices.SortFunc(all, func(x, y *command) int {
		if x.seq < y.seq {
			return -1
		}
		return 1
	})
	out := make([]dsec.CommandStatus, len(all))
	for i, c := range all {
		out[i] = c.snapshot()
	}
	return out, nil
}

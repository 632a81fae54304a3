package rpctest

import (
	"context"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// commands plays commands by their first argument:
//
//	true, false     end at once
//	echo ARGS       writes them
//	cat             copies its input
//	both TEXT       writes TEXT to both streams in turn
//	pieces N SIZE   writes N bytes of numbered text in pieces of SIZE
//	hold            runs until it is signalled; Say lets it write
//
// and anything else is not found, with code 127.
type commands struct{ f *Fake }

// Say lets a running command write.
func (f *Fake) Say(id dsec.SandboxID, c dsec.CommandID, s dsec.Stream, text []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if x, err := f.cmd(id, c); err == nil {
		x.write(s, text)
		f.cond.Broadcast()
	}
}

// Pattern gives n bytes of text in which every place differs from its
// neighbours, with sequences of several bytes.
func Pattern(n int) []byte {
	var b []byte
	for i := 0; len(b) < n; i++ {
		b = append(b, fmt.Sprintf("%d→é😀\x00\xff\n", i)...)
	}
	return b[:n]
}

func (c *cmd) write(s dsec.Stream, text []byte) {
	c.log = append(c.log, dsec.Output{Stream: s, Offset: c.size, Data: text})
	c.size += int64(len(text))
	stat := &c.Stdout
	if s == dsec.Stderr {
		stat = &c.Stderr
	}
	stat.Total += int64(len(text))
	stat.Kept += int64(len(text))
}

func (c *cmd) end(o dsec.Outcome, code int) {
	c.Outcome, c.Code, c.Ended = o, code, time.Now().UTC()
}

func (c *cmd) kept(s dsec.Stream) []byte {
	var b []byte
	for _, o := range c.log {
		if o.Stream == s {
			b = append(b, o.Data...)
		}
	}
	return b
}

// Requires: f.mu held.
func (f *Fake) cmd(id dsec.SandboxID, c dsec.CommandID) (*cmd, error) {
	b, err := f.live(id)
	if err != nil {
		return nil, err
	}
	for _, x := range b.cmds {
		if x.ID == c {
			return x, nil
		}
	}
	return nil, dsec.Errorf(dsec.NotFound, "no command %q", string(c))
}

func (s commands) start(on dsec.Call, c dsec.Command, stdin []byte) (*cmd, error) {
	b, err := s.f.live(on.Sandbox)
	if err != nil {
		return nil, err
	}
	if err := c.Check(); err != nil {
		return nil, dsec.WithOp("fake.Start", on.Sandbox, err)
	}
	if x := b.steps[on.Step]; x != nil && !on.Step.IsZero() {
		x.Replayed = true
		if strings.Join(x.Command.Argv, " ") != strings.Join(c.Argv, " ") {
			return nil, dsec.Errorf(dsec.Diverged, "step %s:%d was another command", on.Step.Session, on.Step.Number)
		}
		return x, nil
	}
	s.f.commands++
	x := &cmd{CommandStatus: dsec.CommandStatus{
		ID: dsec.CommandID("c" + strconv.Itoa(s.f.commands)), Step: on.Step, Command: c, Outcome: dsec.StillRunning, Pid: 7,
		Started: time.Now().UTC(), CPU: 3 * time.Millisecond, MaxRSS: 1 << 20,
	}}
	b.cmds = append(b.cmds, x)
	b.steps[on.Step] = x
	x.stdin.Write(stdin)
	x.play()
	return x, nil
}

func (c *cmd) play() {
	argv := c.Command.Argv
	if c.Command.Shell != "" {
		argv = strings.Fields(c.Command.Shell)
	}
	switch argv[0] {
	case "true":
		c.end(dsec.Exited, 0)
	case "false":
		c.end(dsec.Exited, 1)
	case "echo":
		c.write(dsec.Stdout, []byte(strings.Join(argv[1:], " ")+"\n"))
		c.end(dsec.Exited, 0)
	case "both":
		for i := range argv[1] {
			c.write(dsec.Stream(1+i%2), []byte(argv[1][i:i+1]))
		}
		c.end(dsec.Exited, 0)
	case "cat":
		if c.Command.Stdin == dsec.StdinNone {
			c.write(dsec.Stdout, c.stdin.Bytes())
			c.end(dsec.Exited, 0)
		}
	case "pieces":
		n, _ := strconv.Atoi(argv[1])
		size, _ := strconv.Atoi(argv[2])
		for p := Pattern(n); len(p) > 0; {
			k := min(size, len(p))
			c.write(dsec.Stdout, p[:k])
			p = p[k:]
		}
		c.end(dsec.Exited, 0)
	case "hold":
	default:
		c.Detail = "no such program"
		c.end(dsec.NotStarted, 127)
	}
}

func (s commands) Start(ctx context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	if err := s.f.enter(ctx, "Commands.Start"); err != nil {
		return dsec.CommandStatus{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.start(on, c, nil)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	return x.CommandStatus, nil
}

func (s commands) Run(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	if err := s.f.enter(ctx, "Commands.Run"); err != nil {
		return dsec.Result{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.start(on, c, stdin)
	if err != nil {
		return dsec.Result{}, err
	}
	err = s.f.wait(ctx, func() bool { return x.Outcome != dsec.StillRunning })
	return dsec.Result{CommandStatus: x.CommandStatus, Out: x.kept(dsec.Stdout), Err: x.kept(dsec.Stderr)}, err
}

func (s commands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		if err := s.f.enter(ctx, "Commands.Attach"); err != nil {
			yield(dsec.Output{}, err)
			return
		}
		for {
			o, err := s.next(ctx, on, id, offset)
			if err != nil {
				yield(dsec.Output{}, err)
				return
			}
			if !yield(o, nil) || o.Status != nil {
				return
			}
			offset = o.Offset + int64(len(o.Data))
			if err := s.f.enter(ctx, "Commands.Attach.next"); err != nil {
				yield(dsec.Output{}, err)
				return
			}
		}
	}
}

func (s commands) next(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) (dsec.Output, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return dsec.Output{}, err
	}
	if err := s.f.wait(ctx, func() bool { return x.size > offset || x.Outcome != dsec.StillRunning }); err != nil {
		return dsec.Output{}, err
	}
	for _, o := range x.log {
		if skip := offset - o.Offset; skip < int64(len(o.Data)) {
			o.Data = o.Data[skip:]
			o.Offset = offset
			return o, nil
		}
	}
	st := x.CommandStatus
	return dsec.Output{Offset: x.size, Status: &st}, nil
}

func (s commands) Read(ctx context.Context, on dsec.Call, id dsec.CommandID, stream dsec.Stream, offset int64, max int) ([]byte, error) {
	if err := s.f.enter(ctx, "Commands.Read"); err != nil {
		return nil, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return nil, err
	}
	b := x.kept(stream)
	b = b[min(max0(offset), int64(len(b))):]
	return b[:min(max, len(b))], nil
}

func max0(n int64) int64 { return max(n, 0) }

func (s commands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	if err := s.f.enter(ctx, "Commands.Write"); err != nil {
		return 0, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return 0, err
	}
	switch {
	case x.shut || x.Command.Stdin != dsec.StdinPipe:
		return x.fed, dsec.Errorf(dsec.Conflict, "standard input is closed")
	case in.Offset > x.fed:
		return x.fed, dsec.Errorf(dsec.Invalid, "data at offset %d after %d bytes", in.Offset, x.fed)
	}
	if skip := x.fed - in.Offset; skip < int64(len(in.Data)) {
		x.stdin.Write(in.Data[skip:])
		x.fed = in.Offset + int64(len(in.Data))
	}
	if in.Close {
		x.shut = true
		if x.Outcome == dsec.StillRunning && x.Command.Argv[0] == "cat" {
			x.write(dsec.Stdout, x.stdin.Bytes())
			x.end(dsec.Exited, 0)
		}
	}
	s.f.cond.Broadcast()
	return x.fed, nil
}

func (s commands) Resize(ctx context.Context, on dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	if err := s.f.enter(ctx, "Commands.Resize"); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return err
	}
	if x.Command.TTY == nil {
		return dsec.Errorf(dsec.Invalid, "the command has no terminal")
	}
	x.Command.TTY = &size
	return nil
}

func (s commands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	if err := s.f.enter(ctx, "Commands.Signal"); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return err
	}
	if x.Outcome != dsec.StillRunning {
		return dsec.Errorf(dsec.Conflict, "the command has ended")
	}
	x.Signal = sig
	x.end(dsec.Signaled, 137)
	s.f.cond.Broadcast()
	return nil
}

func (s commands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	if err := s.f.enter(ctx, "Commands.Wait"); err != nil {
		return dsec.CommandStatus{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	x, err := s.f.cmd(on.Sandbox, id)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	err = s.f.wait(ctx, func() bool { return x.Outcome != dsec.StillRunning })
	return x.CommandStatus, err
}

func (s commands) List(ctx context.Context, on dsec.Call) ([]dsec.CommandStatus, error) {
	if err := s.f.enter(ctx, "Commands.List"); err != nil {
		return nil, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.live(on.Sandbox)
	if err != nil {
		return nil, err
	}
	var out []dsec.CommandStatus
	for _, x := range b.cmds {
		out = append(out, x.CommandStatus)
	}
	return out, nil
}

package fullvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"iter"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// qgaCommands maps dsec.Commands onto guest-exec, as far as that goes: output
// comes when a command has ended, at most 16 MiB of a stream, standard input is
// given whole at the start, a timeout kills the leader alone, and what was
// running when the node's process ended is not known to the next.
type qgaCommands struct{ q *qga }

// qgaRun is one command.
type qgaRun struct {
	pid  int64
	done chan struct{}

	// Written before done is closed, under the qga's lock.
	status   dsec.CommandStatus
	out, err []byte
	kind     dsec.Outcome // what a kill by the node means
}

func (q *qga) commands() dsec.Commands { return qgaCommands{q} }

// qgaPath is where programs are looked for.
const qgaPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// check says what cannot be done.
func (c qgaCommands) check(ctx context.Context, cmd dsec.Command) error {
	g := c.q.m.guest
	if err := cmd.Check(); err != nil {
		return err
	}
	switch {
	case g.agent(ctx) != QemuGuest:
		return g.lacks("commands")
	case cmd.TTY != nil:
		return g.lacks("a terminal")
	case cmd.Stdin == dsec.StdinPipe:
		return g.lacks("standard input of a running command")
	case cmd.User != "" && cmd.User != "root" && cmd.User != "0":
		return g.lacks("commands of another user than root")
	case cmd.Idle != 0:
		return g.lacks("an idle timeout")
	}
	return nil
}

// Start implements dsec.Commands.
func (c qgaCommands) Start(ctx context.Context, on dsec.Call, cmd dsec.Command) (dsec.CommandStatus, error) {
	r, err := c.start(ctx, on, cmd, nil)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	return c.status(r), nil
}

func (c qgaCommands) start(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (*qgaRun, error) {
	if err := c.check(ctx, cmd); err != nil {
		return nil, err
	}
	q := c.q
	q.mu.Lock()
	for _, r := range q.list {
		if on.Step != (dsec.Step{}) && r.status.Step == on.Step {
			q.mu.Unlock()
			return r, nil
		}
	}
	q.mu.Unlock()
	st := q.m.state()
	env := map[string]string{}
	list := append([]string{qgaPath}, st.Guest.Env...)
	maps.Copy(env, cmd.Env)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	argv := cmd.Argv
	if cmd.Shell != "" {
		argv = []string{"/bin/sh", "-c", cmd.Shell}
	}
	cwd := cmd.Cwd
	if cwd == "" {
		cwd = st.Guest.Cwd
	}
	if cwd != "" && cwd != "/" {
		argv = append([]string{"/bin/sh", "-c", `cd "$0" && exec "$@"`, cwd}, argv...)
	}
	args := map[string]any{"path": argv[0], "arg": argv[1:], "env": list, "capture-output": true}
	if stdin != nil {
		args["input-data"] = stdin // encoded as base64, as the agent wants it
	}
	var a struct {
		Pid int64 `json:"pid"`
	}
	id := make([]byte, 8)
	rand.Read(id) //nolint:errcheck // never fails
	r := &qgaRun{done: make(chan struct{}), status: dsec.CommandStatus{
		ID: dsec.CommandID(hex.EncodeToString(id)), Step: on.Step, Command: cmd, Outcome: dsec.StillRunning, Started: time.Now(),
	}}
	if err := q.call(ctx, "guest-exec", args, &a); err != nil {
		if dsec.KindOf(err) != dsec.Invalid && dsec.KindOf(err) != dsec.NotFound {
			return nil, err
		}
		r.status.Outcome, r.status.Code, r.status.Detail, r.status.Ended = dsec.NotStarted, 127, err.Error(), time.Now()
		close(r.done)
	}
	r.pid, r.status.Pid = a.Pid, int(a.Pid)
	q.mu.Lock()
	q.runs[r.status.ID] = r
	q.list = append(q.list, r)
	if len(q.list) > dsec.CommandsKept {
		if i := slices.IndexFunc(q.list, func(r *qgaRun) bool { return r.status.Outcome != dsec.StillRunning }); i >= 0 {
			delete(q.runs, q.list[i].status.ID)
			q.list = slices.Delete(q.list, i, i+1)
		}
	}
	q.tell()
	q.mu.Unlock()
	if r.status.Outcome == dsec.StillRunning {
		q.wg.Go(func() { q.watch(r, cmd) })
	}
	return r, nil
}

// tell calls the subscriber. Requires: q.mu held.
func (q *qga) tell() {
	if f := q.sub; f != nil {
		a := q.count()
		go f(a)
	}
}

// How often a command's end is asked for.
const (
	watchMin = 20 * time.Millisecond
	watchMax = 500 * time.Millisecond
)

// watch waits for a command's end.
func (q *qga) watch(r *qgaRun, cmd dsec.Command) {
	var deadline time.Time
	if cmd.Timeout > 0 {
		deadline = time.Now().Add(cmd.Timeout)
	}
	for pause := watchMin; ; pause = min(pause*5/4, watchMax) {
		var a struct {
			Exited   bool
			Exitcode *int
			Signal   *int
			Out      []byte `json:"out-data"`
			Err      []byte `json:"err-data"`
		}
		err := q.call(q.life, "guest-exec-status", map[string]any{"pid": r.pid}, &a)
		lost := dsec.KindOf(err) == dsec.Invalid // the agent was started anew
		if q.life.Err() != nil {
			lost = true
		}
		if a.Exited || lost {
			q.mu.Lock()
			s := &r.status
			s.Ended = time.Now()
			limit := cmd.Output
			if limit == 0 {
				limit = dsec.DefaultOutput
			}
			r.out, s.Stdout = cut(a.Out, limit)
			r.err, s.Stderr = cut(a.Err, limit)
			switch {
			case lost:
				s.Outcome, s.Detail = dsec.Interrupted, "the agent does not know it any more"
			case r.kind == dsec.TimedOut:
				s.Outcome, s.Code = dsec.TimedOut, 124
			case a.Signal != nil:
				s.Outcome, s.Code, s.Signal = dsec.Signaled, 128+*a.Signal, signalName(*a.Signal)
			default:
				s.Outcome = dsec.Exited
				if a.Exitcode != nil {
					s.Code = *a.Exitcode
				}
			}
			q.last = s.Ended
			close(r.done)
			q.tell()
			q.mu.Unlock()
			return
		}
		if !deadline.IsZero() && time.Now().After(deadline) {
			deadline = time.Time{}
			q.mu.Lock()
			r.kind = dsec.TimedOut
			q.mu.Unlock()
			q.kill(q.life, r, "KILL") //nolint:errcheck // it is asked again how the command is
		}
		select {
		case <-time.After(pause):
		case <-q.life.Done():
		}
	}
}

func cut(b []byte, limit int64) ([]byte, dsec.StreamStat) {
	kept := min(int64(len(b)), limit)
	return b[:kept], dsec.StreamStat{Total: int64(len(b)), Kept: kept}
}

var signalNames = map[int]string{1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1", 11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM"}

func signalName(n int) string {
	if s := signalNames[n]; s != "" {
		return s
	}
	return strconv.Itoa(n)
}

// kill sends a signal by the guest's own program.
func (q *qga) kill(ctx context.Context, r *qgaRun, sig string) error {
	return q.call(ctx, "guest-exec", map[string]any{"path": "kill", "arg": []string{"-" + sig, strconv.FormatInt(r.pid, 10)}, "env": []string{qgaPath}}, nil)
}

func (c qgaCommands) status(r *qgaRun) dsec.CommandStatus {
	c.q.mu.Lock()
	defer c.q.mu.Unlock()
	return r.status
}

// find gives a command.
func (c qgaCommands) find(id dsec.CommandID) (*qgaRun, error) {
	if err := c.q.m.gone(); err != nil {
		return nil, err
	}
	c.q.mu.Lock()
	defer c.q.mu.Unlock()
	if r := c.q.runs[id]; r != nil {
		return r, nil
	}
	return nil, dsec.Errorf(dsec.NotFound, "there is no command %s", id)
}

// wait waits for a command's end.
func (c qgaCommands) wait(ctx context.Context, r *qgaRun) error {
	select {
	case <-r.done:
		return nil
	case <-c.q.m.Done():
		return driver.Ended()
	case <-ctx.Done():
		return dsec.WithOp("", "", context.Cause(ctx))
	}
}

// Run implements dsec.Commands.
func (c qgaCommands) Run(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	cmd.Stdin = dsec.StdinNone
	r, err := c.start(ctx, on, cmd, stdin)
	if err == nil {
		err = c.wait(ctx, r)
	}
	if err != nil {
		return dsec.Result{}, err
	}
	return dsec.Result{CommandStatus: c.status(r), Out: r.out[:min(len(r.out), dsec.MaxRunOutput)], Err: r.err[:min(len(r.err), dsec.MaxRunOutput)]}, nil
}

// Attach implements dsec.Commands: all of standard output, then all of standard
// error, once the command has ended.
func (c qgaCommands) Attach(ctx context.Context, _ dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		r, err := c.find(id)
		if err == nil {
			err = c.wait(ctx, r)
		}
		if err != nil {
			yield(dsec.Output{}, err)
			return
		}
		at := int64(0)
		for _, s := range []struct {
			stream dsec.Stream
			data   []byte
		}{{dsec.Stdout, r.out}, {dsec.Stderr, r.err}} {
			for chunk := range slices.Chunk(s.data, dsec.MaxChunk) {
				skip := min(max(offset-at, 0), int64(len(chunk)))
				if rest := chunk[skip:]; len(rest) > 0 && !yield(dsec.Output{Stream: s.stream, Offset: at + skip, Data: rest}, nil) {
					return
				}
				at += int64(len(chunk))
			}
		}
		st := c.status(r)
		yield(dsec.Output{Offset: at, Status: &st}, nil)
	}
}

// Read implements dsec.Commands.
func (c qgaCommands) Read(_ context.Context, _ dsec.Call, id dsec.CommandID, s dsec.Stream, offset int64, most int) ([]byte, error) {
	r, err := c.find(id)
	if err != nil {
		return nil, err
	}
	c.q.mu.Lock()
	defer c.q.mu.Unlock()
	data := r.out
	if s == dsec.Stderr {
		data = r.err
	}
	if offset < 0 || most < 0 {
		return nil, dsec.Errorf(dsec.Invalid, "offset %d and length %d are not a range", offset, most)
	}
	from := min(offset, int64(len(data)))
	return data[from:min(from+int64(most), int64(len(data)))], nil
}

// Write implements dsec.Commands.
func (c qgaCommands) Write(_ context.Context, _ dsec.Call, id dsec.CommandID, _ dsec.StdinWrite) (int64, error) {
	if _, err := c.find(id); err != nil {
		return 0, err
	}
	return 0, c.q.m.guest.lacks("standard input of a running command")
}

// Resize implements dsec.Commands.
func (c qgaCommands) Resize(_ context.Context, _ dsec.Call, id dsec.CommandID, _ dsec.WinSize) error {
	if _, err := c.find(id); err != nil {
		return err
	}
	return dsec.Errorf(dsec.Invalid, "the command has no terminal")
}

// Signal implements dsec.Commands: the leader alone gets it.
func (c qgaCommands) Signal(ctx context.Context, _ dsec.Call, id dsec.CommandID, sig string) error {
	r, err := c.find(id)
	if err != nil {
		return err
	}
	if c.status(r).Outcome != dsec.StillRunning {
		return dsec.Errorf(dsec.Conflict, "the command has ended")
	}
	name := sig
	if len(name) > 3 && name[:3] == "SIG" {
		name = name[3:]
	}
	for n, s := range signalNames {
		if s == name || strconv.Itoa(n) == name {
			return c.q.kill(ctx, r, s)
		}
	}
	return dsec.Errorf(dsec.Invalid, "there is no signal %q", sig)
}

// Wait implements dsec.Commands.
func (c qgaCommands) Wait(ctx context.Context, _ dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	r, err := c.find(id)
	if err == nil {
		err = c.wait(ctx, r)
	}
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	return c.status(r), nil
}

// List implements dsec.Commands.
func (c qgaCommands) List(context.Context, dsec.Call) ([]dsec.CommandStatus, error) {
	if err := c.q.m.gone(); err != nil {
		return nil, err
	}
	c.q.mu.Lock()
	defer c.q.mu.Unlock()
	var out []dsec.CommandStatus
	for _, r := range c.q.list {
		out = append(out, r.status)
	}
	return out, nil
}

package synthetic

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// guest is the agent of a synthetic machine.
type guest struct{ m *machine }

var (
	_ driver.Guest = guest{}
	_ driver.Inlet = guest{}
)

func (g guest) Commands() dsec.Commands { return commands(g) }
func (g guest) Files() dsec.Files       { return files(g) }
func (g guest) Ports() dsec.Ports       { return ports(g) }

// Activity counts what runs.
func (g guest) Activity(ctx context.Context) (driver.Activity, error) {
	if err := g.m.host.hit(ctx, OpActivity); err != nil {
		return driver.Activity{}, err
	}
	if err := g.m.alive(); err != nil {
		return driver.Activity{}, err
	}
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	return g.m.activity, nil
}

// Forget drops the answers of steps.
func (g guest) Forget(_ context.Context, steps []dsec.Step) error {
	t := commands(g).table()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range steps {
		delete(t.steps, s)
	}
	return nil
}

// Subscribe sets the one subscriber.
func (g guest) Subscribe(f func(driver.Activity)) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	if !g.m.ended {
		g.m.subscriber = f
	}
}

// commands understands these programs, by argument list or as a plain shell
// line without quoting:
//
//	true, false, exit N    end at once
//	echo WORDS             writes them and a newline
//	warn WORDS             the same on standard error
//	yes N                  writes N bytes
//	sleep DURATION         ends later ("1.5" is seconds, "10m" works too)
//	cat                    copies its standard input
//	hang                   ends by a signal only
//
// Anything else is NotStarted with code 127.
type commands struct{ m *machine }

var _ dsec.Commands = commands{}

// commandTable is what a machine remembers of its commands.
type commandTable struct {
	mu    sync.Mutex
	next  int
	order []*command
	byID  map[dsec.CommandID]*command
	steps map[dsec.Step]*command
}

// command is one command; all but id is guarded by its table's mu.
type command struct {
	id      dsec.CommandID
	status  dsec.CommandStatus
	out     [3][]byte // by stream
	log     []piece   // both streams in order
	size    int64     // bytes in log
	input   int64     // offset of standard input
	inDone  bool
	changed chan struct{} // closed at each change, then replaced
	timer   *time.Timer
	limit   *time.Timer
}

type piece struct {
	stream dsec.Stream
	data   []byte
}

// table gives the machine's commands, made on first use.
func (c commands) table() *commandTable {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.m.commands == nil {
		c.m.commands = &commandTable{byID: map[dsec.CommandID]*command{}, steps: map[dsec.Step]*command{}}
	}
	return c.m.commands
}

// Start runs a scripted program.
func (c commands) Start(ctx context.Context, on dsec.Call, cmd dsec.Command) (dsec.CommandStatus, error) {
	p, replayed, err := c.start(ctx, on, cmd)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	t := c.table()
	t.mu.Lock()
	defer t.mu.Unlock()
	st := p.status
	st.Replayed = replayed
	return st, nil
}

func (c commands) start(ctx context.Context, on dsec.Call, cmd dsec.Command) (*command, bool, error) {
	if err := c.m.alive(); err != nil {
		return nil, false, err
	}
	if err := cmd.Check(); err != nil {
		return nil, false, err
	}
	if err := c.m.host.hit(ctx, OpExec); err != nil {
		return nil, false, err
	}
	if c.m.Paused() {
		return nil, false, dsec.Errorf(dsec.Internal, "a command was started in a machine that is paused")
	}
	t := c.table()
	t.mu.Lock()
	if old := t.steps[on.Step]; old != nil && !on.Step.IsZero() {
		same := reflect.DeepEqual(old.status.Command, cmd)
		t.mu.Unlock()
		if !same {
			return nil, false, dsec.Errorf(dsec.Diverged, "step %s:%d ran another command", on.Step.Session, on.Step.Number)
		}
		return old, true, nil
	}
	t.next++
	p := &command{id: dsec.CommandID("c" + strconv.Itoa(t.next)), changed: make(chan struct{})}
	p.status = dsec.CommandStatus{
		ID: p.id, Step: on.Step, Command: cmd, Outcome: dsec.StillRunning, Pid: 10 + t.next, Started: time.Now(),
	}
	t.order = append(t.order, p)
	t.byID[p.id] = p
	if !on.Step.IsZero() {
		t.steps[on.Step] = p
	}
	t.mu.Unlock()

	c.m.count(1)
	t.mu.Lock()
	live := c.script(t, p, cmd)
	if live && cmd.Timeout > 0 {
		p.limit = time.AfterFunc(cmd.Timeout, func() { c.finish(t, p, dsec.TimedOut, 124, "") })
	}
	t.mu.Unlock()
	if !live {
		c.m.count(-1)
	}
	return p, false, nil
}

// script does what the program does at its start and reports whether it runs
// on. Requires: t.mu held.
func (c commands) script(t *commandTable, p *command, cmd dsec.Command) bool {
	argv := cmd.Argv
	if cmd.Shell != "" {
		argv = strings.Fields(cmd.Shell)
	}
	if len(argv) == 0 {
		argv = []string{"true"}
	}
	arg := strings.Join(argv[1:], " ")
	switch argv[0] {
	case "true":
		p.conclude(dsec.Exited, 0, "")
	case "false":
		p.conclude(dsec.Exited, 1, "")
	case "exit":
		n, _ := strconv.Atoi(arg)
		p.conclude(dsec.Exited, n, "")
	case "echo":
		p.write(dsec.Stdout, []byte(arg+"\n"))
		p.conclude(dsec.Exited, 0, "")
	case "warn":
		p.write(dsec.Stderr, []byte(arg+"\n"))
		p.conclude(dsec.Exited, 0, "")
	case "yes":
		n, _ := strconv.Atoi(arg)
		p.write(dsec.Stdout, bytes.Repeat([]byte("y\n"), (n+1)/2)[:n])
		p.conclude(dsec.Exited, 0, "")
	case "sleep":
		d, err := time.ParseDuration(arg)
		if err != nil {
			s, _ := strconv.ParseFloat(arg, 64)
			d = time.Duration(s * float64(time.Second))
		}
		p.timer = time.AfterFunc(d, func() { c.finish(t, p, dsec.Exited, 0, "") })
		return true
	case "cat":
		if cmd.Stdin == dsec.StdinPipe {
			return true
		}
		p.conclude(dsec.Exited, 0, "")
	case "hang":
		return true
	default:
		p.status.Detail = fmt.Sprintf("%s: no such program", argv[0])
		p.conclude(dsec.NotStarted, 127, "")
	}
	return false
}

// finish ends a running command.
func (c commands) finish(t *commandTable, p *command, o dsec.Outcome, code int, sig string) {
	t.mu.Lock()
	was := p.status.Outcome == dsec.StillRunning
	if was {
		p.conclude(o, code, sig)
	}
	t.mu.Unlock()
	if was {
		c.m.count(-1)
	}
}

// conclude sets the final status. Requires: the table's mu held.
func (p *command) conclude(o dsec.Outcome, code int, sig string) {
	p.status.Outcome, p.status.Code, p.status.Signal, p.status.Ended = o, code, sig, time.Now()
	for _, t := range []*time.Timer{p.timer, p.limit} {
		if t != nil {
			t.Stop()
		}
	}
	p.wake()
}

// wake lets the waiting readers look again. Requires: the table's mu held.
func (p *command) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// write appends output. Requires: the table's mu held.
func (p *command) write(s dsec.Stream, data []byte) {
	p.out[s] = append(p.out[s], data...)
	p.log = append(p.log, piece{s, data})
	p.size += int64(len(data))
	st := &p.status.Stdout
	if s == dsec.Stderr {
		st = &p.status.Stderr
	}
	st.Total += int64(len(data))
	st.Kept = st.Total
	p.wake()
}

// interrupt ends what runs when the machine goes.
func (t *commandTable) interrupt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.order {
		if p.status.Outcome == dsec.StillRunning {
			p.conclude(dsec.Interrupted, 137, "KILL")
		}
	}
}

// find gives a command by its ID.
func (c commands) find(id dsec.CommandID) (*commandTable, *command, error) {
	if err := c.m.alive(); err != nil {
		return nil, nil, err
	}
	t := c.table()
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	if p == nil {
		return nil, nil, dsec.Errorf(dsec.NotFound, "no command has the id %q", string(id))
	}
	return t, p, nil
}

// Run starts a program, feeds it and waits.
func (c commands) Run(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	if len(stdin) > 0 {
		cmd.Stdin = dsec.StdinPipe
	}
	p, replayed, err := c.start(ctx, on, cmd)
	if err != nil {
		return dsec.Result{}, err
	}
	if cmd.Stdin == dsec.StdinPipe && !replayed {
		if _, err := c.Write(ctx, on, p.id, dsec.StdinWrite{Data: stdin, Close: true}); err != nil && dsec.KindOf(err) != dsec.Conflict {
			return dsec.Result{}, err
		}
	}
	st, err := c.Wait(ctx, on, p.id)
	if err != nil {
		return dsec.Result{}, err
	}
	st.Replayed = replayed
	t := c.table()
	t.mu.Lock()
	defer t.mu.Unlock()
	return dsec.Result{CommandStatus: st, Out: bytes.Clone(p.out[dsec.Stdout]), Err: bytes.Clone(p.out[dsec.Stderr])}, nil
}

// Wait blocks until the command ended.
func (c commands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	t, p, err := c.find(id)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	for {
		t.mu.Lock()
		st, changed := p.status, p.changed
		t.mu.Unlock()
		if st.Outcome != dsec.StillRunning {
			return st, nil
		}
		select {
		case <-changed:
		case <-c.m.done:
			// Mostly the command is interrupted by now and the next look says
			// so; one that began while the machine went is not.
			t.interrupt()
		case <-ctx.Done():
			return dsec.CommandStatus{}, context.Cause(ctx)
		}
	}
}

// Attach yields the output from offset on and the status at its end.
func (c commands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		t, p, err := c.find(id)
		if err != nil {
			yield(dsec.Output{}, err)
			return
		}
		at, i := int64(0), 0
		for {
			t.mu.Lock()
			log, st, changed := p.log[i:], p.status, p.changed
			t.mu.Unlock()
			i += len(log)
			for _, w := range log {
				from := min(max(offset-at, 0), int64(len(w.data)))
				if from < int64(len(w.data)) && !yield(dsec.Output{Stream: w.stream, Offset: at + from, Data: w.data[from:]}, nil) {
					return
				}
				at += int64(len(w.data))
			}
			if st.Outcome != dsec.StillRunning {
				yield(dsec.Output{Offset: at, Status: &st}, nil)
				return
			}
			select {
			case <-changed:
			case <-c.m.done:
				t.interrupt()
			case <-ctx.Done():
				yield(dsec.Output{}, context.Cause(ctx))
				return
			}
		}
	}
}

// Read returns a part of one stream.
func (c commands) Read(_ context.Context, _ dsec.Call, id dsec.CommandID, s dsec.Stream, offset int64, max int) ([]byte, error) {
	t, p, err := c.find(id)
	if err != nil {
		return nil, err
	}
	if s != dsec.Stdout && s != dsec.Stderr || offset < 0 || max < 0 {
		return nil, dsec.Errorf(dsec.Invalid, "stream %d at %d", s, offset)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	b := p.out[s]
	b = b[min(offset, int64(len(b))):]
	return bytes.Clone(b[:min(max, len(b))]), nil
}

// Write feeds cat.
func (c commands) Write(_ context.Context, _ dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	t, p, err := c.find(id)
	if err != nil {
		return 0, err
	}
	t.mu.Lock()
	switch {
	case p.inDone || p.status.Outcome != dsec.StillRunning || p.status.Command.Stdin != dsec.StdinPipe:
		t.mu.Unlock()
		return 0, dsec.Errorf(dsec.Conflict, "standard input is closed")
	case in.Offset > p.input:
		t.mu.Unlock()
		return 0, dsec.Errorf(dsec.Invalid, "write at %d leaves a gap after %d", in.Offset, p.input)
	}
	if skip := p.input - in.Offset; skip < int64(len(in.Data)) {
		data := bytes.Clone(in.Data[skip:])
		p.input += int64(len(data))
		p.write(dsec.Stdout, data)
	}
	p.inDone = in.Close
	at := p.input
	t.mu.Unlock()
	if in.Close {
		c.finish(t, p, dsec.Exited, 0, "")
	}
	return at, nil
}

// Resize needs a terminal.
func (c commands) Resize(_ context.Context, _ dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	t, p, err := c.find(id)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.status.Command.TTY == nil {
		return dsec.Errorf(dsec.Invalid, "the command has no terminal")
	}
	p.status.Command.TTY = &size
	return nil
}

// Signal ends the command, whatever the signal.
func (c commands) Signal(_ context.Context, _ dsec.Call, id dsec.CommandID, sig string) error {
	t, p, err := c.find(id)
	if err != nil {
		return err
	}
	t.mu.Lock()
	over := p.status.Outcome != dsec.StillRunning
	t.mu.Unlock()
	if over {
		return dsec.Errorf(dsec.Conflict, "the command has ended")
	}
	code := 143
	if sig = strings.TrimPrefix(sig, "SIG"); sig == "KILL" {
		code = 137
	}
	c.finish(t, p, dsec.Signaled, code, sig)
	return nil
}

// List gives all commands, oldest first.
func (c commands) List(context.Context, dsec.Call) ([]dsec.CommandStatus, error) {
	if err := c.m.alive(); err != nil {
		return nil, err
	}
	t := c.table()
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]dsec.CommandStatus, 0, len(t.order))
	for _, p := range t.order {
		out = append(out, p.status)
	}
	return out, nil
}

// Listen accepts every port: nothing in a synthetic machine calls.
func (g guest) Listen(context.Context, int) error { return g.m.alive() }

// Accept waits until the machine is gone.
func (g guest) Accept(ctx context.Context, _ int) (dsec.PortConn, error) {
	select {
	case <-g.m.done:
		return nil, g.m.alive()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

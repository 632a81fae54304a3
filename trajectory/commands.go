package trajectory

import (
	"context"
	"encoding/json"
	"errors"
	"iter"

	"github.com/dsec-go/dsec"
)

// commands is the recorded dsec.Commands.
type commands struct{ r *Recorder }

var _ dsec.Commands = commands{}

// begin records the request of a command.
func (c commands) begin(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (begun, error) {
	if err := cmd.Check(); err != nil {
		return begun{}, err
	}
	if c.r.log.chain(on.Sandbox) == nil && on.Step.IsZero() {
		return begun{}, errNoChain
	}
	var bod body
	input := ""
	if len(stdin) > 0 {
		var err error
		if bod, input, err = c.r.log.contentBody(ctx, stdin); err != nil {
			return begun{}, unwritable(err)
		}
	}
	p, err := paramOf(cmd, input)
	if err != nil {
		return begun{}, err
	}
	b, err := c.r.log.begin(ctx, request{on: on, who: whoOf(ctx), op: dsec.RecordCommand, param: p, body: bod})
	if b.first && !b.again {
		b.counted, b.before = true, c.r.guests.Fetched(on.Sandbox)
	}
	return b, err
}

// Run runs a command, or answers its step.
func (c commands) Run(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	if len(stdin) == 0 && cmd.Stdin == dsec.StdinPipe {
		cmd.Stdin = dsec.StdinNone // at its end from the start
	}
	b, err := c.begin(ctx, on, cmd, stdin)
	switch {
	case errors.Is(err, errNoChain):
		return c.r.inner.Commands.Run(ctx, on, cmd, stdin)
	case err != nil:
		return dsec.Result{}, dsec.WithOp("trajectory.Run", on.Sandbox, err)
	case b.answer != 0:
		return c.result(ctx, on.Sandbox, b.answer)
	case b.first:
		cmd, err := c.asRecorded(ctx, on, b, cmd)
		if err != nil {
			c.r.log.settle(b.chain, b.flight, nil, 0, err)
			return dsec.Result{}, err
		}
		c.r.work.Go(func() {
			call := dsec.Call{Sandbox: on.Sandbox, Step: b.chain.guestStep(on.Step, b.flight.request)}
			res, err := c.r.inner.Commands.Run(c.r.carry(ctx), call, cmd, stdin)
			c.ended(b, call, res.CommandStatus, &res, err)
		})
	default:
		// The command may stand still in a sandbox that was paused since, as that
		// of a trainer that died: whoever comes back for it is a call that wakes.
		c.r.work.Go(func() {
			c.r.inner.Commands.List(ctx, dsec.Call{Sandbox: on.Sandbox}) //nolint:errcheck // the flight tells what became of it
		})
	}
	select {
	case <-b.flight.done:
	case <-ctx.Done():
		return dsec.Result{}, context.Cause(ctx)
	}
	if err := b.flight.err; err != nil {
		return dsec.Result{}, err
	}
	if res, ok := b.flight.live.(*dsec.Result); ok && b.first {
		res.Step, res.Replayed = on.Step, false
		return *res, nil
	}
	return c.result(ctx, on.Sandbox, b.flight.answer)
}

// Start starts a command, or finds the one that its step started.
func (c commands) Start(ctx context.Context, on dsec.Call, cmd dsec.Command) (dsec.CommandStatus, error) {
	b, err := c.begin(ctx, on, cmd, nil)
	switch {
	case errors.Is(err, errNoChain):
		return c.r.inner.Commands.Start(ctx, on, cmd)
	case err != nil:
		return dsec.CommandStatus{}, dsec.WithOp("trajectory.Start", on.Sandbox, err)
	case b.answer != 0:
		return c.status(ctx, on.Sandbox, b.answer)
	}
	if cmd, err = c.asRecorded(ctx, on, b, cmd); err != nil {
		if b.first {
			c.r.log.settle(b.chain, b.flight, nil, 0, err)
		}
		return dsec.CommandStatus{}, err
	}
	call := dsec.Call{Sandbox: on.Sandbox, Step: b.chain.guestStep(on.Step, b.flight.request)}
	type started struct {
		st  dsec.CommandStatus
		err error
	}
	got := make(chan started, 1)
	c.r.work.Go(func() {
		life := c.r.carry(ctx)
		st, err := c.r.inner.Commands.Start(life, call, cmd)
		st.Step = on.Step
		got <- started{st, err}
		if !b.first {
			return // whoever was first follows it
		}
		if err != nil {
			c.ended(b, call, st, nil, err)
			return
		}
		c.follow(b, call, st.ID)
	})
	select {
	case s := <-got:
		if s.err == nil && s.st.Outcome != dsec.StillRunning {
			return c.over(ctx, on, b)
		}
		s.st.Replayed = !b.first
		return s.st, s.err
	case <-ctx.Done():
		return dsec.CommandStatus{}, context.Cause(ctx)
	}
}

// over is Start's answer for a command that has ended by now: an end is not
// shown before it is durable.
func (c commands) over(ctx context.Context, on dsec.Call, b begun) (dsec.CommandStatus, error) {
	select {
	case <-b.flight.done:
	case <-ctx.Done():
		return dsec.CommandStatus{}, context.Cause(ctx)
	}
	if err := b.flight.err; err != nil {
		return dsec.CommandStatus{}, err
	}
	st, err := c.status(ctx, on.Sandbox, b.flight.answer)
	st.Replayed = !b.first
	return st, err
}

// follow waits for the end of a command and records it.
func (c commands) follow(b begun, call dsec.Call, id dsec.CommandID) {
	for {
		st, err := c.r.inner.Commands.Wait(c.r.life, call, id)
		if k := dsec.KindOf(err); err != nil && (k == dsec.Timeout || k == dsec.Unavailable) && c.r.life.Err() == nil {
			continue // a wait has its own limit
		}
		c.ended(b, call, st, nil, err)
		return
	}
}

// ended records the end of a command and lets the guest forget it.
func (c commands) ended(b begun, call dsec.Call, st dsec.CommandStatus, res *dsec.Result, err error) {
	if c.r.life.Err() != nil && err != nil {
		c.r.finish(b, nil, body{}, err) //nolint:errcheck // the next process finds the command
		return
	}
	if err == nil && st.Outcome == dsec.Interrupted {
		// A guest's last word while it goes: the end of its sandbox says it better.
		err = dsec.Errorf(dsec.Conflict, "the sandbox has ended")
	}
	if err != nil && unsure(err) {
		// It may have run. The end of the sandbox records it as interrupted; until
		// then whoever repeats its step, or looks at it, asks the guest again.
		c.r.log.settle(b.chain, b.flight, nil, 0, err)
		c.r.lookAgain(b.chain)
		return
	}
	var answer json.RawMessage
	var bod body
	if err == nil {
		bod, err = c.output(call, st, res)
	}
	if err == nil {
		a := answerOf(st)
		if b.counted {
			a.Fetched = max(0, c.r.guests.Fetched(call.Sandbox)-b.before)
		}
		answer, err = marshal(a)
	}
	var live any
	if res != nil {
		live = res
	}
	if c.r.log.end(c.r.life, b.chain, b.flight, answer, live, bod, err) == nil && err == nil {
		c.r.forget(b.chain, call.Step, bod.size)
	}
}

// unsure reports whether a command may have run although its call failed:
// because its sandbox ended, or its guest could not be reached any more.
func unsure(err error) bool {
	switch dsec.KindOf(err) {
	case dsec.Conflict, dsec.Lost, dsec.Unavailable, dsec.Timeout, dsec.Canceled, dsec.Internal:
		return true
	}
	return false
}

// output takes what a command printed, in the order of the guest. What Run
// returned is enough when it is all of one stream.
func (c commands) output(call dsec.Call, st dsec.CommandStatus, res *dsec.Result) (body, error) {
	if st.Stdout.Total+st.Stderr.Total == 0 {
		return body{}, nil
	}
	s := c.r.log.spool(c.r.life, dsec.BodyOutput)
	defer s.abort()
	var frame []byte
	put := func(o dsec.Output) error {
		frame = dsec.AppendOutput(frame[:0], o)
		_, err := s.Write(frame)
		return err
	}
	switch {
	case res != nil && st.Stderr.Total == 0 && int64(len(res.Out)) == st.Stdout.Total:
		if err := put(dsec.Output{Stream: dsec.Stdout, Data: res.Out}); err != nil {
			return body{}, err
		}
	case res != nil && st.Stdout.Total == 0 && int64(len(res.Err)) == st.Stderr.Total:
		if err := put(dsec.Output{Stream: dsec.Stderr, Data: res.Err}); err != nil {
			return body{}, err
		}
	default:
		for o, err := range c.r.inner.Commands.Attach(c.r.life, call, st.ID, 0) {
			if err != nil {
				return body{}, err
			}
			if err := put(o); err != nil {
				return body{}, err
			}
		}
	}
	return s.finish()
}

// result answers Run from the record.
func (c commands) result(ctx context.Context, id dsec.SandboxID, answer uint64) (dsec.Result, error) {
	r, err := c.r.log.recorded(ctx, id, answer)
	if err != nil {
		return dsec.Result{}, err
	}
	st, err := r.status()
	if err != nil {
		return dsec.Result{}, err
	}
	st.Replayed = true
	res := dsec.Result{CommandStatus: st}
	if r.answer.Body == "" {
		return res, nil
	}
	for o, err := range c.r.log.outputs(ctx, r) {
		if err != nil {
			return dsec.Result{}, err
		}
		to, kept := &res.Out, st.Stdout.Kept // behind that come last bytes, and Run returns beginnings
		if o.Stream == dsec.Stderr {
			to, kept = &res.Err, st.Stderr.Kept
		}
		*to = append(*to, o.Data[:min(int64(len(o.Data)), min(dsec.MaxRunOutput, kept)-int64(len(*to)))]...)
	}
	return res, nil
}

// status answers Start and Wait from the record.
func (c commands) status(ctx context.Context, id dsec.SandboxID, answer uint64) (dsec.CommandStatus, error) {
	r, err := c.r.log.recorded(ctx, id, answer)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	st, err := r.status()
	st.Replayed = err == nil
	return st, err
}

// Attach yields a command's output, from the record once it has ended.
func (c commands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		// What is recorded needs no guest, and wakes no paused sandbox.
		if answer, ok := c.r.log.commandAnswer(ctx, on.Sandbox, id); ok {
			c.replay(ctx, on.Sandbox, answer, offset, yield)
			return
		}
		for o, err := range c.r.inner.Commands.Attach(ctx, on, id, offset) {
			if err == nil && o.Status != nil {
				st := *o.Status
				err = c.safely(ctx, on.Sandbox, &st)
				o.Status = &st
			}
			if !yield(o, err) || err != nil {
				return
			}
		}
	}
}

// replay yields recorded output from an offset on, then the status.
func (c commands) replay(ctx context.Context, id dsec.SandboxID, answer uint64, offset int64, yield func(dsec.Output, error) bool) {
	r, err := c.r.log.recorded(ctx, id, answer)
	if err != nil {
		yield(dsec.Output{}, err)
		return
	}
	st, err := r.status()
	if err != nil {
		yield(dsec.Output{}, err)
		return
	}
	end := int64(0)
	gap := int64(0)
	if r.answer.Body != "" {
		for o, err := range c.r.log.outputs(ctx, r) {
			if err != nil {
				yield(dsec.Output{}, err)
				return
			}
			end = o.Offset + int64(len(o.Data))
			if o.Gap > 0 {
				if end > offset {
					gap += min(o.Gap, end-offset)
				}
				continue
			}
			if skip := offset - o.Offset; skip > 0 {
				o.Data = o.Data[min(skip, int64(len(o.Data))):]
				o.Offset = offset
			}
			if len(o.Data) == 0 {
				continue
			}
			o.Gap, gap = gap, 0
			if !yield(o, nil) {
				return
			}
		}
	}
	yield(dsec.Output{Offset: end, Gap: gap, Status: &st}, nil)
}

// safeTries is how often safely follows a command whose call broke off.
const safeTries = 3

// safely waits until the end of a command is durable, and takes the step out
// of its status if nobody but the recorder knows it.
func (c commands) safely(ctx context.Context, id dsec.SandboxID, st *dsec.CommandStatus) error {
	ch := c.r.log.chain(id)
	for try := 1; st.Outcome != dsec.StillRunning; try++ {
		f, open := ch.flightOf(st.Step)
		if open && f == nil { // nobody follows it
			if err := c.r.takeUp(ctx, ch); err != nil {
				return err
			}
			f, _ = ch.flightOf(st.Step)
		}
		if f == nil {
			break
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if f.err == nil {
			break
		}
		if f.lost || try == safeTries {
			return f.err
		}
	}
	hide(st)
	return nil
}

func hide(st *dsec.CommandStatus) {
	if st.Step.Session == hiddenSession {
		st.Step, st.Replayed = dsec.Step{}, false
	}
}

// flightOf finds the call under way that started a command, by its step as the
// guest knows it. Without a flight it may be open all the same. A call is under
// way until its answer is durable.
func (c *chain) flightOf(step dsec.Step) (f *flight, open bool) {
	if c == nil {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	request := step.Number - c.defaults.Branch // of the original's it becomes a number that no request has
	if step.Session != hiddenSession {
		request = c.steps[step].request
	}
	if f := c.unsynced[request]; f != nil {
		return f, true
	}
	o, open := c.open[request]
	return o.flight, open
}

// commandAnswer finds the recorded answer of a command, if it is durable.
func (l *Log) commandAnswer(ctx context.Context, id dsec.SandboxID, command dsec.CommandID) (uint64, bool) {
	if c := l.chain(id); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		a, ok := c.commands[command]
		for _, f := range c.unsynced {
			ok = ok && f.wrote != a
		}
		return a, ok
	}
	s, _, err := l.archivedSection(ctx, id)
	if err != nil {
		return 0, false
	}
	for _, row := range s.Commands {
		if row.ID == command {
			return row.Answer, true
		}
	}
	return 0, false
}

// Read returns bytes of one stream.
func (c commands) Read(ctx context.Context, on dsec.Call, id dsec.CommandID, s dsec.Stream, offset int64, most int) ([]byte, error) {
	answer, ok := c.r.log.commandAnswer(ctx, on.Sandbox, id)
	if !ok {
		return c.r.inner.Commands.Read(ctx, on, id, s, offset, most)
	}
	switch { // as its guest would
	case s != dsec.Stdout && s != dsec.Stderr:
		return nil, dsec.Errorf(dsec.Invalid, "stream %d is neither standard output nor standard error", s)
	case offset < 0 || most < 0:
		return nil, dsec.Errorf(dsec.Invalid, "offset %d or length %d is negative", offset, most)
	}
	r, err := c.r.log.recorded(ctx, on.Sandbox, answer)
	if err != nil || r.answer.Body == "" {
		return nil, err
	}
	st, err := r.status()
	if err != nil {
		return nil, err
	}
	count := st.Stdout
	if s == dsec.Stderr {
		count = st.Stderr
	}
	return page(c.r.log.outputs(ctx, r), s, count, offset, most)
}

// page reads bytes of one stream from recorded output: of its beginning, or of
// its last bytes if they are kept.
func page(output iter.Seq2[dsec.Output, error], s dsec.Stream, count dsec.StreamStat, offset int64, most int) ([]byte, error) {
	var out, last []byte
	var at int64
	for o, err := range output {
		if err != nil {
			return nil, err
		}
		if o.Stream != s {
			continue
		}
		data := o.Data
		if n := min(int64(len(data)), count.Kept-at); n > 0 {
			piece := data[min(max(offset-at, 0), n):n]
			out = append(out, piece[:min(len(piece), most-len(out))]...) // and reads on: see outputs
			data, at = data[n:], at+n
		}
		last = append(last, data...) // at most dsec.OutputTail
	}
	if begin := count.Total - int64(len(last)); offset >= count.Kept && len(last) > 0 {
		out = last[min(max(offset-begin, 0), int64(len(last))):]
	}
	return out[:min(len(out), most)], nil
}

// Wait returns the status of a command that ended, once that is durable.
func (c commands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	if answer, ok := c.r.log.commandAnswer(ctx, on.Sandbox, id); ok {
		st, err := c.status(ctx, on.Sandbox, answer)
		st.Replayed = false // nobody repeated its step
		return st, err
	}
	st, err := c.r.inner.Commands.Wait(ctx, on, id)
	if err == nil {
		err = c.safely(ctx, on.Sandbox, &st)
	}
	return st, err
}

// List returns what the guest remembers. What has ended and is not durable
// counts as running.
func (c commands) List(ctx context.Context, on dsec.Call) ([]dsec.CommandStatus, error) {
	ch := c.r.log.chain(on.Sandbox)
	left := ch.left()
	all, err := c.r.inner.Commands.List(ctx, on)
	if err == nil && len(left) > 0 {
		err = c.r.adopt(ch, left, all)
	}
	for i := range all {
		st := &all[i]
		if _, open := ch.flightOf(st.Step); open && st.Outcome != dsec.StillRunning {
			st.Outcome, st.Code, st.Signal = dsec.StillRunning, 0, ""
		}
		hide(st)
	}
	return all, err
}

type stdinParam struct {
	Command dsec.CommandID `json:"command"`
	Offset  int64          `json:"offset"`
	Content string         `json:"content,omitempty"` // digest
	Close   bool           `json:"close,omitempty"`
}

// Write feeds standard input.
func (c commands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	p := stdinParam{Command: id, Offset: in.Offset, Close: in.Close}
	var bod body
	if len(in.Data) > 0 {
		var err error
		if bod, p.Content, err = c.r.log.contentBody(ctx, in.Data); err != nil {
			return 0, dsec.WithOp("trajectory.Write", on.Sandbox, unwritable(err))
		}
	}
	// It blocks while the command does not read; then the caller may give up and
	// come back, so it is not carried out apart from him.
	return inline(ctx, c.r, on, dsec.RecordStdin, p, bod, func(ctx context.Context) (int64, error) {
		return c.r.inner.Commands.Write(ctx, on, id, in)
	})
}

type resizeParam struct {
	Command dsec.CommandID `json:"command"`
	Size    dsec.WinSize   `json:"size"`
}

// Resize sets the size of a terminal.
func (c commands) Resize(ctx context.Context, on dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	return doNothing(ctx, c.r, on, dsec.RecordResize, resizeParam{id, size}, func(ctx context.Context) error {
		return c.r.inner.Commands.Resize(ctx, on, id, size)
	})
}

type signalParam struct {
	Command dsec.CommandID `json:"command"`
	Signal  string         `json:"signal"`
}

// Signal sends a signal.
func (c commands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	return doNothing(ctx, c.r, on, dsec.RecordSignal, signalParam{id, sig}, func(ctx context.Context) error {
		return c.r.inner.Commands.Signal(ctx, on, id, sig)
	})
}

// doNothing is do for what answers with an error alone.
func doNothing(ctx context.Context, r *Recorder, on dsec.Call, op dsec.RecordOp, param any, f func(ctx context.Context) error) error {
	_, err := do(ctx, r, on, op, param, body{}, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

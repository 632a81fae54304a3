package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// replay is one replay under way.
type replay struct {
	plan
	s        dsec.Services
	t        tape
	box      dsec.Sandbox // the new one
	call     dsec.Call
	pace     time.Duration
	progress *progress

	running map[uint64]*playing // operations begun and not ended, by record
	ids     map[dsec.CommandID]*playing
	fed     map[dsec.CommandID]chan struct{} // closed when the last input of a command is taken

	compared    int
	alike       int
	skipped     []skipped
	unended     []skipped // done again, and there is no end to compare with
	differences []difference
	files       *filesCompared
	filesWhy    string // they were not compared
}

// skipped is an operation that was not done again, or not compared.
type skipped struct {
	Record    uint64
	Operation string
	Why       string
}

// playing is one operation that is being done again.
type playing struct {
	request dsec.Record
	answer  *dsec.Record // as recorded; nil if there is none
	id      dsec.CommandID
	cancel  context.CancelFunc
	done    chan struct{}

	// Once done is closed.
	got facts
	err error // a fault of dsec's
}

func newReplay(s dsec.Services, t tape, p plan, box dsec.Sandbox, pace time.Duration, show *progress) *replay {
	return &replay{
		plan: p, s: s, t: t, box: box, call: dsec.Call{Sandbox: box.ID}, pace: pace, progress: show,
		running: map[uint64]*playing{}, ids: map[dsec.CommandID]*playing{}, fed: map[dsec.CommandID]chan struct{}{},
	}
}

// play does what was recorded, in order. What had ended before something else
// began has ended before that begins; what overlapped may overlap.
func (r *replay) play(ctx context.Context) error {
	defer r.progress.clear()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i := r.from; i < r.to; i++ {
		rec := r.all[i]
		r.progress.show("record %d of %d", rec.Seq, r.all[r.to-1].Seq)
		if isAnswer(rec) {
			if err := r.end(ctx, rec.Of); err != nil {
				return err
			}
			continue
		}
		if len(r.running) > 0 {
			if err := r.wait(ctx, rec.Mono-r.all[i-1].Mono); err != nil {
				return err
			}
		}
		if err := r.begin(ctx, rec); err != nil {
			return err
		}
	}
	// The last operation is ended if nothing was begun before its end. One that
	// was left in the background is left there.
	last := r.all[r.to-1]
	for _, rec := range r.all[r.to:] {
		switch {
		case !isAnswer(rec):
			return nil
		case rec.Of == last.Seq:
			return r.end(ctx, last.Seq)
		}
	}
	return nil
}

// wait keeps a recorded pause, within limits.
func (r *replay) wait(ctx context.Context, d time.Duration) error {
	d = min(d, r.pace)
	if d <= 0 {
		return nil
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// answerOf finds the recorded answer of a request.
func (r *replay) answerOf(seq uint64) *dsec.Record {
	for i := int(seq); i < len(r.all); i++ {
		if r.all[i].Of == seq {
			return &r.all[i]
		}
	}
	return nil
}

// why says why an operation is not done again; "" if it is.
func (r *replay) why(rec dsec.Record, answer *dsec.Record) string {
	switch rec.Op {
	case dsec.RecordDial:
		return "what goes through ports is not recorded"
	}
	if answer == nil || answer.Error == nil {
		return ""
	}
	switch dsec.ParseErrorKind(answer.Error.Kind) {
	case dsec.Unavailable, dsec.Canceled, dsec.Timeout, dsec.Internal, dsec.Lost:
		return "it failed for a reason outside of the sandbox: " + answer.Error.Text
	}
	return ""
}

// begin begins an operation. It blocks no longer than it takes to begin it, so
// that others may overlap.
func (r *replay) begin(ctx context.Context, rec dsec.Record) error {
	switch rec.Op {
	case dsec.RecordCreate, dsec.RecordStop, dsec.RecordEnd, dsec.RecordExtend, dsec.RecordLabel, dsec.RecordCommit, dsec.RecordPause, dsec.RecordResume,
		dsec.RecordSave, dsec.RecordFork:
		return nil // they change nothing in it, or end it
	}
	p := &playing{request: rec, answer: r.answerOf(rec.Seq), done: make(chan struct{})}
	if why := r.why(rec, p.answer); why != "" {
		return r.skip(rec, why)
	}
	var err error
	ctx, p.cancel = context.WithCancel(ctx)
	if rec.Op == dsec.RecordCommand {
		err = r.beginCommand(ctx, p)
	} else {
		err = r.beginCall(ctx, p)
	}
	if err != nil {
		p.cancel()
		return fmt.Errorf("repeat record %d: %w", rec.Seq, err)
	}
	r.running[rec.Seq] = p
	return nil
}

func (r *replay) skip(rec dsec.Record, why string) error {
	words, err := operationLine(rec)
	r.skipped = append(r.skipped, skipped{rec.Seq, words, why})
	return err
}

// leave notes an operation whose recorded end says nothing.
func (r *replay) leave(p *playing, why string) error {
	words, err := operationLine(p.request)
	r.unended = append(r.unended, skipped{p.request.Seq, words, why})
	return err
}

// leaveRest notes what was begun and not ended.
func (r *replay) leaveRest() error {
	for _, seq := range slices.Sorted(maps.Keys(r.running)) {
		why := "its end comes later"
		if r.running[seq].answer == nil {
			why = "it never ended"
		}
		if err := r.leave(r.running[seq], why); err != nil {
			return err
		}
	}
	return nil
}

// refused reports whether err is an answer of the sandbox to what was asked,
// and not a fault on the way.
func refused(err error) bool {
	switch dsec.KindOf(err) {
	case dsec.Invalid, dsec.Denied, dsec.NotFound, dsec.Exists, dsec.Conflict, dsec.Exhausted, dsec.Unsupported:
		return true
	}
	return false
}

// settle notes how an operation went.
func (p *playing) settle(got facts, err error) {
	if err != nil && refused(err) {
		got, err = facts{{"error", dsec.KindOf(err).String(), nil}}, nil
	}
	p.got, p.err = got, err
	close(p.done)
}

// beginCommand starts a command; it is followed apart.
func (r *replay) beginCommand(ctx context.Context, p *playing) error {
	cmd, err := trajectory.CommandOf(p.request.Request)
	if err != nil {
		return err
	}
	var input io.ReadCloser
	if p.request.Body == dsec.BodyContent { // it was fed at once
		cmd.Stdin = dsec.StdinPipe
		if input, err = r.t.body(ctx, p.request); err != nil {
			return err
		}
	}
	st, err := r.s.Commands.Start(ctx, r.call, cmd)
	if err != nil {
		if input != nil {
			input.Close()
		}
		p.settle(nil, err)
		return nil
	}
	p.id = st.ID
	if p.answer != nil {
		if was, err := trajectory.StatusOf(p.request, *p.answer); err == nil && was.ID != "" {
			r.ids[was.ID] = p
		}
	}
	go func() {
		if input != nil {
			if err := r.feed(ctx, st.ID, input); err != nil {
				p.settle(nil, err)
				return
			}
		}
		got, err := r.commandFacts(ctx, st.ID)
		p.settle(got, err)
	}()
	return nil
}

// feed writes all of an input. A command that does not want it is no fault.
func (r *replay) feed(ctx context.Context, id dsec.CommandID, in io.ReadCloser) error {
	defer in.Close()
	buf := make([]byte, dsec.MaxChunk)
	for offset := int64(0); ; {
		n, err := io.ReadFull(in, buf)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return fmt.Errorf("read recorded input: %w", err)
		}
		next, err := r.s.Commands.Write(ctx, r.call, id, dsec.StdinWrite{Offset: offset, Data: buf[:n], Close: last})
		if err != nil && dsec.KindOf(err) == dsec.Conflict {
			return nil
		}
		if err != nil || last {
			return err
		}
		offset = next
	}
}

// commandFacts waits for the end of a command and gives what is compared.
func (r *replay) commandFacts(ctx context.Context, id dsec.CommandID) (facts, error) {
	st, err := r.s.Commands.Wait(ctx, r.call, id)
	if err != nil {
		return nil, err
	}
	return factsOfCommand(st, r.s.Commands.Attach(ctx, r.call, id, 0))
}

// command finds the command that stands for a recorded one.
func (r *replay) command(id dsec.CommandID) (dsec.CommandID, error) {
	if p := r.ids[id]; p != nil {
		return p.id, nil
	}
	// One that was interrupted has no ID in its record. It can only be the one
	// that runs.
	var found dsec.CommandID
	for _, p := range r.running {
		if p.request.Op == dsec.RecordCommand && p.id != "" && r.unnamed(p) {
			if found != "" {
				return "", fmt.Errorf("it is not known which command is %s", id)
			}
			found = p.id
		}
	}
	if found == "" {
		return id, nil // there was none either; the answer says so
	}
	return found, nil
}

func (r *replay) unnamed(p *playing) bool {
	for _, x := range r.ids {
		if x == p {
			return false
		}
	}
	return true
}

// beginCall carries out any other operation apart.
func (r *replay) beginCall(ctx context.Context, p *playing) error {
	x, err := parse[params](p.request, p.request.Request)
	if err != nil {
		return err
	}
	id := x.Command
	if id != "" {
		if id, err = r.command(id); err != nil {
			return err
		}
	}
	op := dsec.FileOp{Path: string(x.Path), User: string(x.User)}
	f, c := r.s.Files, r.s.Commands
	var do func() (facts, error)
	only := func(call func() error) func() (facts, error) { return func() (facts, error) { return nil, call() } }
	switch p.request.Op {
	case dsec.RecordStdin:
		before, after := r.fed[id], make(chan struct{})
		r.fed[id] = after
		do = func() (facts, error) {
			defer close(after)
			if before != nil {
				select { // one piece after the other
				case <-before:
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}
			return r.writeStdin(ctx, p.request, id, x)
		}
	case dsec.RecordResize:
		do = only(func() error { return c.Resize(ctx, r.call, id, x.Size) })
	case dsec.RecordSignal:
		do = only(func() error { return c.Signal(ctx, r.call, id, x.Signal) })
	case dsec.RecordMkdir:
		do = only(func() error { return f.Mkdir(ctx, r.call, op, x.Mode) })
	case dsec.RecordMove:
		do = only(func() error { return f.Move(ctx, r.call, op, string(x.To)) })
	case dsec.RecordRemove:
		do = only(func() error { return f.Remove(ctx, r.call, op) })
	case dsec.RecordChmod:
		do = only(func() error { return f.Chmod(ctx, r.call, op, x.Mode) })
	case dsec.RecordChown:
		do = only(func() error { return f.Chown(ctx, r.call, op, string(x.Owner)) })
	case dsec.RecordSymlink:
		do = only(func() error { return f.Symlink(ctx, r.call, op, string(x.Link)) })
	case dsec.RecordWrite, dsec.RecordUnpack:
		do = func() (facts, error) { return r.writeContent(ctx, p, op, x) }
	default:
		return dsec.Errorf(dsec.Unsupported, "operation %q is not known here", string(p.request.Op))
	}
	go func() { p.settle(do()) }()
	return nil
}

func (r *replay) writeStdin(ctx context.Context, rec dsec.Record, id dsec.CommandID, x params) (facts, error) {
	in, err := r.t.body(ctx, rec)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	data, err := io.ReadAll(in)
	if err != nil {
		return nil, err
	}
	at, err := r.s.Commands.Write(ctx, r.call, id, dsec.StdinWrite{Offset: x.Offset, Data: data, Close: x.Close})
	if err != nil {
		return nil, err
	}
	return facts{{"offset", fmt.Sprint(at), nil}}, nil
}

// writeContent stores a file or unpacks an archive as it was sent, which is in
// the record of the answer. Of one that failed there is none.
func (r *replay) writeContent(ctx context.Context, p *playing, op dsec.FileOp, x params) (facts, error) {
	var in io.ReadCloser = io.NopCloser(eof{})
	if p.answer != nil && p.answer.Error == nil {
		a, err := parse[answers](*p.answer, p.answer.Answer)
		if err != nil {
			return nil, err
		}
		if a.Size > 0 && p.answer.Body == "" {
			return facts{{"content", "not kept, as it is " + size(a.Size), nil}}, nil
		}
		if in, err = r.t.body(ctx, *p.answer); err != nil {
			return nil, err
		}
	}
	defer in.Close()
	if p.request.Op == dsec.RecordUnpack {
		return nil, r.s.Files.Unpack(ctx, r.call, op, in)
	}
	info, err := r.s.Files.Write(ctx, r.call, op, dsec.WriteOptions{Mode: x.Mode, Parents: x.Parents, At: x.At, Append: x.Append}, in)
	if err != nil {
		return nil, err
	}
	return factsOfFile(info), nil
}

type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// How long a command may take beyond what it took: replays share their host.
const (
	slower   = 10
	patience = time.Minute
)

// end waits for an operation and compares it with its record.
func (r *replay) end(ctx context.Context, request uint64) error {
	p := r.running[request]
	if p == nil {
		return nil // skipped, or begun before
	}
	delete(r.running, request)
	defer p.cancel()
	want, err := r.recorded(ctx, p)
	if err != nil {
		return fmt.Errorf("read record %d: %w", p.answer.Seq, err)
	}
	if want == nil {
		return r.leave(p, "the end of the sandbox broke it off")
	}
	limit := patience + slower*(p.answer.Mono-p.request.Mono)
	select {
	case <-p.done:
	case <-time.After(limit):
		p.cancel()
		<-p.done
		if p.id != "" {
			if err := r.s.Commands.Signal(ctx, r.call, p.id, "KILL"); err != nil && dsec.KindOf(err) != dsec.Conflict {
				return err
			}
		}
		p.got, p.err = facts{{"outcome", "not ended after " + limit.Round(time.Second).String(), nil}}, nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if p.err != nil {
		return fmt.Errorf("repeat record %d: %w", request, p.err)
	}
	return r.compare(p, want)
}

// recorded gives the facts of an operation as they were; nil if there are none
// because the end of the sandbox broke it off.
func (r *replay) recorded(ctx context.Context, p *playing) (facts, error) {
	a := *p.answer
	if a.Error != nil {
		return facts{{"error", a.Error.Kind, nil}}, nil
	}
	switch a.Op {
	case dsec.RecordCommand:
		st, err := trajectory.StatusOf(p.request, a)
		if err != nil || st.Outcome == dsec.Interrupted {
			return nil, err
		}
		return factsOfCommand(st, r.t.output(ctx, a))
	case dsec.RecordStdin:
		at, err := parse[int64](a, a.Answer)
		return facts{{"offset", fmt.Sprint(at), nil}}, err
	case dsec.RecordWrite:
		x, err := parse[answers](a, a.Answer)
		if err != nil || x.Info == nil {
			return facts{}, err
		}
		if x.Size > 0 && a.Body == "" {
			return facts{{"content", x.Content, nil}}, nil
		}
		return factsOfFile(*x.Info), nil
	case dsec.RecordUnpack:
		x, err := parse[answers](a, a.Answer)
		if err == nil && x.Size > 0 && a.Body == "" {
			return facts{{"content", x.Content, nil}}, nil
		}
		return facts{}, err
	}
	return facts{}, nil
}

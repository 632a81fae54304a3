package client

import (
	"context"
	"errors"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type commands struct {
	*core
	rpc dsecv1.CommandsClient
}

func (s *commands) Start(ctx context.Context, c dsec.Call, cmd dsec.Command) (dsec.CommandStatus, error) {
	return status(unary(ctx, s.core, on("client.Start", c), s.rpc.Start, &dsecv1.CommandsStartRequest{Command: rpc.CommandToWire(cmd)}))
}

func (s *commands) Run(ctx context.Context, c dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	if len(stdin) > rpc.MaxStdin {
		return s.runLong(ctx, c, cmd, stdin)
	}
	a, err := unary(ctx, s.core, on("client.Run", c), s.rpc.Run, &dsecv1.CommandsRunRequest{Command: rpc.CommandToWire(cmd), Stdin: stdin})
	if err != nil {
		return dsec.Result{}, err
	}
	st, err := status(a.GetStatus(), nil)
	return dsec.Result{CommandStatus: st, Out: a.GetStdout(), Err: a.GetStderr()}, err
}

// runLong is Run with an input that does not fit one message. A command that
// ends without reading all of it is no error, as with a pipe.
func (s *commands) runLong(ctx context.Context, c dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	cmd.Stdin = dsec.StdinPipe
	st, err := s.Start(ctx, c, cmd)
	if err != nil {
		return dsec.Result{}, err
	}
	piece := c
	piece.Step = dsec.Step{} // the name of the command; a piece repeats itself by its offset
	for off := int64(0); off < int64(len(stdin)); {
		rest := stdin[off:]
		n := min(len(rest), dsec.MaxChunk)
		next, err := s.Write(ctx, piece, st.ID, dsec.StdinWrite{Offset: off, Data: rest[:n], Close: n == len(rest)})
		if dsec.KindOf(err) == dsec.Conflict && err != nil {
			break
		}
		if err != nil {
			return dsec.Result{}, err
		}
		off = next
	}
	st, err = s.Wait(ctx, c, st.ID)
	if err != nil {
		return dsec.Result{}, err
	}
	r := dsec.Result{CommandStatus: st}
	if r.Out, err = s.readAll(ctx, c, st.ID, dsec.Stdout, st.Stdout); err == nil {
		r.Err, err = s.readAll(ctx, c, st.ID, dsec.Stderr, st.Stderr)
	}
	return r, err
}

func (s *commands) readAll(ctx context.Context, c dsec.Call, id dsec.CommandID, stream dsec.Stream, stat dsec.StreamStat) ([]byte, error) {
	want := int(min(stat.Kept, dsec.MaxRunOutput))
	var out []byte
	for len(out) < want {
		b, err := s.Read(ctx, c, id, stream, int64(len(out)), want-len(out))
		if err != nil || len(b) == 0 {
			return out, err
		}
		out = append(out, b...)
	}
	return out, nil
}

// Attach keeps the offset of the next byte, so that a dropped connection is
// taken up again where it broke.
func (s *commands) Attach(ctx context.Context, c dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		t := on("client.Attach", c).repeatable()
		if err := t.check(); err != nil {
			yield(dsec.Output{}, err)
			return
		}
		p := s.patience(t)
		for {
			done, err := s.attach(ctx, t, id, &offset, p, yield)
			if done {
				return
			}
			p.broken(s.core, err)
			if !p.again(ctx, err) {
				yield(dsec.Output{}, err)
				return
			}
		}
	}
}

// attach is one connection of an Attach. It reports whether the caller has all
// it wants; if not, why the connection ended.
func (s *commands) attach(ctx context.Context, t to, id dsec.CommandID, offset *int64, p *patience, yield func(dsec.Output, error) bool) (bool, error) {
	ctx2, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.rpc.Attach(s.headers(ctx2, t), &dsecv1.CommandsAttachRequest{Id: string(id), Offset: *offset})
	if err != nil {
		return false, rpc.CallError(ctx, t.op, t.sandbox, err)
	}
	defer stream.Close()
	for {
		w, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			err = errEarly()
		}
		if err != nil {
			return false, rpc.CallError(ctx, t.op, t.sandbox, err)
		}
		o, err := rpc.OutputFromWire(w)
		if err != nil {
			return false, dsec.WithOp(t.op, t.sandbox, err)
		}
		p.answered(s.core)
		if o.Gap > 0 || len(o.Data) > 0 {
			*offset = o.Offset + int64(len(o.Data))
		}
		if !yield(o, nil) || o.Status != nil {
			return true, nil
		}
	}
}

// errEarly is what a stream that ends without its last message gives.
func errEarly() error {
	return dsec.Errorf(dsec.Unavailable, "the stream ended before its last message")
}

func (s *commands) Read(ctx context.Context, c dsec.Call, id dsec.CommandID, stream dsec.Stream, offset int64, max int) ([]byte, error) {
	a, err := unary(ctx, s.core, on("client.Read", c).repeatable(), s.rpc.Read, rpc.ReadToWire(id, stream, offset, max))
	return a.GetData(), err
}

// Write repeats what it may: a repeated piece is skipped by its offset, but one
// that closes would find its own close a Conflict.
func (s *commands) Write(ctx context.Context, c dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	t := on("client.Write", c)
	t.again = !in.Close
	a, err := unary(ctx, s.core, t, s.rpc.Write, &dsecv1.CommandsWriteRequest{Id: string(id), Offset: in.Offset, Data: in.Data, Close: in.Close})
	return a.GetOffset(), err
}

func (s *commands) Resize(ctx context.Context, c dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	_, err := unary(ctx, s.core, on("client.Resize", c).repeatable(), s.rpc.Resize, rpc.ResizeToWire(id, size))
	return err
}

func (s *commands) Signal(ctx context.Context, c dsec.Call, id dsec.CommandID, sig string) error {
	_, err := unary(ctx, s.core, on("client.Signal", c), s.rpc.Signal, &dsecv1.CommandsSignalRequest{Id: string(id), Signal: sig})
	return err
}

func (s *commands) Wait(ctx context.Context, c dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	t := on("client.Wait", c).repeatable()
	if err := t.check(); err != nil {
		return dsec.CommandStatus{}, err
	}
	p := s.patience(t)
	for {
		a, err := s.rpc.Wait(s.headers(ctx, t), &dsecv1.CommandsWaitRequest{Id: string(id)})
		if err != nil {
			err = rpc.CallError(ctx, t.op, t.sandbox, err)
			p.broken(s.core, err)
			if !p.again(ctx, err) {
				return dsec.CommandStatus{}, err
			}
			continue
		}
		p.answered(s.core)
		if st, err := status(a, nil); err != nil || st.Outcome != dsec.StillRunning {
			return st, err
		}
	}
}

func (s *commands) List(ctx context.Context, c dsec.Call) ([]dsec.CommandStatus, error) {
	a, err := unary(ctx, s.core, on("client.List", c).repeatable(), s.rpc.List, &dsecv1.CommandsListRequest{})
	if err != nil {
		return nil, err
	}
	var out []dsec.CommandStatus
	for _, w := range a.GetCommands() {
		st, err := status(w, nil)
		if err != nil {
			return nil, err
		}
		out = append(out, st)
	}
	return out, nil
}

func status(w *dsecv1.CommandStatus, err error) (dsec.CommandStatus, error) {
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	return rpc.StatusFromWire(w)
}

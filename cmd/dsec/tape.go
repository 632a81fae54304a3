package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// tape is one trajectory to be read: of a server, or of files that log --raw
// wrote.
type tape struct {
	id   dsec.SandboxID
	from dsec.Trajectories
}

// tape finds a trajectory. dir is the folder of exported records, if any.
func (a *app) tape(id, dir string) (tape, error) {
	if dir != "" {
		e, err := openExport(a.local(dir))
		if err == nil && id != "" && id != string(e.head.Sandbox) {
			err = dsec.Errorf(dsec.Invalid, "the records in %s are of sandbox %s", dir, e.head.Sandbox)
		}
		return tape{e.head.Sandbox, e}, err
	}
	if id == "" {
		return tape{}, dsec.Errorf(dsec.Invalid, "no sandbox is named")
	}
	s, err := a.services()
	if err != nil {
		return tape{}, err
	}
	if s.Trajectories == nil {
		return tape{}, lacking("trajectories")
	}
	return tape{dsec.SandboxID(id), s.Trajectories}, nil
}

// records yields what is recorded after a number. What a record says is read
// from its stored bytes, which are what the chain vouches for.
func (t tape) records(ctx context.Context, after uint64) iter.Seq2[dsec.Record, error] {
	return func(yield func(dsec.Record, error) bool) {
		for r, err := range t.from.Records(ctx, t.id, after) {
			if err == nil {
				_, r, err = trajectory.Decode(r.Raw)
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

// body opens the body of a record, if it has one.
func (t tape) body(ctx context.Context, r dsec.Record) (io.ReadCloser, error) {
	if b, ok := trajectory.InlineBody(r); ok {
		return io.NopCloser(bytes.NewReader(b)), nil
	}
	if r.Body == "" {
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	return t.from.Body(ctx, t.id, r.Seq)
}

// output yields what a command printed, as its answer has it.
func (t tape) output(ctx context.Context, answer dsec.Record) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		if answer.Body != dsec.BodyOutput {
			return
		}
		b, err := t.body(ctx, answer)
		if err != nil {
			yield(dsec.Output{}, err)
			return
		}
		defer b.Close()
		for o, err := range dsec.ReadOutput(b) {
			if !yield(o, err) || err != nil {
				return
			}
		}
	}
}

// whole reads a trajectory to its present end and checks its chain.
func (t tape) whole(ctx context.Context) ([]dsec.Record, error) {
	v := trajectory.NewVerifier(t.id)
	var all []dsec.Record
	for r, err := range t.records(ctx, 0) {
		if err != nil {
			return nil, err
		}
		if err := v.Add(r.Raw); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	if len(all) == 0 || all[0].Op != dsec.RecordCreate {
		return nil, errors.New("the trajectory does not begin with the sandbox's creation")
	}
	return all, nil
}

// params are the parameters of all requests but those of commands, see
// docs/formats/trajectory.md.
type params struct {
	Path    trajectory.Text
	User    trajectory.Text
	Mode    uint32
	To      trajectory.Text
	Owner   trajectory.Text
	Link    trajectory.Text
	Parents bool
	At      *int64
	Append  bool

	Command dsec.CommandID
	Offset  int64
	Content string // digest
	Close   bool
	Size    dsec.WinSize
	Signal  string

	Port   int
	TTL    int64 // nanoseconds
	Labels map[string]string
	Name   string
	Detail string
	State  dsec.State
	Cause  dsec.Cause
	Count  int
	Events []dsec.InputEvent
}

// creation is the request of a sandbox's first record.
type creation struct {
	Spec   dsec.Spec
	Layers []string
	Node   string
	Origin *struct {
		Sandbox  dsec.SandboxID
		Sequence uint64
	}
	Key string
}

// answers are what calls other than commands return.
type answers struct {
	Info           *dsec.FileInfo // of a write
	Content        string         // digest of what was sent
	Size           int64
	Sent, Received int64 // of a dial
	Lasted         int64 // nanoseconds
	Digest         string
}

// parse reads the JSON of a record. What is missing stays zero.
func parse[T any](r dsec.Record, text json.RawMessage) (v T, err error) {
	if len(text) == 0 {
		return v, nil
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return v, fmt.Errorf("read record %d: %w", r.Seq, err)
	}
	return v, nil
}

// isAnswer reports whether r answers another record.
func isAnswer(r dsec.Record) bool { return r.Of != 0 }

// alone reports whether r is request and answer in one.
func alone(r dsec.Record) bool { return r.Alone }

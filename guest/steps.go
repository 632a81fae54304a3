package guest

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"sync"

	"github.com/dsec-go/dsec"
)

// Limits of the index of steps.
const (
	maxSteps    = 100_000
	maxSessions = 1024
)

// steps remembers what was done under which step.
type steps struct {
	seed maphash.Seed

	mu       sync.Mutex
	sessions map[string]*session
	n        int // steps in all sessions
}

type session struct {
	ops map[uint64]*stepOp
}

// stepOp is one operation that was begun under a step. Its fields are fixed
// once done is closed.
type stepOp struct {
	op      string
	fields  []field
	done    chan struct{}
	failed  bool // nothing happened; whoever waited tries for himself
	content uint64
	result  any
}

// field is the digest of one part of a request, so that a repeated step can be
// told from a different one and the difference named.
type field struct {
	name string
	sum  uint64
}

func (s *steps) init() {
	s.seed = maphash.MakeSeed()
	s.sessions = make(map[string]*session)
}

func (s *steps) text(name, v string) field { return field{name, maphash.String(s.seed, v)} }

func (s *steps) number(name string, v int64) field {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(v))
	return field{name, maphash.Bytes(s.seed, b[:])}
}

// begin claims a step for an operation. first means that the caller is to do
// it and then call end; otherwise it has been done, and the operation holds the
// result. It waits for one under way.
func (s *steps) begin(ctx context.Context, step dsec.Step, op string, fields []field) (o *stepOp, first bool, err error) {
	for {
		s.mu.Lock()
		ses := s.sessions[step.Session]
		if ses == nil {
			if len(s.sessions) >= maxSessions {
				s.mu.Unlock()
				return nil, false, dsec.Errorf(dsec.Exhausted, "steps of %d sessions are remembered", maxSessions)
			}
			ses = &session{ops: make(map[uint64]*stepOp)}
			s.sessions[step.Session] = ses
		}
		o = ses.ops[step.Number]
		if o == nil {
			err = nil
			switch {
			case s.n >= maxSteps:
				err = dsec.Errorf(dsec.Exhausted, "%d steps wait until their answers are safe", maxSteps)
			default:
				o = &stepOp{op: op, fields: fields, done: make(chan struct{})}
				ses.ops[step.Number] = o
				s.n++
			}
			s.mu.Unlock()
			return o, err == nil, err
		}
		s.mu.Unlock()
		if err := o.compare(step, op, fields); err != nil {
			return nil, false, err
		}
		select {
		case <-o.done:
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		}
		if !o.failed {
			return o, false, nil
		}
	}
}

func (o *stepOp) compare(step dsec.Step, op string, fields []field) error {
	if o.op != op {
		return diverged(step, "operation ("+o.op+" then, "+op+" now)")
	}
	for i, f := range fields {
		if i >= len(o.fields) || o.fields[i] != f {
			return diverged(step, f.name)
		}
	}
	return nil
}

func diverged(step dsec.Step, what string) error {
	return dsec.Errorf(dsec.Diverged, "step %d of session %q differs from its record in the %s",
		step.Number, clip(step.Session), what)
}

// end says how the operation of a step went. A failed one is forgotten.
func (s *steps) end(step dsec.Step, o *stepOp, result any, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o.result, o.failed = result, err != nil
	if ses := s.sessions[step.Session]; err != nil && ses != nil && ses.ops[step.Number] == o {
		s.drop(step, ses)
	}
	close(o.done)
}

// forget drops finished steps and gives the commands among them. One under way
// stays: the host cannot have its answer.
func (s *steps) forget(steps []dsec.Step) []*command {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*command
	for _, step := range steps {
		ses := s.sessions[step.Session]
		if ses == nil {
			continue
		}
		o := ses.ops[step.Number]
		if o == nil {
			continue
		}
		select {
		case <-o.done:
		default:
			continue
		}
		if c, ok := o.result.(*command); ok {
			out = append(out, c)
		}
		s.drop(step, ses)
	}
	return out
}

// drop takes a step out of its session. Requires: s.mu held.
func (s *steps) drop(step dsec.Step, ses *session) {
	delete(ses.ops, step.Number)
	s.n--
	if len(ses.ops) == 0 {
		delete(s.sessions, step.Session)
	}
}

// once carries out do under a step, or gives the result it had before.
func (a *Agent) once(ctx context.Context, step dsec.Step, op string, fields []field, do func() (any, error)) (any, error) {
	if step.IsZero() {
		return do()
	}
	o, first, err := a.steps.begin(ctx, step, op, fields)
	if err != nil {
		return nil, err
	}
	if !first {
		return o.result, nil
	}
	r, err := do()
	a.steps.end(step, o, r, err)
	return r, err
}

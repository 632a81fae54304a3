package rpctest

import (
	"bytes"
	"context"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
)

// Trajectory is what the fake has recorded of a sandbox: what a test says.
type Trajectory struct {
	Records []dsec.Record
	Bodies  map[uint64][]byte // by number of the record
	Over    bool
}

// SetTrajectory sets what is recorded of a sandbox, which need not exist.
func (f *Fake) SetTrajectory(id dsec.SandboxID, t Trajectory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.trajectories == nil {
		f.trajectories = map[dsec.SandboxID]Trajectory{}
	}
	f.trajectories[id] = t
}

type trajectories struct{ f *Fake }

func (s trajectories) get(ctx context.Context, op string, id dsec.SandboxID) (Trajectory, error) {
	if err := s.f.enter(ctx, op); err != nil {
		return Trajectory{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	t, ok := s.f.trajectories[id]
	if !ok {
		return t, dsec.Errorf(dsec.NotFound, "sandbox %s has no trajectory here", id)
	}
	return t, nil
}

func (s trajectories) Head(ctx context.Context, id dsec.SandboxID) (dsec.Head, error) {
	t, err := s.get(ctx, "Trajectories.Head", id)
	if err != nil {
		return dsec.Head{}, err
	}
	last := t.Records[len(t.Records)-1]
	return dsec.Head{Seq: last.Seq, Hash: last.Hash, Over: t.Over}, nil
}

func (s trajectories) Records(ctx context.Context, id dsec.SandboxID, after uint64) iter.Seq2[dsec.Record, error] {
	return func(yield func(dsec.Record, error) bool) {
		t, err := s.get(ctx, "Trajectories.Records", id)
		if err != nil {
			yield(dsec.Record{}, err)
			return
		}
		for _, r := range t.Records {
			if r.Seq <= after {
				continue
			}
			if err := s.f.enter(ctx, "Trajectories.Records.next"); err != nil {
				yield(dsec.Record{}, err)
				return
			}
			if !yield(r, nil) {
				return
			}
		}
	}
}

func (s trajectories) Body(ctx context.Context, id dsec.SandboxID, seq uint64) (io.ReadCloser, error) {
	t, err := s.get(ctx, "Trajectories.Body", id)
	if err != nil {
		return nil, err
	}
	b, ok := t.Bodies[seq]
	if !ok {
		return nil, dsec.Errorf(dsec.NotFound, "record %d has no body", seq)
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

package client

import (
	"context"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type trajectories struct {
	*core
	rpc dsecv1.TrajectoriesClient
}

func (s *trajectories) Head(ctx context.Context, id dsec.SandboxID) (dsec.Head, error) {
	t, err := of("client.Head", id)
	if err != nil {
		return dsec.Head{}, err
	}
	a, err := unary(ctx, s.core, t.repeatable(), s.rpc.Head, &dsecv1.TrajectoriesHeadRequest{})
	if err != nil {
		return dsec.Head{}, err
	}
	return rpc.HeadFromWire(a), nil
}

// Records goes on behind the last record that came when a connection drops.
func (s *trajectories) Records(ctx context.Context, id dsec.SandboxID, after uint64) iter.Seq2[dsec.Record, error] {
	return func(yield func(dsec.Record, error) bool) {
		t, err := of("client.Records", id)
		if err != nil {
			yield(dsec.Record{}, err)
			return
		}
		t = t.repeatable()
		p := s.patience(t)
		for {
			var failure error
			for m, err := range messages[dsecv1.TrajectoriesRecordsResponse](ctx, s.core, t, func(ctx context.Context) (receiver[dsecv1.TrajectoriesRecordsResponse], error) {
				return s.rpc.Records(ctx, &dsecv1.TrajectoriesRecordsRequest{After: after})
			}) {
				if err != nil {
					failure = err
					break
				}
				p.answered(s.core)
				for _, w := range m.GetRecords() {
					after = w.GetSeq()
					if !yield(rpc.RecordFromWire(w), nil) {
						return
					}
				}
			}
			if failure == nil {
				return
			}
			if !p.again(ctx, failure) {
				yield(dsec.Record{}, failure)
				return
			}
		}
	}
}

func (s *trajectories) Body(ctx context.Context, id dsec.SandboxID, seq uint64) (io.ReadCloser, error) {
	t, err := of("client.Body", id)
	if err != nil {
		return nil, err
	}
	q := &dsecv1.TrajectoriesBodyRequest{Seq: seq}
	return download(ctx, s.core, t.repeatable(), func(ctx context.Context) (receiver[dsecv1.TrajectoriesBodyResponse], error) {
		return s.rpc.Body(ctx, q)
	}, (*dsecv1.TrajectoriesBodyResponse).GetData)
}

package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// trajectories serves dsec.Trajectories.
type trajectories struct{ *handler }

// recordBatch is how many bytes of records share one message, about.
const recordBatch = 256 << 10

// of gives the sandbox whose trajectory is asked for, once the caller may read
// it. The sandbox may be forgotten: that it was of the caller's project is what
// its first record says, and that never changes.
func (s trajectories) of(ctx context.Context) (dsec.SandboxID, error) {
	id, err := named(ctx)
	if err != nil {
		return "", err
	}
	return id, s.owners.checkBy(ctx, id, func() (dsec.ProjectID, error) {
		for r, err := range s.services.Trajectories.Records(ctx, id, 0) {
			if dsec.KindOf(err) == dsec.NotFound && err != nil {
				err = noSandbox(id) // the same words as for another project's
			}
			return r.Who.Project, err
		}
		return "", noSandbox(id)
	})
}

func (s trajectories) Head(ctx context.Context, _ *dsecv1.TrajectoriesHeadRequest) (*dsecv1.TrajectoriesHeadResponse, error) {
	id, err := s.of(ctx)
	if err != nil {
		return nil, err
	}
	return wire(HeadToWire)(s.services.Trajectories.Head(ctx, id))
}

func (s trajectories) Records(ctx context.Context, req *dsecv1.TrajectoriesRecordsRequest, stream dsecv1.TrajectoriesRecordsServerStream) error {
	id, err := s.of(ctx)
	if err != nil {
		return err
	}
	var batch []*dsecv1.Record
	size := 0
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := stream.Send(&dsecv1.TrajectoriesRecordsResponse{Records: batch})
		batch, size = batch[:0], 0
		return err
	}
	for r, err := range s.services.Trajectories.Records(ctx, id, req.GetAfter()) {
		if err != nil {
			if cut := flush(); cut != nil {
				return cut
			}
			return err
		}
		batch = append(batch, RecordToWire(r))
		if size += 2 * len(r.Raw); size >= recordBatch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	return ctx.Err()
}

func (s trajectories) Body(ctx context.Context, req *dsecv1.TrajectoriesBodyRequest, stream dsecv1.TrajectoriesBodyServerStream) error {
	id, err := s.of(ctx)
	if err != nil {
		return err
	}
	r, err := s.services.Trajectories.Body(ctx, id, req.GetSeq())
	if err != nil {
		return err
	}
	var msg dsecv1.TrajectoriesBodyResponse
	return send(ctx, r, &msg.Data, func() error { return stream.Send(&msg) })
}

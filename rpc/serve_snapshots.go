package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// snapshots serves dsec.Snapshots. Whose a snapshot is, the service itself looks
// at; whose a sandbox, this.
type snapshots struct{ *handler }

// keyOf reads the key of a call.
func keyOf(ctx context.Context) (string, error) {
	return ParseKey(ctx.Value(callKey{}).(*call).header.Get(HeaderKey))
}

func (s snapshots) Take(ctx context.Context, _ *dsecv1.SnapshotsTakeRequest) (*dsecv1.Snapshot, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	key, err := keyOf(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SnapshotToWire)(s.services.Snapshots.Take(ctx, id, dsec.SnapshotOptions{Key: key}))
}

func (s snapshots) Fork(ctx context.Context, req *dsecv1.SnapshotsForkRequest) (*dsecv1.SnapshotsForkResponse, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	key, err := keyOf(ctx)
	if err != nil {
		return nil, err
	}
	n := int(req.GetCount())
	if n == 0 {
		n = 1
	}
	all, err := s.services.Snapshots.Fork(ctx, id, n, dsec.ForkOptions{Key: key, TTL: unspan(req.GetTtl()), Labels: req.GetLabels()})
	if err != nil {
		return nil, err
	}
	return &dsecv1.SnapshotsForkResponse{Sandboxes: each(all, SandboxToWire)}, nil
}

func (s snapshots) List(ctx context.Context, _ *dsecv1.SnapshotsListRequest) (*dsecv1.SnapshotsListResponse, error) {
	all, err := s.services.Snapshots.List(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.SnapshotsListResponse{Snapshots: each(all, SnapshotToWire)}, nil
}

func (s snapshots) Get(ctx context.Context, req *dsecv1.SnapshotsGetRequest) (*dsecv1.Snapshot, error) {
	return wire(SnapshotToWire)(s.services.Snapshots.Get(ctx, dsec.SnapshotID(req.GetId())))
}

func (s snapshots) Remove(ctx context.Context, req *dsecv1.SnapshotsRemoveRequest) (*dsecv1.SnapshotsRemoveResponse, error) {
	return &dsecv1.SnapshotsRemoveResponse{}, s.services.Snapshots.Remove(ctx, dsec.SnapshotID(req.GetId()))
}

// screens serves dsec.Screens.
type screens struct{ *handler }

func (s screens) Screenshot(ctx context.Context, _ *dsecv1.ScreensScreenshotRequest) (*dsecv1.ScreensScreenshotResponse, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	png, err := s.services.Screens.Screenshot(ctx, id)
	return &dsecv1.ScreensScreenshotResponse{Png: png}, err
}

func (s screens) Input(ctx context.Context, req *dsecv1.ScreensInputRequest) (*dsecv1.ScreensInputResponse, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.ScreensInputResponse{}, s.services.Screens.Input(ctx, id, InputFromWire(req.GetEvents()))
}

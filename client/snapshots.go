package client

import (
	"context"
	"crypto/rand"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type snapshots struct {
	*core
	rpc dsecv1.SnapshotsClient
}

// keyed names a call for a sandbox that its key makes repeatable; it always has
// one.
func keyed(op string, id dsec.SandboxID, key string) (to, error) {
	t, err := of(op, id)
	if t.key = key; key == "" {
		t.key = rand.Text()
	}
	return t, err
}

func (s *snapshots) Take(ctx context.Context, id dsec.SandboxID, opt dsec.SnapshotOptions) (dsec.Snapshot, error) {
	t, err := keyed("client.Take", id, opt.Key)
	if err != nil {
		return dsec.Snapshot{}, err
	}
	return taken(unary(ctx, s.core, t, s.rpc.Take, &dsecv1.SnapshotsTakeRequest{}))
}

func (s *snapshots) Fork(ctx context.Context, id dsec.SandboxID, n int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	t, err := keyed("client.Fork", id, opt.Key)
	if err != nil {
		return nil, err
	}
	if n < 1 || n > dsec.MaxForks {
		return nil, dsec.WithOp(t.op, id, dsec.Errorf(dsec.Invalid, "%d children are not between 1 and %d", n, dsec.MaxForks))
	}
	req := &dsecv1.SnapshotsForkRequest{Count: int32(n), Labels: opt.Labels}
	if opt.TTL != 0 {
		req.Ttl = durationpb.New(opt.TTL)
	}
	a, err := unary(ctx, s.core, t, s.rpc.Fork, req)
	return each(a.GetSandboxes(), rpc.SandboxFromWire), err
}

func (s *snapshots) List(ctx context.Context) ([]dsec.Snapshot, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, &dsecv1.SnapshotsListRequest{})
	return each(a.GetSnapshots(), rpc.SnapshotFromWire), err
}

func (s *snapshots) Get(ctx context.Context, id dsec.SnapshotID) (dsec.Snapshot, error) {
	return taken(unary(ctx, s.core, to{op: "client.Get", again: true}, s.rpc.Get, &dsecv1.SnapshotsGetRequest{Id: string(id)}))
}

func (s *snapshots) Remove(ctx context.Context, id dsec.SnapshotID) error {
	_, err := unary(ctx, s.core, to{op: "client.Remove"}, s.rpc.Remove, &dsecv1.SnapshotsRemoveRequest{Id: string(id)})
	return err
}

func taken(w *dsecv1.Snapshot, err error) (dsec.Snapshot, error) {
	if err != nil {
		return dsec.Snapshot{}, err
	}
	return rpc.SnapshotFromWire(w), nil
}

type screens struct {
	*core
	rpc dsecv1.ScreensClient
}

func (s *screens) Screenshot(ctx context.Context, id dsec.SandboxID) ([]byte, error) {
	t, err := of("client.Screenshot", id)
	if err != nil {
		return nil, err
	}
	a, err := unary(ctx, s.core, t.repeatable(), s.rpc.Screenshot, &dsecv1.ScreensScreenshotRequest{})
	return a.GetPng(), err
}

func (s *screens) Input(ctx context.Context, id dsec.SandboxID, events []dsec.InputEvent) error {
	t, err := of("client.Input", id)
	if err != nil {
		return err
	}
	if err := dsec.CheckInput(events); err != nil {
		return dsec.WithOp(t.op, id, err)
	}
	_, err = unary(ctx, s.core, t, s.rpc.Input, &dsecv1.ScreensInputRequest{Events: rpc.InputToWire(events)})
	return err
}

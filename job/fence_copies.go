package job

import (
	"context"

	"github.com/dsec-go/dsec"
)

type fencedSnapshots struct {
	dsec.Snapshots
	jobs *Jobs
}

func (f fencedSnapshots) Take(ctx context.Context, id dsec.SandboxID, opt dsec.SnapshotOptions) (dsec.Snapshot, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Snapshot{}, err
	}
	return f.Snapshots.Take(ctx, id, opt)
}

// Fork makes children in the job of the parent, and ends with its owner's lease.
func (f fencedSnapshots) Fork(ctx context.Context, id dsec.SandboxID, n int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return nil, err
	}
	f.jobs.mu.Lock()
	s := f.jobs.sandboxes
	f.jobs.mu.Unlock()
	if s == nil {
		return nil, dsec.WithOp("job.Fork", id, dsec.Errorf(dsec.Unavailable, "the node is starting"))
	}
	parent, err := s.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	if parent.Spec.Job == "" {
		return f.Snapshots.Fork(ctx, id, n, opt)
	}
	t, err := f.jobs.admit(ctx, parent.Spec)
	if err != nil {
		return nil, dsec.WithOp("job.Fork", id, err)
	}
	defer t.work.Done()
	ctx, done := bound(ctx, t.ctx)
	defer done()
	return f.Snapshots.Fork(ctx, id, n, opt)
}

type fencedScreens struct {
	dsec.Screens
	jobs *Jobs
}

func (f fencedScreens) Screenshot(ctx context.Context, id dsec.SandboxID) ([]byte, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return nil, err
	}
	return f.Screens.Screenshot(ctx, id)
}

func (f fencedScreens) Input(ctx context.Context, id dsec.SandboxID, events []dsec.InputEvent) error {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return err
	}
	return f.Screens.Input(ctx, id, events)
}

package job

import (
	"cmp"
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// Fence gives the services of a node as callers are to have them: with Jobs, and
// refusing what an owner asks that was followed by another. A call that was let
// in before the job was opened anew is carried out, and one that waits or reads
// goes on. Calls that carry no epoch are an operator's and pass.
//
// A sandbox that is created in a job which nobody made brings the job into being.
func (j *Jobs) Fence(s dsec.Services) dsec.Services {
	if s.Sandboxes != nil {
		s.Sandboxes = fencedSandboxes{s.Sandboxes, j}
	}
	if s.Commands != nil {
		s.Commands = fencedCommands{s.Commands, j}
	}
	if s.Files != nil {
		s.Files = fencedFiles{s.Files, j}
	}
	if s.Ports != nil {
		s.Ports = fencedPorts{s.Ports, j}
	}
	if s.Snapshots != nil {
		s.Snapshots = fencedSnapshots{s.Snapshots, j}
	}
	if s.Screens != nil {
		s.Screens = fencedScreens{s.Screens, j}
	}
	s.Jobs = j
	return s
}

// check refuses a call on a sandbox by an owner that is fenced.
func (j *Jobs) check(ctx context.Context, on dsec.Call) error {
	epoch := cmp.Or(on.Epoch, dsec.EpochFrom(ctx))
	if epoch == 0 {
		return nil
	}
	j.mu.Lock()
	m, s := j.members[on.Sandbox], j.sandboxes
	if m != nil {
		defer j.mu.Unlock()
		return dsec.WithOp("job.Fence", on.Sandbox, m.job.fence(epoch))
	}
	j.mu.Unlock()
	if s == nil {
		return dsec.WithOp("job.Fence", on.Sandbox, dsec.Errorf(dsec.Unavailable, "the node is starting"))
	}
	// One that was created a moment ago, has no job, or is nowhere.
	b, err := s.Get(ctx, on.Sandbox)
	if err != nil || b.Spec.Job == "" {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if e := j.jobs[key{b.Spec.Project, b.Spec.Job}]; e != nil {
		return dsec.WithOp("job.Fence", on.Sandbox, e.fence(epoch))
	}
	return nil
}

func (j *Jobs) checkID(ctx context.Context, id dsec.SandboxID) error {
	return j.check(ctx, dsec.Call{Sandbox: id})
}

type fencedSandboxes struct {
	dsec.Sandboxes
	jobs *Jobs
}

// Create makes the job if the Spec names one that is not there, and ends with
// its owner's lease.
func (f fencedSandboxes) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	if spec.Job == "" {
		return f.Sandboxes.Create(ctx, spec, opt)
	}
	t, err := f.jobs.admit(ctx, spec)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp("job.Create", "", err)
	}
	defer t.work.Done()
	ctx, done := bound(ctx, t.ctx)
	defer done()
	return f.Sandboxes.Create(ctx, spec, opt)
}

// admit lets the create of a sandbox in a job in.
func (j *Jobs) admit(ctx context.Context, spec dsec.Spec) (*tenure, error) {
	if err := spec.Job.Check(); err != nil {
		return nil, err
	}
	k := key{spec.Project, spec.Job}
	j.mu.Lock()
	e := j.jobs[k]
	j.mu.Unlock()
	if e == nil {
		if err := spec.WithDefaults().Check(); err != nil {
			return nil, err // a bad create makes no job
		}
		var err error
		if e, err = j.ensure(k); err != nil {
			return nil, err
		}
	}
	return j.enter(e, dsec.EpochFrom(ctx))
}

func (f fencedSandboxes) Get(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Get(ctx, id)
}

func (f fencedSandboxes) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Extend(ctx, id, ttl)
}

func (f fencedSandboxes) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Stop(ctx, id)
}

func (f fencedSandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Pause(ctx, id)
}

func (f fencedSandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Resume(ctx, id)
}

func (f fencedSandboxes) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Sandbox{}, err
	}
	return f.Sandboxes.Wait(ctx, id)
}

func (f fencedSandboxes) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	if err := f.jobs.checkID(ctx, id); err != nil {
		return dsec.Image{}, err
	}
	return f.Sandboxes.Commit(ctx, id, name)
}

package trajectory

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// sandboxes is the recorded dsec.Sandboxes. What only reads goes through.
type sandboxes struct {
	dsec.Sandboxes
	r *Recorder
}

// Create makes a sandbox and begins its trajectory. A trajectory that cannot
// be begun takes the sandbox with it.
func (s sandboxes) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	sb, err := s.Sandboxes.Create(ctx, spec, opt)
	if err != nil {
		return sb, err
	}
	if err := s.r.log.created(sb, whoOf(ctx), s.r.lineageOf(ctx, sb.Spec.From)); err != nil {
		s.Sandboxes.Stop(s.r.carry(ctx), sb.ID) //nolint:errcheck // its time to live ends it
		return dsec.Sandbox{}, dsec.WithOp("trajectory.Create", sb.ID, err)
	}
	return sb, nil
}

// Stop records who asked for the end, and ends the sandbox. The record of the
// end itself comes from the node.
func (s sandboxes) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if c := s.r.log.chain(id); c != nil {
		who := whoOf(ctx)
		// A full disk must not keep anybody from stopping what fills it.
		if err := s.r.log.note(c, &head{Op: dsec.RecordStop, Project: who.Project, Token: who.Token}); err != nil {
			s.r.log.cfg.Fault(err)
		}
	}
	return s.Sandboxes.Stop(ctx, id)
}

type extendParam struct {
	TTL time.Duration `json:"ttl"` // nanoseconds
}

// Extend moves the end of the time to live.
func (s sandboxes) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordExtend, extendParam{ttl}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Extend(ctx, id, ttl)
	})
}

type labelParam struct {
	Labels map[string]string `json:"labels"` // an empty value takes one away
}

// Label has set, a node's own, set labels, and records it. Nobody waits for the
// disk: a job labels thousands at a time, and labels are the caller's own notes.
func (r *Recorder) Label(ctx context.Context, id dsec.SandboxID, labels map[string]string,
	set func(context.Context, dsec.SandboxID, map[string]string) (dsec.Sandbox, error),
) (dsec.Sandbox, error) {
	p, err := marshal(labelParam{labels})
	if err != nil {
		return dsec.Sandbox{}, err
	}
	sb, err := set(ctx, id, labels)
	c := r.log.chain(id)
	if err != nil || c == nil {
		return sb, err
	}
	who := whoOf(ctx)
	return sb, dsec.WithOp("trajectory.Label", id, r.log.note(c, &head{Op: dsec.RecordLabel, Project: who.Project, Token: who.Token, Request: p}))
}

type pauseParam struct {
	Detail string `json:"detail,omitempty"` // why, where its user did not ask for it by name
}

// Pause lets the workload stand still.
func (s sandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordPause, pauseParam{dsec.ReasonFrom(ctx).Detail}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Pause(ctx, id)
	})
}

// Resume lets it go on.
func (s sandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordResume, struct{}{}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Resume(ctx, id)
	})
}

type commitParam struct {
	Name string `json:"name"`
}

type commitAnswer struct {
	Digest string   `json:"digest"`
	Layers []string `json:"layers,omitempty"`
}

// Commit makes an image of what changed.
func (s sandboxes) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	p, err := marshal(commitParam{name})
	if err != nil {
		return dsec.Image{}, err
	}
	b, err := s.r.log.begin(ctx, request{on: dsec.Call{Sandbox: id}, who: whoOf(ctx), op: dsec.RecordCommit, param: p})
	if err == errNoChain { //nolint:errorlint // it is never wrapped
		return s.Sandboxes.Commit(ctx, id, name)
	}
	if err != nil {
		return dsec.Image{}, dsec.WithOp("trajectory.Commit", id, err)
	}
	img, err := s.Sandboxes.Commit(ctx, id, name)
	if e := s.r.finish(b, commitAnswer{Digest: img.Digest}, body{}, err); err == nil {
		err = e
	}
	return img, err
}

// change records a call on the sandbox as a whole; its answer is the record
// that the caller gets and is not repeated here.
func change(ctx context.Context, r *Recorder, id dsec.SandboxID, op dsec.RecordOp, param any, f func(ctx context.Context) (dsec.Sandbox, error)) (dsec.Sandbox, error) {
	var sb dsec.Sandbox
	err := doNothing(ctx, r, dsec.Call{Sandbox: id}, op, param, func(ctx context.Context) (err error) {
		sb, err = f(ctx)
		return err
	})
	return sb, err
}

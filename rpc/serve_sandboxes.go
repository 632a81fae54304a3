package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// sandboxes serves dsec.Sandboxes.
type sandboxes struct{ *handler }

func (s sandboxes) Create(ctx context.Context, req *dsecv1.SandboxesCreateRequest) (*dsecv1.Sandbox, error) {
	spec := SpecFromWire(req.GetSpec())
	if err := s.claim(ctx, &spec); err != nil {
		return nil, err
	}
	key, err := ParseKey(ctx.Value(callKey{}).(*call).header.Get(HeaderKey))
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: key}))
}

func (s sandboxes) Get(ctx context.Context, _ *dsecv1.SandboxesGetRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Get(ctx, id))
}

func (s sandboxes) List(ctx context.Context, req *dsecv1.SandboxesListRequest) (*dsecv1.SandboxesListResponse, error) {
	f := FilterFromWire(req)
	if f.After != "" {
		if err := s.owners.check(ctx, s.services.Sandboxes, f.After); err != nil {
			return nil, err
		}
	}
	all, err := listOwn(ctx, s.services.Sandboxes, f)
	return &dsecv1.SandboxesListResponse{Sandboxes: each(all, SandboxToWire)}, err
}

func (s sandboxes) Extend(ctx context.Context, req *dsecv1.SandboxesExtendRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Extend(ctx, id, unspan(req.GetTtl())))
}

func (s sandboxes) Stop(ctx context.Context, _ *dsecv1.SandboxesStopRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Stop(ctx, id))
}

func (s sandboxes) Pause(ctx context.Context, _ *dsecv1.SandboxesPauseRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Pause(ctx, id))
}

func (s sandboxes) Resume(ctx context.Context, _ *dsecv1.SandboxesResumeRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(SandboxToWire)(s.services.Sandboxes.Resume(ctx, id))
}

// Wait answers after a bounded time, so that no proxy on the way loses patience;
// the caller asks again.
func (s sandboxes) Wait(ctx context.Context, req *dsecv1.SandboxesWaitRequest) (*dsecv1.Sandbox, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, waitMax(unspan(req.GetMax())))
	defer cancel()
	b, err := s.services.Sandboxes.Wait(wait, id)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		b, err = s.services.Sandboxes.Get(ctx, id)
	}
	return wire(SandboxToWire)(b, err)
}

func (s sandboxes) Commit(ctx context.Context, req *dsecv1.SandboxesCommitRequest) (*dsecv1.Image, error) {
	id, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return wire(ImageToWire)(s.services.Sandboxes.Commit(ctx, id, req.GetName()))
}

// wire turns an answer for the wire, or passes the error.
func wire[A, W any](to func(A) *W) func(A, error) (*W, error) {
	return func(a A, err error) (*W, error) {
		if err != nil {
			return nil, err
		}
		return to(a), nil
	}
}

// each turns a list.
func each[A, W any](in []A, to func(A) *W) []*W {
	out := make([]*W, len(in))
	for i, a := range in {
		out[i] = to(a)
	}
	return out
}

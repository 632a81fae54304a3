package client

import (
	"context"
	"crypto/rand"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type sandboxes struct {
	*core
	rpc dsecv1.SandboxesClient
}

func (s *sandboxes) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	t := to{op: "client.Create", key: opt.Key}
	if t.key == "" {
		t.key = rand.Text() // a repeated create gives the same sandbox
	}
	return sandbox(unary(ctx, s.core, t, s.rpc.Create, &dsecv1.SandboxesCreateRequest{Spec: rpc.SpecToWire(spec)}))
}

func (s *sandboxes) Get(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	t, err := of("client.Get", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return sandbox(unary(ctx, s.core, t.repeatable(), s.rpc.Get, &dsecv1.SandboxesGetRequest{}))
}

func (s *sandboxes) List(ctx context.Context, f dsec.Filter) ([]dsec.Sandbox, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, rpc.FilterToWire(f))
	return each(a.GetSandboxes(), rpc.SandboxFromWire), err
}

func (s *sandboxes) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	t, err := of("client.Extend", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return sandbox(unary(ctx, s.core, t.repeatable(), s.rpc.Extend, &dsecv1.SandboxesExtendRequest{Ttl: durationpb.New(ttl)}))
}

func (s *sandboxes) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	t, err := of("client.Stop", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return sandbox(unary(ctx, s.core, t.repeatable(), s.rpc.Stop, &dsecv1.SandboxesStopRequest{}))
}

func (s *sandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	t, err := of("client.Pause", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return sandbox(unary(ctx, s.core, t.repeatable(), s.rpc.Pause, &dsecv1.SandboxesPauseRequest{}))
}

func (s *sandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	t, err := of("client.Resume", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return sandbox(unary(ctx, s.core, t.repeatable(), s.rpc.Resume, &dsecv1.SandboxesResumeRequest{}))
}

func (s *sandboxes) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	t, err := of("client.Wait", id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	p := s.patience(t.repeatable())
	for {
		a, err := s.rpc.Wait(s.headers(ctx, t), &dsecv1.SandboxesWaitRequest{})
		if err != nil {
			err = rpc.CallError(ctx, t.op, id, err)
			p.broken(s.core, err)
			if !p.again(ctx, err) {
				return dsec.Sandbox{}, err
			}
			continue
		}
		p.answered(s.core)
		if b := rpc.SandboxFromWire(a); b.State.Ended() {
			return b, nil
		}
	}
}

func (s *sandboxes) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	t, err := of("client.Commit", id)
	if err != nil {
		return dsec.Image{}, err
	}
	return image(unary(ctx, s.core, t, s.rpc.Commit, &dsecv1.SandboxesCommitRequest{Name: name}))
}

// of names a call for a sandbox.
func of(op string, id dsec.SandboxID) (to, error) {
	t := to{op: op, sandbox: id}
	return t, t.check()
}

func sandbox(w *dsecv1.Sandbox, err error) (dsec.Sandbox, error) {
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return rpc.SandboxFromWire(w), nil
}

// each turns a list; an empty one is nil.
func each[W, A any](in []*W, from func(*W) A) []A {
	if len(in) == 0 {
		return nil
	}
	out := make([]A, len(in))
	for i, w := range in {
		out[i] = from(w)
	}
	return out
}

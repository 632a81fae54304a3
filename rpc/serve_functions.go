package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// functions serves dsec.Functions.
type functions struct{ *handler }

// mine makes a function its caller's project's.
func (s functions) mine(ctx context.Context, f *dsec.Function) error {
	h := ctx.Value(callKey{}).(*call).header
	for _, name := range []string{HeaderStep, HeaderKey} {
		if h.Get(name) != "" {
			return dsec.Errorf(dsec.Unsupported, "header %s: a function call is not recorded, and changes nothing: call again when there was no answer", name)
		}
	}
	of := dsec.Spec{Project: f.Project}
	err := s.claim(ctx, &of)
	f.Project = of.Project
	return err
}

func (s functions) Call(ctx context.Context, req *dsecv1.FunctionsCallRequest) (*dsecv1.FunctionResult, error) {
	f := FunctionFromWire(req.GetFunction())
	if err := s.mine(ctx, &f); err != nil {
		return nil, err
	}
	return wire(FunctionResultToWire)(s.services.Functions.Call(ctx, f))
}

func (s functions) Batch(ctx context.Context, req *dsecv1.FunctionsBatchRequest, stream dsecv1.FunctionsBatchServerStream) error {
	b := FunctionBatchFromWire(req)
	if err := s.mine(ctx, &b.Function); err != nil {
		return err
	}
	return sendAll(ctx, s.services.Functions.Batch(ctx, b), FunctionItemToWire, stream.Send)
}

package client

import (
	"context"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type functions struct {
	*core
	rpc dsecv1.FunctionsClient
}

// Call may be repeated: a call has no effect outside of itself.
func (s *functions) Call(ctx context.Context, f dsec.Function) (dsec.FunctionResult, error) {
	w, err := unary(ctx, s.core, to{op: "client.Call", again: true}, s.rpc.Call, &dsecv1.FunctionsCallRequest{Function: rpc.FunctionToWire(f)})
	if err != nil {
		return dsec.FunctionResult{}, err
	}
	return rpc.FunctionResultFromWire(w), nil
}

// Batch opens the stream again only as long as nothing was received.
func (s *functions) Batch(ctx context.Context, b dsec.FunctionBatch) iter.Seq2[dsec.FunctionItem, error] {
	q := rpc.FunctionBatchToWire(b)
	return func(yield func(dsec.FunctionItem, error) bool) {
		got := 0
		open := func(ctx context.Context) (receiver[dsecv1.FunctionItem], error) { return s.rpc.Batch(ctx, q) }
		for m, err := range messages[dsecv1.FunctionItem](ctx, s.core, to{op: "client.Batch", again: true}, open) {
			if err != nil {
				yield(dsec.FunctionItem{}, err)
				return
			}
			got++
			if !yield(rpc.FunctionItemFromWire(m), nil) {
				return
			}
		}
		if got < len(b.Cases) {
			yield(dsec.FunctionItem{}, dsec.WithOp("client.Batch", "", errEarly()))
		}
	}
}

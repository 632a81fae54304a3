package api

import (
	"context"
	"iter"

	"github.com/dsec-go/dsec"
)

// functions is dsec.Functions over all nodes: a call goes to a node that would
// take a sandbox of its kind, and to the next one if that has no room.
type functions struct{ nodes Placement }

func (f functions) pick(ctx context.Context, fn dsec.Function) ([]Node, error) {
	spec := dsec.Spec{Kind: dsec.FnCall, Environment: fn.Environment, Project: fn.Project}
	nodes, err := f.nodes.Pick(ctx, spec, dsec.CreateOptions{})
	if err != nil {
		return nil, err
	}
	var out []Node
	for _, n := range nodes {
		if n.Services.Functions != nil {
			out = append(out, n)
		}
	}
	if len(out) == 0 {
		return nil, dsec.Errorf(dsec.Unsupported, "no node calls functions")
	}
	return out, nil
}

// Call tries the nodes in order for as long as they are full.
func (f functions) Call(ctx context.Context, fn dsec.Function) (r dsec.FunctionResult, err error) {
	if err := fn.Check(); err != nil {
		return r, err
	}
	nodes, err := f.pick(ctx, fn)
	if err != nil {
		return r, err
	}
	for _, n := range nodes {
		r, err = n.Services.Functions.Call(ctx, fn)
		if err == nil || dsec.KindOf(err) != dsec.Exhausted {
			return r, err
		}
	}
	return r, err
}

// Batch stays on one node, where its build is.
func (f functions) Batch(ctx context.Context, b dsec.FunctionBatch) iter.Seq2[dsec.FunctionItem, error] {
	if err := b.Check(); err != nil {
		return failedBatch(err)
	}
	nodes, err := f.pick(ctx, b.Function)
	if err != nil {
		return failedBatch(err)
	}
	return nodes[0].Services.Functions.Batch(ctx, b)
}

func failedBatch(err error) iter.Seq2[dsec.FunctionItem, error] {
	return func(yield func(dsec.FunctionItem, error) bool) { yield(dsec.FunctionItem{}, err) }
}

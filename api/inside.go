package api

import (
	"context"

	"github.com/dsec-go/dsec"
)

type insideKey struct{}

// WithInside gives the context of calls that come from inside a sandbox, through
// its loopback. An Authenticator before such calls asks Inside: only the token of
// that sandbox is to be let in.
func WithInside(ctx context.Context, id dsec.SandboxID) context.Context {
	return context.WithValue(ctx, insideKey{}, id)
}

// Inside gives the sandbox that a call comes from, if it comes from inside one.
func Inside(ctx context.Context) (dsec.SandboxID, bool) {
	id, ok := ctx.Value(insideKey{}).(dsec.SandboxID)
	return id, ok
}

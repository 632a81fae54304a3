package dsec

import "context"

// Reason says why a sandbox is paused or stopped, where its user did not ask for it by name.
type Reason struct {
	Cause  Cause  // of a stop
	Detail string // a sentence for people
}

type reasonKey struct{}

// WithReason gives a context whose pauses and stops have r as their reason. It does not travel
// to another process: nobody may say on another's behalf why.
func WithReason(ctx context.Context, r Reason) context.Context {
	return context.WithValue(ctx, reasonKey{}, r)
}

// ReasonFrom gives the reason that ctx carries: CauseUser and no detail by default.
func ReasonFrom(ctx context.Context) Reason {
	if r, ok := ctx.Value(reasonKey{}).(Reason); ok {
		return r
	}
	return Reason{Cause: CauseUser}
}

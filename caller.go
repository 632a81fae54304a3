package dsec

import "context"

// Caller says on whose behalf a call is made. The api puts it in the context
// once the token is checked; what runs below may compare and record it. A
// context without one is a program of the operator's own.
type Caller struct {
	Project ProjectID
	Token   string // name, never the secret
	Admin   bool   // sees all projects
}

type callerKey struct{}

// WithCaller gives a context that carries c.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerFrom gives the caller that ctx carries, if any.
func CallerFrom(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

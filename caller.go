package dsec

import (
	"context"
	"slices"
	"time"
)

// Caller says on whose behalf a call is made. The api puts it in the context
// once the token is checked; what runs below may compare and record it. A
// context without one is a program of the operator's own.
type Caller struct {
	Project ProjectID
	Token   string // name, never the secret
	Admin   bool   // sees all projects

	Rights  []Right   // of the token
	Expires time.Time // of the token; zero means never
	Sandbox SandboxID // the call came from inside it; else empty
}

// Sees reports whether the sandboxes of a project are the caller's: those of
// its own and of all below it.
func (c Caller) Sees(p ProjectID) bool { return c.Admin || p.Within(c.Project) }

// May reports whether the caller has a right.
func (c Caller) May(r Right) bool {
	return c.Admin || slices.Contains(c.Rights, r)
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

// Carry gives a context that ends with life alone and has the values of both:
// for work on a caller's behalf that outlives the call.
func Carry(life, values context.Context) context.Context { return carried{life, values} }

type carried struct {
	context.Context
	values context.Context
}

func (c carried) Value(key any) any {
	if v := c.Context.Value(key); v != nil {
		return v
	}
	return c.values.Value(key)
}

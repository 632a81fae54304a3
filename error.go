package dsec

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// ErrorKind classifies an Error. Clients decide by kind, people read the text.
type ErrorKind uint8

// The kinds of error. They are few, shared by both ends, and map one-to-one to
// RPC codes in package rpc.
const (
	Internal        ErrorKind = iota // a fault of ours; its text stays on the server
	Invalid                          // the request can never succeed as written
	Unauthenticated                  // no token, or one that is not known
	Denied                           // a known token without the right
	NotFound                         // the thing named does not exist
	Exists                           // the name is taken by something else
	Conflict                         // wrong state, or fenced by a newer owner
	Exhausted                        // a quota, a limit or the node is full
	Unavailable                      // cannot answer now, try again
	Lost                             // the sandbox, or recorded data of it, existed and is gone
	Timeout                          // the call's deadline passed
	Canceled                         // the caller went away
	Diverged                         // a repeated step asks for something else than recorded
	Unsupported                      // this kind, host or build lacks the power
	numErrorKinds
)

var errorKindNames = [...]string{
	"internal", "invalid", "unauthenticated", "denied", "not_found", "exists", "conflict",
	"exhausted", "unavailable", "lost", "timeout", "canceled", "diverged", "unsupported",
}

// String gives the kind's stable lower-case name.
func (k ErrorKind) String() string {
	if int(k) < len(errorKindNames) {
		return errorKindNames[k]
	}
	return "internal"
}

// ParseErrorKind is the inverse of String; an unknown name is Internal.
func ParseErrorKind(s string) ErrorKind {
	for i, n := range errorKindNames {
		if n == s {
			return ErrorKind(i)
		}
	}
	return Internal
}

// ErrorKinds lists every kind, for exhaustive mappings and their tests.
func ErrorKinds() []ErrorKind {
	out := make([]ErrorKind, numErrorKinds)
	for i := range out {
		out[i] = ErrorKind(i)
	}
	return out
}

// Error is what every service returns. Op is the operation that found the
// fault ("edge.Create"); an outer layer sets it only when it is empty, so a
// message reads as one sentence.
type Error struct {
	Op      string
	Kind    ErrorKind
	Sandbox SandboxID // if the error is about one sandbox
	Request string    // id of the request that failed, set where it leaves a server
	Err     error     // the cause; never nil in an Error made by this module
}

// Error gives operation, sandbox and cause in one line.
func (e *Error) Error() string {
	var b strings.Builder
	if e.Op != "" {
		b.WriteString(e.Op)
		b.WriteString(": ")
	}
	if e.Sandbox != "" {
		b.WriteString("sandbox ")
		b.WriteString(string(e.Sandbox))
		b.WriteString(": ")
	}
	if e.Err != nil {
		b.WriteString(e.Err.Error())
	} else {
		b.WriteString(e.Kind.String())
	}
	if e.Request != "" {
		b.WriteString(" (request ")
		b.WriteString(e.Request)
		b.WriteString(")")
	}
	return b.String()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Retryable reports whether the same call may succeed later without a change
// of the request. It follows from the kind.
func (e *Error) Retryable() bool {
	return e.Kind == Unavailable || e.Kind == Exhausted || e.Kind == Timeout
}

// Errorf makes an Error of kind k whose cause is the formatted text; %w works.
func Errorf(k ErrorKind, format string, args ...any) *Error {
	return &Error{Kind: k, Err: fmt.Errorf(format, args...)}
}

// KindOf gives the kind of the first Error in err's chain. A context error is
// Timeout or Canceled, fs.ErrNotExist and fs.ErrExist are NotFound and Exists,
// anything else is Internal.
func KindOf(err error) ErrorKind {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Kind
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, fs.ErrNotExist):
		return NotFound
	case errors.Is(err, fs.ErrExist):
		return Exists
	}
	return Internal
}

// WithOp gives err as an *Error that names op and, where they are not yet set,
// sandbox. A nil err stays nil. The cause's kind is kept.
func WithOp(op string, id SandboxID, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) && e == err { //nolint:errorlint // only the outermost is copied
		c := *e
		if c.Op == "" {
			c.Op = op
		}
		if c.Sandbox == "" {
			c.Sandbox = id
		}
		return &c
	}
	return &Error{Op: op, Kind: KindOf(err), Sandbox: id, Err: err}
}

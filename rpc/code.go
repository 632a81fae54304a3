package rpc

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/proto"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// codes is the one table between kinds of error and RPC codes. It is injective:
// each side can always tell the other's kind. The codes Unknown and OutOfRange
// are never sent.
var codes = [...]connect.Code{
	dsec.Internal:        connect.CodeInternal,
	dsec.Invalid:         connect.CodeInvalidArgument,
	dsec.Unauthenticated: connect.CodeUnauthenticated,
	dsec.Denied:          connect.CodePermissionDenied,
	dsec.NotFound:        connect.CodeNotFound,
	dsec.Exists:          connect.CodeAlreadyExists,
	dsec.Conflict:        connect.CodeFailedPrecondition,
	dsec.Exhausted:       connect.CodeResourceExhausted,
	dsec.Unavailable:     connect.CodeUnavailable,
	dsec.Lost:            connect.CodeDataLoss,
	dsec.Timeout:         connect.CodeDeadlineExceeded,
	dsec.Canceled:        connect.CodeCanceled,
	dsec.Diverged:        connect.CodeAborted,
	dsec.Unsupported:     connect.CodeUnimplemented,
}

// CodeOf gives the RPC code of a kind.
func CodeOf(k dsec.ErrorKind) connect.Code {
	if int(k) < len(codes) {
		return codes[k]
	}
	return connect.CodeInternal
}

// KindOf is the inverse of CodeOf. A code that no kind has is Internal.
func KindOf(c connect.Code) dsec.ErrorKind {
	for k, x := range codes {
		if x == c {
			return dsec.ErrorKind(k)
		}
	}
	return dsec.Internal
}

const internalText = "internal error"

var errorInfoName = string((*dsecv1.ErrorInfo)(nil).ProtoReflect().Descriptor().FullName())

// WireError gives err as it leaves the server: code, cause in words, and an
// ErrorInfo. The text of an Internal stays here; the caller gets the id of the
// request instead.
func WireError(request string, err error) *connect.Error {
	err = receiveError(err)
	kind := dsec.KindOf(err)
	info := &dsecv1.ErrorInfo{Kind: kind.String(), Request: request}
	text := err.Error()
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		info.Op, info.Sandbox = e.Op, string(e.Sandbox)
		// An error that passed through from another server was counted there.
		if outer, ok := err.(*dsec.Error); ok && outer.Err != nil { //nolint:errorlint // op and sandbox of the outermost travel apart
			text = outer.Err.Error()
		}
	}
	if kind == dsec.Internal {
		text = internalText + " (request " + request + ")"
		info.Op = ""
	}
	out := connect.NewError(CodeOf(kind), strings.ToValidUTF8(text, "\uFFFD")).WithCause(err)
	if d, err := connectproto.NewErrorDetail(info); err == nil {
		out = out.WithDetail(d)
	}
	return out
}

// receiveError gives what reading a request failed with as a dsec.Error: it is
// the caller's fault, or the caller is gone.
func receiveError(err error) error {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	text := ce.Message()
	switch ce.Code() {
	case connect.CodeInternal:
		return &dsec.Error{Kind: dsec.Invalid, Err: errors.New(text)}
	case connect.CodeUnknown:
		return &dsec.Error{Kind: dsec.Canceled, Err: errors.New(text)}
	}
	return &dsec.Error{Kind: KindOf(ce.Code()), Err: errors.New(text)}
}

// CallError gives the error of a call as its caller sees it: the server's own,
// or Unavailable when there was no answer, or Timeout and Canceled when ctx is
// the reason. A nil err stays nil.
func CallError(ctx context.Context, op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return dsec.WithOp(op, id, e)
	}
	e := &dsec.Error{Op: op, Kind: dsec.Unavailable, Sandbox: id, Err: err}
	ce, ok := errors.AsType[*connect.Error](err)
	switch {
	case ok && ce.IsRemote():
		e.Kind = KindOf(ce.Code())
		e.Err = errors.New(ce.Message())
		decodeInfo(e, ce)
		if ctx.Err() != nil && (e.Kind == dsec.Timeout || e.Kind == dsec.Canceled) {
			e.Err = ctx.Err()
		}
	case ctx.Err() != nil:
		e.Kind = dsec.KindOf(ctx.Err())
		e.Err = context.Cause(ctx)
	case ok:
		e.Kind = localKind(ce)
		e.Err = errors.New(ce.Message())
		if cause := ce.Unwrap(); cause != nil {
			e.Err = cause // keeps the chain for NotSent
		}
	}
	return e
}

// localKind classifies what the RPC library found by itself on this side.
func localKind(ce *connect.Error) dsec.ErrorKind {
	switch ce.Code() {
	case connect.CodeUnimplemented, connect.CodeUnauthenticated, connect.CodePermissionDenied, connect.CodeResourceExhausted:
		return KindOf(ce.Code()) // a plain HTTP answer, or a message over a limit
	case connect.CodeInternal:
		if strings.HasPrefix(ce.Message(), "marshal message") {
			return dsec.Invalid // the only reason: a text that is not UTF-8
		}
	}
	return dsec.Unavailable
}

func decodeInfo(e *dsec.Error, ce *connect.Error) {
	for _, d := range ce.Details() {
		if d.Type != errorInfoName {
			continue
		}
		var info dsecv1.ErrorInfo
		if proto.Unmarshal(d.Value, &info) != nil {
			continue
		}
		if info.Op != "" {
			e.Op = info.Op
		}
		if info.Sandbox != "" {
			e.Sandbox = dsec.SandboxID(info.Sandbox)
		}
		e.Request = info.Request
		if e.Kind == dsec.Internal {
			e.Err = errors.New(internalText)
		}
	}
}

// NotSent reports whether err shows that the request never reached a server, so
// that repeating it is safe whatever it asks.
func NotSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

var errorWriter = connecthttp.NewErrorWriter(connecthttp.WithCodecs(binaryCodec, jsonCodec))

// WriteError answers r with err, in the form that its protocol has for errors.
// It is for what stands in front of a Handler.
func WriteError(w http.ResponseWriter, r *http.Request, request string, err error) {
	w.Header()[HeaderRequest] = []string{request}
	_ = errorWriter.Write(w, r, WireError(request, err)) // the caller is gone if it fails
}

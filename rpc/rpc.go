package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// Limits of messages.
const (
	MaxRequest = 24 << 20 // largest request of Create, CreateMany, Start and Run: arguments, variables, stdin
	MaxStdin   = 4 << 20  // largest stdin of Run; more goes through Start and Write
	maxMessage = 1 << 20  // largest request message of every other call
)

// Options are what a Handler needs beside the services. The zero value works.
type Options struct {
	Log      *slog.Logger  // gets the text of Internal errors and panics; default none
	PortIdle time.Duration // a port connection that nobody uses is closed after this; default a minute
}

// Names of attributes in the log.
const (
	logRequest = "request"
	logOp      = "op"
	logSandbox = "sandbox"
	logErr     = "err"
)

// Handler serves s over HTTP. A service that is nil answers Unsupported. It
// answers whoever calls: tokens are the business of package api. Closing what it
// keeps is done by cancelling the requests; connections to ports end by
// themselves.
func Handler(s dsec.Services, o Options) http.Handler {
	h := &handler{services: s, log: o.Log, conns: newConns(o.PortIdle), mux: http.NewServeMux()}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	server := connect.NewServer(h.intercept)
	register[dsecv1.SandboxesHandler](server, s.Sandboxes != nil, dsecv1.RegisterSandboxesHandler, sandboxes{h}, dsecv1.UnimplementedSandboxesHandler{})
	register[dsecv1.CommandsHandler](server, s.Commands != nil, dsecv1.RegisterCommandsHandler, commands{h}, dsecv1.UnimplementedCommandsHandler{})
	register[dsecv1.FilesHandler](server, s.Files != nil, dsecv1.RegisterFilesHandler, files{h}, dsecv1.UnimplementedFilesHandler{})
	register[dsecv1.PortsHandler](server, s.Ports != nil, dsecv1.RegisterPortsHandler, ports{h}, dsecv1.UnimplementedPortsHandler{})
	register[dsecv1.ImagesHandler](server, s.Images != nil, dsecv1.RegisterImagesHandler, images{h}, dsecv1.UnimplementedImagesHandler{})
	register[dsecv1.JobsHandler](server, s.Jobs != nil, dsecv1.RegisterJobsHandler, jobs{h}, dsecv1.UnimplementedJobsHandler{})
	register[dsecv1.FunctionsHandler](server, s.Functions != nil, dsecv1.RegisterFunctionsHandler, functions{h}, dsecv1.UnimplementedFunctionsHandler{})
	register[dsecv1.TrajectoriesHandler](server, s.Trajectories != nil, dsecv1.RegisterTrajectoriesHandler, trajectories{h}, dsecv1.UnimplementedTrajectoriesHandler{})
	register[dsecv1.SnapshotsHandler](server, s.Snapshots != nil, dsecv1.RegisterSnapshotsHandler, snapshots{h}, dsecv1.UnimplementedSnapshotsHandler{})
	register[dsecv1.ScreensHandler](server, s.Screens != nil, dsecv1.RegisterScreensHandler, screens{h}, dsecv1.UnimplementedScreensHandler{})
	register[dsecv1.TokensHandler](server, s.Tokens != nil, dsecv1.RegisterTokensHandler, tokens{h}, dsecv1.UnimplementedTokensHandler{})
	register[dsecv1.ProjectsHandler](server, s.Projects != nil, dsecv1.RegisterProjectsHandler, projects{h}, dsecv1.UnimplementedProjectsHandler{})
	register[dsecv1.NodesHandler](server, s.Nodes != nil, dsecv1.RegisterNodesHandler, nodes{h}, dsecv1.UnimplementedNodesHandler{})
	connecthttp.Mount(h.mux, server,
		connecthttp.WithCodecs(lenient{binaryCodec}, lenient{strictJSON}),
		connecthttp.WithCompressors(), // loopback and data-centre links are faster than gzip
		connecthttp.WithReadMaxBytes(maxMessage),
		connecthttp.WithConditionalOptions(func(spec connect.Spec) []connecthttp.Option {
			switch spec.Procedure {
			case dsecv1.SandboxesCreateProcedure, dsecv1.CommandsStartProcedure, dsecv1.CommandsRunProcedure, dsecv1.JobsCreateManyProcedure,
				dsecv1.FunctionsCallProcedure, dsecv1.FunctionsBatchProcedure:
				return []connecthttp.Option{connecthttp.WithReadMaxBytes(MaxRequest)}
			}
			return nil
		}))
	return h
}

func register[H any](server *connect.Server, offered bool, reg func(*connect.Server, H), impl, none H) {
	if !offered {
		impl = none
	}
	reg(server, impl)
}

// handler is what the adapters of the services share.
type handler struct {
	services dsec.Services
	log      *slog.Logger
	mux      *http.ServeMux
	conns    *conns
	owners   owners
}

// call is the state of one request, carried in its context.
type call struct {
	request string
	header  http.Header
}

type callKey struct{}

// RequestID gives the id of the request that ctx belongs to, "" outside of one.
func RequestID(ctx context.Context) string {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.request
	}
	return ""
}

// ServeHTTP names the request and serves it.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{request: RequestIDOr(r.Header.Get(HeaderRequest)), header: r.Header}
	w.Header()[HeaderRequest] = []string{c.request}
	h.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callKey{}, c)))
}

// intercept surrounds every call: it gives errors their form on the wire, and
// makes a panic an Internal.
func (h *handler) intercept(next connect.ServerFunc) connect.ServerFunc {
	return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
		request := RequestID(ctx)
		defer func() {
			if r := recover(); r != nil {
				if r == http.ErrAbortHandler { //nolint:errorlint // the value itself, as net/http compares it
					panic(r)
				}
				err = WireError(request, fmt.Errorf("panic: %v", r))
				h.log.ErrorContext(ctx, "panic", logOp, spec.Procedure, logRequest, request, logErr, fmt.Sprintf("%v\n%s", r, debug.Stack()))
			}
		}()
		if ctx, err = withEpoch(ctx); err == nil {
			err = next(ctx, spec, stream)
		}
		if err == nil {
			return nil
		}
		if cause, ok := errors.AsType[*dsec.Error](context.Cause(ctx)); ok {
			// Whoever ended the call said why; what broke by that is no news.
			err = cause
		} else if ctx.Err() != nil && dsec.KindOf(err) == dsec.Internal {
			// What broke because the caller or its time is gone is not a fault.
			err = &dsec.Error{Kind: dsec.KindOf(ctx.Err()), Err: err}
		}
		wire := WireError(request, err)
		if wire.Code() == connect.CodeInternal {
			h.log.ErrorContext(ctx, "internal error", logOp, spec.Procedure, logRequest, request, logErr, err)
		}
		return wire
	}
}

// sandbox gives the sandbox that the request is for, once the caller may use it.
func (h *handler) sandbox(ctx context.Context) (dsec.SandboxID, error) {
	id, err := named(ctx)
	if err != nil {
		return "", err
	}
	if err := h.owners.check(ctx, h.services.Sandboxes, id); err != nil {
		return "", err
	}
	return id, nil
}

// named gives the sandbox that the request names.
func named(ctx context.Context) (dsec.SandboxID, error) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return "", errors.New("call outside of a request")
	}
	id := dsec.SandboxID(c.header.Get(HeaderSandbox))
	if id == "" {
		return "", dsec.Errorf(dsec.Invalid, "no sandbox is named: header %s is missing", HeaderSandbox)
	}
	return id, nil
}

// on gives the sandbox and the step that the request is for.
func (h *handler) on(ctx context.Context) (dsec.Call, error) {
	id, err := h.sandbox(ctx)
	if err != nil {
		return dsec.Call{}, err
	}
	step, err := ParseStep(ctx.Value(callKey{}).(*call).header.Get(HeaderStep))
	return dsec.Call{Sandbox: id, Step: step, Epoch: dsec.EpochFrom(ctx)}, err
}

// check refuses a request that gives one of our headers twice, where nobody knows which is
// meant, or empty: a step that got lost would be a command that runs twice.
func (c *call) check() error {
	for _, name := range []string{HeaderSandbox, HeaderStep, HeaderKey, HeaderEpoch} {
		switch v := c.header[name]; {
		case len(v) > 1:
			return dsec.Errorf(dsec.Invalid, "header %s is given %d times", name, len(v))
		case len(v) == 1 && v[0] == "":
			return dsec.Errorf(dsec.Invalid, "header %s is empty: leave it out, or give it a value", name)
		}
	}
	return nil
}

// withEpoch checks the headers of a request and gives a context that carries its epoch, if it
// has one.
func withEpoch(ctx context.Context) (context.Context, error) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return ctx, nil
	}
	if err := c.check(); err != nil {
		return ctx, err
	}
	epoch, err := ParseEpoch(c.header.Get(HeaderEpoch))
	if err != nil || epoch == 0 {
		return ctx, err
	}
	return dsec.WithEpoch(ctx, epoch), nil
}

package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// commands serves dsec.Commands.
type commands struct{ *handler }

func (s commands) Start(ctx context.Context, req *dsecv1.CommandsStartRequest) (*dsecv1.CommandStatus, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	c, err := CommandFromWire(req.GetCommand())
	if err != nil {
		return nil, err
	}
	return wire(StatusToWire)(s.services.Commands.Start(ctx, on, c))
}

func (s commands) Run(ctx context.Context, req *dsecv1.CommandsRunRequest) (*dsecv1.CommandsRunResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	c, err := CommandFromWire(req.GetCommand())
	if err != nil {
		return nil, err
	}
	if len(req.GetStdin()) > MaxStdin {
		return nil, dsec.Errorf(dsec.Invalid, "stdin of %d bytes is more than %d; use Start and Write", len(req.GetStdin()), MaxStdin)
	}
	r, err := s.services.Commands.Run(ctx, on, c, req.GetStdin())
	if err != nil {
		return nil, err
	}
	return &dsecv1.CommandsRunResponse{Status: StatusToWire(r.CommandStatus), Stdout: r.Out, Stderr: r.Err}, nil
}

func (s commands) Attach(ctx context.Context, req *dsecv1.CommandsAttachRequest, stream dsecv1.CommandsAttachServerStream) error {
	on, err := s.on(ctx)
	if err != nil {
		return err
	}
	if err := stream.SendHeaders(); err != nil { // a quiet command is attached at once
		return err
	}
	for o, err := range s.services.Commands.Attach(ctx, on, dsec.CommandID(req.GetId()), req.GetOffset()) {
		if err != nil {
			return err
		}
		if err := stream.Send(OutputToWire(o)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (s commands) Read(ctx context.Context, req *dsecv1.CommandsReadRequest) (*dsecv1.CommandsReadResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	out, err := streamFromText(req.GetStream())
	if err != nil {
		return nil, err
	}
	n := min(int(req.GetMax()), dsec.MaxRunOutput) // fewer is always right
	b, err := s.services.Commands.Read(ctx, on, dsec.CommandID(req.GetId()), out, req.GetOffset(), n)
	return &dsecv1.CommandsReadResponse{Data: b}, err
}

func (s commands) Write(ctx context.Context, req *dsecv1.CommandsWriteRequest) (*dsecv1.CommandsWriteResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	if len(req.GetData()) > dsec.MaxChunk {
		return nil, tooMuch(len(req.GetData()))
	}
	off, err := s.services.Commands.Write(ctx, on, dsec.CommandID(req.GetId()), dsec.StdinWrite{
		Offset: req.GetOffset(), Data: req.GetData(), Close: req.GetClose(),
	})
	return &dsecv1.CommandsWriteResponse{Offset: off}, err
}

func tooMuch(n int) error {
	return dsec.Errorf(dsec.Invalid, "%d bytes in one message are more than %d", n, dsec.MaxChunk)
}

func (s commands) Resize(ctx context.Context, req *dsecv1.CommandsResizeRequest) (*dsecv1.CommandsResizeResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	size, err := sizeFromWire(req.GetSize())
	if err != nil {
		return nil, err
	}
	return &dsecv1.CommandsResizeResponse{}, s.services.Commands.Resize(ctx, on, dsec.CommandID(req.GetId()), size)
}

func (s commands) Signal(ctx context.Context, req *dsecv1.CommandsSignalRequest) (*dsecv1.CommandsSignalResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.CommandsSignalResponse{}, s.services.Commands.Signal(ctx, on, dsec.CommandID(req.GetId()), req.GetSignal())
}

// Wait answers after a bounded time; the caller asks again.
func (s commands) Wait(ctx context.Context, req *dsecv1.CommandsWaitRequest) (*dsecv1.CommandStatus, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, waitMax(unspan(req.GetMax())))
	defer cancel()
	id := dsec.CommandID(req.GetId())
	st, err := s.services.Commands.Wait(wait, on, id)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		st, err = dsec.CommandStatus{ID: id, Outcome: dsec.StillRunning}, nil
	}
	return wire(StatusToWire)(st, err)
}

func (s commands) List(ctx context.Context, _ *dsecv1.CommandsListRequest) (*dsecv1.CommandsListResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.services.Commands.List(ctx, on)
	return &dsecv1.CommandsListResponse{Commands: each(all, StatusToWire)}, err
}

package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// ports serves dsec.Ports.
type ports struct{ *handler }

func (s ports) Dial(ctx context.Context, req *dsecv1.PortsDialRequest) (*dsecv1.PortsDialResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	c, err := s.services.Ports.Dial(ctx, on, int(req.GetPort()))
	if err != nil {
		return nil, err
	}
	return &dsecv1.PortsDialResponse{Conn: s.conns.add(on.Sandbox, c)}, nil
}

// Receive owns the reading side. The connection is closed with the caller, so
// that a caller that dies leaves nothing.
func (s ports) Receive(ctx context.Context, req *dsecv1.PortsReceiveRequest, stream dsecv1.PortsReceiveServerStream) error {
	c, err := s.conn(ctx, req.GetConn())
	if err != nil {
		return err
	}
	if err := c.receive(); err != nil {
		return err
	}
	if err := stream.SendHeaders(); err != nil { // a quiet connection is received from at once
		s.conns.drop(c)
		return err
	}
	// Closing is the only way to end a Read.
	stop := context.AfterFunc(ctx, func() { s.conns.drop(c) })
	var msg dsecv1.PortsReceiveResponse
	err = send(ctx, reader{c}, &msg.Data, func() error { return stream.Send(&msg) })
	if !stop() || err != nil {
		s.conns.drop(c)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	s.conns.received(c)
	return nil
}

func (s ports) Send(ctx context.Context, req *dsecv1.PortsSendRequest) (*dsecv1.PortsSendResponse, error) {
	c, err := s.conn(ctx, req.GetConn())
	if err != nil {
		return nil, err
	}
	if len(req.GetData()) > dsec.MaxChunk {
		return nil, tooMuch(len(req.GetData()))
	}
	off, err := c.send(ctx, req.GetOffset(), req.GetData(), req.GetClose())
	return &dsecv1.PortsSendResponse{Offset: off}, err
}

func (s ports) Close(ctx context.Context, req *dsecv1.PortsCloseRequest) (*dsecv1.PortsCloseResponse, error) {
	// An unknown connection is a closed one: repeating a Close is harmless.
	if c, err := s.conn(ctx, req.GetConn()); err == nil {
		s.conns.drop(c)
	}
	return &dsecv1.PortsCloseResponse{}, nil
}

func (s ports) conn(ctx context.Context, id string) (*conn, error) {
	sandbox, err := s.sandbox(ctx)
	if err != nil {
		return nil, err
	}
	return s.conns.get(sandbox, id)
}

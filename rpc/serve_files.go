package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// files serves dsec.Files.
type files struct{ *handler }

// listBatch is how many files share one message of a listing.
const listBatch = 256

func (s files) Stat(ctx context.Context, req *dsecv1.FilesStatRequest) (*dsecv1.FileInfo, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return wire(InfoToWire)(s.services.Files.Stat(ctx, on, FileFromWire(req.GetFile())))
}

func (s files) List(ctx context.Context, req *dsecv1.FilesListRequest, stream dsecv1.FilesListServerStream) error {
	on, err := s.on(ctx)
	if err != nil {
		return err
	}
	var batch []*dsecv1.FileInfo
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := stream.Send(&dsecv1.FilesListResponse{Files: batch})
		batch = batch[:0]
		return err
	}
	for i, err := range s.services.Files.List(ctx, on, FileFromWire(req.GetFile()), int(req.GetDepth())) {
		if err != nil {
			if cut := flush(); cut != nil {
				return cut
			}
			return err
		}
		if batch = append(batch, InfoToWire(i)); len(batch) == listBatch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	return ctx.Err()
}

func (s files) Read(ctx context.Context, req *dsecv1.FilesReadRequest, stream dsecv1.FilesReadServerStream) error {
	on, err := s.on(ctx)
	if err != nil {
		return err
	}
	r, err := s.services.Files.Read(ctx, on, FileFromWire(req.GetFile()), dsec.ReadRange{Offset: req.GetOffset(), Length: req.GetLength()})
	if err != nil {
		return err
	}
	var msg dsecv1.FilesReadResponse
	return send(ctx, r, &msg.Data, func() error { return stream.Send(&msg) })
}

func (s files) Write(ctx context.Context, stream dsecv1.FilesWriteServerStream) (*dsecv1.FileInfo, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	first, body, err := upload(stream.Receive)
	if err != nil {
		return nil, err
	}
	return wire(InfoToWire)(s.services.Files.Write(ctx, on, FileFromWire(first.GetFile()), dsec.WriteOptions{
		Mode: first.GetMode(), Parents: first.GetParents(), At: first.At, Append: first.GetAppend(),
	}, body))
}

func (s files) Mkdir(ctx context.Context, req *dsecv1.FilesMkdirRequest) (*dsecv1.FilesMkdirResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesMkdirResponse{}, s.services.Files.Mkdir(ctx, on, FileFromWire(req.GetFile()), req.GetMode())
}

func (s files) Move(ctx context.Context, req *dsecv1.FilesMoveRequest) (*dsecv1.FilesMoveResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesMoveResponse{}, s.services.Files.Move(ctx, on, FileFromWire(req.GetFile()), unname(req.GetTo(), req.GetToBytes()))
}

func (s files) Remove(ctx context.Context, req *dsecv1.FilesRemoveRequest) (*dsecv1.FilesRemoveResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesRemoveResponse{}, s.services.Files.Remove(ctx, on, FileFromWire(req.GetFile()))
}

func (s files) Chmod(ctx context.Context, req *dsecv1.FilesChmodRequest) (*dsecv1.FilesChmodResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesChmodResponse{}, s.services.Files.Chmod(ctx, on, FileFromWire(req.GetFile()), req.GetMode())
}

func (s files) Chown(ctx context.Context, req *dsecv1.FilesChownRequest) (*dsecv1.FilesChownResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesChownResponse{}, s.services.Files.Chown(ctx, on, FileFromWire(req.GetFile()), req.GetOwner())
}

func (s files) Symlink(ctx context.Context, req *dsecv1.FilesSymlinkRequest) (*dsecv1.FilesSymlinkResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	target := unname(req.GetTarget(), req.GetTargetBytes())
	return &dsecv1.FilesSymlinkResponse{}, s.services.Files.Symlink(ctx, on, FileFromWire(req.GetFile()), target)
}

func (s files) Watch(ctx context.Context, req *dsecv1.FilesWatchRequest, stream dsecv1.FilesWatchServerStream) error {
	on, err := s.on(ctx)
	if err != nil {
		return err
	}
	opt := dsec.WatchOptions{Recursive: req.GetRecursive()}
	for e, err := range s.services.Files.Watch(ctx, on, FileFromWire(req.GetFile()), opt) {
		if err != nil {
			return err
		}
		if err := stream.Send(EventToWire(e)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (s files) Pack(ctx context.Context, req *dsecv1.FilesPackRequest, stream dsecv1.FilesPackServerStream) error {
	on, err := s.on(ctx)
	if err != nil {
		return err
	}
	r, err := s.services.Files.Pack(ctx, on, FileFromWire(req.GetFile()))
	if err != nil {
		return err
	}
	var msg dsecv1.FilesPackResponse
	return send(ctx, r, &msg.Data, func() error { return stream.Send(&msg) })
}

func (s files) Unpack(ctx context.Context, stream dsecv1.FilesUnpackServerStream) (*dsecv1.FilesUnpackResponse, error) {
	on, err := s.on(ctx)
	if err != nil {
		return nil, err
	}
	first, body, err := upload(stream.Receive)
	if err != nil {
		return nil, err
	}
	return &dsecv1.FilesUnpackResponse{}, s.services.Files.Unpack(ctx, on, FileFromWire(first.GetFile()), body)
}

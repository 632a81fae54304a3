package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// images serves dsec.Images.
type images struct{ *handler }

func (s images) Pull(ctx context.Context, req *dsecv1.ImagesPullRequest, stream dsecv1.ImagesPullServerStream) error {
	opt := dsec.ImportOptions{Name: req.GetName(), Role: dsec.Role(req.GetRole())}
	for p, err := range s.services.Images.Pull(ctx, req.GetRef(), opt) {
		if err != nil {
			return err
		}
		if err := stream.Send(ProgressToWire(p)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (s images) Upload(ctx context.Context, stream dsecv1.ImagesUploadServerStream) (*dsecv1.Image, error) {
	first, body, err := upload(stream.Receive)
	if err != nil {
		return nil, err
	}
	opt := dsec.ImportOptions{Name: first.GetName(), Role: dsec.Role(first.GetRole())}
	return wire(ImageToWire)(s.services.Images.Upload(ctx, opt, body))
}

func (s images) Adopt(ctx context.Context, req *dsecv1.ImagesAdoptRequest) (*dsecv1.Image, error) {
	opt := dsec.ImportOptions{Name: req.GetName(), Role: dsec.Role(req.GetRole())}
	return wire(ImageToWire)(s.services.Images.Adopt(ctx, req.GetDigest(), opt))
}

func (s images) List(ctx context.Context, req *dsecv1.ImagesListRequest) (*dsecv1.ImagesListResponse, error) {
	page, err := s.services.Images.List(ctx, ImageQueryFromWire(req))
	return &dsecv1.ImagesListResponse{Images: each(page.Images, ImageToWire), Next: page.Next}, err
}

func (s images) Tag(ctx context.Context, req *dsecv1.ImagesTagRequest) (*dsecv1.Image, error) {
	return wire(ImageToWire)(s.services.Images.Tag(ctx, req.GetName(), req.GetTag()))
}

func (s images) Export(ctx context.Context, req *dsecv1.ImagesExportRequest, stream dsecv1.ImagesExportServerStream) error {
	r, err := s.services.Images.Export(ctx, dsec.Environment{Base: req.GetBase(), Workspace: req.GetWorkspace(), Toolkits: req.GetToolkits()})
	if err != nil {
		return err
	}
	var msg dsecv1.ImagesExportResponse
	return send(ctx, r, &msg.Data, func() error { return stream.Send(&msg) })
}

func (s images) Inspect(ctx context.Context, req *dsecv1.ImagesInspectRequest) (*dsecv1.Image, error) {
	return wire(ImageToWire)(s.services.Images.Inspect(ctx, req.GetName()))
}

func (s images) Remove(ctx context.Context, req *dsecv1.ImagesRemoveRequest) (*dsecv1.ImagesRemoveResponse, error) {
	return &dsecv1.ImagesRemoveResponse{}, s.services.Images.Remove(ctx, req.GetName())
}

func (s images) Collect(ctx context.Context, req *dsecv1.ImagesCollectRequest) (*dsecv1.ImagesCollectResponse, error) {
	c, err := s.services.Images.Collect(ctx, dsec.CollectOptions{Alone: req.GetAlone()})
	return &dsecv1.ImagesCollectResponse{Blobs: int64(c.Blobs), Bytes: c.Bytes}, err
}

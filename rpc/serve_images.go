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

func (s images) List(ctx context.Context, _ *dsecv1.ImagesListRequest) (*dsecv1.ImagesListResponse, error) {
	all, err := s.services.Images.List(ctx)
	return &dsecv1.ImagesListResponse{Images: each(all, ImageToWire)}, err
}

func (s images) Inspect(ctx context.Context, req *dsecv1.ImagesInspectRequest) (*dsecv1.Image, error) {
	return wire(ImageToWire)(s.services.Images.Inspect(ctx, req.GetName()))
}

func (s images) Remove(ctx context.Context, req *dsecv1.ImagesRemoveRequest) (*dsecv1.ImagesRemoveResponse, error) {
	return &dsecv1.ImagesRemoveResponse{}, s.services.Images.Remove(ctx, req.GetName())
}

func (s images) Collect(ctx context.Context, _ *dsecv1.ImagesCollectRequest) (*dsecv1.ImagesCollectResponse, error) {
	c, err := s.services.Images.Collect(ctx)
	return &dsecv1.ImagesCollectResponse{Blobs: int64(c.Blobs), Bytes: c.Bytes}, err
}

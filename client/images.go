package client

import (
	"context"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type images struct {
	*core
	rpc dsecv1.ImagesClient
}

func (s *images) Pull(ctx context.Context, ref string, opt dsec.ImportOptions) iter.Seq2[dsec.Progress, error] {
	q := &dsecv1.ImagesPullRequest{Ref: ref, Name: opt.Name, Role: string(opt.Role)}
	return func(yield func(dsec.Progress, error) bool) {
		last := false
		for m, err := range messages[dsecv1.Progress](ctx, s.core, to{op: "client.Pull"}, func(ctx context.Context) (receiver[dsecv1.Progress], error) { return s.rpc.Pull(ctx, q) }) {
			if err != nil {
				yield(dsec.Progress{}, err)
				return
			}
			p := rpc.ProgressFromWire(m)
			last = p.Image != nil
			if !yield(p, nil) {
				return
			}
		}
		if !last {
			yield(dsec.Progress{}, dsec.WithOp("client.Pull", "", errEarly()))
		}
	}
}

func (s *images) Upload(ctx context.Context, opt dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	msg := &dsecv1.ImagesUploadRequest{Name: opt.Name, Role: string(opt.Role)}
	return image(upload(ctx, s.core, to{op: "client.Upload"}, s.rpc.Upload, r, func(b []byte) *dsecv1.ImagesUploadRequest {
		msg.Data = b
		return msg
	}, func() { msg.Name, msg.Role = "", "" }))
}

func (s *images) Adopt(ctx context.Context, digest string, opt dsec.ImportOptions) (dsec.Image, error) {
	q := &dsecv1.ImagesAdoptRequest{Digest: digest, Name: opt.Name, Role: string(opt.Role)}
	return image(unary(ctx, s.core, to{op: "client.Adopt", again: true}, s.rpc.Adopt, q))
}

func (s *images) List(ctx context.Context, q dsec.ImageQuery) (dsec.ImagePage, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, rpc.ImageQueryToWire(q))
	return dsec.ImagePage{Images: each(a.GetImages(), rpc.ImageFromWire), Next: a.GetNext()}, err
}

func (s *images) Tag(ctx context.Context, name, tag string) (dsec.Image, error) {
	return image(unary(ctx, s.core, to{op: "client.Tag"}, s.rpc.Tag, &dsecv1.ImagesTagRequest{Name: name, Tag: tag}))
}

func (s *images) Export(ctx context.Context, e dsec.Environment) (io.ReadCloser, error) {
	q := &dsecv1.ImagesExportRequest{Base: e.Base, Workspace: e.Workspace, Toolkits: e.Toolkits}
	return download(ctx, s.core, to{op: "client.Export", again: true}, func(ctx context.Context) (receiver[dsecv1.ImagesExportResponse], error) {
		return s.rpc.Export(ctx, q)
	}, (*dsecv1.ImagesExportResponse).GetData)
}

func (s *images) Inspect(ctx context.Context, name string) (dsec.Image, error) {
	return image(unary(ctx, s.core, to{op: "client.Inspect", again: true}, s.rpc.Inspect, &dsecv1.ImagesInspectRequest{Name: name}))
}

func (s *images) Remove(ctx context.Context, name string) error {
	_, err := unary(ctx, s.core, to{op: "client.Remove"}, s.rpc.Remove, &dsecv1.ImagesRemoveRequest{Name: name})
	return err
}

func (s *images) Collect(ctx context.Context, opt dsec.CollectOptions) (dsec.Collected, error) {
	a, err := unary(ctx, s.core, to{op: "client.Collect"}, s.rpc.Collect, &dsecv1.ImagesCollectRequest{Alone: opt.Alone})
	return dsec.Collected{Blobs: int(a.GetBlobs()), Bytes: a.GetBytes()}, err
}

func image(w *dsecv1.Image, err error) (dsec.Image, error) {
	if err != nil {
		return dsec.Image{}, err
	}
	return rpc.ImageFromWire(w), nil
}

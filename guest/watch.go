package guest

import (
	"context"
	"github.com/dsec-go/dsec"
	"io"
	"iter"
)

func (f files) Watch(ctx context.Context, _ dsec.Call, op dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) {}
}
func (f files) Pack(ctx context.Context, _ dsec.Call, op dsec.FileOp) (io.ReadCloser, error) {
	return nil, nil
}
func (f files) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, r io.Reader) error {
	return nil
}
func moveAcross(ctx context.Context, from, to string) error { return nil }

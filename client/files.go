package client

import (
	"context"
	"errors"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type files struct {
	*core
	rpc dsecv1.FilesClient
}

func (s *files) Stat(ctx context.Context, c dsec.Call, f dsec.FileOp) (dsec.FileInfo, error) {
	return info(unary(ctx, s.core, on("client.Stat", c).repeatable(), s.rpc.Stat, &dsecv1.FilesStatRequest{File: rpc.FileToWire(f)}))
}

func (s *files) List(ctx context.Context, c dsec.Call, f dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	t := on("client.List", c).repeatable()
	q := rpc.ListToWire(f, depth)
	return func(yield func(dsec.FileInfo, error) bool) {
		for m, err := range messages[dsecv1.FilesListResponse](ctx, s.core, t, func(ctx context.Context) (receiver[dsecv1.FilesListResponse], error) { return s.rpc.List(ctx, q) }) {
			if err != nil {
				yield(dsec.FileInfo{}, err)
				return
			}
			for _, w := range m.GetFiles() {
				if !yield(rpc.InfoFromWire(w), nil) {
					return
				}
			}
		}
	}
}

func (s *files) Read(ctx context.Context, c dsec.Call, f dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	q := &dsecv1.FilesReadRequest{File: rpc.FileToWire(f), Offset: r.Offset, Length: r.Length}
	return download(ctx, s.core, on("client.Read", c).repeatable(), func(ctx context.Context) (receiver[dsecv1.FilesReadResponse], error) {
		return s.rpc.Read(ctx, q)
	}, (*dsecv1.FilesReadResponse).GetData)
}

func (s *files) Write(ctx context.Context, c dsec.Call, f dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	t := on("client.Write", c)
	msg := &dsecv1.FilesWriteRequest{File: rpc.FileToWire(f), Mode: opt.Mode, Parents: opt.Parents, At: opt.At, Append: opt.Append}
	return info(upload(ctx, s.core, t, s.rpc.Write, r, func(b []byte) *dsecv1.FilesWriteRequest {
		msg.Data = b
		return msg
	}, func() { msg.File, msg.Mode, msg.Parents, msg.At, msg.Append = nil, 0, false, nil, false }))
}

func (s *files) Mkdir(ctx context.Context, c dsec.Call, f dsec.FileOp, mode uint32) error {
	_, err := unary(ctx, s.core, on("client.Mkdir", c).repeatable(), s.rpc.Mkdir, &dsecv1.FilesMkdirRequest{File: rpc.FileToWire(f), Mode: mode})
	return err
}

func (s *files) Move(ctx context.Context, c dsec.Call, f dsec.FileOp, to string) error {
	_, err := unary(ctx, s.core, on("client.Move", c), s.rpc.Move, rpc.MoveToWire(f, to))
	return err
}

func (s *files) Remove(ctx context.Context, c dsec.Call, f dsec.FileOp) error {
	_, err := unary(ctx, s.core, on("client.Remove", c), s.rpc.Remove, &dsecv1.FilesRemoveRequest{File: rpc.FileToWire(f)})
	return err
}

func (s *files) Chmod(ctx context.Context, c dsec.Call, f dsec.FileOp, mode uint32) error {
	_, err := unary(ctx, s.core, on("client.Chmod", c).repeatable(), s.rpc.Chmod, &dsecv1.FilesChmodRequest{File: rpc.FileToWire(f), Mode: mode})
	return err
}

func (s *files) Chown(ctx context.Context, c dsec.Call, f dsec.FileOp, owner string) error {
	_, err := unary(ctx, s.core, on("client.Chown", c).repeatable(), s.rpc.Chown, &dsecv1.FilesChownRequest{File: rpc.FileToWire(f), Owner: owner})
	return err
}

func (s *files) Symlink(ctx context.Context, c dsec.Call, f dsec.FileOp, target string) error {
	_, err := unary(ctx, s.core, on("client.Symlink", c), s.rpc.Symlink, rpc.SymlinkToWire(f, target))
	return err
}

func (s *files) Watch(ctx context.Context, c dsec.Call, f dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	t := on("client.Watch", c).repeatable()
	q := &dsecv1.FilesWatchRequest{File: rpc.FileToWire(f), Recursive: opt.Recursive}
	return func(yield func(dsec.WatchEvent, error) bool) {
		for m, err := range messages[dsecv1.WatchEvent](ctx, s.core, t, func(ctx context.Context) (receiver[dsecv1.WatchEvent], error) { return s.rpc.Watch(ctx, q) }) {
			if err != nil {
				yield(dsec.WatchEvent{}, err)
				return
			}
			if !yield(rpc.EventFromWire(m), nil) {
				return
			}
		}
	}
}

func (s *files) Pack(ctx context.Context, c dsec.Call, f dsec.FileOp) (io.ReadCloser, error) {
	q := &dsecv1.FilesPackRequest{File: rpc.FileToWire(f)}
	return download(ctx, s.core, on("client.Pack", c).repeatable(), func(ctx context.Context) (receiver[dsecv1.FilesPackResponse], error) {
		return s.rpc.Pack(ctx, q)
	}, (*dsecv1.FilesPackResponse).GetData)
}

func (s *files) Unpack(ctx context.Context, c dsec.Call, f dsec.FileOp, r io.Reader) error {
	msg := &dsecv1.FilesUnpackRequest{File: rpc.FileToWire(f)}
	_, err := upload(ctx, s.core, on("client.Unpack", c), s.rpc.Unpack, r, func(b []byte) *dsecv1.FilesUnpackRequest {
		msg.Data = b
		return msg
	}, func() { msg.File = nil })
	return err
}

func info(w *dsecv1.FileInfo, err error) (dsec.FileInfo, error) {
	if err != nil {
		return dsec.FileInfo{}, err
	}
	return rpc.InfoFromWire(w), nil
}

// receiver is the reading side of a server stream.
type receiver[M any] interface {
	Receive() (*M, error)
	Close() error
}

// messages yields the messages of a server stream. It is opened again only as
// long as nothing was received.
func messages[M any](ctx context.Context, c *core, t to, open func(context.Context) (receiver[M], error)) iter.Seq2[*M, error] {
	return func(yield func(*M, error) bool) {
		s, err := opened(ctx, c, t, open)
		if err != nil {
			yield(nil, err)
			return
		}
		defer s.close()
		for m, err := s.first, s.err; !errors.Is(err, io.EOF); m, err = s.Receive() {
			if err != nil {
				yield(nil, rpc.CallError(ctx, t.op, t.sandbox, err))
				return
			}
			if !yield(m, nil) {
				return
			}
		}
	}
}

// stream is an open server stream whose first message, or end, has arrived.
type stream[M any] struct {
	receiver[M]
	cancel context.CancelFunc
	first  *M
	err    error // of the first message: nil or io.EOF
}

func (s *stream[M]) close() {
	s.cancel() // else Close reads on to the end
	s.Close()
}

// opened opens a stream and waits for its first message, so that what the
// server refuses is refused here.
func opened[M any](ctx context.Context, c *core, t to, open func(context.Context) (receiver[M], error)) (*stream[M], error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	p := c.patience(t)
	for {
		sctx, cancel := context.WithCancel(ctx)
		s := &stream[M]{cancel: cancel}
		r, err := open(c.headers(sctx, t))
		if err == nil {
			s.receiver = r
			if s.first, s.err = r.Receive(); s.err == nil || errors.Is(s.err, io.EOF) && !errors.Is(s.err, io.ErrUnexpectedEOF) {
				return s, nil
			}
			err = s.err
			s.close()
		}
		cancel()
		err = rpc.CallError(ctx, t.op, t.sandbox, err)
		if !p.again(ctx, err) {
			return nil, err
		}
	}
}

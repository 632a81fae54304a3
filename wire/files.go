package wire

import (
	"context"
	"errors"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
)

// files is the host's end of dsec.Files.
type files struct{ c *Client }

func (f files) Stat(ctx context.Context, _ dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	p, err := f.c.call(ctx, request{m: mStat, args: appendFileOp(nil, op), idempotent: true})
	if err != nil {
		return dsec.FileInfo{}, err
	}
	return decodeInfo(p)
}

func decodeInfo(p []byte) (dsec.FileInfo, error) {
	d := decoder{b: p}
	i := d.info()
	return i, guestFault(d.err())
}

func (f files) List(ctx context.Context, _ dsec.Call, op dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	args := appendInt(appendFileOp(nil, op), int64(depth))
	return sequence(ctx, f.c, mListFiles, args, (*decoder).info)
}

func (f files) Watch(ctx context.Context, _ dsec.Call, op dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	args := appendBool(appendFileOp(nil, op), opt.Recursive)
	return sequence(ctx, f.c, mWatch, args, (*decoder).event)
}

// sequence yields the items that the guest sends as they come. A broken
// connection ends it, since the rest might not fit what was yielded.
func sequence[T any](ctx context.Context, c *Client, m method, args []byte, item func(*decoder) T) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		s, err := c.stream(ctx, m, args, nil, false)
		if err != nil {
			yield(zero, err)
			return
		}
		for {
			p, err := s.next(ctx)
			if err != nil {
				if err = c.endOf(ctx, s, err); err != nil {
					yield(zero, err)
				}
				return
			}
			more := true
			err = eachItem(p.b, func(d *decoder) {
				v := item(d)
				more = more && !d.bad && yield(v, nil)
			})
			p.release()
			if err != nil && more {
				yield(zero, err)
			}
			if err != nil || !more {
				s.abandon()
				return
			}
		}
	}
}

// stream opens a call that is more than one message.
func (c *Client) stream(ctx context.Context, m method, args, data []byte, more bool) (*stream, error) {
	for try := 0; ; try++ {
		l, err := c.connect(ctx)
		if err != nil {
			return nil, err
		}
		s, sent, err := l.open(m, args, data, more, maxResponse, nil)
		if err == nil {
			return s, nil
		}
		if err = c.judge(ctx, err); err != nil {
			return nil, err
		}
		if sent || try > maxTries {
			return nil, errUnknown(sent)
		}
	}
}

// endOf gives the error that ended a stream of data; nil if the guest said
// that all is well.
func (c *Client) endOf(ctx context.Context, s *stream, err error) error {
	if errors.Is(err, errAnswered) || errors.Is(err, io.EOF) {
		if _, err = s.response(ctx); err == nil {
			return nil
		}
	}
	if ctx.Err() != nil {
		s.abandon()
	} else {
		s.forget()
	}
	if err = c.judge(ctx, err); err == nil {
		err = dsec.Errorf(dsec.Unavailable, "the connection to the guest broke")
	}
	return err
}

func (f files) Read(ctx context.Context, _ dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	return f.download(ctx, mReadFile, appendInt(appendInt(appendFileOp(nil, op), r.Offset), r.Length))
}

func (f files) Pack(ctx context.Context, _ dsec.Call, op dsec.FileOp) (io.ReadCloser, error) {
	return f.download(ctx, mPack, appendFileOp(nil, op))
}

// download waits for the first data, so that a missing file is an error of the
// call and not of the first read.
func (f files) download(ctx context.Context, m method, args []byte) (io.ReadCloser, error) {
	s, err := f.c.stream(ctx, m, args, nil, false)
	if err != nil {
		return nil, err
	}
	p, err := s.next(ctx)
	if err != nil {
		if err = f.c.endOf(ctx, s, err); err != nil {
			return nil, err
		}
		return &download{err: io.EOF}, nil
	}
	return &download{c: f.c, ctx: ctx, s: s, p: p, rest: p.b}, nil
}

// download reads what a guest sends. It is for one goroutine.
type download struct {
	c    *Client
	ctx  context.Context // of the call, which governs the whole stream
	s    *stream         // nil once ended
	p    *buffer
	rest []byte
	err  error
}

func (d *download) Read(b []byte) (int, error) {
	for len(d.rest) == 0 {
		if d.err != nil {
			return 0, d.err
		}
		d.p.release()
		d.p = nil
		p, err := d.s.next(d.ctx)
		if err != nil {
			if d.err = d.c.endOf(d.ctx, d.s, err); d.err == nil {
				d.err = io.EOF
			}
			d.s = nil
			continue
		}
		d.p, d.rest = p, p.b
	}
	n := copy(b, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

func (d *download) Close() error {
	if d.s != nil {
		d.s.abandon()
		d.s = nil
	}
	d.p.release()
	d.p, d.rest = nil, nil
	if d.err == nil {
		d.err = errors.New("read of a closed file")
	}
	return nil
}

func (f files) Write(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	args := appendWriteOptions(appendFileOp(appendStep(nil, on.Step), op), opt)
	p, err := f.upload(ctx, mWriteFile, args, r)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	return decodeInfo(p)
}

func (f files) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, r io.Reader) error {
	_, err := f.upload(ctx, mUnpack, appendFileOp(appendStep(nil, on.Step), op), r)
	return err
}

// upload sends all of r. A short content travels with the request.
func (f files) upload(ctx context.Context, m method, args []byte, r io.Reader) ([]byte, error) {
	buf := getBuffer(chunk)
	defer buf.release()
	n, rerr := io.ReadFull(r, buf.b)
	if rerr != nil && !errors.Is(rerr, io.EOF) && !errors.Is(rerr, io.ErrUnexpectedEOF) {
		return nil, sourceError(rerr)
	}
	s, err := f.c.stream(ctx, m, args, buf.b[:n], rerr == nil)
	if err != nil {
		return nil, err
	}
	for rerr == nil {
		n, rerr = io.ReadFull(r, buf.b)
		flags := uint8(0)
		switch {
		case errors.Is(rerr, io.EOF), errors.Is(rerr, io.ErrUnexpectedEOF):
			flags = fEnd
		case rerr != nil:
			s.abandon() // the guest keeps the old file
			return nil, sourceError(rerr)
		}
		if err := s.send(ctx, flags, buf.b[:n], nil); err != nil {
			if errors.Is(err, errAnswered) { // it refuses before it has all
				break
			}
			return nil, f.broken(ctx, s, err)
		}
	}
	p, err := s.response(ctx)
	if err != nil {
		return nil, f.broken(ctx, s, err)
	}
	return p, nil
}

func (f files) broken(ctx context.Context, s *stream, err error) error {
	if ctx.Err() != nil {
		s.abandon()
	} else {
		s.forget()
	}
	if err = f.c.judge(ctx, err); err == nil {
		err = errUnknown(true)
	}
	return err
}

// sourceError is a fault of what the caller gave us to send.
func sourceError(err error) error {
	if kind := dsec.KindOf(err); kind != dsec.Internal {
		return err
	}
	return dsec.Errorf(dsec.Canceled, "read the content to write: %w", err)
}

func (f files) mutate(ctx context.Context, m method, on dsec.Call, args []byte) error {
	_, err := f.c.call(ctx, request{m: m, args: append(appendStep(nil, on.Step), args...), step: on.Step})
	return err
}

func (f files) Mkdir(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return f.mutate(ctx, mMkdir, on, appendUint(appendFileOp(nil, op), uint64(mode)))
}

func (f files) Move(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	return f.mutate(ctx, mMove, on, appendString(appendFileOp(nil, op), to))
}

func (f files) Remove(ctx context.Context, on dsec.Call, op dsec.FileOp) error {
	return f.mutate(ctx, mRemove, on, appendFileOp(nil, op))
}

func (f files) Chmod(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return f.mutate(ctx, mChmod, on, appendUint(appendFileOp(nil, op), uint64(mode)))
}

func (f files) Chown(ctx context.Context, on dsec.Call, op dsec.FileOp, owner string) error {
	return f.mutate(ctx, mChown, on, appendString(appendFileOp(nil, op), owner))
}

func (f files) Symlink(ctx context.Context, on dsec.Call, op dsec.FileOp, target string) error {
	return f.mutate(ctx, mSymlink, on, appendString(appendFileOp(nil, op), target))
}

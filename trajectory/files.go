package trajectory

import (
	"context"
	"errors"
	"io"

	"github.com/dsec-go/dsec"
)

// maxContent is the most of a file or an archive that is kept with the record
// of its writing. Of more there are only digest and size.
const maxContent = 64 << 20

// files is the recorded dsec.Files. What only reads goes through as it is.
type files struct {
	dsec.Files
	r *Recorder
}

type pathParam struct {
	Path  Text   `json:"path"`
	User  Text   `json:"user,omitempty"`
	Mode  uint32 `json:"mode,omitempty"`
	To    Text   `json:"to,omitempty"`    // of a move
	Owner Text   `json:"owner,omitempty"` // of a chown
	Link  Text   `json:"link,omitempty"`  // target of a symlink
}

func (f files) Mkdir(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return doNothing(ctx, f.r, on, dsec.RecordMkdir, pathParam{Path: Text(op.Path), User: Text(op.User), Mode: mode}, func(ctx context.Context) error {
		return f.Files.Mkdir(ctx, on, op, mode)
	})
}

func (f files) Move(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	return doNothing(ctx, f.r, on, dsec.RecordMove, pathParam{Path: Text(op.Path), User: Text(op.User), To: Text(to)}, func(ctx context.Context) error {
		return f.Files.Move(ctx, on, op, to)
	})
}

func (f files) Remove(ctx context.Context, on dsec.Call, op dsec.FileOp) error {
	return doNothing(ctx, f.r, on, dsec.RecordRemove, pathParam{Path: Text(op.Path), User: Text(op.User)}, func(ctx context.Context) error {
		return f.Files.Remove(ctx, on, op)
	})
}

func (f files) Chmod(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return doNothing(ctx, f.r, on, dsec.RecordChmod, pathParam{Path: Text(op.Path), User: Text(op.User), Mode: mode}, func(ctx context.Context) error {
		return f.Files.Chmod(ctx, on, op, mode)
	})
}

func (f files) Chown(ctx context.Context, on dsec.Call, op dsec.FileOp, owner string) error {
	return doNothing(ctx, f.r, on, dsec.RecordChown, pathParam{Path: Text(op.Path), User: Text(op.User), Owner: Text(owner)}, func(ctx context.Context) error {
		return f.Files.Chown(ctx, on, op, owner)
	})
}

func (f files) Symlink(ctx context.Context, on dsec.Call, op dsec.FileOp, target string) error {
	return doNothing(ctx, f.r, on, dsec.RecordSymlink, pathParam{Path: Text(op.Path), User: Text(op.User), Link: Text(target)}, func(ctx context.Context) error {
		return f.Files.Symlink(ctx, on, op, target)
	})
}

type writeParam struct {
	Path    Text   `json:"path"`
	User    Text   `json:"user,omitempty"`
	Mode    uint32 `json:"mode,omitempty"`
	Parents bool   `json:"parents,omitempty"`
	At      *int64 `json:"at,omitempty"`
	Append  bool   `json:"append,omitempty"`
}

// contentAnswer is the answer of what was fed with a stream: the result, and
// what the stream held.
type contentAnswer struct {
	Info    *dsec.FileInfo `json:"info,omitempty"`
	Path    Text           `json:"path,omitempty"` // of Info, which may be no UTF-8
	Content string         `json:"content"`        // digest
	Size    int64          `json:"size"`
}

// Write stores a file.
func (f files) Write(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, in io.Reader) (dsec.FileInfo, error) {
	p := writeParam{Path: Text(op.Path), User: Text(op.User), Mode: opt.Mode, Parents: opt.Parents, At: opt.At, Append: opt.Append}
	a, err := f.feed(ctx, on, dsec.RecordWrite, p, in, func(in io.Reader) (*dsec.FileInfo, error) {
		info, err := f.Files.Write(ctx, on, op, opt, in)
		return &info, err
	})
	if err != nil {
		return dsec.FileInfo{}, err
	}
	return *a.Info, nil
}

// Unpack extracts an archive.
func (f files) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, in io.Reader) error {
	_, err := f.feed(ctx, on, dsec.RecordUnpack, pathParam{Path: Text(op.Path), User: Text(op.User)}, in, func(in io.Reader) (*dsec.FileInfo, error) {
		return nil, f.Files.Unpack(ctx, on, op, in)
	})
	return err
}

// feed records a call that takes a stream from its caller. What the stream held
// is known when it has ended, so it is in the record of the answer, and a
// repeated step is read to its end before it is answered.
func (f files) feed(ctx context.Context, on dsec.Call, op dsec.RecordOp, param any, in io.Reader, call func(io.Reader) (*dsec.FileInfo, error)) (contentAnswer, error) {
	p, err := marshal(param)
	if err != nil {
		return contentAnswer{}, err
	}
	sp := f.r.log.spool(ctx, dsec.BodyContent)
	sp.most = maxContent
	defer sp.abort()
	for {
		b, err := f.r.log.begin(ctx, request{on: on, who: whoOf(ctx), op: op, param: p})
		switch {
		case errors.Is(err, errNoChain):
			info, err := call(in)
			return contentAnswer{Info: info}, err
		case err != nil:
			return contentAnswer{}, dsec.WithOp("trajectory."+string(op), on.Sandbox, err)
		case b.first:
			info, err := call(io.TeeReader(in, sp))
			if err == nil {
				_, err = io.Copy(sp, in) // an archive may have more behind its end
			}
			var bod body
			if err == nil {
				bod, err = sp.finish()
			}
			a := contentAnswer{Info: info, Content: sp.digest(), Size: sp.n}
			if info != nil {
				a.Path = Text(info.Path)
			}
			if e := f.r.finish(b, a, bod, err); err == nil {
				err = e
			}
			return a, err
		case b.answer != 0:
			a, err := replayed[contentAnswer](ctx, f.r.log, on.Sandbox, b.answer)
			if err != nil {
				return a, err
			}
			if a.Info != nil {
				a.Info.Path = string(a.Path)
			}
			now := f.r.log.spool(ctx, "")
			now.most = -1
			if _, err := io.Copy(now, in); err != nil {
				return a, err
			}
			if d := now.digest(); d != a.Content {
				return a, dsec.WithOp("trajectory."+string(op), on.Sandbox, divergence(on.Step, "content", a.Content, d))
			}
			return a, nil
		}
		select {
		case <-b.flight.done: // then its answer, or another try
		case <-ctx.Done():
			return contentAnswer{}, context.Cause(ctx)
		}
	}
}

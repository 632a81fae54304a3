package fullvm

import (
	"context"
	"errors"
	"io"
	"iter"
	"path"

	"github.com/dsec-go/dsec"
)

// qgaFiles maps dsec.Files onto guest-file-*: whole files are read and written,
// as root. The rest is Unsupported and says so.
type qgaFiles struct{ q *qga }

func (q *qga) files() dsec.Files { return qgaFiles{q} }

func (f qgaFiles) lacks(what string) error { return f.q.m.guest.lacks(what) }

// qgaPiece is how much is read or written at once.
const qgaPiece = 1 << 20

// open opens a file of the guest.
func (f qgaFiles) open(ctx context.Context, op dsec.FileOp, mode string) (handle int64, err error) {
	g := f.q.m.guest
	switch {
	case g.agent(ctx) != QemuGuest:
		return 0, g.lacks("files")
	case op.User != "" && op.User != "root" && op.User != "0":
		return 0, g.lacks("files of another user than root")
	case op.Path == "":
		return 0, dsec.Errorf(dsec.Invalid, "the path is empty")
	}
	if !path.IsAbs(op.Path) {
		op.Path = path.Join("/", f.q.m.state().Guest.Cwd, op.Path)
	}
	err = f.q.call(ctx, "guest-file-open", map[string]any{"path": op.Path, "mode": mode}, &handle)
	return handle, err
}

func (f qgaFiles) closeFile(handle int64) error {
	return f.q.call(f.q.life, "guest-file-close", map[string]any{"handle": handle}, nil)
}

// Read implements dsec.Files.
func (f qgaFiles) Read(ctx context.Context, _ dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	h, err := f.open(ctx, op, "r")
	if err != nil {
		return nil, err
	}
	if r.Offset > 0 {
		if err := f.q.call(ctx, "guest-file-seek", map[string]any{"handle": h, "offset": r.Offset, "whence": 0}, nil); err != nil {
			return nil, errors.Join(err, f.closeFile(h))
		}
	}
	left := r.Length
	if left == 0 {
		left = 1<<63 - 1
	}
	return &qgaReader{f: f, ctx: ctx, handle: h, left: left}, nil
}

type qgaReader struct {
	f      qgaFiles
	ctx    context.Context // of the call that it is
	handle int64
	left   int64
	buf    []byte
	eof    bool
	closed bool
}

// Read implements io.Reader.
func (r *qgaReader) Read(p []byte) (int, error) {
	for len(r.buf) == 0 {
		if r.eof || r.left <= 0 {
			return 0, io.EOF
		}
		var a struct {
			Data []byte `json:"buf-b64"`
			EOF  bool   `json:"eof"`
		}
		if err := r.f.q.call(r.ctx, "guest-file-read", map[string]any{"handle": r.handle, "count": min(r.left, qgaPiece)}, &a); err != nil {
			return 0, err
		}
		r.buf, r.eof = a.Data[:min(int64(len(a.Data)), r.left)], a.EOF || len(a.Data) == 0
		r.left -= int64(len(r.buf))
	}
	n := copy(p, r.buf)
	r.buf = r.buf[n:]
	return n, nil
}

// Close implements io.Closer.
func (r *qgaReader) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	return r.f.closeFile(r.handle)
}

// Write implements dsec.Files. The file is written in place.
func (f qgaFiles) Write(ctx context.Context, _ dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (info dsec.FileInfo, err error) {
	mode := "w"
	switch {
	case opt.At != nil:
		return info, f.lacks("writing into the middle of a file")
	case opt.Mode != 0 || opt.Parents:
		return info, f.lacks("modes and parent folders of a written file")
	case opt.Append:
		mode = "a"
	}
	h, err := f.open(ctx, op, mode)
	if err != nil {
		return info, err
	}
	defer func() { err = errors.Join(err, f.closeFile(h)) }()
	buf := make([]byte, qgaPiece)
	for {
		n, rerr := io.ReadFull(r, buf)
		for piece := buf[:n]; len(piece) > 0; {
			var a struct{ Count int }
			if err := f.q.call(ctx, "guest-file-write", map[string]any{"handle": h, "buf-b64": piece}, &a); err != nil {
				return info, err
			}
			if a.Count <= 0 || a.Count > len(piece) {
				return info, dsec.Errorf(dsec.Exhausted, "the guest's disk takes no more")
			}
			piece = piece[a.Count:]
			info.Size += int64(a.Count)
		}
		switch {
		case errors.Is(rerr, io.EOF), errors.Is(rerr, io.ErrUnexpectedEOF):
			info.Path, info.Type = op.Path, dsec.TypeFile
			return info, nil
		case rerr != nil:
			return info, rerr
		}
	}
}

// The rest is not to be had.

func (f qgaFiles) Stat(ctx context.Context, _ dsec.Call, _ dsec.FileOp) (dsec.FileInfo, error) {
	return dsec.FileInfo{}, f.lacks("looking at a file")
}

func (f qgaFiles) List(context.Context, dsec.Call, dsec.FileOp, int) iter.Seq2[dsec.FileInfo, error] {
	return func(yield func(dsec.FileInfo, error) bool) { yield(dsec.FileInfo{}, f.lacks("listing a folder")) }
}

func (f qgaFiles) Mkdir(context.Context, dsec.Call, dsec.FileOp, uint32) error {
	return f.lacks("making a folder")
}

func (f qgaFiles) Move(context.Context, dsec.Call, dsec.FileOp, string) error {
	return f.lacks("moving a file")
}

func (f qgaFiles) Remove(context.Context, dsec.Call, dsec.FileOp) error {
	return f.lacks("removing a file")
}

func (f qgaFiles) Chmod(context.Context, dsec.Call, dsec.FileOp, uint32) error {
	return f.lacks("changing a file's mode")
}

func (f qgaFiles) Chown(context.Context, dsec.Call, dsec.FileOp, string) error {
	return f.lacks("changing a file's owner")
}

func (f qgaFiles) Symlink(context.Context, dsec.Call, dsec.FileOp, string) error {
	return f.lacks("making a link")
}

func (f qgaFiles) Watch(context.Context, dsec.Call, dsec.FileOp, dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) {
		yield(dsec.WatchEvent{}, f.lacks("watching files"))
	}
}

func (f qgaFiles) Pack(context.Context, dsec.Call, dsec.FileOp) (io.ReadCloser, error) {
	return nil, f.lacks("packing a folder")
}

func (f qgaFiles) Unpack(_ context.Context, _ dsec.Call, _ dsec.FileOp, r io.Reader) error {
	return f.lacks("unpacking a folder")
}

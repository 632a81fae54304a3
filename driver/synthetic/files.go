package synthetic

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"iter"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// files keeps small files in memory, by cleaned path. Folders exist where a
// file is below them or Mkdir made them. Owners, links and watching are
// Unsupported: tests of those need a kernel.
type files struct{ m *machine }

var _ dsec.Files = files{}

type fileTable struct {
	mu    sync.Mutex
	files map[string]*file
}

type file struct {
	dir  bool
	mode uint32
	data []byte
	mod  time.Time
}

// table gives the machine's files, made on first use.
func (f files) table() (*fileTable, error) {
	if err := f.m.alive(); err != nil {
		return nil, err
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.m.files == nil {
		f.m.files = &fileTable{files: map[string]*file{"/": {dir: true, mode: 0o755, mod: f.m.born}}}
	}
	return f.m.files, nil
}

func clean(p string) string { return path.Join("/", p) }

// find gives an existing file. Requires: t.mu held.
func (t *fileTable) find(p string) (*file, error) {
	if x := t.files[clean(p)]; x != nil {
		return x, nil
	}
	return nil, dsec.Errorf(dsec.NotFound, "no file %q", p)
}

// parents makes the folders above p. Requires: t.mu held.
func (t *fileTable) parents(p string) error {
	for d := path.Dir(p); ; d = path.Dir(d) {
		if x := t.files[d]; x == nil {
			t.files[d] = &file{dir: true, mode: 0o755, mod: time.Now()}
		} else if !x.dir {
			return dsec.Errorf(dsec.Invalid, "%q is not a folder", d)
		}
		if d == "/" {
			return nil
		}
	}
}

func (x *file) info(p string) dsec.FileInfo {
	typ := dsec.TypeFile
	if x.dir {
		typ = dsec.TypeDir
	}
	return dsec.FileInfo{Path: p, Type: typ, Mode: x.mode, Size: int64(len(x.data)), ModTime: x.mod, Nlink: 1}
}

func (f files) Stat(_ context.Context, _ dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	t, err := f.table()
	if err != nil {
		return dsec.FileInfo{}, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	x, err := t.find(op.Path)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	return x.info(clean(op.Path)), nil
}

func (f files) List(_ context.Context, _ dsec.Call, op dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	return func(yield func(dsec.FileInfo, error) bool) {
		t, err := f.table()
		if err != nil {
			yield(dsec.FileInfo{}, err)
			return
		}
		t.mu.Lock()
		var out []dsec.FileInfo
		if _, err = t.find(op.Path); err == nil {
			root := strings.TrimSuffix(clean(op.Path), "/") + "/"
			for p, x := range t.files {
				rest, below := strings.CutPrefix(p, root)
				if below && rest != "" && strings.Count(rest, "/") < depth {
					out = append(out, x.info(p))
				}
			}
		}
		t.mu.Unlock()
		if err != nil {
			yield(dsec.FileInfo{}, err)
			return
		}
		slices.SortFunc(out, func(a, b dsec.FileInfo) int { return cmp.Compare(a.Path, b.Path) })
		for _, i := range out {
			if !yield(i, nil) {
				return
			}
		}
	}
}

func (f files) Read(_ context.Context, _ dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	t, err := f.table()
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	x, err := t.find(op.Path)
	if err != nil {
		return nil, err
	}
	if x.dir {
		return nil, dsec.Errorf(dsec.Invalid, "%q is a folder", op.Path)
	}
	b := x.data[min(r.Offset, int64(len(x.data))):]
	if r.Length > 0 {
		b = b[:min(r.Length, int64(len(b)))]
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

func (f files) Write(_ context.Context, _ dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	t, err := f.table()
	if err != nil {
		return dsec.FileInfo{}, err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	p := clean(op.Path)
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.files[path.Dir(p)]; d == nil && !opt.Parents {
		return dsec.FileInfo{}, dsec.Errorf(dsec.NotFound, "no folder %q", path.Dir(p))
	}
	if err := t.parents(p); err != nil {
		return dsec.FileInfo{}, err
	}
	old := t.files[p]
	x := &file{mode: cmp.Or(opt.Mode, 0o644), data: data, mod: time.Now()}
	switch {
	case old != nil && old.dir:
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "%q is a folder", p)
	case opt.Append && old != nil:
		x.data = append(bytes.Clone(old.data), data...)
	case opt.At != nil && old != nil:
		x.data = append(bytes.Clone(old.data), make([]byte, max(0, int(*opt.At)+len(data)-len(old.data)))...)
		copy(x.data[*opt.At:], data)
	}
	t.files[p] = x
	return x.info(p), nil
}

func (f files) Mkdir(_ context.Context, _ dsec.Call, op dsec.FileOp, mode uint32) error {
	t, err := f.table()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p := clean(op.Path)
	if err := t.parents(p); err != nil {
		return err
	}
	if x := t.files[p]; x == nil {
		t.files[p] = &file{dir: true, mode: cmp.Or(mode, 0o755), mod: time.Now()}
	} else if !x.dir {
		return dsec.Errorf(dsec.Exists, "%q is not a folder", p)
	}
	return nil
}

func (f files) Move(_ context.Context, _ dsec.Call, op dsec.FileOp, to string) error {
	t, err := f.table()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.find(op.Path); err != nil {
		return err
	}
	from, dest := clean(op.Path), clean(to)
	moved := map[string]*file{}
	for p, x := range t.files {
		if p == from || strings.HasPrefix(p, from+"/") {
			moved[dest+p[len(from):]] = x
			delete(t.files, p)
		}
	}
	for p, x := range moved {
		t.files[p] = x
	}
	return t.parents(dest)
}

func (f files) Remove(_ context.Context, _ dsec.Call, op dsec.FileOp) error {
	t, err := f.table()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	root := clean(op.Path)
	if root == "/" {
		return dsec.Errorf(dsec.Invalid, "the root cannot be removed")
	}
	if _, err := t.find(root); err != nil {
		return err
	}
	for p := range t.files {
		if p == root || strings.HasPrefix(p, root+"/") {
			delete(t.files, p)
		}
	}
	return nil
}

func (f files) Chmod(_ context.Context, _ dsec.Call, op dsec.FileOp, mode uint32) error {
	t, err := f.table()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	x, err := t.find(op.Path)
	if err == nil {
		x.mode = mode
	}
	return err
}

var errNone = dsec.Errorf(dsec.Unsupported, "a synthetic machine does not do this")

func (f files) Chown(context.Context, dsec.Call, dsec.FileOp, string) error   { return errNone }
func (f files) Symlink(context.Context, dsec.Call, dsec.FileOp, string) error { return errNone }
func (f files) Pack(context.Context, dsec.Call, dsec.FileOp) (io.ReadCloser, error) {
	return nil, errNone
}
func (f files) Unpack(context.Context, dsec.Call, dsec.FileOp, io.Reader) error { return errNone }

// Watch says it is ready and then nothing until ctx ends.
func (f files) Watch(ctx context.Context, _ dsec.Call, op dsec.FileOp, _ dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) {
		if err := f.m.alive(); err != nil {
			yield(dsec.WatchEvent{}, err)
			return
		}
		if !yield(dsec.WatchEvent{Op: dsec.OpReady, Path: clean(op.Path)}, nil) {
			return
		}
		select {
		case <-ctx.Done():
		case <-f.m.done:
			yield(dsec.WatchEvent{}, f.m.alive())
		}
	}
}

// EchoPort is the one port that is open in every synthetic machine: it sends
// back what it gets.
const EchoPort = 7

type ports struct{ m *machine }

var _ dsec.Ports = ports{}

func (p ports) Dial(_ context.Context, _ dsec.Call, port int) (dsec.PortConn, error) {
	if err := p.m.alive(); err != nil {
		return nil, err
	}
	if port != EchoPort {
		return nil, dsec.Errorf(dsec.Unavailable, "nothing listens on port %d", port)
	}
	r, w := io.Pipe()
	return &echo{r, w}, nil
}

// echo is a loop: what is written is read.
type echo struct {
	*io.PipeReader
	w *io.PipeWriter
}

func (e *echo) Write(b []byte) (int, error) { return e.w.Write(b) }
func (e *echo) CloseWrite() error           { return e.w.Close() }
func (e *echo) Close() error {
	e.w.CloseWithError(io.ErrClosedPipe)
	return e.PipeReader.Close()
}

package rpctest

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"iter"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// files keeps files in a map from path to content.
type files struct{ f *Fake }

// in runs do on the files of a sandbox.
func (s files) in(ctx context.Context, op string, on dsec.Call, do func(b *box) error) error {
	if err := s.f.enter(ctx, op); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.live(on.Sandbox)
	if err != nil {
		return err
	}
	err = do(b)
	s.f.cond.Broadcast()
	return dsec.WithOp("fake."+op, on.Sandbox, err)
}

func (b *box) file(f dsec.FileOp) (*file, error) {
	if x := b.files[f.Path]; x != nil {
		return x, nil
	}
	return nil, dsec.Errorf(dsec.NotFound, "no file %q", f.Path)
}

func (b *box) put(path string, t dsec.FileType, mode uint32, data []byte) *file {
	x := &file{FileInfo: dsec.FileInfo{Path: path, Type: t, Mode: mode, Size: int64(len(data)), ModTime: time.Unix(1700000000, 5).UTC(), Nlink: 1}, data: data}
	b.files[path] = x
	return x
}

func (s files) Stat(ctx context.Context, on dsec.Call, f dsec.FileOp) (i dsec.FileInfo, err error) {
	err = s.in(ctx, "Files.Stat", on, func(b *box) error {
		x, err := b.file(f)
		if err == nil {
			i = x.FileInfo
		}
		return err
	})
	return i, err
}

func (s files) List(ctx context.Context, on dsec.Call, f dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	return func(yield func(dsec.FileInfo, error) bool) {
		var all []dsec.FileInfo
		err := s.in(ctx, "Files.List", on, func(b *box) error {
			for _, p := range slices.Sorted(maps.Keys(b.files)) {
				rest, ok := strings.CutPrefix(p, strings.TrimSuffix(f.Path, "/")+"/")
				if ok && strings.Count(rest, "/") < depth {
					all = append(all, b.files[p].FileInfo)
				}
			}
			return nil
		})
		for _, i := range all {
			if !yield(i, nil) {
				return
			}
			if err = s.f.enter(ctx, "Files.List.next"); err != nil {
				break
			}
		}
		if err != nil {
			yield(dsec.FileInfo{}, err)
		}
	}
}

// failing reads b and asks Fail before every piece.
type failing struct {
	s   files
	ctx context.Context
	op  string
	r   io.Reader
}

func (f failing) Read(p []byte) (int, error) {
	if err := f.s.f.enter(f.ctx, f.op); err != nil {
		return 0, err
	}
	return f.r.Read(p[:min(len(p), 8<<10)])
}

func (s files) Read(ctx context.Context, on dsec.Call, f dsec.FileOp, r dsec.ReadRange) (rc io.ReadCloser, err error) {
	err = s.in(ctx, "Files.Read", on, func(b *box) error {
		x, err := b.file(f)
		if err != nil {
			return err
		}
		data := x.data[min(r.Offset, int64(len(x.data))):]
		if r.Length > 0 {
			data = data[:min(r.Length, int64(len(data)))]
		}
		rc = io.NopCloser(failing{s, ctx, "Files.Read.next", bytes.NewReader(data)})
		return nil
	})
	return rc, err
}

func (s files) Write(ctx context.Context, on dsec.Call, f dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (i dsec.FileInfo, err error) {
	if err := s.f.enter(ctx, "Files.Write.first"); err != nil {
		return i, err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return i, dsec.WithOp("fake.Write", on.Sandbox, err)
	}
	err = s.in(ctx, "Files.Write", on, func(b *box) error {
		if x := b.files[f.Path]; x != nil && opt.Append {
			data = append(x.data, data...)
		} else if x != nil && opt.At != nil {
			data = append(x.data[:*opt.At:*opt.At], data...)
		}
		i = b.put(f.Path, dsec.TypeFile, cmp.Or(opt.Mode, 0o644), data).FileInfo
		return nil
	})
	return i, err
}

func (s files) Mkdir(ctx context.Context, on dsec.Call, f dsec.FileOp, mode uint32) error {
	return s.in(ctx, "Files.Mkdir", on, func(b *box) error {
		b.put(f.Path, dsec.TypeDir, mode, nil)
		return nil
	})
}

func (s files) Move(ctx context.Context, on dsec.Call, f dsec.FileOp, to string) error {
	return s.in(ctx, "Files.Move", on, func(b *box) error {
		x, err := b.file(f)
		if err == nil {
			delete(b.files, f.Path)
			x.Path = to
			b.files[to] = x
		}
		return err
	})
}

func (s files) Remove(ctx context.Context, on dsec.Call, f dsec.FileOp) error {
	return s.in(ctx, "Files.Remove", on, func(b *box) error {
		_, err := b.file(f)
		delete(b.files, f.Path)
		return err
	})
}

func (s files) Chmod(ctx context.Context, on dsec.Call, f dsec.FileOp, mode uint32) error {
	return s.in(ctx, "Files.Chmod", on, func(b *box) error {
		x, err := b.file(f)
		if err == nil {
			x.Mode = mode
		}
		return err
	})
}

func (s files) Chown(ctx context.Context, on dsec.Call, f dsec.FileOp, owner string) error {
	return s.in(ctx, "Files.Chown", on, func(b *box) error {
		x, err := b.file(f)
		if err != nil {
			return err
		}
		n, err := strconv.ParseUint(owner, 10, 32)
		if err != nil {
			return dsec.Errorf(dsec.Invalid, "no user %q", owner)
		}
		x.UID = uint32(n)
		return nil
	})
}

func (s files) Symlink(ctx context.Context, on dsec.Call, f dsec.FileOp, target string) error {
	return s.in(ctx, "Files.Symlink", on, func(b *box) error {
		if b.files[f.Path] != nil {
			return dsec.Errorf(dsec.Exists, "file %q exists", f.Path)
		}
		b.put(f.Path, dsec.TypeSymlink, 0o777, nil).Target = target
		return nil
	})
}

// Watch reports what is made below the path.
func (s files) Watch(ctx context.Context, on dsec.Call, f dsec.FileOp, _ dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) {
		seen := map[string]bool{}
		fresh := func() (out []string) {
			for _, b := range s.f.boxes {
				for p := range b.files {
					if b.ID == on.Sandbox && !seen[p] && strings.HasPrefix(p, f.Path) {
						out = append(out, p)
						seen[p] = true
					}
				}
			}
			return out
		}
		if err := s.in(ctx, "Files.Watch", on, func(*box) error { fresh(); return nil }); err != nil {
			yield(dsec.WatchEvent{}, err)
			return
		}
		if !yield(dsec.WatchEvent{Op: dsec.OpReady}, nil) {
			return
		}
		for {
			var found []string
			s.f.mu.Lock()
			err := s.f.wait(ctx, func() bool { found = fresh(); return len(found) > 0 })
			s.f.mu.Unlock()
			if err != nil {
				yield(dsec.WatchEvent{}, err)
				return
			}
			for _, p := range found {
				if !yield(dsec.WatchEvent{Op: dsec.OpCreate, Path: p}, nil) {
					return
				}
			}
		}
	}
}

// Pack gives the names and contents below the path, one after the other.
func (s files) Pack(ctx context.Context, on dsec.Call, f dsec.FileOp) (rc io.ReadCloser, err error) {
	err = s.in(ctx, "Files.Pack", on, func(b *box) error {
		var out bytes.Buffer
		for _, p := range slices.Sorted(maps.Keys(b.files)) {
			if strings.HasPrefix(p, f.Path) {
				out.WriteString(p + "\n")
				out.Write(b.files[p].data)
			}
		}
		rc = io.NopCloser(failing{s, ctx, "Files.Pack.next", &out})
		return nil
	})
	return rc, err
}

// Unpack stores all it is given as one file.
func (s files) Unpack(ctx context.Context, on dsec.Call, f dsec.FileOp, r io.Reader) error {
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return s.in(ctx, "Files.Unpack", on, func(b *box) error {
		b.put(f.Path+"/unpacked", dsec.TypeFile, 0o644, data)
		return nil
	})
}

// ports has one service, on port 7: what is sent comes back, and at the end of
// the input "bye" follows.
type ports struct{ f *Fake }

func (s ports) Dial(ctx context.Context, on dsec.Call, port int) (dsec.PortConn, error) {
	if err := s.f.enter(ctx, "Ports.Dial"); err != nil {
		return nil, err
	}
	if port != 7 {
		return nil, dsec.Errorf(dsec.Unavailable, "nothing listens on port %d", port)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	served, err := l.Accept() // before l closes, which would reset what waits
	if err != nil {
		c.Close()
		return nil, err
	}
	go func() {
		defer served.Close()
		if _, err := io.Copy(served, served); err == nil {
			_, _ = served.Write([]byte("bye"))
		}
	}()
	return c.(*net.TCPConn), nil
}

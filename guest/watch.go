package guest

import (
	"context"
	"errors"
	"iter"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// renameWait is how long the second half of a rename may lag behind the first.
// The kernel queues them one after the other; only a full queue parts them.
const renameWait = 20 * time.Millisecond

// Watch implements dsec.Files. A reader that falls behind gets OpOverflow, as
// the kernel's queue is the only buffer.
func (f files) Watch(ctx context.Context, _ dsec.Call, op dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) {
		t, err := f.target(op)
		if err == nil {
			err = watch(ctx, t, opt.Recursive, yield)
		}
		if err != nil {
			yield(dsec.WatchEvent{}, fileError("watch", op.Path, err))
		}
	}
}

// watcher follows one tree. It belongs to one goroutine.
type watcher struct {
	id        identity
	recursive bool
	fd        int
	dirs      map[int32]string // watched folders
	byPath    map[string]int32
	seen      map[string]bool // told from a scan; their create events are old news
	from      string          // first half of a rename, waiting for the second
	cookie    uint32
	fromDir   bool
	out       func(dsec.WatchEvent) bool
	stopped   bool // nobody wants more
	gone      bool // the root is gone
}

func watch(ctx context.Context, t target, recursive bool, yield func(dsec.WatchEvent, error) bool) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if errors.Is(err, unix.EMFILE) {
		return dsec.Errorf(dsec.Exhausted, "too many watches: the limit is fs.inotify.max_user_instances")
	}
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) }) //nolint:errcheck // it has deadlines
	defer stop()
	w := &watcher{
		id: t.id, recursive: recursive, fd: fd,
		dirs: make(map[int32]string), byPath: make(map[string]int32), seen: make(map[string]bool),
	}
	w.out = func(e dsec.WatchEvent) bool {
		w.stopped = w.stopped || !yield(e, nil)
		return !w.stopped
	}
	root := strings.TrimRight(t.path, "/")
	if root == "" {
		root = "/"
	}
	if err := w.add(root, false); err != nil {
		return err
	}
	if !w.out(dsec.WatchEvent{Op: dsec.OpReady, Path: root}) {
		return nil
	}
	return w.loop(ctx, f, root)
}

func (w *watcher) loop(ctx context.Context, f *os.File, root string) error {
	buf := make([]byte, 16<<10)
	for !w.stopped && !w.gone {
		if w.from != "" {
			f.SetReadDeadline(time.Now().Add(renameWait)) //nolint:errcheck // as above
		}
		n, err := f.Read(buf)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if w.from != "" {
			f.SetReadDeadline(time.Time{}) //nolint:errcheck // as above
			if ctx.Err() != nil {          // its deadline may just have been undone
				return context.Cause(ctx)
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				w.movedOut()
				continue
			}
		}
		if err != nil {
			return err
		}
		if err := w.events(buf[:n], root); err != nil {
			return err
		}
		if left, err := unix.IoctlGetInt(w.fd, unix.TIOCINQ); err == nil && left == 0 {
			clear(w.seen) // whatever a scan foresaw has come
		}
	}
	return nil
}

// events handles what one read gave.
func (w *watcher) events(b []byte, root string) error {
	for len(b) >= unix.SizeofInotifyEvent && !w.stopped && !w.gone {
		e := *(*unix.InotifyEvent)(unsafe.Pointer(&b[0]))
		end := unix.SizeofInotifyEvent + int(e.Len)
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:end]), "\x00")
		b = b[end:]
		if err := w.event(e, name, root); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) event(e unix.InotifyEvent, name, root string) error {
	if e.Mask&unix.IN_Q_OVERFLOW != 0 {
		w.from = ""
		if !w.out(dsec.WatchEvent{Op: dsec.OpOverflow, Path: root}) {
			return nil
		}
		return w.add(root, false) // folders made meanwhile are watched again
	}
	dir, ok := w.dirs[e.Wd]
	if !ok {
		return nil
	}
	isDir := e.Mask&unix.IN_ISDIR != 0
	if name == "" {
		return w.self(e, dir, root)
	}
	p := dir + "/" + name
	if dir == "/" {
		p = "/" + name
	}
	if w.from != "" && (e.Mask&unix.IN_MOVED_TO == 0 || e.Cookie != w.cookie) {
		w.movedOut()
	}
	temp := strings.HasPrefix(name, tempPrefix)
	switch {
	case e.Mask&unix.IN_MOVED_FROM != 0:
		w.from, w.cookie, w.fromDir = p, e.Cookie, isDir
	case e.Mask&unix.IN_MOVED_TO != 0:
		return w.movedTo(p, isDir)
	case temp: // a file that is being written here
	case e.Mask&unix.IN_CREATE != 0:
		if w.seen[p] {
			delete(w.seen, p)
			return nil
		}
		if w.out(dsec.WatchEvent{Op: dsec.OpCreate, Path: p}) && isDir && w.recursive {
			return w.add(p, true)
		}
	case e.Mask&unix.IN_MODIFY != 0:
		w.out(dsec.WatchEvent{Op: dsec.OpWrite, Path: p})
	case e.Mask&unix.IN_ATTRIB != 0:
		w.out(dsec.WatchEvent{Op: dsec.OpChmod, Path: p})
	case e.Mask&unix.IN_DELETE != 0:
		delete(w.seen, p)
		w.out(dsec.WatchEvent{Op: dsec.OpRemove, Path: p})
	}
	return nil
}

// self handles what a watched folder says of itself. Its parent, if watched
// too, tells the rest.
func (w *watcher) self(e unix.InotifyEvent, dir, root string) error {
	switch {
	case e.Mask&unix.IN_IGNORED != 0:
		delete(w.dirs, e.Wd)
		if w.byPath[dir] == e.Wd {
			delete(w.byPath, dir)
		}
	case dir != root:
	case e.Mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		w.out(dsec.WatchEvent{Op: dsec.OpRemove, Path: root})
		w.gone = true
	case e.Mask&unix.IN_ATTRIB != 0:
		w.out(dsec.WatchEvent{Op: dsec.OpChmod, Path: root})
	}
	return nil
}

// movedOut ends a rename whose other half lies outside.
func (w *watcher) movedOut() {
	p := w.from
	w.from = ""
	if w.fromDir {
		w.forget(p)
	}
	if !strings.HasPrefix(p[strings.LastIndexByte(p, '/')+1:], tempPrefix) {
		w.out(dsec.WatchEvent{Op: dsec.OpRemove, Path: p})
	}
}

// movedTo is the second half of a rename, or the only one.
func (w *watcher) movedTo(p string, isDir bool) error {
	from := w.from
	w.from = ""
	switch {
	case from == "":
		if !w.out(dsec.WatchEvent{Op: dsec.OpCreate, Path: p}) {
			return nil
		}
	case strings.HasPrefix(from[strings.LastIndexByte(from, '/')+1:], tempPrefix):
		// A file that was written here as one.
		w.out(dsec.WatchEvent{Op: dsec.OpWrite, Path: p})
		return nil
	default:
		if isDir {
			w.rename(from, p)
		}
		if !w.out(dsec.WatchEvent{Op: dsec.OpRename, Path: from, To: p}) {
			return nil
		}
	}
	if isDir && w.recursive {
		return w.add(p, from == "")
	}
	return nil
}

// below reports whether p is dir or in it.
func below(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, dir) && p[len(dir)] == '/'
}

// forget drops the watches of a folder that left.
func (w *watcher) forget(dir string) {
	for wd, p := range w.dirs {
		if below(p, dir) {
			unix.InotifyRmWatch(w.fd, uint32(wd)) //nolint:errcheck // it may be gone
			delete(w.dirs, wd)
			delete(w.byPath, p)
		}
	}
}

func (w *watcher) rename(from, to string) {
	for wd, p := range w.dirs {
		if below(p, from) {
			delete(w.byPath, p)
			w.dirs[wd] = to + p[len(from):]
			w.byPath[w.dirs[wd]] = wd
		}
	}
}

// add watches a folder, and below it if recursive. First the watch is set, then
// the folder is read, so that nothing made in it is missed; with tell what is
// found is told as created. Folders that vanish or that the user may not look
// into are left out, but for the first one.
func (w *watcher) add(dir string, tell bool) error {
	if _, known := w.byPath[dir]; known && tell {
		return nil
	}
	var names, dirs []string
	err := as(w.id, func() error {
		wd, err := unix.InotifyAddWatch(w.fd, dir, watchMask)
		if err != nil {
			return err
		}
		w.dirs[int32(wd)] = dir
		w.byPath[dir] = int32(wd)
		if !w.recursive {
			return nil
		}
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if names, err = readNames(fd); err != nil {
			return err
		}
		slices.Sort(names)
		for _, n := range names {
			var st unix.Stat_t
			if unix.Fstatat(fd, n, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				dirs = append(dirs, n)
			}
		}
		return nil
	})
	switch {
	case errors.Is(err, unix.ENOSPC):
		return dsec.Errorf(dsec.Exhausted, "too many folders to watch: the limit is fs.inotify.max_user_watches")
	case err != nil && len(w.dirs) > 0 && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EACCES)):
		return nil
	case err != nil:
		return err
	}
	base := strings.TrimRight(dir, "/") + "/"
	if tell {
		for _, n := range names {
			if strings.HasPrefix(n, tempPrefix) {
				continue
			}
			w.seen[base+n] = true
			if !w.out(dsec.WatchEvent{Op: dsec.OpCreate, Path: base + n}) {
				return nil
			}
		}
	}
	for _, n := range dirs {
		if err := w.add(base+n, tell); err != nil || w.stopped {
			return err
		}
	}
	return nil
}

package guest

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/wire"
)

// cells is the agent's part in calls that run in cells: files, streams, limits.
// The room itself is package jail's; what runs warm is in warm.go.
type cells struct {
	mu   sync.Mutex
	warm map[string]*warm
}

var _ wire.CellHandler = (*Agent)(nil)

func (a *Agent) cellBox() (*jail.Box, error) {
	if a.opt.Cells == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "this sandbox runs no commands in cells")
	}
	return a.opt.Cells, nil
}

// Stage implements wire.CellHandler.
func (a *Agent) Stage(_ context.Context, name string, files []wire.CellFile) error {
	box, err := a.cellBox()
	if err != nil {
		return err
	}
	if !plainName(name) {
		return dsec.Errorf(dsec.Invalid, "stage %q is no plain name", clip(name))
	}
	at := box.Builds() + "/" + name
	if _, err := os.Stat(at); err == nil {
		return nil
	}
	tmp, err := os.MkdirTemp(box.Builds(), "new")
	if err != nil {
		return short(err)
	}
	defer os.RemoveAll(tmp)
	for _, f := range files {
		if !plainName(f.Path) {
			return dsec.Errorf(dsec.Invalid, "staged file %q is no plain name", clip(f.Path))
		}
		if err := os.WriteFile(tmp+"/"+f.Path, f.Data, 0o600); err != nil {
			return short(err)
		}
		if err := os.Chmod(tmp+"/"+f.Path, os.FileMode(f.Mode&0o555|0o444)); err != nil {
			return err
		}
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	if err := os.Rename(tmp, at); err != nil && !errors.Is(err, os.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

func plainName(s string) bool {
	return s != "" && len(s) < 200 && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}

// CallCell implements wire.CellHandler.
func (a *Agent) CallCell(ctx context.Context, c wire.CellCall) (wire.CellResult, error) {
	box, err := a.cellBox()
	if err != nil {
		return wire.CellResult{}, err
	}
	id, err := a.identity(c.User)
	if err != nil {
		return wire.CellResult{}, err
	}
	w := a.findWarm(c.Warm)
	if c.Warm != "" && w == nil {
		return wire.CellResult{}, dsec.Errorf(dsec.NotFound, "no warm program has the name %q", clip(c.Warm))
	}
	if c.Build != "" {
		if _, err := os.Stat(box.Builds() + "/" + c.Build); err != nil || !plainName(c.Build) {
			return wire.CellResult{}, dsec.Errorf(dsec.NotFound, "no stage has the name %q", clip(c.Build))
		}
	}
	p := Process{Argv: c.Argv, Env: environ(a.opt.Env, c.Env, id.home, false), Dir: c.Dir, UID: id.uid, GID: id.gid, Groups: id.groups}
	if w == nil {
		if len(c.Argv) == 0 {
			return wire.CellResult{}, dsec.Errorf(dsec.Invalid, "a call without a program")
		}
		if p.Path = c.Argv[0]; !strings.Contains(p.Path, "/") {
			if p.Path, err = findProgram(p.Path, getenv(p.Env, "PATH"), "/", id); err != nil {
				return notInCell(c.Argv[0], err)
			}
		}
	}
	cell, err := box.OpenCell(jail.CellConfig{
		Limits: jail.CellLimits{Memory: c.Memory, Pids: c.Pids}, Build: c.Build, BuildAt: c.BuildAt,
	})
	if err != nil {
		return wire.CellResult{}, short(err)
	}
	r := &cellRun{cell: cell, call: &c, id: id}
	res, err := r.run(ctx, p, w)
	if e := cell.Close(); e != nil && err == nil {
		res.Broken = true
		res.Detail = e.Error()
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return res, err
}

func notInCell(program string, err error) (wire.CellResult, error) {
	code, detail, ok := notStarted(err)
	if !ok {
		return wire.CellResult{}, short(err)
	}
	return wire.CellResult{End: wire.CellNoStart, Code: code, Detail: clip(program) + ": " + detail}, nil
}

// cellRun is one call under way.
type cellRun struct {
	cell *jail.Cell
	call *wire.CellCall
	id   identity

	mu  sync.Mutex
	end wire.CellEnd // why it was ended; empty while it goes
}

// kill ends the call for a reason, unless it was ended for another.
func (r *cellRun) kill(why wire.CellEnd) {
	r.mu.Lock()
	if r.end == "" {
		r.end = why
	}
	r.mu.Unlock()
	r.cell.Kill() //nolint:errcheck // gone is as good
}

func (r *cellRun) run(ctx context.Context, p Process, w *warm) (res wire.CellResult, err error) {
	c := r.call
	if err := r.files(); err != nil {
		return res, err
	}
	var child [3]*os.File
	var outs [2]*capped
	defer func() {
		for _, f := range child {
			if f != nil {
				f.Close()
			}
		}
		for _, o := range outs {
			if o != nil {
				o.f.Close()
			}
		}
	}()
	feed, in, err := r.stdin()
	if err != nil {
		return res, short(err)
	}
	child[0] = in
	if feed != nil {
		defer feed.Close()
	}
	for i := range outs {
		ours, theirs, err := pipe(0)
		if err != nil {
			return res, short(err)
		}
		child[1+i], outs[i] = theirs, &capped{f: ours, limit: c.Output}
	}
	p.Stdin, p.Stdout, p.Stderr = child[0], child[1], child[2]

	stop := context.AfterFunc(ctx, func() { r.kill(wire.CellExited) })
	defer stop()
	begin := time.Now()
	if c.Wall > 0 {
		t := time.AfterFunc(c.Wall, func() { r.kill(wire.CellWall) })
		defer t.Stop()
	}
	if c.CPU > 0 {
		watch := r.watchCPU()
		defer close(watch)
	}
	var wait func() (jail.Exit, error)
	if w != nil {
		wait, err = w.fork(r.cell, p)
	} else {
		var proc *jail.CellProcess
		proc, err = r.cell.Start(jail.Process{
			Path: p.Path, Argv: p.Argv, Env: p.Env, Dir: p.Dir, UID: p.UID, GID: p.GID, Groups: p.Groups,
			Stdin: p.Stdin, Stdout: p.Stdout, Stderr: p.Stderr,
		})
		if err != nil {
			return notInCell(p.Argv[0], err)
		}
		wait = proc.Wait
	}
	if err != nil {
		return res, err
	}
	for i, f := range child {
		f.Close()
		child[i] = nil
	}
	var pumps sync.WaitGroup
	for _, o := range outs {
		pumps.Go(func() { o.pump(func() { r.kill(wire.CellOutput) }) })
	}
	if feed != nil {
		// Ends with the cell at the latest: nobody reads any more then.
		pumps.Go(func() { feed.Write(c.Stdin); feed.Close() }) //nolint:errcheck // it need not read it
	}
	exit, err := wait()
	res.Wall = time.Since(begin)
	// Whatever it has left ends here, and with it the last writers of its pipes.
	r.mu.Lock()
	if r.end == "" {
		r.end = wire.CellExited
	}
	end := r.end
	r.mu.Unlock()
	r.cell.Kill() //nolint:errcheck // gone is as good
	pumps.Wait()
	if err != nil {
		return wire.CellResult{Broken: true}, err
	}
	if ctx.Err() != nil {
		return res, context.Cause(ctx)
	}
	u := r.cell.Usage()
	res.CPU, res.Memory = u.CPU, u.Peak
	res.Out, res.Err = outs[0].b, outs[1].b
	res.Stdout, res.Stderr = outs[0].stat(), outs[1].stat()
	if exit.Signal != 0 {
		res.Signal = signalName(exit.Signal)
	} else {
		res.Code = exit.Code
	}
	switch {
	case end == wire.CellExited && u.OOMKills > 0 && (exit.Signal != 0 || exit.Code != 0):
		end = wire.CellMemory
	case end == wire.CellExited && (res.Stdout.Truncated() || res.Stderr.Truncated()):
		end = wire.CellOutput // it ended before it could be
	case end == wire.CellExited && c.CPU > 0 && u.CPU >= c.CPU && exit.Signal != 0:
		end = wire.CellCPU
	}
	res.End = end
	if c.Collect != "" && end == wire.CellExited && exit.Signal == 0 && exit.Code == 0 {
		res.Files, res.TooMuch, err = r.collect()
	}
	return res, err
}

// watchCPU ends the call when its processes have used their time. It looks at
// the earliest moment at which they can have, and sleeps on.
func (r *cellRun) watchCPU() chan struct{} {
	stop := make(chan struct{})
	cpus := time.Duration(runtime.NumCPU())
	go func() {
		left := r.call.CPU
		for {
			select {
			case <-stop:
				return
			case <-time.After(max(left/cpus, 2*time.Millisecond)):
			}
			if left = r.call.CPU - r.cell.Usage().CPU; left <= 0 {
				r.kill(wire.CellCPU)
				return
			}
		}
	}()
	return stop
}

// stdin makes the call's input. What fits in a pipe is in it before the call
// begins; only more needs somebody to write.
func (r *cellRun) stdin() (feed, child *os.File, err error) {
	const pipeSize = 64 << 10
	if len(r.call.Stdin) == 0 {
		child, err = os.OpenFile(os.DevNull, os.O_RDONLY, 0)
		return nil, child, err
	}
	if feed, child, err = pipe(1); err != nil {
		return nil, nil, err
	}
	if len(r.call.Stdin) <= pipeSize {
		_, err = feed.Write(r.call.Stdin)
		feed.Close()
		return nil, child, err
	}
	return feed, child, nil
}

// capped is the beginning of an output stream.
type capped struct {
	f     *os.File
	limit int64
	b     []byte
	total int64
}

func (o *capped) stat() dsec.StreamStat {
	return dsec.StreamStat{Total: o.total, Kept: int64(len(o.b))}
}

// pump reads to the end, and calls full once when there is more than the limit.
func (o *capped) pump(full func()) {
	buf := pumpBuffers.Get().(*[pumpBuffer]byte)
	defer pumpBuffers.Put(buf)
	for {
		n, err := o.f.Read(buf[:])
		was := o.total
		o.total += int64(n)
		if room := o.limit - int64(len(o.b)); room > 0 && n > 0 {
			o.b = append(o.b, buf[:min(int64(n), room)]...)
		}
		if was <= o.limit && o.total > o.limit {
			full()
		}
		if err != nil {
			return
		}
	}
}

// files puts what the call brings along into the cell. Nothing of the call runs
// yet, so links can only be the image's, and RESOLVE_IN_ROOT keeps them inside.
func (r *cellRun) files() error {
	c := r.call
	made := map[string]bool{"/": true, ".": true}
	for _, d := range []string{c.Dir, c.Collect} {
		if d != "" {
			if err := r.folder(d, made); err != nil {
				return err
			}
		}
	}
	for _, f := range c.Files {
		p := path.Join(c.Dir, f.Path)
		if err := r.folder(path.Dir(p), made); err != nil {
			return err
		}
		mode := f.Mode & 0o777
		if mode == 0 {
			mode = 0o644
		}
		fd, err := r.open(p, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW, mode)
		if err != nil {
			return fileFault(p, err)
		}
		file := os.NewFile(uintptr(fd), p)
		_, err = file.Write(f.Data)
		if err == nil {
			err = file.Chmod(os.FileMode(mode))
		}
		if err == nil {
			err = file.Chown(int(r.id.uid), int(r.id.gid))
		}
		if err = errors.Join(err, file.Close()); err != nil {
			return fileFault(p, err)
		}
	}
	return nil
}

func fileFault(p string, err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return dsec.Errorf(dsec.Invalid, "file %q does not fit: files take at most half of the call's memory", clip(p))
	}
	return dsec.Errorf(dsec.Invalid, "file %q cannot be made: %w", clip(p), err)
}

func (r *cellRun) open(p string, flags int, mode uint32) (int, error) {
	if flags&unix.O_CREAT == 0 {
		mode = 0
	}
	return unix.Openat2(r.cell.Root(), strings.TrimPrefix(p, "/"), &unix.OpenHow{
		Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: unix.RESOLVE_IN_ROOT,
	})
}

// folder makes a folder with those above it. A new one is the user's.
func (r *cellRun) folder(dir string, made map[string]bool) error {
	if made[dir] {
		return nil
	}
	if err := r.folder(path.Dir(dir), made); err != nil {
		return err
	}
	parent := r.cell.Root()
	if up := path.Dir(dir); up != "/" {
		fd, err := r.open(up, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return fileFault(dir, err)
		}
		defer unix.Close(fd)
		parent = fd
	}
	err := unix.Mkdirat(parent, path.Base(dir), 0o755)
	switch {
	case errors.Is(err, unix.EEXIST):
		// The working folder is the user's also where the image has it.
		if dir != r.call.Dir && dir != r.call.Collect {
			err = nil
			break
		}
		fallthrough
	case err == nil:
		err = unix.Fchownat(parent, path.Base(dir), int(r.id.uid), int(r.id.gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return fileFault(dir, err)
	}
	made[dir] = true
	return nil
}

// collect reads the regular files of a folder once nothing of the call runs.
func (r *cellRun) collect() (out []wire.CellFile, tooMuch bool, err error) {
	fd, err := unix.Openat2(r.cell.Root(), strings.TrimPrefix(r.call.Collect, "/"), &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, false, nil //nolint:nilerr // it was removed: nothing to give
	}
	dir := os.NewFile(uintptr(fd), r.call.Collect)
	defer dir.Close()
	names, err := dir.Readdirnames(1024)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, false, short(err)
	}
	left := int64(wire.MaxCollect)
	for _, n := range names {
		f, err := unix.Openat(fd, n, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		file := os.NewFile(uintptr(f), n)
		var st unix.Stat_t
		if unix.Fstat(f, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			file.Close()
			continue
		}
		if left -= st.Size; left < 0 {
			file.Close()
			return nil, true, nil
		}
		b, err := io.ReadAll(io.LimitReader(file, st.Size))
		file.Close()
		if err != nil {
			return nil, false, short(err)
		}
		out = append(out, wire.CellFile{Path: n, Mode: st.Mode & 0o777, Data: b})
	}
	return out, false, nil
}

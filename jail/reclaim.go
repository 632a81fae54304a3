package jail

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A workload that runs is never swapped: what its limit lets it have stays in
// memory. One that stands still is the first whose pages may go.
const (
	swapNever = "0"
	swapFirst = "100"
)

// Frozen reports whether the workload was told to stand still.
func (g *Group) Frozen() bool {
	if g.c.v2 {
		return readInt(g.path("", "work", "cgroup.freeze")) == 1
	}
	return readInt(g.path("freezer", "freezer.self_freezing")) == 1
}

// AllowSwap lets the workload's memory be moved to swap; KeepInMemory undoes
// it for what is not there yet. A kernel without swap has neither.
func (g *Group) AllowSwap() error    { return g.setSwap(swapFirst, "max") }
func (g *Group) KeepInMemory() error { return g.setSwap(swapNever, swapNever) }

func (g *Group) setSwap(v1, v2 string) error {
	path, text := g.path("memory", "memory.swappiness"), v1
	if g.c.v2 {
		path, text = g.path("", "work", "memory.swap.max"), v2
	}
	if err := writeFile(path, text); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("allow swap: %w", err)
	}
	return nil
}

// Reclaim gives memory of the workload back to the host, its file pages and,
// where AllowSwap was called and there is swap, all others. It stops when
// target bytes are back, if the kernel can be told so, or when no more comes.
// target 0 means all. The bytes that came back are valid beside an error too.
func (g *Group) Reclaim(ctx context.Context, target int64) (int64, error) {
	before := g.memory()
	err := g.reclaim(ctx, target)
	return max(before-g.memory(), 0), err
}

func (g *Group) memory() int64 {
	if g.c.v2 {
		return readInt(g.path("", "work", "memory.current"))
	}
	return readInt(g.path("memory", "memory.usage_in_bytes"))
}

// reclaimStep is how much is asked for in one go on v2, so that ctx is looked
// at now and then.
const reclaimStep = 16 << 20

func (g *Group) reclaim(ctx context.Context, target int64) error {
	var err error
	if g.c.v2 {
		left := target
		if target == 0 {
			left = g.memory()
		}
		for path := g.path("", "work", "memory.reclaim"); left > 0 && err == nil; left -= reclaimStep {
			if err = context.Cause(ctx); err == nil {
				err = writeFile(path, strconv.FormatInt(min(left, reclaimStep), 10))
			}
		}
		if errors.Is(err, unix.EAGAIN) { // less came than was asked for: that was all
			return nil
		}
	} else {
		err = interruptible(ctx, func() error { return writeOnce(g.path("memory", "memory.force_empty"), swapNever) })
		if errors.Is(err, unix.EBUSY) {
			return nil
		}
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return g.pageOut(ctx)
	}
	if err != nil {
		return fmt.Errorf("reclaim memory: %w", err)
	}
	return nil
}

// interruptible runs a long system call that ends with EINTR on any signal, on
// a thread that gets one when ctx ends. The runtime ignores a SIGURG that it
// did not ask for.
func interruptible(ctx context.Context, call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tid, done, watched := unix.Gettid(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		for { // the call may not have begun yet
			unix.Tgkill(os.Getpid(), tid, unix.SIGURG) //nolint:errcheck // the thread is there
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	var err error
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		if err = context.Cause(ctx); err == nil {
			err = call()
		}
	}
	close(done)
	<-watched
	return err
}

// writeOnce is writeFile that tells of a signal.
func writeOnce(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

// pageOut is Reclaim for kernels that cannot be asked for it by group.
func (g *Group) pageOut(ctx context.Context) error {
	_, err := g.advise(ctx, unix.MADV_PAGEOUT, 1<<62)
	if err != nil {
		return fmt.Errorf("page out: %w", err)
	}
	return nil
}

// Prefault asks for pages of the workload that are in swap before it misses
// them, at most limit bytes of address space. It is best effort: a process may
// end meanwhile.
func (g *Group) Prefault(ctx context.Context, limit int64) {
	if g.swapped() > 0 {
		g.advise(ctx, unix.MADV_WILLNEED, limit) //nolint:errcheck // missing them is only slower
	}
}

// swapped is how many bytes of the workload are in swap.
func (g *Group) swapped() int64 {
	if g.c.v2 {
		return readInt(g.path("", "work", "memory.swap.current"))
	}
	b, _ := os.ReadFile(g.path("memory", "memory.stat"))
	return Count(string(b), "swap ")
}

// advise gives a piece of advice for the private memory of all processes of the
// workload, up to limit bytes.
func (g *Group) advise(ctx context.Context, advice int, limit int64) (int64, error) {
	var given int64
	for _, pid := range g.pids() {
		n, err := advise(ctx, pid, advice, limit-given)
		given += n
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			return given, err
		}
		if given >= limit {
			break
		}
	}
	return given, nil
}

// pids lists the processes of the commands, as the host counts.
func (g *Group) pids() []int {
	top := g.path("freezer")
	if g.c.v2 {
		top = g.path("", "work")
	}
	files, _ := filepath.Glob(filepath.Join(top, "*", "cgroup.procs"))
	var out []int
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, s := range strings.Fields(string(b)) {
			if p, err := strconv.Atoi(s); err == nil && p > 0 {
				out = append(out, p)
			}
		}
	}
	return out
}

// adviseAtOnce is how many ranges process_madvise takes.
const adviseAtOnce = 512

func advise(ctx context.Context, pid, advice int, limit int64) (int64, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	ranges, err := privateRanges(pid, limit)
	if err != nil {
		return 0, err
	}
	var given int64
	for len(ranges) > 0 {
		if err := context.Cause(ctx); err != nil {
			return given, err
		}
		part := ranges[:min(len(ranges), adviseAtOnce)]
		n, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&part[0])), uintptr(len(part)), uintptr(advice), 0, 0)
		if errno != 0 {
			return given, errno
		}
		given += int64(n)
		ranges = ranges[len(part):]
	}
	return given, nil
}

// remoteRange is a struct iovec of another process.
type remoteRange struct{ base, length uint64 }

// privateRanges lists the private writable memory of a process, up to limit
// bytes.
func privateRanges(pid int, limit int64) ([]remoteRange, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []remoteRange
	for sc := bufio.NewScanner(f); sc.Scan() && limit > 0; {
		r, ok := parseRange(sc.Text())
		if !ok {
			continue
		}
		r.length = min(r.length, uint64(limit))
		limit -= int64(r.length)
		out = append(out, r)
	}
	return out, nil
}

// parseRange reads a line of /proc/PID/maps, "55e0-55e1 rw-p ...", and reports
// whether it is private and writable.
func parseRange(line string) (remoteRange, bool) {
	span, rest, _ := strings.Cut(line, " ")
	from, to, _ := strings.Cut(span, "-")
	a, err1 := strconv.ParseUint(from, 16, 64)
	b, err2 := strconv.ParseUint(to, 16, 64)
	if err1 != nil || err2 != nil || b <= a || len(rest) < 4 || rest[1] != 'w' || rest[3] != 'p' {
		return remoteRange{}, false
	}
	return remoteRange{a, b - a}, true
}

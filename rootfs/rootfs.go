// Package rootfs makes environments mountable: one shared, reference-counted
// EROFS mount per layer and node, and an overlay of them for each sandbox. All
// mounts are detached: they are in no mount table, and vanish with the last
// descriptor or namespace that holds them. Kernels before 6.15 want layers to be
// attached somewhere, see attic.go; they are in no table of the host's either.
//
// It does not know names, images or blobs: a layer is a metadata image and its
// data devices as local files, which package image verifies and hands over. It
// does not make namespaces; the driver gives the user namespace whose ids the
// lowers are mapped to.
//
// Invariants:
//   - Two sandboxes that use the same layer on a node share one superblock, and
//     so its page cache.
//   - A layer is unmounted when nobody holds it and IdleLayers others are kept
//     already.
//   - Nothing here writes to a layer.
//
// Read next: overlay.go, then driver/container.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Layer is what a layer is mounted from: local files.
type Layer struct {
	Digest string   // of its manifest; the key of sharing
	Meta   string   // EROFS metadata image
	Data   []string // data devices, in the order of its device table
	Lazy   bool     // reading may have to wait for a store
}

// Source finds a layer's verified local files.
type Source interface {
	Layer(ctx context.Context, digest string) (Layer, error)
}

// IdleLayers is how many layers without a user stay mounted.
const IdleLayers = 64

// Layers is the node's table of shared layer mounts. It is safe for concurrent
// use.
type Layers struct {
	source Source
	holder Holder // of mounts; nil: they end with the process

	mu    sync.Mutex
	table map[string]*shared
	idle  []string // digests without users, the longest idle first
}

type shared struct {
	users int
	ready chan struct{} // closed when mount or err is set
	mount *os.File
	held  string // its name in the holder; "" if it is not there
	err   error
}

// NewLayers makes an empty table over s.
func NewLayers(s Source) *Layers {
	return &Layers{source: s, table: map[string]*shared{}}
}

// Acquire returns the mounts of the named layers, mounting those that are not
// yet. The files stay the table's; release gives them back, once.
func (l *Layers) Acquire(ctx context.Context, digests []string) (mounts []*os.File, release func(), err error) {
	got := make([]string, 0, len(digests))
	release = sync.OnceFunc(func() {
		for _, d := range got {
			l.release(d)
		}
	})
	for _, d := range digests {
		m, err := l.acquire(ctx, d)
		if err != nil {
			release()
			return nil, nil, fmt.Errorf("mount layer %s: %w", d, err)
		}
		got = append(got, d)
		mounts = append(mounts, m)
	}
	return mounts, release, nil
}

func (l *Layers) acquire(ctx context.Context, digest string) (*os.File, error) {
	l.mu.Lock()
	s, ok := l.table[digest]
	if !ok {
		s = &shared{ready: make(chan struct{})}
		l.table[digest] = s
	}
	s.users++
	l.mu.Unlock()
	if !ok {
		// The mount outlives the call that asked first, so its deadline does
		// not decide for the others that wait.
		s.mount, s.held, s.err = l.mount(context.WithoutCancel(ctx), digest)
		close(s.ready)
	}
	select {
	case <-s.ready:
	case <-ctx.Done():
		l.release(digest)
		return nil, ctx.Err()
	}
	if s.err != nil {
		l.release(digest)
		return nil, s.err
	}
	return s.mount, nil
}

func (l *Layers) mount(ctx context.Context, digest string) (m *os.File, held string, err error) {
	layer, err := l.source.Layer(ctx, digest)
	if err != nil {
		return nil, "", err
	}
	if m, err = MountLayer(layer); err != nil {
		return nil, "", err
	}
	return m, l.hold(digest, layer, m), nil
}

func (l *Layers) release(digest string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.table[digest]
	if s == nil {
		return
	}
	if s.users--; s.users > 0 {
		return
	}
	select {
	case <-s.ready:
	default:
		return // still being mounted by a caller that will look again
	}
	if s.err != nil {
		delete(l.table, digest)
		return
	}
	l.idle = append(l.idle, digest)
	for len(l.idle) > IdleLayers {
		l.drop(l.idle[0])
	}
}

// drop unmounts an idle layer, or forgets that it was idle.
// Requires: l.mu held.
func (l *Layers) drop(digest string) {
	for i, d := range l.idle {
		if d == digest {
			l.idle = append(l.idle[:i:i], l.idle[i+1:]...)
			break
		}
	}
	if s := l.table[digest]; s != nil && s.users == 0 {
		l.letGo(s)
		Unmount(s.mount) //nolint:errcheck // at worst it stays until the process ends
		delete(l.table, digest)
	}
}

// Forget unmounts every layer without a user: before blobs are deleted.
func (l *Layers) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.idle) > 0 {
		l.drop(l.idle[0])
	}
}

// InUse lists the digests that are mounted.
func (l *Layers) InUse() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for d := range l.table {
		out = append(out, d)
	}
	return out
}

// MountLayer mounts an EROFS layer read-only and detached; Unmount ends that.
// Files that are no such layer are Invalid, with the kernel's reason.
func MountLayer(l Layer) (*os.File, error) {
	m, err := mountErofs(l.Meta, l.Data)
	if errors.Is(err, unix.ENOTBLK) {
		m, err = mountErofsLoop(l) // a kernel before 6.12
	}
	return m, err
}

func mountErofs(meta string, data []string) (*os.File, error) {
	fs, err := openFS("erofs")
	if err != nil {
		return nil, err
	}
	defer fs.close()
	fs.set("source", meta)
	fs.flag("ro")
	for _, d := range data {
		fs.set("device", d)
	}
	return fs.mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV)
}

// fsContext is a file system being configured; the first error sticks.
type fsContext struct {
	name string
	fd   int
	err  error
}

func openFS(name string) (*fsContext, error) {
	fd, err := unix.Fsopen(name, unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.ENODEV) {
		return nil, dsec.Errorf(dsec.Unsupported, "the kernel has no file system %s", name)
	}
	if err != nil {
		return nil, fmt.Errorf("open file system %s: %w", name, err)
	}
	return &fsContext{name: name, fd: fd}, nil
}

func (f *fsContext) close() { unix.Close(f.fd) }

func (f *fsContext) set(key, value string) {
	if f.err == nil {
		f.err = f.explain("set "+key, unix.FsconfigSetString(f.fd, key, value))
	}
}

func (f *fsContext) setFile(key string, file *os.File) {
	if f.err == nil {
		f.err = f.explain("set "+key, unix.FsconfigSetFd(f.fd, key, int(file.Fd())))
	}
}

func (f *fsContext) flag(key string) {
	if f.err == nil {
		f.err = f.explain("set "+key, unix.FsconfigSetFlag(f.fd, key))
	}
}

func (f *fsContext) mount(attrs int) (*os.File, error) {
	if f.err == nil {
		f.err = f.explain("mount", unix.FsconfigCreate(f.fd))
	}
	if f.err != nil {
		return nil, f.err
	}
	fd, err := unix.Fsmount(f.fd, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return nil, f.explain("mount", err)
	}
	return os.NewFile(uintptr(fd), f.name), nil
}

// explain adds what the kernel wrote to the context's log.
func (f *fsContext) explain(what string, err error) error {
	if err == nil {
		return nil
	}
	var text []string
	buf := make([]byte, 4096)
	for {
		n, e := unix.Read(f.fd, buf)
		if n <= 0 || e != nil {
			break
		}
		text = append(text, strings.TrimSpace(string(buf[:n])))
	}
	if len(text) > 0 {
		return fmt.Errorf("%s %s: %w (%s)", what, f.name, err, strings.Join(text, "; "))
	}
	return fmt.Errorf("%s %s: %w", what, f.name, err)
}

package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// attic serves kernels before 6.15, which clone only mounts that are attached
// somewhere, and take lower layers by path alone. It is one thread in a mount
// namespace of its own, which holds nothing but an empty root: layers hang
// there under numbers, in no table of the host's, and vanish with the process.
// The host's own mounts are not kept busy by it.
type attic struct {
	work chan func()

	// Of the thread.
	next   int
	layers map[uint64]string // by mount id, the folder of a layer
}

// openAttic starts the process's only one with the first layer that needs it.
var openAttic = sync.OnceValues(func() (*attic, error) {
	a := &attic{work: make(chan func()), layers: map[uint64]string{}}
	ready := make(chan error)
	go onOwnThread(func() {
		err := emptyNamespace()
		ready <- err
		if err != nil {
			return
		}
		for w := range a.work {
			w()
		}
	})
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("make a mount namespace for layers: %w", err)
	}
	return a, nil
})

// onOwnThread runs f on a thread that nobody else ever runs on. It is not the
// main one: what /proc/self tells of mounts is of that, and the process would
// take f's for its own.
func onOwnThread(f func()) {
	runtime.LockOSThread() // never unlocked; but for the main one, the thread ends with the goroutine
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	done := make(chan struct{})
	go func() { // elsewhere, as long as this thread is taken
		defer close(done)
		onOwnThread(f)
	}()
	<-done
	runtime.UnlockOSThread()
}

// atticUsed says that openAttic was called.
var atticUsed atomic.Bool

// inAttic runs f on the attic's thread.
func inAttic(f func(*attic) error) error {
	atticUsed.Store(true)
	a, err := openAttic()
	if err != nil {
		return err
	}
	done := make(chan error)
	a.work <- func() { done <- f(a) }
	return <-done
}

// emptyNamespace gives the calling thread a mount namespace with an empty root
// that is its working folder.
func emptyNamespace() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	const at = "/proc" // any folder that every host has
	if err := unix.Mount("dsec-layers", at, "tmpfs", 0, "size=1m,mode=700"); err != nil {
		return err
	}
	if err := unix.Chdir(at); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// attach hangs up a detached mount.
func (a *attic) attach(mount *os.File, name string) error {
	if err := unix.Mkdir(name, 0o700); err != nil {
		return err
	}
	if err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		unix.Rmdir(name) //nolint:errcheck // just made, empty
		return fmt.Errorf("attach mount: %w", err)
	}
	return nil
}

func (a *attic) detach(name string) error {
	if err := unix.Unmount(name, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("detach mount: %w", err)
	}
	return unix.Rmdir(name)
}

// clone is idmapped for a layer, which hangs here from then on.
func (a *attic) clone(layer, userns *os.File) (*os.File, error) {
	id, err := mountID(layer)
	if err != nil {
		return nil, err
	}
	if a.layers[id] == "" {
		a.next++
		name := "layer" + strconv.Itoa(a.next)
		if err := a.attach(layer, name); err != nil {
			return nil, err
		}
		a.layers[id] = name
	}
	return idmapped(layer, userns)
}

// mapped is idmapped for a layer, on any kernel.
func mapped(layer, userns *os.File) (*os.File, error) {
	m, err := idmapped(layer, userns)
	if errors.Is(err, errNoClone) {
		err = inAttic(func(a *attic) error {
			m, err = a.clone(layer, userns)
			return err
		})
	}
	return m, err
}

// overlay assembles o. Everything is hung up under short names for as long as
// it takes, since the kernel reads them all from one page.
func (a *attic) overlay(o Overlay, writable *os.File) (m *os.File, err error) {
	var names []string
	defer func() {
		for _, n := range names { // the overlay has its own by now
			err = errors.Join(err, a.detach(n))
		}
		if err != nil && m != nil {
			m.Close()
			m = nil
		}
	}()
	hang := func(f *os.File, name string) error {
		err := a.attach(f, name)
		if err == nil {
			names = append(names, name)
		}
		return err
	}
	if err := hang(writable, "w"); err != nil {
		return nil, err
	}
	lowers := make([]string, 0, len(o.Lowers))
	for i := len(o.Lowers) - 1; i >= 0; i-- { // the kernel wants the topmost first
		clone, err := a.clone(o.Lowers[i], o.UserNS)
		if err != nil {
			return nil, err
		}
		name := strconv.Itoa(i)
		err = hang(clone, name)
		clone.Close()
		if err != nil {
			return nil, err
		}
		lowers = append(lowers, name)
	}
	const root = "root"
	if err := unix.Mkdir(root, 0o700); err != nil {
		return nil, err
	}
	options := "lowerdir=" + strings.Join(lowers, ":") + ",upperdir=w/" + filepath.Base(o.Upper) + ",workdir=w/" + filepath.Base(o.Work) + ",volatile"
	if err := unix.Mount("dsec", root, "overlay", 0, options); err != nil {
		unix.Rmdir(root) //nolint:errcheck // just made, empty
		return nil, fmt.Errorf("mount overlay: %w", err)
	}
	names = append(names, root)
	fd, err := unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone overlay: %w", err)
	}
	return os.NewFile(uintptr(fd), "overlay"), nil
}

// Unmount ends a layer's mount that MountLayer made. What was mounted above it
// stays as it is.
func Unmount(layer *os.File) error {
	id, err := mountID(layer)
	layer.Close()
	if err != nil {
		return err
	}
	if !atticUsed.Load() {
		return nil
	}
	return inAttic(func(a *attic) error {
		name := a.layers[id]
		if name == "" {
			return nil
		}
		delete(a.layers, id)
		return a.detach(name)
	})
}

// mountID is the number of the mount that an open file is on.
func mountID(f *os.File) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return 0, fmt.Errorf("find mount of layer: %w", err)
	}
	return st.Mnt_id, nil
}

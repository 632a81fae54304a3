package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Overlay describes a sandbox's root.
type Overlay struct {
	Lowers []*os.File // shared layer mounts, lowest first
	UserNS *os.File   // the user namespace whose ids the lowers are shown in; none when nil
	Upper  string     // writable folder, owned by the namespace's root
	Work   string     // empty folder on the same file system
}

// MaxLowers is the kernel's limit of overlay layers.
const MaxLowers = 500

// Mount assembles the overlay, detached. It is volatile: no fsync reaches the
// disk, and after a crash of the host the upper folder is worthless.
func (o Overlay) Mount() (*os.File, error) {
	if len(o.Lowers) == 0 || len(o.Lowers) > MaxLowers {
		return nil, dsec.Errorf(dsec.Invalid, "an overlay has 1 to %d layers, not %d", MaxLowers, len(o.Lowers))
	}
	lowers := make([]*os.File, 0, len(o.Lowers))
	defer func() {
		for _, l := range lowers {
			l.Close()
		}
	}()
	for i := len(o.Lowers) - 1; i >= 0; i-- { // the kernel wants the topmost first
		l, err := idmapped(o.Lowers[i], o.UserNS)
		if err != nil {
			return nil, err
		}
		lowers = append(lowers, l)
	}
	m, err := o.mount(func(fs *fsContext) {
		for _, l := range lowers {
			fs.setFile("lowerdir+", l)
		}
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EBADF) {
		if m, e := o.mountByPath(lowers); e == nil {
			return m, nil
		}
	}
	return m, err
}

func (o Overlay) mount(setLowers func(*fsContext)) (*os.File, error) {
	fs, err := openFS("overlay")
	if err != nil {
		return nil, err
	}
	defer fs.close()
	fs.set("source", "dsec")
	setLowers(fs)
	fs.set("upperdir", o.Upper)
	fs.set("workdir", o.Work)
	fs.flag("volatile")
	return fs.mount(0)
}

// idmapped clones a layer's mount so that uid n of the layer is uid n of the
// namespace.
func idmapped(layer, userns *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(layer.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone layer mount: %w", err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	if userns == nil {
		return f, nil
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		f.Close()
		return nil, fmt.Errorf("map ids of layer mount: %w", err)
	}
	return f, nil
}

// mountByPath serves kernels before 6.15, which take no descriptors of detached
// mounts: the lowers are attached in a mount namespace of the thread's own,
// named by path, and the thread is thrown away.
func (o Overlay) mountByPath(lowers []*os.File) (*os.File, error) {
	type result struct {
		m   *os.File
		err error
	}
	res := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		m, err := func() (*os.File, error) {
			if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
				return nil, err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return nil, err
			}
			const at = "/proc" // upper and work are named by real paths, so any other folder may be covered
			if err := unix.Mount("lowers", at, "tmpfs", 0, "size=64k"); err != nil {
				return nil, err
			}
			var paths []string
			for i, l := range lowers {
				p := filepath.Join(at, strconv.Itoa(i))
				if err := os.Mkdir(p, 0o700); err != nil {
					return nil, err
				}
				if err := unix.MoveMount(int(l.Fd()), "", unix.AT_FDCWD, p, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
					return nil, err
				}
				paths = append(paths, p)
			}
			return o.mount(func(fs *fsContext) {
				for _, p := range paths {
					fs.set("lowerdir+", p)
				}
			})
		}()
		res <- result{m, err}
	}()
	r := <-res
	return r.m, r.err
}

// MountFolder gives a folder as a detached mount, for roots that are used in
// place. With a user namespace, the folder's ids are shown in it.
func MountFolder(dir string, userns *os.File) (*os.File, error) {
	d, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return idmapped(d, userns)
}

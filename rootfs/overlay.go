package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Overlay describes a sandbox's root.
type Overlay struct {
	Lowers []*os.File // shared layer mounts, lowest first
	UserNS *os.File   // the user namespace whose ids the lowers are shown in; none when nil
	Upper  string     // writable folder, owned by the namespace's root
	Work   string     // empty folder beside it
}

// MaxLowers is the kernel's limit of overlay layers.
const MaxLowers = 500

// Mount assembles the overlay, detached. It is volatile: no fsync reaches the
// disk, and after a crash of the host the upper folder is worthless.
func (o Overlay) Mount() (*os.File, error) {
	if len(o.Lowers) == 0 || len(o.Lowers) > MaxLowers {
		return nil, dsec.Errorf(dsec.Invalid, "an overlay has 1 to %d layers, not %d", MaxLowers, len(o.Lowers))
	}
	m, err := o.mount()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EBADF) || errors.Is(err, unix.EOPNOTSUPP) {
		if m, e := o.mountByPath(); e == nil {
			return m, nil
		} else if errors.Is(err, errNoClone) {
			return nil, e
		}
	}
	return m, err
}

// mount gives the kernel the lowers as descriptors, which it takes since 6.15.
func (o Overlay) mount() (*os.File, error) {
	fs, err := openFS("overlay")
	if err != nil {
		return nil, err
	}
	defer fs.close()
	fs.set("source", "dsec")
	for i := len(o.Lowers) - 1; i >= 0; i-- { // the kernel wants the topmost first
		l, err := idmapped(o.Lowers[i], o.UserNS)
		if err != nil {
			return nil, err
		}
		defer l.Close() // a detached mount ends with its descriptor
		fs.setFile("lowerdir+", l)
	}
	fs.set("upperdir", o.Upper)
	fs.set("workdir", o.Work)
	fs.flag("volatile")
	return fs.mount(0)
}

// mountByPath serves older kernels.
func (o Overlay) mountByPath() (m *os.File, err error) {
	dir := filepath.Dir(o.Upper)
	if dir != filepath.Dir(o.Work) {
		return nil, dsec.Errorf(dsec.Invalid, "the writable folders %s and %s are not in one", o.Upper, o.Work)
	}
	writable, err := MountFolder(dir, nil)
	if err != nil {
		return nil, err
	}
	defer writable.Close()
	err = inAttic(func(a *attic) error {
		m, err = a.overlay(o, writable)
		return err
	})
	return m, err
}

// errNoClone is the answer of a kernel before 6.15 to cloning what is attached
// nowhere.
var errNoClone = errors.New("the kernel does not clone a detached mount")

// idmapped clones a layer's mount so that uid n of the layer is uid n of the
// namespace.
func idmapped(layer, userns *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(layer.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		if err == unix.EINVAL {
			err = fmt.Errorf("%w: %w", errNoClone, err)
		}
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

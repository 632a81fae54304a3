package erofs

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
)

// Errors that every function of this package wraps in what it returns.
var (
	// ErrInvalid means the input asks for something no file system can hold,
	// or that is refused because it is hostile (a name with "..").
	ErrInvalid = errors.New("invalid")
	// ErrCorrupt means bytes that should be a metadata image or a tar stream
	// are not, or end too early.
	ErrCorrupt = errors.New("corrupt")
	// ErrUnsupported means a valid use of the format outside this package's
	// subset.
	ErrUnsupported = errors.New("unsupported")
	// ErrTooBig means a limit was reached, one of the format or the caller's.
	ErrTooBig = errors.New("too big")
	// ErrChanged means a file changed while it was being read.
	ErrChanged = errors.New("changed while being read")
)

// Overlay attributes that give a tree its meaning as an upper layer.
const (
	XattrOpaque   = "trusted.overlay.opaque"
	XattrRedirect = "trusted.overlay.redirect"
	XattrMetacopy = "trusted.overlay.metacopy"
)

// A Device is one data blob that files point into.
type Device struct {
	// Tag names the blob, at most 64 bytes: its SHA-256 in hexadecimal.
	// Devices with the same non-empty tag are the same device.
	Tag string
	// Blocks is the blob's length.
	Blocks uint32
	// Mapped is the block where the blob starts in the flat form. It is set
	// on the devices that Encode returns and otherwise ignored.
	Mapped uint32
}

// An Extent maps a run of a file's blocks to blocks of a device. What no
// extent covers is a hole.
type Extent struct {
	File   uint64 // first block in the file
	Count  uint64
	Device *Device
	Start  uint32 // first block in the device
}

// An Inode is one file of any type. Names that share an Inode are hard links
// of each other. An Inode that is in a tree must not be changed, except by
// the code that builds the tree.
type Inode struct {
	Mode         uint32 // type and permissions, as in stat(2)
	UID, GID     uint32
	ModTime      time.Time
	Major, Minor uint32 // of a block or character device
	Size         int64  // of a regular file
	Target       string // of a symlink
	Xattrs       map[string]string
	Extents      []Extent // of a regular file, ascending
	// Contents is the same for two regular files of one size only if they have
	// the same bytes, and the same holes in them; whatever the blobs these lie in.
	// It is known when the file was read from a tar or folder and else zero.
	Contents Sum

	children map[string]*Inode // of a directory
	implicit bool              // a directory nobody described, made for its children
	hidden   map[string]bool   // whiteouts met while reading a tar; "" is all
}

// IsDir reports whether n is a directory.
func (n *Inode) IsDir() bool { return n.Mode&typeMask == typeDir }

// IsRegular reports whether n is a regular file.
func (n *Inode) IsRegular() bool { return n.Mode&typeMask == typeRegular }

// IsSymlink reports whether n is a symbolic link.
func (n *Inode) IsSymlink() bool { return n.Mode&typeMask == typeSymlink }

// IsWhiteout reports whether n is an overlay whiteout: character device 0:0.
func (n *Inode) IsWhiteout() bool {
	return n.Mode&typeMask == typeChar && n.Major == 0 && n.Minor == 0
}

// IsOpaque reports whether n is a directory that hides what is below it.
func (n *Inode) IsOpaque() bool { return n.IsDir() && n.Xattrs[XattrOpaque] == "y" }

// Child returns the entry of directory n with that name, or nil.
func (n *Inode) Child(name string) *Inode { return n.children[name] }

// Names returns the sorted names in directory n.
func (n *Inode) Names() []string { return slices.Sorted(maps.Keys(n.children)) }

func (n *Inode) setXattr(name, value string) {
	if n.Xattrs == nil {
		n.Xattrs = map[string]string{}
	}
	n.Xattrs[name] = value
}

// copyDir returns n without its children.
func (n *Inode) copyDir() *Inode {
	c := *n
	c.Xattrs = maps.Clone(n.Xattrs)
	c.children = make(map[string]*Inode, len(n.children))
	c.hidden = nil
	return &c
}

func newDir() *Inode {
	return &Inode{
		Mode: typeDir | 0o755, ModTime: time.Unix(0, 0),
		children: map[string]*Inode{}, implicit: true,
	}
}

func newWhiteout() *Inode {
	return &Inode{Mode: typeChar, ModTime: time.Unix(0, 0)}
}

// A Tree is the metadata of a whole file system. It is not safe for
// concurrent use while it is being built.
type Tree struct {
	root *Inode
	// below, while a tar is read, is what the layer will lie on. Paths that
	// lead through its symlinks are followed.
	below *Tree
	// budget, while a tar is read, pays for folders that paths lead through.
	budget *Budget
}

// New returns a tree that holds an empty root folder, 0755, owned by root.
func New() *Tree { return &Tree{root: newDir()} }

// Root returns the root directory.
func (t *Tree) Root() *Inode { return t.root }

// Add puts n at a path, replacing what is there; missing parents are made.
// Adding a directory over a directory replaces its attributes and keeps its
// children. Adding one Inode at several paths makes hard links. Symlinks in
// the path are followed inside the tree. A path that leaves the tree, or that
// has a name over 255 bytes, is ErrInvalid.
func (t *Tree) Add(path string, n *Inode) error {
	parts, err := splitPath(path)
	if err != nil {
		return err
	}
	if err := n.check(); err != nil {
		return fmt.Errorf("add %q: %w", path, err)
	}
	if n.IsDir() && n.children == nil {
		n.children = map[string]*Inode{}
	}
	if len(parts) == 0 {
		if !n.IsDir() {
			return fmt.Errorf("add %q: the root must be a folder: %w", path, ErrInvalid)
		}
		if n != t.root {
			n.adopt(t.root)
			t.root = n
		}
		return nil
	}
	dir, err := t.descend(parts[:len(parts)-1])
	if err != nil {
		return fmt.Errorf("add %q: %w", path, err)
	}
	name := parts[len(parts)-1]
	if old := dir.children[name]; old != nil && old != n && old.IsDir() && n.IsDir() {
		n.adopt(old)
	}
	dir.children[name] = n
	return nil
}

// adopt gives directory n the children of old, which it replaces.
func (n *Inode) adopt(old *Inode) {
	n.hidden = old.hidden
	if len(n.children) == 0 {
		n.children = old.children
		return
	}
	for name, c := range old.children {
		if n.children[name] == nil {
			n.children[name] = c
		}
	}
}

// Lookup returns the inode at a path without following symlinks, or nil.
func (t *Tree) Lookup(path string) *Inode {
	parts, err := splitPath(path)
	if err != nil {
		return nil
	}
	n := t.root
	for _, p := range parts {
		if n = n.children[p]; n == nil {
			return nil
		}
	}
	return n
}

// at returns the inode at a path of names that are known to be plain.
func (t *Tree) at(dirs []string, name string) *Inode {
	n := t.root
	for _, d := range dirs {
		if n = n.children[d]; n == nil {
			return nil
		}
	}
	return n.children[name]
}

// Walk yields every name below the root, parents first, siblings in order.
// The root itself is "".
func (t *Tree) Walk() iter.Seq2[string, *Inode] {
	return func(yield func(string, *Inode) bool) { walk("", t.root, yield) }
}

func walk(path string, n *Inode, yield func(string, *Inode) bool) bool {
	if !yield(path, n) {
		return false
	}
	for _, name := range n.Names() {
		p := name
		if path != "" {
			p = path + "/" + name
		}
		if !walk(p, n.children[name], yield) {
			return false
		}
	}
	return true
}

const maxLinks = 40

// descend returns the folder at parts, following symlinks inside the tree and
// making what is missing. A file in the way is replaced by a folder, as the
// later of two contradicting entries wins.
func (t *Tree) descend(parts []string) (*Inode, error) {
	links := 0
	dirs := []*Inode{t.root} // the path walked, for ".."
	var names []string
	for len(parts) > 0 {
		name := parts[0]
		parts = parts[1:]
		cur := dirs[len(dirs)-1]
		if name == ".." {
			if len(dirs) > 1 {
				dirs = dirs[:len(dirs)-1]
				names = names[:len(names)-1]
			}
			continue
		}
		next := cur.children[name]
		if next == nil && t.below != nil {
			if l := t.below.at(names, name); l != nil && l.IsSymlink() {
				next = l
			}
		}
		switch {
		case next != nil && next.IsSymlink():
			if links++; links > maxLinks {
				return nil, fmt.Errorf("too many symlinks: %w", ErrInvalid)
			}
			target := strings.FieldsFunc(next.Target, func(r rune) bool { return r == '/' })
			target = slices.DeleteFunc(target, func(s string) bool { return s == "." })
			if strings.HasPrefix(next.Target, "/") {
				dirs, names = dirs[:1], nil
			}
			parts = append(target, parts...)
			if len(parts) > maxDepth {
				return nil, fmt.Errorf("path too deep: %w", ErrInvalid)
			}
			continue
		case next == nil || !next.IsDir():
			if len(name) > maxName {
				return nil, fmt.Errorf("name of %d bytes: %w", len(name), ErrInvalid)
			}
			if t.budget != nil {
				if err := t.budget.take(1, 0, int64(len(name))); err != nil {
					return nil, err
				}
			}
			next = newDir()
			cur.children[name] = next
		}
		if len(dirs) >= maxDepth {
			return nil, fmt.Errorf("path too deep: %w", ErrInvalid)
		}
		dirs, names = append(dirs, next), append(names, name)
	}
	return dirs[len(dirs)-1], nil
}

// splitPath cuts a path into names. Leading and doubled slashes and "." are
// dropped; ".." is refused, since it has no honest use in an archive.
func splitPath(path string) ([]string, error) {
	var parts []string
	for name := range strings.SplitSeq(path, "/") {
		switch {
		case name == "" || name == ".":
		case name == "..":
			return nil, fmt.Errorf("path %q leaves its folder: %w", path, ErrInvalid)
		case len(name) > maxName:
			return nil, fmt.Errorf("name of %d bytes: %w", len(name), ErrInvalid)
		case strings.IndexByte(name, 0) >= 0:
			return nil, fmt.Errorf("path %q has a zero byte: %w", path, ErrInvalid)
		default:
			parts = append(parts, name)
		}
	}
	if len(parts) > maxDepth {
		return nil, fmt.Errorf("path of %d names: %w", len(parts), ErrInvalid)
	}
	return parts, nil
}

// check refuses what an on-disk inode cannot express.
func (n *Inode) check() error {
	switch {
	case direntType(n.Mode) == 0 || n.Mode>>16 != 0:
		return fmt.Errorf("mode %#o: %w", n.Mode, ErrInvalid)
	case n.UID == 1<<32-1 || n.GID == 1<<32-1:
		return fmt.Errorf("owner %d:%d: %w", n.UID, n.GID, ErrInvalid)
	case n.Major > 0xfff || n.Minor > 0xfffff:
		return fmt.Errorf("device %d:%d: %w", n.Major, n.Minor, ErrInvalid)
	case n.Size < 0:
		return fmt.Errorf("size %d: %w", n.Size, ErrInvalid)
	case n.Size > maxFile:
		return fmt.Errorf("size %d: %w", n.Size, ErrTooBig)
	case n.IsSymlink() && (n.Target == "" || strings.IndexByte(n.Target, 0) >= 0):
		return fmt.Errorf("symlink to %q: %w", n.Target, ErrInvalid)
	case len(n.Target) > maxTarget:
		return fmt.Errorf("symlink of %d bytes: %w", len(n.Target), ErrInvalid)
	}
	size := xattrHeadSize
	for name, value := range n.Xattrs {
		_, rest, ok := splitXattr(name)
		if !ok {
			return fmt.Errorf("attribute %q: %w", name, ErrUnsupported)
		}
		if len(value) > 65535 {
			return fmt.Errorf("attribute %q of %d bytes: %w", name, len(value), ErrTooBig)
		}
		size += int(alignUp(int64(4+len(rest)+len(value)), 4))
	}
	if (size-xattrHeadSize)/4+1 > 65535 {
		return fmt.Errorf("attributes of %d bytes: %w", size, ErrTooBig)
	}
	return nil
}

package erofs

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Merge lays trees over each other, lowest first, with the semantics of
// overlayfs, and returns the one tree that results. Whiteouts and opaque
// marks do their work and vanish: nothing is expected below the result.
// Files are shared with the arguments, which must not change afterwards.
func Merge(layers ...*Tree) (*Tree, error) {
	t := New()
	for i, upper := range layers {
		m := &merger{base: t, mode: final}
		root, err := m.dir(upper.root, t.root)
		if err != nil {
			return nil, fmt.Errorf("merge layer %d: %w", i, err)
		}
		t = &Tree{root: root}
	}
	return t, nil
}

// Fold joins layers, lowest first, into one layer that means the same over
// whatever they were made for: whiteouts and opaque marks stay where they may
// still hide something. A layer that renamed a folder of its base (an overlay
// redirect) cannot be folded without that base: ErrUnsupported.
func Fold(layers ...*Tree) (*Tree, error) {
	if len(layers) == 0 {
		return New(), nil
	}
	t := layers[0]
	for i, upper := range layers[1:] {
		m := &merger{base: t, mode: layer}
		root, err := m.dir(upper.root, t.root)
		if err != nil {
			return nil, fmt.Errorf("fold layer %d: %w", i+1, err)
		}
		t = &Tree{root: root}
	}
	return &Tree{root: settle(t.root, false)}, nil
}

// settle copies the folders of a folded layer, without marks that have nothing
// left to hide: those inside an opaque folder (covered). They would not be
// harmless, since overlayfs lists a whiteout that lies in a single layer.
func settle(dir *Inode, covered bool) *Inode {
	out := dir.copyDir()
	if covered {
		delete(out.Xattrs, XattrOpaque)
	}
	covered = covered || out.IsOpaque()
	for name, n := range dir.children {
		switch {
		case n.IsWhiteout() && covered:
			continue
		case n.IsDir():
			n = settle(n, covered && !hasXattr(n, XattrRedirect))
		}
		out.children[name] = n
	}
	return out
}

// Prune returns t without the whiteouts that hide nothing of the layers that it will lie over. They
// would not be harmless: overlayfs lists those of a folder that lies in t alone.
func Prune(t *Tree, below ...*Tree) *Tree {
	roots := make([]*Inode, len(below))
	for i, b := range below {
		roots[i] = b.root
	}
	return &Tree{root: prune(t.root, roots)}
}

// prune copies a folder. below are those that it will lie over.
func prune(dir *Inode, below []*Inode) *Inode {
	out := dir.copyDir()
	for name, n := range dir.children {
		hides, under := false, []*Inode(nil)
		for _, b := range below {
			if l := b.children[name]; l != nil && !l.IsWhiteout() {
				hides = true
				if l.IsDir() {
					under = append(under, l)
				}
			}
		}
		switch {
		case n.IsWhiteout() && !hides:
			continue
		case n.IsDir() && !hasXattr(n, XattrRedirect): // else it lies over another folder
			n = prune(n, under)
		}
		out.children[name] = n
	}
	return out
}

// HasWhiteouts reports whether a tree has any.
func (t *Tree) HasWhiteouts() bool {
	for _, n := range t.Walk() {
		if n.IsWhiteout() {
			return true
		}
	}
	return false
}

type mergeMode int

const (
	final mergeMode = iota
	layer
)

// A merger puts one upper tree over base. It never changes a node of either:
// directories are made anew, so that look-ups in base (for redirects) see it
// as it was.
type merger struct {
	base *Tree
	mode mergeMode
}

// dir returns upper over lower, either of which may be nil.
func (m *merger) dir(upper, lower *Inode) (*Inode, error) {
	if upper == nil {
		return lower, nil
	}
	attrs := upper
	if upper.implicit && lower != nil {
		attrs = lower
	}
	out := attrs.copyDir()
	delete(out.Xattrs, XattrRedirect)
	delete(out.Xattrs, XattrOpaque)
	if upper.IsOpaque() {
		lower = nil
	}
	if lower != nil {
		maps.Copy(out.children, lower.children)
	}
	if m.mode == layer {
		switch {
		case upper.IsOpaque() || lower != nil && lower.IsOpaque():
			out.setXattr(XattrOpaque, "y")
		case lower != nil && hasXattr(lower, XattrRedirect):
			out.setXattr(XattrRedirect, lower.Xattrs[XattrRedirect])
		}
	}
	for _, name := range upper.Names() {
		u := upper.children[name]
		n, err := m.entry(lower, name, u)
		if err != nil {
			return nil, err
		}
		if n == nil {
			delete(out.children, name)
		} else {
			out.children[name] = n
		}
	}
	return out, nil
}

// entry returns what stands for one name of the folder lower (nil if there is
// none), with u over it; nil for nothing.
func (m *merger) entry(lower *Inode, name string, u *Inode) (*Inode, error) {
	var l *Inode
	if lower != nil {
		l = lower.children[name]
	}
	switch {
	case u.IsWhiteout():
		if m.mode == final {
			return nil, nil
		}
		return u, nil
	case u.IsDir():
		return m.subdir(lower, name, u, l)
	case u.IsRegular() && hasXattr(u, XattrMetacopy):
		return m.metacopy(lower, name, u, l)
	}
	return u, nil
}

func hasXattr(n *Inode, name string) bool {
	_, ok := n.Xattrs[name]
	return ok
}

func (m *merger) subdir(lower *Inode, name string, u, l *Inode) (*Inode, error) {
	if to, ok := u.Xattrs[XattrRedirect]; ok && !u.IsOpaque() {
		if m.mode == layer {
			return nil, fmt.Errorf("folder %q is redirected to %q: %w", name, to, ErrUnsupported)
		}
		l = m.redirected(lower, to)
	}
	switch {
	case l == nil:
		return m.dir(u, nil)
	case l.IsDir():
		return m.dir(u, l)
	}
	// What hid the lower layers' folder of this name hides it still.
	n, err := m.dir(u, nil)
	if err == nil && m.mode == layer {
		n.setXattr(XattrOpaque, "y")
	}
	return n, err
}

// redirected finds the base's folder that an overlay redirect names: an
// absolute path, or another name in the folder that lies below.
func (m *merger) redirected(lower *Inode, to string) *Inode {
	var n *Inode
	switch {
	case strings.HasPrefix(to, "/"):
		n = m.base.Lookup(to)
	case lower != nil:
		n = lower.children[to]
	}
	if n == nil || !n.IsDir() {
		return nil
	}
	return n
}

// metacopy gives a file whose metadata alone was copied up its data back.
func (m *merger) metacopy(lower *Inode, name string, u, l *Inode) (*Inode, error) {
	if to, ok := u.Xattrs[XattrRedirect]; ok {
		l = nil
		if strings.HasPrefix(to, "/") {
			l = m.base.Lookup(to)
		} else if lower != nil {
			l = lower.children[to]
		}
	}
	if l == nil && m.mode == layer {
		return u, nil // its data is further down
	}
	if l == nil || !l.IsRegular() {
		return nil, fmt.Errorf("file %q has its data in a layer that is missing: %w", name, ErrInvalid)
	}
	c := *u
	c.Xattrs = maps.Clone(u.Xattrs)
	delete(c.Xattrs, XattrRedirect)
	if !hasXattr(l, XattrMetacopy) {
		delete(c.Xattrs, XattrMetacopy)
	}
	c.Size = l.Size
	c.Extents = slices.Clone(l.Extents)
	c.Contents = l.Contents
	return &c, nil
}

// Explicit gives a layer that means over below what upper means, and says so
// without redirects: a folder that was renamed and a file whose metadata alone was
// changed are there with all they have. It is upper itself if there is none.
func Explicit(below, upper *Tree) (*Tree, error) {
	if !redirects(upper.root) {
		return upper, nil
	}
	merged, err := Merge(below, upper)
	if err != nil {
		return nil, err
	}
	return &Tree{root: explicit(upper.root, merged.root)}, nil
}

func redirects(n *Inode) bool {
	if hasXattr(n, XattrRedirect) || hasXattr(n, XattrMetacopy) {
		return true
	}
	for _, c := range n.children {
		if redirects(c) {
			return true
		}
	}
	return false
}

// explicit copies folder upper, with what merged has in place of redirects.
func explicit(upper, merged *Inode) *Inode {
	out := upper.copyDir()
	for name, u := range upper.children {
		m := merged.children[name]
		switch {
		case hasXattr(u, XattrMetacopy):
			u = m
		case u.IsDir() && hasXattr(u, XattrRedirect):
			// Everything in it is listed, so nothing below is to be seen.
			all := m.copyDir()
			all.children = m.children
			all.setXattr(XattrOpaque, "y")
			u = all
		case u.IsDir():
			u = explicit(u, m)
		}
		out.children[name] = u
	}
	return out
}

package erofs

import (
	"fmt"
	"io"
	"slices"
)

// Live gives the devices that files of t point into, with how many blocks of each,
// and does not count a file twice that has several names.
func (t *Tree) Live() map[*Device]int64 {
	live := map[*Device]int64{}
	t.files(func(n *Inode) error { //nolint:errcheck // it gives none
		for _, x := range n.Extents {
			live[x.Device] += int64(x.Count)
		}
		return nil
	})
	return live
}

// Bring lays the contents of files of t anew into b where they lie in devices that
// from has a reader for, so that t needs those no more. Holes stay holes. It changes
// files of t, which t shares with what it was made of.
func (b *Blob) Bring(t *Tree, from map[*Device]io.ReaderAt) error {
	lookup := b.opts.Lookup
	b.opts.Lookup = nil // it would find them where they are
	defer func() { b.opts.Lookup = lookup }()
	return t.files(func(n *Inode) error {
		if !slices.ContainsFunc(n.Extents, func(x Extent) bool { return from[x.Device] != nil }) {
			return nil
		}
		if err := b.bring(n, from); err != nil {
			return fmt.Errorf("bring file of %d bytes: %w", n.Size, err)
		}
		return nil
	})
}

// bring lays one file anew. What lies elsewhere stays there.
func (b *Blob) bring(n *Inode, from map[*Device]io.ReaderAt) error {
	var all []Extent
	for _, x := range n.Extents {
		r := from[x.Device]
		if r == nil {
			all = append(all, x)
			continue
		}
		c := b.file(int64(x.Count)<<blockBits, dense)
		if err := c.data(0, c.size, io.NewSectionReader(r, int64(x.Start)<<blockBits, c.size)); err != nil {
			return err
		}
		if err := c.flush(); err != nil {
			return err
		}
		for _, y := range c.extents {
			y.File += x.File
			all = append(all, y)
		}
	}
	n.Extents = all
	return nil
}

// files calls f with each regular file of t, once whatever names it has.
func (t *Tree) files(f func(*Inode) error) error {
	seen := map[*Inode]bool{}
	var walk func(*Inode) error
	walk = func(dir *Inode) error {
		for _, name := range dir.Names() { // in one order: what is laid is the same every time
			n := dir.children[name]
			switch {
			case n.IsDir():
				if err := walk(n); err != nil {
					return err
				}
			case n.IsRegular() && !seen[n]:
				seen[n] = true
				if err := f(n); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return walk(t.root)
}

package erofs

import (
	"fmt"
	"slices"
	"time"
)

// Decode reads a metadata image back into a tree. It understands what Encode
// writes and a little more (compact inodes, plain block maps); files whose
// data lies in the image itself, compressed files and shared attributes are
// ErrUnsupported. Everything that contradicts itself is ErrCorrupt. It copies
// what it needs from meta.
func Decode(meta []byte) (*Tree, error) {
	d := &decoder{b: meta, budget: int64(len(meta)), seen: map[uint64]*Inode{}}
	t, err := d.tree()
	if err != nil {
		return nil, fmt.Errorf("decode metadata image: %w", err)
	}
	return t, nil
}

// A decoder counts the bytes it interprets against the length of the image: in
// an honest image each byte means one thing, and a hostile one can then not
// make a small image mean a large tree by overlapping its parts.
type decoder struct {
	b       []byte
	budget  int64
	base    int64 // where inodes start
	build   time.Time
	devices []*Device
	mask    uint16
	seen    map[uint64]*Inode
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrCorrupt)...)
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrUnsupported)...)
}

// at returns n bytes at off, and pays for them.
func (d *decoder) at(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off > int64(len(d.b)) || n > int64(len(d.b))-off {
		return nil, corrupt("%d bytes at %d of %d", n, off, len(d.b))
	}
	if d.budget -= n; d.budget < 0 {
		return nil, corrupt("overlapping parts")
	}
	return d.b[off : off+n], nil
}

func (d *decoder) tree() (*Tree, error) {
	if len(d.b) < BlockSize || len(d.b)%BlockSize != 0 {
		return nil, corrupt("%d bytes", len(d.b))
	}
	s := d.b[superOffset : superOffset+superSize]
	if le.Uint32(s) != superMagic {
		return nil, corrupt("no superblock")
	}
	if le.Uint32(s[8:])&compatChecksum != 0 && le.Uint32(s[4:]) != checksum(d.b) {
		return nil, corrupt("superblock checksum")
	}
	if s[12] != blockBits || s[90] != 0 {
		return nil, unsupported("block size 2^%d", s[12])
	}
	if f := le.Uint32(s[80:]) &^ (incompatChunked | incompatDevices); f != 0 {
		return nil, unsupported("features %#x", f)
	}
	d.base = int64(le.Uint32(s[40:])) << blockBits
	d.build = time.Unix(int64(le.Uint64(s[24:])), int64(le.Uint32(s[32:])))
	n := int(le.Uint16(s[86:]))
	table, err := d.at(int64(le.Uint16(s[88:]))*deviceSize, int64(n)*deviceSize)
	if err != nil {
		return nil, fmt.Errorf("device table: %w", err)
	}
	for slot := range slices.Chunk(table, deviceSize) {
		tag := slot[:64]
		if i := slices.Index(tag, 0); i >= 0 {
			tag = tag[:i]
		}
		d.devices = append(d.devices, &Device{
			Tag: string(tag), Blocks: le.Uint32(slot[64:]), Mapped: le.Uint32(slot[68:]),
		})
	}
	// The kernel keeps as many bits of a device number as the table needs.
	for d.mask = 1; int(d.mask) < n+1 && d.mask != 0xffff; d.mask = d.mask<<1 | 1 {
	}
	root := uint64(le.Uint16(s[14:]))
	r, h, err := d.inode(root)
	if err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}
	if !r.IsDir() {
		return nil, corrupt("root has mode %#o", r.Mode)
	}
	if err := d.dir(r, h, root, root, 0); err != nil {
		return nil, err
	}
	return &Tree{root: r}, nil
}

// header is the part of an inode that says where its rest is.
type header struct {
	layout int
	u      uint32 // block, device number or chunk format
	xattr  int64
	end    int64 // of inode and attributes
}

// inode reads one inode, but not the entries of a directory, and the place of
// the rest if it was read for the first time.
func (d *decoder) inode(nid uint64) (*Inode, header, error) {
	var h header
	if n := d.seen[nid]; n != nil {
		return n, h, nil
	}
	if nid > uint64(len(d.b))>>slotBits {
		return nil, h, corrupt("inode %d", nid)
	}
	n, h, err := d.header(nid)
	if err != nil {
		return nil, h, fmt.Errorf("inode %d: %w", nid, err)
	}
	if err := d.xattrs(n, h.end-h.xattr, h.xattr); err != nil {
		return nil, h, fmt.Errorf("inode %d: %w", nid, err)
	}
	switch n.Mode & typeMask {
	case typeSymlink:
		if n.Size > maxTarget {
			return nil, h, corrupt("inode %d: symlink of %d bytes", nid, n.Size)
		}
		b, err := d.bytes(h, n.Size)
		if err != nil {
			return nil, h, fmt.Errorf("inode %d: %w", nid, err)
		}
		n.Target, n.Size = string(b), 0
	case typeRegular:
		if err := d.extents(n, h); err != nil {
			return nil, h, fmt.Errorf("inode %d: %w", nid, err)
		}
	case typeChar, typeBlock:
		n.Major, n.Minor = decodeDev(h.u)
		n.Size = 0
	case typeDir:
		n.children = map[string]*Inode{}
	default:
		n.Size = 0
	}
	if err := n.check(); err != nil {
		return nil, h, corrupt("inode %d: %v", nid, err)
	}
	d.seen[nid] = n
	return n, h, nil
}

func (d *decoder) header(nid uint64) (*Inode, header, error) {
	var h header
	off := d.base + int64(nid)<<slotBits
	b, err := d.at(off, compactSize)
	if err != nil {
		return nil, h, err
	}
	format := le.Uint16(b)
	h.layout = int(format >> 1 & 7)
	h.u = le.Uint32(b[16:])
	n := &Inode{Mode: uint32(le.Uint16(b[4:])), ModTime: d.build}
	size := uint64(le.Uint32(b[8:]))
	length := int64(compactSize)
	switch {
	case format>>4 != 0:
		return nil, h, unsupported("format %#x", format)
	case format&1 == 0:
		n.UID, n.GID = uint32(le.Uint16(b[24:])), uint32(le.Uint16(b[26:]))
	default:
		length = extendedSize
		more, err := d.at(off+compactSize, extendedSize-compactSize)
		if err != nil {
			return nil, h, err
		}
		size = le.Uint64(b[8:])
		n.UID, n.GID = le.Uint32(b[24:]), le.Uint32(b[28:])
		nsec := le.Uint32(more[8:])
		if nsec > 999999999 {
			return nil, h, corrupt("%d nanoseconds", nsec)
		}
		n.ModTime = time.Unix(int64(le.Uint64(more)), int64(nsec))
	}
	if direntType(n.Mode) == 0 {
		return nil, h, corrupt("mode %#o", n.Mode)
	}
	if size > maxFile {
		return nil, h, corrupt("size %d", size)
	}
	n.Size = int64(size)
	if count := int64(le.Uint16(b[2:])); count > 0 {
		h.xattr = xattrHeadSize + (count-1)*4
	}
	h.end = off + length + h.xattr
	return n, h, nil
}

func (d *decoder) xattrs(n *Inode, off, size int64) error {
	if size == 0 {
		return nil
	}
	b, err := d.at(off, size)
	if err != nil {
		return err
	}
	if b[4] != 0 {
		return unsupported("shared attributes")
	}
	b = b[xattrHeadSize:]
	for len(b) > 0 {
		nameLen, valueLen := int(b[0]), int(le.Uint16(b[2:]))
		size := int(alignUp(int64(4+nameLen+valueLen), 4))
		if size > len(b) {
			return corrupt("attribute of %d bytes", size)
		}
		if b[1]&0x80 != 0 {
			return unsupported("attribute prefix %#x", b[1])
		}
		name, ok := joinXattr(b[1], string(b[4:4+nameLen]))
		if !ok {
			return corrupt("attribute in namespace %d", b[1])
		}
		n.setXattr(name, string(b[4+nameLen:4+nameLen+valueLen]))
		b = b[size:]
	}
	return nil
}

// bytes returns the contents of a directory or symlink.
func (d *decoder) bytes(h header, size int64) ([]byte, error) {
	start := int64(h.u) << blockBits
	switch h.layout {
	case layoutPlain:
		return d.at(start, size)
	case layoutInline:
		whole := size &^ (BlockSize - 1)
		tail, err := d.at(h.end, size-whole)
		if err != nil {
			return nil, err
		}
		if h.end%BlockSize+int64(len(tail)) > BlockSize {
			return nil, corrupt("tail crosses a block")
		}
		if whole == 0 {
			return tail, nil
		}
		b, err := d.at(start, whole)
		if err != nil {
			return nil, err
		}
		return slices.Concat(b, tail), nil
	}
	return nil, unsupported("layout %d", h.layout)
}

func (d *decoder) extents(n *Inode, h header) error {
	if n.Size == 0 {
		return nil
	}
	if h.layout != layoutChunk {
		return unsupported("file in layout %d", h.layout)
	}
	format := h.u & 0xffff
	if format&^(chunkBitsMask|chunkIndexes) != 0 {
		return unsupported("chunk format %#x", format)
	}
	shift := uint(format & chunkBitsMask)
	blocks := blocksOf(n.Size)
	count := int64((blocks-1)>>shift + 1)
	unit := int64(4)
	if format&chunkIndexes != 0 {
		unit = indexSize
	}
	b, err := d.at(alignUp(h.end, unit), count*unit)
	if err != nil {
		return err
	}
	c := contents{}
	for i := range count {
		var id uint16
		start := le.Uint32(b[i*unit:])
		if unit == indexSize {
			id = le.Uint16(b[i*unit+2:]) & d.mask
			start = le.Uint32(b[i*unit+4:])
		}
		if start == nullBlock {
			continue
		}
		if id == 0 {
			return unsupported("data in the metadata image")
		}
		if int(id) > len(d.devices) {
			return corrupt("device %d of %d", id, len(d.devices))
		}
		x := Extent{File: uint64(i) << shift, Device: d.devices[id-1], Start: start}
		x.Count = min(1<<shift, blocks-x.File)
		if uint64(start)+x.Count > uint64(x.Device.Blocks) {
			return corrupt("block %d of device %d", start, id)
		}
		c.append(x)
	}
	n.Extents = c.extents
	return nil
}

// dir reads the entries of directory n, and those of directories below.
func (d *decoder) dir(n *Inode, h header, nid, parent uint64, depth int) error {
	if depth > maxDepth {
		return corrupt("folders nested over %d", maxDepth)
	}
	b, err := d.bytes(h, n.Size)
	if err != nil {
		return fmt.Errorf("folder %d: %w", nid, err)
	}
	n.Size = 0
	type sub struct {
		n   *Inode
		h   header
		nid uint64
	}
	var subs []sub
	dots := 0
	last := ""
	for block := range slices.Chunk(b, BlockSize) {
		err := entries(block, func(name string, id uint64, kind byte) error {
			if name <= last {
				return corrupt("%q after %q", name, last)
			}
			last = name
			if name == "." || name == ".." {
				if want := map[string]uint64{".": nid, "..": parent}[name]; id != want {
					return corrupt("%q is inode %d", name, id)
				}
				dots++
				return nil
			}
			known := d.seen[id] != nil
			c, ch, err := d.inode(id)
			if err != nil {
				return err
			}
			if direntType(c.Mode) != kind {
				return corrupt("%q has type %d", name, kind)
			}
			if c.IsDir() {
				if known {
					return corrupt("%q is a second name of a folder", name)
				}
				subs = append(subs, sub{c, ch, id})
			}
			n.children[name] = c
			return nil
		})
		if err != nil {
			return fmt.Errorf("folder %d: %w", nid, err)
		}
	}
	if dots != 2 {
		return corrupt("folder %d without itself or its parent", nid)
	}
	for _, s := range subs {
		if err := d.dir(s.n, s.h, s.nid, nid, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// entries calls f for each name in one block of a directory.
func entries(b []byte, f func(name string, nid uint64, kind byte) error) error {
	if len(b) < direntSize {
		return corrupt("folder block of %d bytes", len(b))
	}
	first := int(le.Uint16(b[8:]))
	if first < direntSize || first%direntSize != 0 || first > len(b) {
		return corrupt("first name at %d", first)
	}
	for at := 0; at < first; at += direntSize {
		e := b[at:]
		lo, hi := int(le.Uint16(e[8:])), len(b)
		if at+direntSize < first {
			hi = int(le.Uint16(e[direntSize+8:]))
		} else if lo < hi {
			// The last name ends with its block or at a zero byte.
			if i := slices.Index(b[lo:], 0); i >= 0 {
				hi = lo + i
			}
		}
		if lo < first || hi > len(b) || lo >= hi || hi-lo > maxName {
			return corrupt("name from %d to %d", lo, hi)
		}
		name := string(b[lo:hi])
		for _, c := range []byte(name) {
			if c == 0 || c == '/' {
				return corrupt("name %q", name)
			}
		}
		if err := f(name, le.Uint64(e), e[10]); err != nil {
			return err
		}
	}
	return nil
}

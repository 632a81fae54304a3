package erofs

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"math/bits"
	"slices"
)

// An Image is an encoded tree.
type Image struct {
	// Meta is the metadata image, a whole number of blocks. The kernel wants
	// it in a file on a real file system (ext4, not tmpfs or overlayfs).
	Meta []byte
	// Devices are the blobs Meta names, in the order in which the kernel
	// expects them as device= options. Blobs no file points into are absent.
	Devices []Device
	// Inodes is the number of files of all types.
	Inodes int
}

// Encode returns the metadata image of t. Every device must have its final
// Tag and Blocks by now.
func (t *Tree) Encode() (*Image, error) {
	e := &encoder{plans: map[*Inode]*plan{}, devices: map[any]uint16{}}
	if err := e.plan(t.root, t.root, "", 0); err != nil {
		return nil, err
	}
	if err := e.children(t.root, "", 0); err != nil {
		return nil, err
	}
	if err := e.layOut(); err != nil {
		return nil, err
	}
	if err := e.write(); err != nil {
		return nil, err
	}
	return &Image{Meta: e.out, Devices: e.table, Inodes: len(e.order)}, nil
}

// An encoder works in three passes, since names refer to inodes by position:
// plan (sizes only), layOut (positions), write.
type encoder struct {
	plans   map[*Inode]*plan
	order   []*plan
	devices map[any]uint16 // tag, or pointer where there is none, to number from 1
	table   []Device
	meta    int64 // where inodes start
	out     []byte
}

// A plan is what is known of one inode's place and shape.
type plan struct {
	n      *Inode
	parent *Inode
	nlink  uint32
	xattr  int64 // bytes of extended attributes
	layout uint16
	size   int64 // i_size

	bits    int   // log2 of blocks in a chunk
	indexes int64 // chunks
	dir     [][]string
	tail    int64 // bytes that are inline
	blocks  int64 // whole blocks outside
	pos     int64
	block   uint32 // the first of those blocks
}

// plan registers one inode under the next position.
func (e *encoder) plan(n, parent *Inode, path string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("encode %q: path too deep: %w", path, ErrInvalid)
	}
	if p := e.plans[n]; p != nil {
		if n.IsDir() {
			return fmt.Errorf("encode %q: hard link to a folder: %w", path, ErrInvalid)
		}
		p.nlink++
		return nil
	}
	if err := n.check(); err != nil {
		return fmt.Errorf("encode %q: %w", path, err)
	}
	p := &plan{n: n, parent: parent, nlink: 1, xattr: xattrSize(n)}
	e.plans[n] = p
	e.order = append(e.order, p)
	room := BlockSize - extendedSize - p.xattr
	switch {
	case n.IsDir():
		p.nlink = 2
		p.planDir()
	case n.IsSymlink():
		p.size = int64(len(n.Target))
	case n.IsRegular():
		p.size = n.Size
		if err := e.planFile(p); err != nil {
			return fmt.Errorf("encode %q: %w", path, err)
		}
		return nil
	}
	// Directories and symlinks keep their last, partial block beside the
	// inode when it and the attributes fit into one block together, which is
	// what older kernels demand of symlinks.
	p.tail = p.size % BlockSize
	p.blocks = p.size / BlockSize
	if p.tail > 0 && p.tail <= room {
		p.layout = layoutInline
	} else if p.tail > 0 {
		p.tail = 0
		p.blocks++
	}
	return nil
}

// children plans the entries of a folder side by side, then goes down.
func (e *encoder) children(dir *Inode, path string, depth int) error {
	names := dir.Names()
	for _, name := range names {
		if name == "." || name == ".." || len(name) > maxName {
			return fmt.Errorf("encode %q: name %q: %w", path, name, ErrInvalid)
		}
		c := dir.children[name]
		if err := e.plan(c, dir, path+"/"+name, depth+1); err != nil {
			return err
		}
		if c.IsDir() {
			e.plans[dir].nlink++
		}
	}
	for _, name := range names {
		if c := dir.children[name]; c.IsDir() {
			if err := e.children(c, path+"/"+name, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// planDir cuts the sorted names, with "." and "..", into blocks.
func (p *plan) planDir() {
	names := append(p.n.Names(), ".", "..")
	slices.Sort(names)
	used, first := 0, 0
	for i, name := range names {
		need := direntSize + len(name)
		if used+need > BlockSize {
			p.dir = append(p.dir, names[first:i])
			used, first = 0, i
		}
		used += need
	}
	p.dir = append(p.dir, names[first:])
	p.size = int64(len(p.dir)-1)*BlockSize + int64(used)
}

func (e *encoder) planFile(p *plan) error {
	if p.size == 0 {
		return nil
	}
	blocks := blocksOf(p.size)
	p.layout = layoutChunk
	// The largest chunk is wanted at whose multiples all changes of mapping
	// fall: those are then the only places a new index is needed.
	edges := uint64(0)
	end := uint64(0)
	for _, x := range p.n.Extents {
		if x.Count == 0 || x.File < end || x.Count > blocks || x.File > blocks-x.Count {
			return fmt.Errorf("extents overlap or pass the end: %w", ErrInvalid)
		}
		if x.Device == nil || uint64(x.Start)+x.Count > uint64(x.Device.Blocks) {
			return fmt.Errorf("extent outside its device: %w", ErrInvalid)
		}
		end = x.File + x.Count
		edges |= x.File
		if end != blocks {
			edges |= end
		}
		if err := e.device(x.Device); err != nil {
			return err
		}
	}
	p.bits = min(bits.Len64(blocks-1), maxChunkBits)
	if edges != 0 {
		p.bits = min(p.bits, bits.TrailingZeros64(edges))
	}
	p.indexes = int64((blocks-1)>>p.bits + 1)
	return nil
}

func deviceKey(d *Device) any {
	if d.Tag != "" {
		return d.Tag
	}
	return d
}

func (e *encoder) device(d *Device) error {
	key := deviceKey(d)
	if id, ok := e.devices[key]; ok {
		if e.table[id-1].Blocks != d.Blocks {
			return fmt.Errorf("device %q has two sizes: %w", d.Tag, ErrInvalid)
		}
		return nil
	}
	if len(e.table) == maxDevices {
		return fmt.Errorf("more than %d devices: %w", maxDevices, ErrTooBig)
	}
	if len(d.Tag) > 64 {
		return fmt.Errorf("device tag %q: %w", d.Tag, ErrInvalid)
	}
	e.table = append(e.table, *d)
	e.devices[key] = uint16(len(e.table))
	return nil
}

func (p *plan) bytes() int64 {
	n := extendedSize + p.xattr
	if p.layout == layoutChunk {
		return alignUp(n, indexSize) + p.indexes*indexSize
	}
	return n + p.tail
}

// layOut gives every inode and block its position and allocates the image.
func (e *encoder) layOut() error {
	e.meta = alignUp(superOffset+superSize+int64(len(e.table))*deviceSize, BlockSize)
	pos := e.meta
	for _, p := range e.order {
		pos = alignUp(pos, 1<<slotBits)
		// An inode never straddles blocks, nor does one with a tail.
		whole := int64(extendedSize)
		if p.layout == layoutInline {
			whole = p.bytes()
		}
		if pos%BlockSize+whole > BlockSize {
			pos = alignUp(pos, BlockSize)
		}
		p.pos = pos
		pos += p.bytes()
	}
	pos = alignUp(pos, BlockSize)
	for _, p := range e.order {
		if p.blocks > 0 {
			p.block = uint32(pos >> blockBits)
			pos += p.blocks * BlockSize
		}
	}
	mapped := uint64(pos) >> blockBits
	for i := range e.table {
		e.table[i].Mapped = uint32(mapped)
		mapped += uint64(e.table[i].Blocks)
	}
	if mapped >= nullBlock {
		return fmt.Errorf("encode: %d blocks: %w", mapped, ErrTooBig)
	}
	e.out = make([]byte, pos)
	return nil
}

func (e *encoder) nid(n *Inode) uint64 {
	return uint64(e.plans[n].pos-e.meta) >> slotBits
}

func (e *encoder) write() error {
	for i, p := range e.order {
		e.writeInode(p, uint32(i+1))
	}
	for i, d := range e.table {
		slot := e.out[superOffset+superSize+i*deviceSize:]
		copy(slot[:64], d.Tag)
		le.PutUint32(slot[64:], d.Blocks)
		le.PutUint32(slot[68:], d.Mapped)
	}
	s := e.out[superOffset:]
	le.PutUint32(s, superMagic)
	le.PutUint32(s[8:], compatChecksum|compatMtime)
	s[12] = blockBits
	le.PutUint16(s[14:], uint16(e.nid(e.order[0].n)))
	le.PutUint64(s[16:], uint64(len(e.order)))
	le.PutUint32(s[36:], uint32(len(e.out)>>blockBits))
	le.PutUint32(s[40:], uint32(e.meta>>blockBits))
	feature := uint32(incompatChunked)
	if len(e.table) > 0 {
		feature |= incompatDevices
		le.PutUint16(s[86:], uint16(len(e.table)))
		le.PutUint16(s[88:], (superOffset+superSize)/deviceSize)
	}
	le.PutUint32(s[80:], feature)
	// The UUID is a name-based one (version 8) of everything else.
	sum := sha256.Sum256(e.out)
	uuid := s[48:64]
	copy(uuid, sum[:])
	uuid[6] = uuid[6]&0x0f | 0x80
	uuid[8] = uuid[8]&0x3f | 0x80
	le.PutUint32(s[4:], checksum(e.out))
	return nil
}

func (e *encoder) writeInode(p *plan, number uint32) {
	n := p.n
	b := e.out[p.pos:]
	le.PutUint16(b, 1|p.layout<<1)
	if p.xattr > 0 {
		le.PutUint16(b[2:], uint16((p.xattr-xattrHeadSize)/4+1))
	}
	le.PutUint16(b[4:], uint16(n.Mode))
	le.PutUint64(b[8:], uint64(p.size))
	switch {
	case p.layout == layoutChunk:
		le.PutUint16(b[16:], uint16(p.bits)|chunkIndexes)
	case p.blocks > 0:
		le.PutUint32(b[16:], p.block)
	default:
		le.PutUint32(b[16:], encodeDev(n.Major, n.Minor))
	}
	le.PutUint32(b[20:], number)
	le.PutUint32(b[24:], n.UID)
	le.PutUint32(b[28:], n.GID)
	le.PutUint64(b[32:], uint64(n.ModTime.Unix()))
	le.PutUint32(b[40:], uint32(n.ModTime.Nanosecond()))
	le.PutUint32(b[44:], p.nlink)
	writeXattrs(b[extendedSize:extendedSize+p.xattr], n)
	rest := b[extendedSize+p.xattr:]
	switch {
	case n.IsDir():
		e.writeDir(p, rest)
	case n.IsSymlink() && p.tail > 0:
		copy(rest, n.Target)
	case n.IsSymlink():
		copy(e.out[int64(p.block)<<blockBits:], n.Target)
	case p.layout == layoutChunk:
		e.writeIndexes(p, b[alignUp(extendedSize+p.xattr, indexSize):])
	}
}

func (e *encoder) writeDir(p *plan, inline []byte) {
	for i, names := range p.dir {
		var b []byte
		if i < int(p.blocks) {
			b = e.out[(int64(p.block)+int64(i))<<blockBits:][:BlockSize]
		} else {
			b = inline[:p.tail]
		}
		off := len(names) * direntSize
		for j, name := range names {
			n := p.n.children[name]
			switch name {
			case ".":
				n = p.n
			case "..":
				n = p.parent
			}
			d := b[j*direntSize:]
			le.PutUint64(d, e.nid(n))
			le.PutUint16(d[8:], uint16(off))
			d[10] = direntType(n.Mode)
			off += copy(b[off:], name)
		}
	}
}

func (e *encoder) writeIndexes(p *plan, b []byte) {
	xs := p.n.Extents
	for i := range p.indexes {
		first := uint64(i) << p.bits
		for len(xs) > 0 && xs[0].File+xs[0].Count <= first {
			xs = xs[1:]
		}
		d := b[i*indexSize:]
		if len(xs) == 0 || xs[0].File > first {
			le.PutUint32(d[4:], nullBlock)
			continue
		}
		le.PutUint16(d[2:], e.devices[deviceKey(xs[0].Device)])
		le.PutUint32(d[4:], xs[0].Start+uint32(first-xs[0].File))
	}
}

func xattrSize(n *Inode) int64 {
	if len(n.Xattrs) == 0 {
		return 0
	}
	size := int64(xattrHeadSize)
	for name, value := range n.Xattrs {
		_, rest, _ := splitXattr(name)
		size += alignUp(int64(4+len(rest)+len(value)), 4)
	}
	return size
}

func writeXattrs(b []byte, n *Inode) {
	off := xattrHeadSize
	for _, name := range slices.Sorted(maps.Keys(n.Xattrs)) {
		value := n.Xattrs[name]
		index, rest, _ := splitXattr(name)
		d := b[off:]
		d[0] = byte(len(rest))
		d[1] = index
		le.PutUint16(d[2:], uint16(len(value)))
		copy(d[4:], rest)
		copy(d[4+len(rest):], value)
		off += int(alignUp(int64(4+len(rest)+len(value)), 4))
	}
}

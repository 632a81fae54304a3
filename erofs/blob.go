package erofs

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"math/bits"
)

const (
	// ChunkSize is the unit in which a blob is verified when it is read
	// lazily: its chunk table has one SHA-256 for each.
	ChunkSize = 256 << 10

	// pieceSize is the unit in which equal contents are found.
	pieceSize = 1 << 20
	maxPiece  = 16 << 20
	// sparseIndexes bounds the index of a file with holes: larger files get
	// coarser holes, down to maxPiece.
	sparseIndexes = 1 << 16
)

// A Sum is a SHA-256.
type Sum = [sha256.Size]byte

// BlobOptions are what is optional about a new blob.
type BlobOptions struct {
	// Lookup, if set, finds contents in older blobs: sum is that of up to
	// 16 MiB of file data padded with zeros to size bytes, a whole number of
	// blocks. The device it returns needs its Tag and Blocks.
	Lookup func(sum Sum, size int) (d *Device, block uint32, ok bool)
	// Laid, if set, is told of each piece that this blob holds, in the order in
	// which they lie in it, end to end, and so without gaps.
	Laid func(sum Sum, size int)
	// Limit bounds the blob's size in bytes; 0 is the format's 16 TiB.
	Limit int64
	// Sums says who makes the sums of chunks.
	Sums Sums
}

// Sums says who makes the sums of a blob's chunks.
type Sums int

const (
	// Summed has Finish return them.
	Summed Sums = iota
	// Unsummed leaves them to the writer, which gets pieces as they come.
	Unsummed
)

// A Blob lays file contents into one data blob, written sequentially to w,
// finding equal contents on the way. It serves one goroutine.
type Blob struct {
	w      io.Writer
	opts   BlobOptions
	dev    *Device
	pieces map[pieceKey]place
	chunk  []byte // not yet hashed and written
	sums   []Sum
	size   int64
	buf    []byte // one piece of the current file
	err    error  // a failed write; the blob is useless from then on
}

type pieceKey struct {
	sum  Sum
	size int
}

type place struct {
	dev   *Device
	block uint32
}

// NewBlob returns an empty blob that will be written to w.
func NewBlob(w io.Writer, opts BlobOptions) *Blob {
	if opts.Limit == 0 {
		opts.Limit = (math.MaxUint32 - 1) << blockBits
	}
	return &Blob{
		w: w, opts: opts, dev: &Device{}, pieces: map[pieceKey]place{},
		chunk: make([]byte, 0, ChunkSize),
	}
}

// Finish writes what is left and returns the blob's size and the SHA-256 of
// each of its chunks, the last of which may be short.
func (b *Blob) Finish() (size int64, chunks []Sum, err error) {
	if len(b.chunk) > 0 && b.err == nil {
		b.flush()
	}
	return b.size, b.sums, b.err
}

// Size is the number of bytes laid so far.
func (b *Blob) Size() int64 { return b.size }

// Device is the blob as trees point into it.
func (b *Blob) Device() *Device { return b.dev }

// SetTag names the blob's device; without it a tree that points into the blob
// encodes with a nameless device.
func (b *Blob) SetTag(tag string) { b.dev.Tag = tag }

func (b *Blob) flush() {
	b.sums = append(b.sums, sha256.Sum256(b.chunk))
	b.write(b.chunk)
	b.chunk = b.chunk[:0]
}

func (b *Blob) write(data []byte) {
	if b.err != nil {
		return
	}
	if _, err := b.w.Write(data); err != nil {
		b.err = fmt.Errorf("write blob: %w", err)
	}
}

// add stores a whole number of blocks and returns where they are, and their sum.
func (b *Blob) add(data []byte) (place, Sum, error) {
	key := pieceKey{sha256.Sum256(data), len(data)}
	p, err := b.place(key, data)
	return p, key.sum, err
}

func (b *Blob) place(key pieceKey, data []byte) (place, error) {
	if p, ok := b.pieces[key]; ok {
		return p, nil
	}
	if b.opts.Lookup != nil {
		if dev, block, ok := b.opts.Lookup(key.sum, key.size); ok {
			p := place{dev, block}
			b.pieces[key] = p
			return p, nil
		}
	}
	if b.size+int64(len(data)) > b.opts.Limit {
		return place{}, fmt.Errorf("blob over %d bytes: %w", b.opts.Limit, ErrTooBig)
	}
	p := place{b.dev, uint32(b.size >> blockBits)}
	b.size += int64(len(data))
	b.dev.Blocks += uint32(len(data) >> blockBits)
	if b.opts.Sums == Unsummed {
		b.write(data)
		data = nil
	}
	for len(data) > 0 && b.err == nil {
		n := copy(b.chunk[len(b.chunk):ChunkSize], data)
		b.chunk = b.chunk[:len(b.chunk)+n]
		data = data[n:]
		if len(b.chunk) == ChunkSize {
			b.flush()
		}
	}
	b.pieces[key] = p
	if b.opts.Laid != nil {
		b.opts.Laid(key.sum, key.size)
	}
	return p, b.err
}

// contents collects the extents of one file. Ranges are given in ascending
// order; what is not given, or is zero in whole units, becomes a hole.
type contents struct {
	b       *Blob
	size    int64
	unit    int64 // granularity of holes
	piece   int64 // a multiple of unit
	cur     int64 // start of the piece in the buffer, or -1
	full    []bool
	extents []Extent
	pieces  []byte // of the file: where, and the sum
}

type density int

const (
	dense  density = iota // holes are looked for a whole piece at a time
	sparse                // holes matter
)

func (b *Blob) file(size int64, d density) *contents {
	c := &contents{b: b, size: size, cur: -1, piece: pieceSize, unit: pieceSize}
	if d == sparse {
		per := blocksOf(size) / sparseIndexes
		c.unit = min(int64(BlockSize)<<bits.Len64(per), maxPiece)
		c.piece = max(c.piece, c.unit)
	}
	if int64(len(b.buf)) < min(c.piece, alignUp(size, BlockSize)) {
		b.buf = make([]byte, c.piece)
	}
	return c
}

// data takes n bytes of the file at off from r.
func (c *contents) data(off, n int64, r io.Reader) error {
	for n > 0 {
		start := off - off%c.piece
		if start != c.cur {
			if err := c.flush(); err != nil {
				return err
			}
			c.open(start)
		}
		part := min(n, start+c.piece-off)
		at := off - start
		if _, err := io.ReadFull(r, c.b.buf[at:at+part]); err != nil {
			return err
		}
		for u := at / c.unit; u*c.unit < at+part; u++ {
			c.full[u] = true
		}
		off += part
		n -= part
	}
	return nil
}

func (c *contents) open(start int64) {
	c.cur = start
	length := min(c.piece, alignUp(c.size-start, BlockSize))
	clear(c.b.buf[:length])
	if c.full == nil {
		c.full = make([]bool, c.piece/c.unit)
	}
	clear(c.full)
}

// flush stores the runs of units in the buffer that are not zero.
func (c *contents) flush() error {
	if c.cur < 0 {
		return nil
	}
	length := min(c.piece, alignUp(c.size-c.cur, BlockSize))
	buf := c.b.buf[:length]
	for u, full := range c.full {
		if full {
			lo := int64(u) * c.unit
			c.full[u] = !isZero(buf[lo:min(lo+c.unit, length)])
		}
	}
	for u := 0; u < len(c.full); {
		if !c.full[u] {
			u++
			continue
		}
		lo := int64(u) * c.unit
		for u < len(c.full) && c.full[u] {
			u++
		}
		run := buf[lo:min(int64(u)*c.unit, length)]
		p, sum, err := c.b.add(run)
		if err != nil {
			return err
		}
		c.pieces = le.AppendUint64(c.pieces, uint64(c.cur+lo)>>blockBits)
		c.pieces = append(c.pieces, sum[:]...)
		c.append(Extent{
			File: uint64(c.cur+lo) >> blockBits, Count: uint64(len(run)) >> blockBits,
			Device: p.dev, Start: p.block,
		})
	}
	c.cur = -1
	return nil
}

func (c *contents) append(x Extent) {
	if n := len(c.extents); n > 0 {
		last := &c.extents[n-1]
		if last.Device == x.Device && last.File+last.Count == x.File &&
			uint64(last.Start)+last.Count == uint64(x.Start) {
			last.Count += x.Count
			return
		}
	}
	c.extents = append(c.extents, x)
}

// finish gives the file its contents.
func (c *contents) finish(n *Inode) error {
	if err := c.flush(); err != nil {
		return err
	}
	n.Extents = c.extents
	n.Contents = sha256.Sum256(c.pieces)
	return nil
}

var zeros [BlockSize]byte

func isZero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

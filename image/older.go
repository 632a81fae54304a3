package image

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	// maxOlder bounds the blobs of other layers that one layer points into,
	// since each is a device of its mount.
	maxOlder = 64
	// maxListed bounds the pieces that are in memory of such blobs.
	maxListed = 8 << 20
	// maxAsked bounds the blobs that one import keeps an account of.
	maxAsked = 1 << 16
	// renewAfter is how often a long import tells collections what it uses.
	renewAfter = DefaultMinAge / 6
)

// A finder finds contents that the store has already, for one layer being made:
// in blobs of the same layer that are complete, and by the file index in those of
// other layers. It serves one goroutine.
//
// Pieces come one by one, so which older blobs save most is not known before the
// end. A blob is pointed into when it could have saved enough already, and the
// more there are the more that is: no blob is in the way of a better one for the
// sake of one small file.
type finder struct {
	ctx   context.Context
	lib   *Library
	index *fileIndex // nil without one
	room  int        // for more older blobs
	used  int
	asked map[uint32]*older // by number in the index
	taken map[string]bool   // plain digests in use, as tags
	own   map[ownKey]ownPlace
	left  int // pieces that may still be listed
	since time.Time
}

type ownKey struct {
	sum  erofs.Sum
	size int
}

type ownPlace struct {
	dev   *erofs.Device
	block uint32
}

// An older blob is one that the layer may point into.
type older struct {
	data    Data
	dev     *erofs.Device
	list    *pieceList // not nil: it is pointed into
	matched int64      // bytes it has too, says the index
	refused bool
}

func (l *Library) newFinder(ctx context.Context) *finder {
	return &finder{
		ctx: ctx, lib: l, index: l.fileIndex(), room: maxOlder, left: maxListed, since: time.Now(),
		asked: map[uint32]*older{}, taken: map[string]bool{}, own: map[ownKey]ownPlace{},
	}
}

// enough is what the next older blob must save to be pointed into: a block for
// the first eight, twice as much for each eight more.
func (f *finder) enough() int64 { return erofs.BlockSize << (f.used / 8) }

// lookup is for erofs.BlobOptions.
func (f *finder) lookup(sum erofs.Sum, size int) (dev *erofs.Device, block uint32, ok bool) {
	if p, ok := f.own[ownKey{sum, size}]; ok {
		return p.dev, p.block, true
	}
	if f.index == nil {
		return nil, 0, false
	}
	if time.Since(f.since) > renewAfter {
		f.renew()
	}
	var next *older
	var nextAt uint32
	f.index.find(sum, func(n uint32, d Data, at uint32) {
		if ok {
			return
		}
		o := f.asked[n]
		if o == nil {
			if len(f.asked) >= maxAsked {
				return
			}
			o = &older{data: d, refused: !f.lib.takes(d)}
			f.asked[n] = o
		}
		switch {
		case o.refused:
		case o.list != nil && o.list.has(at, sum, size):
			dev, block, ok = o.dev, at, true
		case o.list == nil && next == nil:
			next, nextAt = o, at
		}
	})
	if ok || next == nil {
		return dev, block, ok
	}
	if next.matched += int64(size); next.matched < f.enough() || f.used >= f.room {
		return nil, 0, false
	}
	if err := f.take(next); err != nil {
		next.refused = true
		if errors.Is(err, blob.ErrNotFound) {
			f.index.forget(next.data.Digest)
		}
		return nil, 0, false
	}
	return next.dev, nextAt, next.list.has(nextAt, sum, size)
}

// laid takes in a blob of this layer that is complete.
func (f *finder) laid(dev *erofs.Device, pieces []byte) {
	block := uint32(0)
	for e := range slices.Chunk(pieces, pieceSize) {
		n := uint32(binary.LittleEndian.Uint16(e[sha256.Size:])) + 1
		f.own[ownKey{erofs.Sum(e), int(n) * erofs.BlockSize}] = ownPlace{dev, block}
		block += n
	}
}

// takes reports whether a layer of this library may have that data: where blobs are
// files to be mounted, none is packed.
func (l *Library) takes(d Data) bool { return d.Packed == nil || l.opts.Pack != None }

// take makes an older blob one that is pointed into: it keeps it from being
// collected, and makes sure that it and its list of pieces are there.
func (f *finder) take(o *older) error {
	d := o.data
	if f.taken[d.Digest.Hex()] || d.Pieces.Size/pieceSize > int64(f.left) {
		return fmt.Errorf("data %s: no room for it", d.Digest)
	}
	if err := f.lib.keep(f.ctx, d); err != nil {
		return err
	}
	list, err := readPieces(f.ctx, f.lib.store, d)
	if err != nil {
		return err
	}
	o.list = list
	o.dev = &erofs.Device{Tag: d.Digest.Hex(), Blocks: uint32(d.Size / erofs.BlockSize)}
	f.left -= list.len()
	f.used++
	f.taken[o.dev.Tag] = true
	return nil
}

// renew keeps what is in use from being collected for another while.
func (f *finder) renew() {
	f.since = time.Now()
	for _, o := range f.asked {
		if o.list != nil {
			f.lib.keep(f.ctx, o.data) //nolint:errcheck // publishing finds out
		}
	}
}

// data gives the blobs that were pointed into, by tag.
func (f *finder) data() map[string]Data {
	out := map[string]Data{}
	for n, o := range f.asked {
		if o.list != nil {
			out[o.dev.Tag] = o.data
			f.index.hit(n)
		}
	}
	return out
}

// keep has collections leave a blob alone for a while, and makes sure that it is
// there. From then on it is.
func (l *Library) keep(ctx context.Context, d Data) error {
	l.sweeping.RLock()
	defer l.sweeping.RUnlock()
	for _, p := range d.parts() {
		l.touch(ctx, p.Digest)
	}
	for _, p := range d.parts() {
		info, err := l.store.Stat(ctx, p.Digest)
		if err != nil {
			return err
		}
		if info.Size != p.Size {
			return fmt.Errorf("blob %s has %d bytes, should have %d: %w", p.Digest, info.Size, p.Size, ErrCorrupt)
		}
	}
	return nil
}

// fileIndex opens the library's file index when it is first wanted. Without one,
// or while another process has it, files are stored again: nil.
func (l *Library) fileIndex() *fileIndex {
	l.indexing.Lock()
	defer l.indexing.Unlock()
	if l.index != nil || l.opts.Index == "" {
		return l.index
	}
	x, err := openIndex(l.opts.Index)
	if err != nil {
		return nil
	}
	l.index = x
	return x
}

// Learn takes layers that other nodes made into the file index, from their lists
// of pieces, in the order given. Layers that are known cost nothing; those without
// a list, and those that are gone, are passed over. Without an index it does
// nothing.
func (l *Library) Learn(ctx context.Context, layers []blob.Digest) error {
	x := l.fileIndex()
	if x == nil {
		return nil
	}
	for _, d := range layers {
		if x.hasLayer(d) {
			continue
		}
		if err := l.learn(ctx, x, d); err != nil && !errors.Is(err, blob.ErrNotFound) && !isCorrupt(err) {
			return stored("image.Learn", fmt.Errorf("layer %s: %w", d, err))
		}
	}
	return nil
}

func (l *Library) learn(ctx context.Context, x *fileIndex, layer blob.Digest) error {
	m, err := l.manifest(ctx, layer)
	if err != nil {
		return err
	}
	for _, d := range m.Data {
		if d.Pieces == nil || x.has(d.Digest) {
			continue
		}
		list, err := readPieces(ctx, l.store, d)
		if err != nil {
			return err
		}
		if err := x.add(d, list); err != nil {
			return err
		}
	}
	x.addLayer(layer, m.Content)
	return nil
}

// Close lets go of the library's file index. The library goes on without it.
func (l *Library) Close() {
	l.indexing.Lock()
	defer l.indexing.Unlock()
	if l.index != nil {
		l.index.close()
		l.index, l.opts.Index = nil, ""
	}
}

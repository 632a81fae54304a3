package depot

import (
	"slices"
	"sync"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/lazy"
)

// NoteFor is how long what is read of a layer is noted, after it was told first.
const NoteFor = 30 * time.Second

// Bounds of notes.
const (
	maxLayers    = 256                         // that are noted at a time
	maxPages     = (256 << 20) / lazy.PageSize // of a layer
	maxExtents   = 1 << 15                     // likewise
	maxNotedBlob = 1 << 40                     // bytes; pages of a larger one are not noted
)

// notes record which pages of layers were read first, in order. What the kernel has in memory
// it asks for once, so the first sandbox of a layer is the one that is seen.
type notes struct {
	after time.Duration // how long a layer is noted

	mu     sync.Mutex
	layers map[blob.Digest]*note
	byBlob map[blob.Digest][]*note // those that are noted now
}

// note is what was read of a layer.
type note struct {
	since   time.Time
	data    []blob.Digest
	seen    []map[int]uint64 // by blob: words of pages
	extents []extent
	pages   int
	done    bool // it is not wanted: there is a profile
	spoilt  bool // which is of no use
}

// extent is a row of pages: number of the blob, first page, how many.
type extent [3]int

// begin notes a layer from now on, unless it was already.
func (n *notes) begin(layer blob.Digest, data []blob.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.layers == nil {
		n.layers, n.byBlob = map[blob.Digest]*note{}, map[blob.Digest][]*note{}
	}
	if n.layers[layer] != nil {
		return
	}
	if len(n.layers) >= maxLayers {
		for d, old := range n.layers {
			if n.over(old) {
				n.close(old)
				delete(n.layers, d)
			}
		}
	}
	if len(n.layers) < maxLayers {
		l := &note{since: time.Now(), data: data, seen: make([]map[int]uint64, len(data))}
		n.layers[layer] = l
		for _, d := range data {
			n.byBlob[d] = append(n.byBlob[d], l)
		}
	}
}

// over reports whether nothing more of a layer is noted.
func (n *notes) over(l *note) bool {
	return l.done || time.Since(l.since) > n.after
}

// close has reads pass a layer by. Requires: n.mu held.
func (n *notes) close(l *note) {
	for _, d := range l.data {
		if rest := slices.DeleteFunc(n.byBlob[d], func(x *note) bool { return x == l }); len(rest) > 0 {
			n.byBlob[d] = rest
		} else {
			delete(n.byBlob, d)
		}
	}
	l.seen = nil
}

// dismiss notes a layer no more: it has a profile.
func (n *notes) dismiss(layer blob.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.layers[layer]; l != nil {
		n.close(l)
		l.done, l.extents = true, nil
	}
}

// spoil says that the profile of a layer is of no use.
func (n *notes) spoil(layer blob.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.layers[layer]; l != nil {
		l.spoilt = true
	}
}

// spoilt reports whether the profile of a layer was found to be of no use.
func (n *notes) spoilt(layer blob.Digest) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.layers[layer]
	return l != nil && l.spoilt
}

// read notes n bytes at off of a blob.
func (n *notes) read(d blob.Digest, off int64, size int) {
	if size <= 0 || off+int64(size) > maxNotedBlob {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range slices.Clone(n.byBlob[d]) {
		if n.over(l) {
			n.close(l)
			continue
		}
		l.read(slices.Index(l.data, d), int(off/lazy.PageSize), int((off+int64(size)-1)/lazy.PageSize))
	}
}

// read notes the pages from first to last that were not yet.
func (l *note) read(b, first, last int) {
	if l.seen[b] == nil {
		l.seen[b] = map[int]uint64{}
	}
	for p := first; p <= last; p++ {
		bit := uint64(1) << (p % 64)
		if l.seen[b][p/64]&bit != 0 {
			continue
		}
		if n := len(l.extents); n > 0 && l.extents[n-1][0] == b && l.extents[n-1][1]+l.extents[n-1][2] == p && l.pages < maxPages {
			l.extents[n-1][2]++
		} else if n < maxExtents && l.pages < maxPages {
			l.extents = append(l.extents, extent{b, p, 1})
		} else {
			return
		}
		l.seen[b][p/64] |= bit
		l.pages++
	}
}

// take gives what was noted of a layer once its time is over; nil before.
func (n *notes) take(layer blob.Digest) *note {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.layers[layer]
	if l == nil || l.done || len(l.extents) == 0 || !n.over(l) {
		return nil
	}
	return &note{data: l.data, extents: l.extents}
}

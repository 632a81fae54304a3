package lazy

import (
	"context"
	"math/bits"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// PageSize is the unit of what is here of a chunk that was not fetched whole.
const PageSize = 4096

const chunkPages = erofs.ChunkSize / PageSize // as many as a word has bits

// pages are those of absent chunks that somebody brought one by one, see Expect. They are
// known to this process alone: for its successor the chunks are absent. Guarded by entry.mu.
type pages struct {
	here   map[int]uint64 // by chunk
	coming map[int]uint64 // somebody is about to bring them
	change chan struct{}  // closed when either changes; nil while nobody waits for that
}

// Extent is a row of pages of a blob.
type Extent struct {
	Blob        blob.Digest
	First, Many int
}

// masks calls f for each chunk of a row of pages.
func masks(first, many int, f func(chunk int, mask uint64)) {
	for end := first + many; first < end; {
		i, at := first/chunkPages, first%chunkPages
		n := min(chunkPages-at, end-first)
		f(i, (^uint64(0)>>(chunkPages-n))<<at)
		first += n
	}
}

// need is the mask of what a read of n bytes at off wants of chunk i.
func need(i int, off int64, n int) (mask uint64) {
	first := max(int(off/PageSize), i*chunkPages)
	end := min(int((off+int64(n)+PageSize-1)/PageSize), (i+1)*chunkPages)
	masks(first, end-first, func(_ int, m uint64) { mask = m })
	return mask
}

// waits gives what is closed at the next change. Requires: e.mu held.
func (p *pages) waits() <-chan struct{} {
	if p.change == nil {
		p.change = make(chan struct{})
	}
	return p.change
}

// settle says that pages are not coming any more. Requires: e.mu held.
func (p *pages) settle(i int, mask uint64) {
	if rest := p.coming[i] &^ mask; rest != 0 {
		p.coming[i] = rest
	} else {
		delete(p.coming, i)
	}
}

// changed wakes who waits. Requires: e.mu held.
func (p *pages) changed() {
	if p.change != nil {
		close(p.change)
		p.change = nil
	}
}

// Expect says that pages are about to be brought: a read that wants no others of an absent
// chunk waits for them for a moment and has nothing fetched. What has not come when done is
// called is fetched as ever. Blobs and pages that are not there are passed over.
func (c *Cache) Expect(list []Extent) (done func()) {
	touched := map[*entry]map[int]uint64{}
	for _, x := range list {
		c.mu.Lock()
		e := c.blobs[x.Blob]
		c.mu.Unlock()
		if e == nil || x.First < 0 || x.Many <= 0 || int64(x.First)+int64(x.Many) > (e.plain+PageSize-1)/PageSize {
			continue
		}
		if touched[e] == nil {
			touched[e] = map[int]uint64{}
		}
		masks(x.First, x.Many, func(i int, m uint64) { touched[e][i] |= m })
	}
	for e, chunks := range touched {
		e.mu.Lock()
		for i, m := range chunks {
			if e.pages.coming == nil {
				e.pages.coming = map[int]uint64{}
			}
			e.pages.coming[i] |= m
		}
		e.mu.Unlock()
	}
	return func() {
		for e, chunks := range touched {
			e.mu.Lock()
			for i, m := range chunks {
				e.pages.settle(i, m)
			}
			e.pages.changed()
			e.mu.Unlock()
		}
	}
}

// Bring keeps pages of a blob, which the caller has checked; data ends with a page or with the
// blob. It reports whether there was room: nothing is dropped to make some.
func (c *Cache) Bring(x Extent, data []byte) bool {
	e, err := c.pin(x.Blob)
	if err != nil {
		return false
	}
	defer c.unpin(e)
	at := int64(x.First) * PageSize
	if x.First < 0 || x.Many <= 0 || int64(len(data)) != min(int64(x.Many)*PageSize, e.plain-at) {
		return false
	}
	if !c.reserveFree(int64(len(data))) {
		return false
	}
	if _, err := e.file.WriteAt(data, at); err != nil { // a full disk
		c.giveBack(int64(len(data)))
		return false
	}
	// Written soon, so that the pages can be given back when they are read.
	unix.SyncFileRange(int(e.file.Fd()), at, int64(len(data)), unix.SYNC_FILE_RANGE_WRITE) //nolint:errcheck // a hint
	e.mu.Lock()
	kept := int64(0)
	masks(x.First, x.Many, func(i int, m uint64) {
		if e.state[i] == absent {
			if e.pages.here == nil {
				e.pages.here = map[int]uint64{}
			}
			kept += e.pageBytes(i, m&^e.pages.here[i])
			e.pages.here[i] |= m
		}
		e.pages.settle(i, m)
	})
	e.have += kept
	e.pages.changed()
	e.mu.Unlock()
	c.giveBack(int64(len(data)) - kept)
	c.stats.brought.Add(int64(x.Many))
	return true
}

// pageBytes is how many bytes pages of a chunk have: all of them PageSize but the blob's last.
func (e *entry) pageBytes(i int, mask uint64) int64 {
	n := int64(bits.OnesCount64(mask)) * PageSize
	if last := (e.plain - 1) / PageSize; last/chunkPages == int64(i) && mask>>(last%chunkPages)&1 == 1 {
		n -= (last+1)*PageSize - e.plain
	}
	return n
}

// unpage forgets the pages of a chunk, which is here whole or not to be believed, and gives how
// many bytes they were. Requires: e.mu held.
func (e *entry) unpage(i int) int64 {
	n := e.pageBytes(i, e.pages.here[i])
	delete(e.pages.here, i)
	e.have -= n
	return n
}

// Peek reads what is here of a blob: all of p, or nothing.
func (c *Cache) Peek(d blob.Digest, off int64, p []byte) bool {
	e, err := c.pin(d)
	if err != nil || off < 0 || off+int64(len(p)) > e.plain || len(p) == 0 {
		if err == nil {
			c.unpin(e)
		}
		return false
	}
	defer c.unpin(e)
	e.mu.Lock()
	for i := int(off / erofs.ChunkSize); i <= int((off+int64(len(p))-1)/erofs.ChunkSize); i++ {
		if e.state[i] != kept && need(i, off, len(p))&^e.pages.here[i] != 0 {
			e.mu.Unlock()
			return false
		}
	}
	e.mu.Unlock()
	_, err = e.file.ReadAt(p, off)
	return err == nil
}

// Count adds to the bytes that came from the store what the caller fetched for Bring.
func (c *Cache) Count(fetched int64) { c.stats.fetched.Add(fetched) }

// politeness is how long what is brought unasked gives way.
const politeness = 20 * time.Millisecond

// pagePatience is how long a read waits for pages that are on their way before it has the
// chunk fetched: they may be at the end of a long row over a slow line.
const pagePatience = 500 * time.Millisecond

// GiveWay waits a moment if reads wait for chunks, and none for what is being brought.
func (c *Cache) GiveWay(ctx context.Context) {
	if c.waiting.Load() > 0 && c.paging.Load() == 0 {
		select {
		case <-time.After(politeness):
		case <-ctx.Done():
		}
	}
}

// reserveFree is reserve without dropping anything.
func (c *Cache) reserveFree(n int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cfg.Bytes > 0 && c.cached+n > c.cfg.Bytes {
		return false
	}
	c.cached += n
	return true
}

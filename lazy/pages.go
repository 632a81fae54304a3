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
		if e == nil || !e.has(x) {
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

// Bring keeps pages of a blob, which the caller has checked, as far as their chunks are absent
// and nobody fetches them; data ends with a page or with the blob. It reports whether there was
// room: nothing is dropped to make some.
func (c *Cache) Bring(x Extent, data []byte) bool {
	e, err := c.pin(x.Blob)
	if err != nil {
		return false
	}
	defer c.unpin(e)
	at := int64(x.First) * PageSize
	if !e.has(x) || int64(len(data)) != min(int64(x.Many)*PageSize, e.plain-at) {
		return false
	}
	e.mu.Lock()
	missing := e.missing(x)
	if missing == 0 {
		masks(x.First, x.Many, e.pages.settle)
		e.pages.changed()
	}
	e.mu.Unlock()
	if missing == 0 {
		return true
	}
	if !c.reserveFree(missing) {
		return false
	}
	ok := true
	e.mu.Lock()
	// What came meanwhile is not written: a chunk that is here was checked against its table.
	// A fetch that begins from now on writes after this.
	masks(x.First, x.Many, func(i int, m uint64) {
		defer e.pages.settle(i, m)
		n := e.pageBytes(i, m&^e.pages.here[i])
		if e.gone || e.state[i] != absent || e.flying[i] != nil || n == 0 || n > missing {
			return
		}
		from := max(at, int64(i)*erofs.ChunkSize)
		to := min(at+int64(len(data)), int64(i+1)*erofs.ChunkSize)
		if _, err := e.file.WriteAt(data[from-at:to-at], from); err != nil { // a full disk
			ok = false
			return
		}
		if e.pages.here == nil {
			e.pages.here = map[int]uint64{}
		}
		e.pages.here[i] |= m
		e.have += n
		missing -= n
	})
	e.pages.changed()
	e.mu.Unlock()
	c.giveBack(missing)
	// Written soon, so that the pages can be given back when they are read.
	unix.SyncFileRange(int(e.file.Fd()), at, int64(len(data)), unix.SYNC_FILE_RANGE_WRITE) //nolint:errcheck // a hint
	c.stats.brought.Add(int64(x.Many))
	return ok
}

// has reports whether a blob has all of an extent.
func (e *entry) has(x Extent) bool {
	return x.First >= 0 && x.Many > 0 && int64(x.First)+int64(x.Many) <= (e.plain+PageSize-1)/PageSize
}

// missing is how many bytes of an extent Bring would keep now. Requires: e.mu held.
func (e *entry) missing(x Extent) (n int64) {
	masks(x.First, x.Many, func(i int, m uint64) {
		if e.state[i] == absent && e.flying[i] == nil {
			n += e.pageBytes(i, m&^e.pages.here[i])
		}
	})
	return n
}

// Wants reports whether Bring would keep anything of extents.
func (c *Cache) Wants(list []Extent) bool {
	for _, x := range list {
		e, err := c.pin(x.Blob)
		if err != nil {
			continue
		}
		e.mu.Lock()
		wants := e.has(x) && e.missing(x) > 0
		e.mu.Unlock()
		c.unpin(e)
		if wants {
			return true
		}
	}
	return false
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

// Chunk gives a chunk that is kept, checked again; nil for any other.
func (c *Cache) Chunk(d blob.Digest, i int) []byte {
	e, err := c.pin(d)
	if err != nil {
		return nil
	}
	defer c.unpin(e)
	o := e.origin.Load()
	e.mu.Lock()
	here := o != nil && i >= 0 && i < len(e.state) && e.state[i] == kept
	e.mu.Unlock()
	if !here {
		return nil
	}
	b := make([]byte, e.sizeOf(i))
	if _, err := e.file.ReadAt(b, int64(i)*erofs.ChunkSize); err != nil || !o.table.Is(i, b) {
		return nil
	}
	return b
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

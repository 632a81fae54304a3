package lazy

import (
	"slices"
	"time"

	"github.com/dsec-go/dsec/blob"
)

// Bounds of what is fetched unasked.
const (
	prefetchers = 2
	ahead       = 16                    // chunks of a list that are looked at together
	politeness  = 20 * time.Millisecond // for reads that wait for the store
)

// Prefetch has chunks of a blob fetched in that order, behind what anybody waits for. It drops
// nothing to make room for them. Chunks that the blob has not are ignored, as is a blob that
// was not added: a list is a hint.
func (c *Cache) Prefetch(d blob.Digest, chunks []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[d]
	if e == nil || e.origin.Load() == nil || len(chunks) == 0 {
		return
	}
	if len(e.ahead) == 0 {
		c.queue = append(c.queue, e)
	}
	e.ahead = append(e.ahead, chunks...)
	c.nudge()
}

// nudge wakes one who prefetches.
func (c *Cache) nudge() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// prefetch fetches what is queued until the cache is closed.
func (c *Cache) prefetch() {
	for {
		select {
		case <-c.wake:
		case <-c.life.Done():
			return
		}
		for c.prefetchSome() {
			if c.waiting.Load() > 0 {
				select {
				case <-time.After(politeness):
				case <-c.life.Done():
				}
			}
			if c.life.Err() != nil {
				return
			}
		}
	}
}

// prefetchSome takes the beginning of the oldest list. It reports whether there was one.
func (c *Cache) prefetchSome() bool {
	c.mu.Lock()
	if len(c.queue) == 0 {
		c.mu.Unlock()
		return false
	}
	e := c.queue[0]
	list := e.ahead[:min(ahead, len(e.ahead))]
	if e.ahead = e.ahead[len(list):]; len(e.ahead) == 0 {
		e.ahead, c.queue = nil, c.queue[1:]
	}
	if len(c.queue) > 0 {
		c.nudge() // the others can work on what is left
	}
	e.pins++
	c.mu.Unlock()
	defer c.unpin(e)

	list = slices.Sorted(slices.Values(list))
	for len(list) > 0 {
		n := 1
		for n < len(list) && list[n] == list[0]+n {
			n++
		}
		e.mu.Lock()
		var r run
		if i := list[0]; i >= 0 && i < len(e.state) {
			r = e.row(i, n)
		}
		e.mu.Unlock()
		if len(r.flights) > 0 {
			c.stats.prefetched.Add(int64(len(r.flights)))
			c.fetch(e, r, c.reserveFree)
		}
		list = list[max(1, len(r.flights)):]
	}
	return true
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

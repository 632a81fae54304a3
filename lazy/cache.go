package lazy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
)

// DefaultLimit is how long a read waits for the store.
const DefaultLimit = 30 * time.Second

// ErrUnknown is the error of a blob that was not added.
var ErrUnknown = errors.New("blob is not known to the cache")

// Config says where a Cache fetches from and keeps what it has.
type Config struct {
	Store blob.Store
	Dir   string        // on ext4, xfs or btrfs; the cache's alone
	Bytes int64         // of chunks kept at most; 0 is no bound
	Limit time.Duration // of one read; default DefaultLimit

	// Boot names the host's present boot; default the kernel's boot ID.
	Boot string
}

// Stats count since Open, except for Cached, which is now.
type Stats struct {
	Cached  int64 // bytes of chunks kept
	Fetched int64 // bytes that came from the store
	Hits    int64 // chunks that a read found kept
	Misses  int64 // chunks that reads had fetched, those ahead of them too
	Brought int64 // pages that came before anybody wanted them, see Bring
	Unkept  int64 // chunks that were served and had no room
	Evicted int64 // blobs whose chunks were dropped to make room
	Corrupt int64 // chunks that did not match their table, from the store or the disk
	Failed  int64 // reads that ended with an error
}

// Cache holds parts of blobs. It is safe for concurrent use.
type Cache struct {
	cfg  Config
	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup
	lock *os.File
	slot chan struct{} // one for each fetch under way

	waiting atomic.Int64 // reads that wait for chunks
	paging  atomic.Int64 // reads that wait for pages
	stats   struct {
		fetched, hits, misses, brought, unkept, evicted, corrupt, failed atomic.Int64
	}

	mu     sync.Mutex
	blobs  map[blob.Digest]*entry
	cached int64
}

// entry is one blob. Its mu is taken after Cache.mu.
type entry struct {
	digest blob.Digest
	plain  int64                  // its bytes
	origin atomic.Pointer[origin] // nil as long as it was not added
	file   *os.File               // sparse, as long as the blob
	marks  *os.File               // see marks.go

	pins int       // reads and fetches under way, and holders of the path; guarded by Cache.mu
	used time.Time // guarded by Cache.mu

	mu      sync.Mutex
	state   []mark
	have    int64 // bytes of chunks that are not absent, and of pages
	sure    int   // chunks that are kept
	flying  map[int]*flight
	streams [8]stream
	guesses guesses
	pages   pages
	gone    bool // another took its place
}

// origin is where the chunks of a blob come from.
type origin struct {
	data  image.Data
	table *image.Table
}

// Open opens a cache and finds what an earlier one kept. One process has a folder at a time.
func Open(cfg Config) (*Cache, error) {
	if cfg.Limit == 0 {
		cfg.Limit = DefaultLimit
	}
	if cfg.Boot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("open cache: %w", err)
		}
		cfg.Boot = strings.TrimSpace(string(b))
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("open cache: another process has %s: %w", cfg.Dir, err)
	}
	c := &Cache{cfg: cfg, lock: lock, slot: make(chan struct{}, maxFetches), blobs: map[blob.Digest]*entry{}}
	c.life, c.end = context.WithCancel(context.Background())
	if err := c.find(); err != nil {
		return nil, errors.Join(fmt.Errorf("open cache: %w", err), c.Close())
	}
	return c, nil
}

// find counts what lies in the folder. Blobs that nobody added since are known by their files
// alone: they can be dropped, not read.
func (c *Cache) find() error {
	names, err := filepath.Glob(filepath.Join(c.cfg.Dir, "*"+marksSuffix))
	if err != nil {
		return err
	}
	for _, name := range names {
		hex := strings.TrimSuffix(filepath.Base(name), marksSuffix)
		d, err := blob.Parse("sha256:" + hex)
		if err != nil {
			continue // not ours
		}
		e := &entry{digest: d, flying: map[int]*flight{}}
		if err := e.open(c.cfg, 0); err != nil {
			c.remove(e) // torn or of another version: fetched again
			continue
		}
		if st, err := e.file.Stat(); err == nil {
			e.used = st.ModTime()
		}
		c.blobs[d] = e
		c.cached += e.have
	}
	return nil
}

// Close ends all fetches. What was kept stays for the next.
func (c *Cache) Close() error {
	c.end()
	c.work.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.blobs {
		e.close()
	}
	return c.lock.Close()
}

// Add makes a blob known, so that it can be read. Again it changes where it is fetched from:
// plain or packed, its bytes are the same.
func (c *Cache) Add(d image.Data, t *image.Table) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[d.Digest]
	switch {
	case e != nil && (e.size() != d.Size || len(e.state) != t.Len()):
		e.mu.Lock()
		e.gone = true
		e.mu.Unlock()
		c.drop(e)
		e.close()
		c.remove(e)
		delete(c.blobs, d.Digest)
		e = nil
	}
	if e == nil {
		e = &entry{digest: d.Digest, flying: map[int]*flight{}}
		if err := e.open(c.cfg, d.Size); err != nil {
			return fmt.Errorf("add blob %s: %w", d.Digest, err)
		}
		c.blobs[d.Digest] = e
	}
	e.origin.Store(&origin{d, t})
	e.used = time.Now()
	return nil
}

// Forget makes a blob unknown, with what is here of it, unless somebody reads it or has its file
// open. It reports whether the blob is unknown now.
func (c *Cache) Forget(d blob.Digest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[d]
	if e == nil {
		return true
	}
	if e.pins > 0 || e.busy() {
		return false
	}
	e.origin.Store(nil)
	c.drop(e)
	return c.blobs[d] == nil
}

// Path gives a blob as a plain file if all of it is here, which then stays until release is
// called; otherwise ok is false.
func (c *Cache) Path(d blob.Digest) (path string, release func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[d]
	if e == nil || !e.complete() {
		return "", nil, false
	}
	e.pins, e.used = e.pins+1, time.Now()
	return e.path(c.cfg.Dir), sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		e.pins, e.used = e.pins-1, time.Now()
	}), true
}

func (e *entry) complete() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.origin.Load() != nil && e.sure == len(e.state)
}

// Cached gives the bytes of a blob that are here.
func (c *Cache) Cached(d blob.Digest) int64 {
	c.mu.Lock()
	e := c.blobs[d]
	c.mu.Unlock()
	if e == nil {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.have
}

// Stats gives the counts.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	cached := c.cached
	c.mu.Unlock()
	s := &c.stats
	return Stats{
		Cached: cached, Fetched: s.fetched.Load(), Hits: s.hits.Load(), Misses: s.misses.Load(), Brought: s.brought.Load(),
		Unkept: s.unkept.Load(), Evicted: s.evicted.Load(), Corrupt: s.corrupt.Load(), Failed: s.failed.Load(),
	}
}

// pin finds a blob and keeps it.
func (c *Cache) pin(d blob.Digest) (*entry, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.blobs[d]
	if e == nil || e.origin.Load() == nil {
		return nil, fmt.Errorf("blob %s: %w", d, ErrUnknown)
	}
	e.pins++
	e.used = time.Now()
	return e, nil
}

func (c *Cache) unpin(e *entry) {
	c.mu.Lock()
	e.pins--
	c.mu.Unlock()
}

// reserve makes room for n bytes, by dropping blobs that nobody reads, the longest unused
// first. The bytes count as cached from then on.
func (c *Cache) reserve(n int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	busy := map[*entry]bool{}
	for c.cfg.Bytes > 0 && c.cached+n > c.cfg.Bytes {
		var oldest *entry
		for _, e := range c.blobs {
			if e.pins == 0 && e.bytes() > 0 && !busy[e] && (oldest == nil || e.used.Before(oldest.used)) {
				oldest = e
			}
		}
		if oldest == nil {
			return false
		}
		before := c.cached
		if oldest.busy() {
			busy[oldest] = true
			continue
		}
		if c.drop(oldest); c.cached == before {
			return false // its marks cannot be taken back
		}
		c.stats.evicted.Add(1)
	}
	c.cached += n
	return true
}

func (c *Cache) giveBack(n int64) {
	c.mu.Lock()
	c.cached -= n
	c.mu.Unlock()
}

func (e *entry) bytes() int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.have
}

// drop forgets the chunks of a blob, then takes their bytes from the disk. A blob that was
// not added since Open goes altogether. Requires: c.mu held, nobody reads it.
func (c *Cache) drop(e *entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	have := e.have
	e.forget()
	c.cached -= have - e.have
	if e.origin.Load() == nil && e.have == 0 {
		e.close()
		c.remove(e)
		delete(c.blobs, e.digest)
	}
}

// remove deletes the files of a blob.
func (c *Cache) remove(e *entry) {
	for _, p := range []string{e.path(c.cfg.Dir) + marksSuffix, e.path(c.cfg.Dir)} { // the word first
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return // an unreadable folder; the marks that stay are checked when they are read
		}
	}
}

func (e *entry) path(dir string) string { return filepath.Join(dir, e.digest.Hex()) }

func (e *entry) close() {
	if e.file != nil {
		e.file.Close()
	}
	if e.marks != nil {
		e.marks.Close()
	}
}

func (e *entry) size() int64 {
	st, err := e.file.Stat()
	if err != nil {
		return -1
	}
	return st.Size()
}

// chunksOf is the number of chunks of a blob.
func chunksOf(size int64) int { return int((size + erofs.ChunkSize - 1) / erofs.ChunkSize) }

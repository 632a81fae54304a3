package lazy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
)

// Bounds.
const (
	maxFetches = 16 // under way; each holds its chunks until they are written and copied
	maxRun     = 16 // chunks of one fetch: 4 MiB
	minStream  = 4  // chunks of a fetch from which on the next is fetched before anybody waits

	// A fetch brings half as much more as its reader has read without a gap. An image is many
	// small files that nobody reads all of: growing by what was fetched, not read, brought half
	// as much again as a task touched.
	readShare = 2

	// A fetch for who reads here and there brings the chunk behind along as long as that share of
	// those was read: the files of a program lie together.
	guessShare = 0.7
	guessAgain = 64  // fetches after which a guess is tried all the same
	guessKnown = 256 // guesses that count; older ones fade

	// The kernel has several requests of one reader under way, in any order.
	disorder = 256 << 10
)

var errSlow = errors.New("the store did not answer in time")

// flight is one chunk on its way. data and err are set before done is closed.
type flight struct {
	done chan struct{}
	data []byte
	err  error
}

// stream is a reader that goes forward.
type stream struct {
	end  int64 // of what it has read
	run  int64 // bytes that it has read without a gap
	next int   // chunk behind what was fetched for it; 0 if nothing was
	used time.Time
}

// window is how many chunks a fetch for s brings.
func (s *stream) window() int {
	return int(min(maxRun, 1+s.run/(readShare*erofs.ChunkSize)))
}

// run is a row of chunks that one fetch brings.
type run struct {
	first   int
	flights []*flight
}

// Result says how a read went.
type Result struct {
	N      int           // bytes
	Missed []int         // chunks that were not here when they were asked for
	Waited time.Duration // for them, and for pages that somebody brought
}

// Read gives the n bytes at off, or as many as the blob has, in what buf returns. buf is
// called once all of them are at hand. It fails with what the store says, or at the limit.
func (c *Cache) Read(ctx context.Context, d blob.Digest, off int64, n int, buf func() ([]byte, error)) (Result, error) {
	e, err := c.pin(d)
	if err != nil {
		return Result{}, err
	}
	defer c.unpin(e)
	r, err := c.read(ctx, e, off, n, buf)
	if err != nil {
		c.stats.failed.Add(1)
		return r, fmt.Errorf("read %d bytes at %d of blob %s: %w", n, off, d, err)
	}
	return r, nil
}

func (c *Cache) read(ctx context.Context, e *entry, off int64, n int, buf func() ([]byte, error)) (Result, error) {
	var r Result
	if off < 0 || n < 0 {
		return r, unix.EINVAL
	}
	o := e.origin.Load()
	if o == nil {
		return r, ErrUnknown // pinned in the moment that it was forgotten
	}
	n = int(min(int64(n), max(0, e.plain-off)))
	if n == 0 {
		return r, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.Limit, errSlow)
	defer cancel()
	first, last := int(off/erofs.ChunkSize), int((off+int64(n)-1)/erofs.ChunkSize)
	e.mu.Lock()
	s := e.follow(off, int64(n))
	e.mu.Unlock()
	parts := make([][]byte, last-first+1) // nil where the file has it
	for i := first; i <= last; i++ {
		begin := time.Now()
		data, how, err := c.chunk(ctx, e, o, s, i, last, need(i, off, n))
		if how != found {
			r.Waited += time.Since(begin)
		}
		if how == fetched {
			r.Missed = append(r.Missed, i)
		}
		if err != nil {
			return r, err
		}
		parts[i-first] = data
	}
	p, err := buf()
	if err != nil {
		return r, err
	}
	p = p[:n]
	for i := first; i <= last; i++ {
		at := int64(i) * erofs.ChunkSize
		from := max(off, at)
		to := min(off+int64(n), at+e.sizeOf(i))
		out := p[from-off : to-off]
		if data := parts[i-first]; data != nil {
			copy(out, data[from-at:])
			continue
		}
		if _, err := io.ReadFull(io.NewSectionReader(e.file, from, to-from), out); err != nil {
			e.mu.Lock()
			have := e.have
			err = errors.Join(err, e.set(i, absent)) // the next read fetches it
			e.unpage(i)
			freed := have - e.have
			e.mu.Unlock()
			c.giveBack(freed)
			return r, fmt.Errorf("read the cache: %w", err)
		}
		// EROFS has these pages now; twice is once too often.
		unix.Fadvise(int(e.file.Fd()), from, to-from, unix.FADV_DONTNEED) //nolint:errcheck // a hint
	}
	r.N = n
	return r, nil
}

// outcome says how something that is read came to be here.
type outcome int

const (
	found   outcome = iota // it was here
	brought                // it was awaited, and came without being fetched for this read
	fetched                // it was fetched
)

// chunk has pages of chunk i at hand: in the file, or the whole chunk as data. A fetch for it
// brings those up to last along.
func (c *Cache) chunk(ctx context.Context, e *entry, o *origin, s *stream, i, last int, pages uint64) (data []byte, how outcome, err error) {
	var patience <-chan time.Time
	late := false
	for {
		e.mu.Lock()
		e.guesses.read(i)
		switch e.state[i] {
		case kept:
			next, ok := e.forward(s, i)
			e.mu.Unlock()
			if ok {
				c.start(e, next)
			}
			if how == found {
				c.stats.hits.Add(1)
			}
			return nil, how, nil
		case suspect:
			e.mu.Unlock()
			if err := c.recheck(e, o, i); err != nil {
				return nil, how, err
			}
			continue
		}
		f := e.flying[i]
		switch rest := pages &^ e.pages.here[i]; {
		case rest == 0:
			e.mu.Unlock()
			if how == found {
				c.stats.hits.Add(1)
			}
			return nil, how, nil
		case f == nil && rest&^e.pages.coming[i] == 0 && !late:
			change := e.pages.waits()
			e.mu.Unlock()
			how = brought
			if patience == nil {
				patience = time.After(pagePatience)
			}
			c.paging.Add(1)
			select {
			case <-change:
			case <-patience:
				late = true
				e.mu.Lock()
				e.pages.coming = nil // nor does anybody else wait
				e.pages.changed()
				e.mu.Unlock()
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
			c.paging.Add(-1)
			if err != nil {
				return nil, how, err
			}
			continue
		}
		var r run
		if f == nil {
			r = e.plan(s, i, last)
			f = r.flights[0]
		}
		e.mu.Unlock()
		if len(r.flights) > 0 {
			c.start(e, r)
		}
		c.waiting.Add(1)
		select {
		case <-f.done:
			c.waiting.Add(-1)
			return f.data, fetched, f.err
		case <-ctx.Done():
			c.waiting.Add(-1)
			return nil, fetched, context.Cause(ctx)
		}
	}
}

// recheck decides about a chunk of an earlier boot.
func (c *Cache) recheck(e *entry, o *origin, i int) error {
	b := make([]byte, e.sizeOf(i))
	_, err := e.file.ReadAt(b, int64(i)*erofs.ChunkSize)
	m := kept
	if err != nil || !o.table.Is(i, b) {
		m = absent
		c.stats.corrupt.Add(1)
	}
	e.mu.Lock()
	if e.state[i] != suspect {
		e.mu.Unlock()
		return nil
	}
	have := e.have
	err = e.set(i, m)
	freed := have - e.have
	e.mu.Unlock()
	c.giveBack(freed)
	if err != nil {
		return fmt.Errorf("mark chunk %d: %w", i, err)
	}
	return nil
}

// guesses are the chunks that were brought along on the chance that somebody reads them.
// Guarded by entry.mu.
type guesses struct {
	open         map[int]bool // not read yet
	tried, right float64      // of late
	held         int          // fetches without one since
}

// try reports whether to bring a chunk along.
func (g *guesses) try() bool {
	if g.right < guessShare*g.tried && g.held < guessAgain {
		g.held++
		return false
	}
	g.held = 0
	return true
}

func (g *guesses) made(i int) {
	if g.open == nil {
		g.open = map[int]bool{}
	}
	g.open[i] = true
	if g.tried++; g.tried > guessKnown {
		g.tried, g.right = g.tried/2, g.right/2
	}
}

// read notes that chunk i is wanted.
func (g *guesses) read(i int) {
	if g.open[i] {
		delete(g.open, i)
		g.right++
	}
}

// follow finds the reader whose next bytes these are, or takes them for a new one's. Requires:
// e.mu held.
func (e *entry) follow(off, n int64) *stream {
	s := &e.streams[0]
	for k := range e.streams {
		t := &e.streams[k]
		if t.run > 0 && off <= t.end && off >= t.end-disorder {
			s = t
			break
		}
		if t.used.Before(s.used) {
			s = t // the one that was quiet for longest
		}
	}
	if s.run == 0 || off > s.end || off < s.end-disorder {
		*s = stream{end: off}
	}
	s.end, s.run, s.used = max(s.end, off+n), s.run+n, time.Now()
	return s
}

// plan takes a row of absent chunks from i on: those up to last, and more if whoever reads
// goes forward. Requires: e.mu held, chunk i absent and not flying.
func (e *entry) plan(s *stream, i, last int) run {
	n := max(s.window(), last-i+1)
	guess := n == 1 && e.guesses.try()
	if guess {
		n = 2
	}
	r := e.row(i, n)
	if guess && len(r.flights) == 2 {
		e.guesses.made(i + 1)
	}
	s.next = i + len(r.flights)
	return r
}

// forward takes the next row of a reader that goes forward, when he comes to the second half
// of what was fetched for him. Requires: e.mu held.
func (e *entry) forward(s *stream, i int) (run, bool) {
	w := s.window()
	if w < minStream || i < s.next-w/2 || i >= s.next || s.next >= len(e.state) || e.state[s.next] != absent || e.flying[s.next] != nil {
		return run{}, false
	}
	r := e.row(s.next, w)
	s.next += len(r.flights)
	return r, true
}

// row takes up to n chunks from i on that are absent and not flying. Requires: e.mu held.
func (e *entry) row(i, n int) run {
	r := run{first: i}
	for j := i; j < len(e.state) && j < i+min(n, maxRun) && e.state[j] == absent && e.flying[j] == nil; j++ {
		f := &flight{done: make(chan struct{})}
		e.flying[j] = f
		r.flights = append(r.flights, f)
	}
	return r
}

// start fetches a row beside the caller, who has e pinned.
func (c *Cache) start(e *entry, r run) {
	c.mu.Lock()
	e.pins++
	c.mu.Unlock()
	c.stats.misses.Add(int64(len(r.flights)))
	c.work.Go(func() {
		defer c.unpin(e)
		c.fetch(e, r, c.reserve)
	})
}

// fetch brings a row. Whoever waits for a chunk of it has it as soon as it is there.
func (c *Cache) fetch(e *entry, r run, reserve func(int64) bool) {
	landed := 0
	land := func(data []byte, err error) {
		i, f := r.first+landed, r.flights[landed]
		landed++
		f.data, f.err = data, err
		e.mu.Lock()
		if err == nil && data != nil && !c.keep(e, i, data, reserve) {
			c.stats.unkept.Add(1)
		}
		delete(e.flying, i)
		e.mu.Unlock()
		close(f.done)
	}
	err := c.bring(e, r, func(data []byte) { land(data, nil) })
	for landed < len(r.flights) {
		land(nil, err)
	}
	begin, size := int64(r.first)*erofs.ChunkSize, int64(len(r.flights))*erofs.ChunkSize
	// Written soon, so that the pages can be given back when they are read.
	unix.SyncFileRange(int(e.file.Fd()), begin, size, unix.SYNC_FILE_RANGE_WRITE) //nolint:errcheck // a hint
}

// bring reads a row from the store and gives its chunks in order.
func (c *Cache) bring(e *entry, r run, land func([]byte)) error {
	ctx, cancel := context.WithTimeoutCause(c.life, c.cfg.Limit, errSlow)
	defer cancel()
	select {
	case c.slot <- struct{}{}:
		defer func() { <-c.slot }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	o := e.origin.Load()
	if o == nil {
		return ErrUnknown
	}
	begin, _ := o.table.Range(r.first)
	end, n := o.table.Range(r.first + len(r.flights) - 1)
	from := o.data.Stored().Digest
	body, err := c.cfg.Store.Get(ctx, from, begin, end+n-begin)
	if err != nil {
		return Because(ctx, err)
	}
	defer body.Close()
	for k := range r.flights {
		i := r.first + k
		_, n := o.table.Range(i)
		frame := make([]byte, n)
		got, err := io.ReadFull(body, frame)
		c.stats.fetched.Add(int64(got))
		if err != nil {
			return Because(ctx, fmt.Errorf("chunk %d: %w", i, err))
		}
		data, err := o.table.Open(i, frame, nil)
		if err != nil {
			if errors.Is(err, image.ErrCorrupt) {
				c.stats.corrupt.Add(1)
			}
			return err
		}
		land(data)
	}
	return nil
}

// Because gives why a context ended, if that is what err is about.
func Because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

// keep writes a chunk, then its mark. Requires: e.mu held, which makes reserve look at all
// blobs but this one: it is pinned.
func (c *Cache) keep(e *entry, i int, data []byte, reserve func(int64) bool) bool {
	n := int64(len(data))
	e.mu.Unlock()
	ok := reserve(n)
	if ok {
		if _, err := e.file.WriteAt(data, int64(i)*erofs.ChunkSize); err != nil { // a full disk
			c.giveBack(n)
			ok = false
		}
	}
	e.mu.Lock()
	if !ok {
		return false
	}
	if e.state[i] != absent || e.set(i, kept) != nil {
		e.mu.Unlock()
		c.giveBack(n)
		e.mu.Lock()
		return false
	}
	if twice := e.unpage(i); twice > 0 {
		e.mu.Unlock()
		c.giveBack(twice)
		e.mu.Lock()
	}
	return true
}

package microvm

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// pool keeps machines that nobody has asked for: copies of the saved guests of
// the sizes in use, each warmed, see warm.go, so that the emulator has translated
// what a start runs through. They stand still until they are taken, and cost no
// processor time.
//
// One goroutine fills it, one machine at a time, and only while nobody starts
// one: a create that finds it empty makes its own.
type pool struct {
	driver *Driver
	wake   chan struct{}
	stop   chan struct{}
	once   sync.Once
	run    sync.WaitGroup

	mu       sync.Mutex
	sizes    map[shape]*ready
	starting int       // creates under way
	quiet    time.Time // until when it waits
	changed  chan struct{}
}

// ready are the machines of one size.
type ready struct {
	slots   []*slot
	filling bool // from below Low until High
	used    time.Time
	failed  time.Time // when the last could not be made
	err     error
}

const (
	poolQuiet  = 20 * time.Millisecond // after a create, for its first command
	poolForget = 10 * time.Minute      // after which a size is not in use any more
	poolRetry  = 10 * time.Second      // after a failure
)

func (p *pool) init(d *Driver) {
	p.driver, p.wake, p.stop, p.sizes, p.changed = d, make(chan struct{}, 1), make(chan struct{}), map[shape]*ready{}, make(chan struct{})
}

// start begins to fill.
func (p *pool) start() {
	if p.driver.config.High > 0 {
		p.once.Do(func() { p.run.Go(p.fill) })
	}
}

func (p *pool) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// use marks a size as one that is asked for.
func (p *pool) use(s shape) {
	if p.driver.config.High == 0 {
		return
	}
	p.mu.Lock()
	r := p.sizes[s]
	if r == nil {
		r = &ready{}
		p.sizes[s] = r
	}
	r.used = time.Now()
	p.mu.Unlock()
	p.kick()
}

// begin and end enclose a start.
func (p *pool) begin() {
	p.mu.Lock()
	p.starting++
	p.mu.Unlock()
}

func (p *pool) end() {
	p.mu.Lock()
	p.starting--
	p.quiet = time.Now().Add(poolQuiet)
	p.mu.Unlock()
	p.kick()
}

// busy reports whether a start is under way, or machines that map t are ready or being made.
func (p *pool) busy(t *template) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.sizes[t.Shape]
	return p.starting > 0 || r != nil && (len(r.slots) > 0 || r.filling)
}

// take gives a ready machine of a size, or nil.
func (p *pool) take(s shape) *slot {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.sizes[s]
	for r != nil && len(r.slots) > 0 {
		g := r.slots[0]
		r.slots = r.slots[1:]
		select {
		case <-g.process().Done():
			p.driver.working.Go(func() { g.destroy() }) //nolint:errcheck // the next Adopt tries again
		default:
			return g
		}
	}
	return nil
}

// wants gives the size that is to be made next, and how long from now; or says
// that there is none. Sizes that nobody asks for any more lose theirs.
func (p *pool) wants() (s shape, wait time.Duration, drop []*slot, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.driver.config
	for size, r := range p.sizes {
		if time.Since(r.used) > poolForget {
			drop = append(drop, r.slots...)
			delete(p.sizes, size)
			continue
		}
		if len(r.slots) < c.Low {
			r.filling = true
		}
		if len(r.slots) >= c.High {
			r.filling = false
		}
		if r.filling && !ok {
			s, ok = size, true
			wait = max(time.Until(p.quiet), poolRetry-time.Since(r.failed))
			if r.failed.IsZero() {
				wait = time.Until(p.quiet)
			}
		}
	}
	if p.starting > 0 {
		ok = false
	}
	return s, wait, drop, ok
}

func (p *pool) fill() {
	for {
		s, wait, drop, ok := p.wants()
		for _, g := range drop {
			g.destroy() //nolint:errcheck // the next Adopt tries again
		}
		later := time.After(poolForget / 2)
		switch {
		case ok && wait <= 0:
			g, err := p.driver.member(p.driver.life, s)
			p.put(s, g, err)
			continue
		case ok:
			later = time.After(wait)
		}
		select {
		case <-later:
		case <-p.wake:
		case <-p.stop:
			return
		}
	}
}

// put adds a machine to the pool, or notes why there is none.
func (p *pool) put(s shape, g *slot, err error) {
	p.mu.Lock()
	r := p.sizes[s]
	gone := r == nil
	if r != nil {
		r.err = err
		if err != nil {
			r.failed = time.Now()
		} else {
			r.failed = time.Time{}
			r.slots = append(r.slots, g)
		}
	}
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	if err != nil {
		p.driver.config.Log.Warn("no machine for the pool", "size", s.String(), "err", err)
	} else if gone {
		g.destroy() //nolint:errcheck // the next Adopt tries again
	}
}

// full waits until the pool of a size is full.
func (p *pool) full(ctx context.Context, s shape) error {
	for {
		p.mu.Lock()
		r, changed := p.sizes[s], p.changed
		n, err := 0, error(nil)
		if r != nil {
			n, err = len(r.slots), r.err
		}
		p.mu.Unlock()
		if r == nil || n >= p.driver.config.High || err != nil {
			return err
		}
		p.kick()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// close ends filling and every ready machine.
func (p *pool) close() error {
	close(p.stop)
	p.run.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, r := range p.sizes {
		for _, g := range r.slots {
			errs = append(errs, g.destroy())
		}
	}
	clear(p.sizes)
	return errors.Join(errs...)
}

// member makes a machine for the pool: a copy that was warmed and stands still.
func (d *Driver) member(ctx context.Context, s shape) (*slot, error) {
	t, err := d.template(ctx, s)
	if err != nil {
		return nil, err
	}
	g, err := d.fresh(ctx, t, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, d.config.Answer)
	defer cancel()
	if err = g.proc.Cont(ctx); err == nil {
		err = d.warm(ctx, g)
	}
	if err == nil {
		err = g.proc.Stop(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return g, nil
}

// answering limits ctx by how long a guest may take to answer.
func (d *Driver) answering(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d.config.Answer, dsec.Errorf(dsec.Timeout, "the guest did not answer within %v", d.config.Answer))
}

package container

import (
	"context"
	"sync"
	"time"

	"github.com/dsec-go/dsec/jail"
)

// pool keeps shells ready. It makes one at a time in the background, and only
// while nobody waits and a moment after the last was taken: a create that finds
// it empty makes its own, so a burst is not slowed down by the pool's own work,
// nor is the first command of a lone sandbox.
type pool struct {
	size int
	make func(jail.Priority) (*shell, error)
	wake chan struct{}
	stop chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	ready  []*shell
	taken  time.Time // when the last was taken
	makers int       // creates that make their own now
	closed bool
}

// poolQuiet is about how long a create and its first command take.
const poolQuiet = 12 * time.Millisecond

func newPool(size int, makeShell func(jail.Priority) (*shell, error)) *pool {
	return &pool{size: max(size, 0), make: makeShell, wake: make(chan struct{}, 1), stop: make(chan struct{})}
}

// start begins to fill the pool.
func (p *pool) start() {
	if p.size == 0 {
		return
	}
	p.done.Go(func() {
		for {
			var later <-chan time.Time
			switch wait, wants := p.wants(); {
			case wants && wait > 0:
				later = time.After(wait)
			case wants:
				s, err := p.make(jail.Spare)
				if err == nil {
					p.put(s)
					continue
				}
				// The next get makes its own and tells its caller what is wrong.
			}
			select {
			case <-later:
			case <-p.wake:
			case <-p.stop:
				return
			}
		}
	})
}

// wants reports whether a shell is to be made, and how long from now.
func (p *pool) wants() (wait time.Duration, wants bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return poolQuiet - time.Since(p.taken), !p.closed && p.makers == 0 && len(p.ready) < p.size
}

func (p *pool) put(s *shell) {
	p.mu.Lock()
	p.ready = append(p.ready, s)
	p.mu.Unlock()
}

func (p *pool) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// get takes the oldest ready shell, or makes one.
func (p *pool) get(ctx context.Context) (*shell, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.taken = time.Now()
	if len(p.ready) > 0 {
		s := p.ready[0]
		p.ready = p.ready[1:]
		p.mu.Unlock()
		p.kick()
		return s, nil
	}
	p.makers++
	p.mu.Unlock()
	s, err := p.make(jail.Urgent)
	p.mu.Lock()
	p.makers--
	p.mu.Unlock()
	p.kick()
	return s, err
}

// close ends the filling and returns what was ready.
func (p *pool) close() []*shell {
	close(p.stop)
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.done.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	ready := p.ready
	p.ready = nil
	return ready
}

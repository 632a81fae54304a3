package client

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
)

// Pauses between attempts grow from the first to the longest.
const (
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second
	reattach     = 15 // times Config.Retry, for a stream or a wait that was under way
)

// patience decides whether a call is made again, and waits before it is.
type patience struct {
	safe   bool // repeating cannot do a thing twice
	budget time.Duration
	end    time.Time // zero before the first failure
	pause  time.Duration
}

func (c *core) patience(t to) *patience {
	return &patience{safe: t.again || t.key != "", budget: c.retry}
}

// answered notes progress: the next failure starts anew, with more patience.
func (p *patience) answered(c *core) {
	p.end, p.pause, p.budget = time.Time{}, 0, reattach*c.retry
}

// broken notes that a stream or a wait failed with err. One that reached the
// server was under way, though there was no answer yet: a command may be quiet
// for hours before its server restarts. Only the first failure counts, so that
// a server that ends every call is not asked for ever.
func (p *patience) broken(c *core, err error) {
	if p.end.IsZero() && !rpc.NotSent(err) {
		p.budget = reattach * c.retry
	}
}

// again reports whether to try once more after err, and pauses first. A context
// that ends meanwhile ends it.
func (p *patience) again(ctx context.Context, err error) bool {
	if p.budget <= 0 || ctx.Err() != nil || dsec.KindOf(err) != dsec.Unavailable {
		return false
	}
	if !p.safe && !rpc.NotSent(err) {
		return false
	}
	now := time.Now()
	if p.end.IsZero() {
		p.end = now.Add(p.budget)
	}
	p.pause = min(max(2*p.pause, firstPause), longestPause)
	// Many clients lose the same server at once; they do not come back at once.
	d := p.pause/2 + rand.N(p.pause/2+1)
	if now.Add(d).After(p.end) {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

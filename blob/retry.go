package blob

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// The values of a zero Retry.
const (
	defaultRetryFor   = 30 * time.Second
	defaultRetryFirst = 50 * time.Millisecond
	defaultRetryMax   = 3 * time.Second
)

// Retry says how long to go on asking a store that is unavailable. The zero value is what
// a node uses.
type Retry struct {
	For   time.Duration // from the first failure on, 30 s if 0; negative: never again
	First time.Duration // the first pause, 50 ms if 0; each later one is twice as long
	Max   time.Duration // the longest pause, 3 s if 0
}

// Do calls op until it succeeds, fails with something else than ErrUnavailable, ctx ends or
// r.For is over. Then the last error of op is wrapped, so that errors.Is finds what it
// would have found; and no other Retry around this one tries again.
func (r Retry) Do(ctx context.Context, op func(context.Context) error) error {
	var p patience
	for {
		err := op(ctx)
		if err == nil || !Retryable(err) {
			return err
		}
		if err := p.wait(ctx, r, err); err != nil {
			return err
		}
	}
}

// Retryable reports whether the same call may succeed later, by itself, and nobody below
// has tried that long enough already.
func Retryable(err error) bool {
	var gave *gaveUpError
	return errors.Is(err, ErrUnavailable) && !errors.As(err, &gave)
}

// gaveUpError is what Retry makes of the last error.
type gaveUpError struct {
	tries int
	after time.Duration
	err   error
}

func (e *gaveUpError) Error() string {
	return fmt.Sprintf("%v (tried %d times in %v)", e.err, e.tries, e.after.Round(time.Millisecond))
}

func (e *gaveUpError) Unwrap() error { return e.err }

// patience is one row of failures of one thing. The zero value has seen none.
type patience struct {
	since time.Time
	tries int
	pause time.Duration
}

// wait pauses after a failure. It returns nil if it is worth trying again, and otherwise
// what to tell the caller. Pauses vary by half, so that those who failed together do not
// come back together.
func (p *patience) wait(ctx context.Context, r Retry, err error) error {
	if r.For < 0 {
		return err
	}
	now := time.Now()
	if p.tries == 0 {
		p.since, p.pause = now, def(r.First, defaultRetryFirst)
	}
	p.tries++
	left := def(r.For, defaultRetryFor) - now.Sub(p.since)
	if left <= 0 {
		return &gaveUpError{tries: p.tries, after: now.Sub(p.since), err: err}
	}
	pause := p.pause/2 + rand.N(p.pause/2+1)
	p.pause = min(2*p.pause, def(r.Max, defaultRetryMax))
	// The last try comes when the time is over, not a pause before.
	if serr := sleep(ctx, min(pause, left)); serr != nil {
		return fmt.Errorf("%w (after %w)", serr, err)
	}
	return nil
}

func def(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

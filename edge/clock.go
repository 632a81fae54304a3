package edge

import "time"

// now reads the host's clock; a test moves it.
var now = time.Now

// clock is the node's time: the host's at Open, and from there on a clock that
// nobody sets. So what is due in an hour is due in an hour, whatever is done to
// the host's clock meanwhile. The next process reads that one anew. The nil
// clock is the host's.
type clock struct{ opened time.Time }

func newClock() *clock { return &clock{now()} }

func (c *clock) now() time.Time {
	t := now()
	if c == nil {
		return t
	}
	return c.opened.Add(t.Sub(c.opened)) // Sub looks at the monotonic reading alone
}

// nano is now in nanoseconds since 1970.
func (c *clock) nano() int64 { return c.now().UnixNano() }

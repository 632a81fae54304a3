package edge

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// MovableClock gives a function that lets the host's clock jump by whole
// seconds, as somebody does who sets it: the monotonic reading goes on. It is
// called before the bubble of fake time, whose times have no such reading.
func MovableClock(t testing.TB) (move func(by time.Duration)) {
	var moved atomic.Int64
	outside := now()
	inside := sync.OnceValue(time.Now)
	now = func() time.Time {
		begin := inside()
		return jumped(outside.Add(time.Since(begin)), time.Duration(moved.Load()))
	}
	t.Cleanup(func() { now = time.Now })
	return func(by time.Duration) { moved.Add(int64(by)) }
}

// jumped moves the wall reading alone: in a time with both it is the first word,
// seconds above 30 bits of nanoseconds.
func jumped(t time.Time, by time.Duration) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) += uint64(by/time.Second) << 30
	return t
}

func TestJumped(t *testing.T) {
	a := time.Now()
	for _, by := range []time.Duration{5 * time.Hour, -5 * time.Hour} {
		b := jumped(a, by)
		if b.UnixNano()-a.UnixNano() != int64(by) || b.Sub(a) != 0 {
			t.Fatalf("a clock set by %v shows %v after %v", by, b, a) // then the tests with it prove nothing
		}
	}
}

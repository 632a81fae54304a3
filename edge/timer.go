package edge

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// timers wakes sandboxes: one heap and one goroutine for all of a node. A
// sandbox has at most one time set.
type timers struct {
	mu   sync.Mutex
	heap timerHeap
	wake chan struct{} // the earliest time may have changed
	now  func() int64
}

func newTimers(now func() int64) *timers { return &timers{wake: make(chan struct{}, 1), now: now} }

// set makes e due at the time, replacing the one set before.
func (t *timers) set(e *entry, at int64) {
	t.mu.Lock()
	e.due = at
	if e.slot > 0 {
		heap.Fix(&t.heap, e.slot-1)
	} else {
		heap.Push(&t.heap, e)
	}
	first := t.heap[0] == e
	t.mu.Unlock()
	if first {
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
}

// drop forgets e.
func (t *timers) drop(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.slot > 0 {
		heap.Remove(&t.heap, e.slot-1)
	}
}

// next takes the entry that is due, or says when the earliest is.
func (t *timers) next(now int64) (e *entry, wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.heap) == 0 {
		return nil, time.Hour
	}
	if d := t.heap[0].due - now; d > 0 {
		return nil, time.Duration(d)
	}
	return heap.Pop(&t.heap).(*entry), 0
}

// run calls fire for each entry that is due, until ctx ends.
func (t *timers) run(ctx context.Context, fire func(*entry)) {
	clock := time.NewTimer(time.Hour)
	defer clock.Stop()
	for {
		e, wait := t.next(t.now())
		if e != nil {
			fire(e)
			if ctx.Err() != nil {
				return
			}
			continue
		}
		clock.Reset(wait)
		select {
		case <-clock.C:
		case <-t.wake:
		case <-ctx.Done():
			return
		}
	}
}

// timerHeap orders entries by due; entry.slot is the index plus one.
type timerHeap []*entry

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].slot, h[j].slot = i+1, j+1
}

// Push and Pop serve container/heap.
func (h *timerHeap) Push(x any) {
	e := x.(*entry)
	*h = append(*h, e)
	e.slot = len(*h)
}

func (h *timerHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	e.slot = 0
	return e
}

package driver

import (
	"slices"
	"time"
)

// Slots knows which numbers of a driver's machines are taken. One that was
// freed is given out again first. It is not safe for concurrent use.
type Slots struct {
	First int // the lowest number
	Limit int // all numbers are below it

	taken map[int]bool
	freed []int
	next  int // counted from First; all numbers from here on were never used
}

// Take gives a number that is free, if there is one.
func (s *Slots) Take() (int, bool) {
	n := s.First + s.next
	switch {
	case len(s.freed) > 0:
		n = s.freed[len(s.freed)-1]
		s.freed = s.freed[:len(s.freed)-1]
	case n < s.Limit:
		s.next++
	default:
		return 0, false
	}
	s.take(n)
	return n, true
}

// Mark takes the number of a folder that an earlier process left. Those below it
// that were never used become free.
func (s *Slots) Mark(n int) {
	for ; s.First+s.next <= n; s.next++ {
		if free := s.First + s.next; free != n {
			s.freed = append(s.freed, free)
		}
	}
	s.freed = slices.DeleteFunc(s.freed, func(f int) bool { return f == n })
	s.take(n)
}

func (s *Slots) take(n int) {
	if s.taken == nil {
		s.taken = map[int]bool{}
	}
	s.taken[n] = true
}

// Free gives a number back. One that is free already stays so.
func (s *Slots) Free(n int) {
	if s.taken[n] {
		delete(s.taken, n)
		s.freed = append(s.freed, n)
	}
}

// Freed lists the numbers that were used and are free, or were passed over by
// Mark.
func (s *Slots) Freed() []int { return s.freed }

// Timer cuts a start into stages.
type Timer struct {
	last   time.Time
	stages []Stage
}

// NewTimer begins the first stage.
func NewTimer() *Timer { return &Timer{last: time.Now()} }

// Mark names the stage that ends now.
func (t *Timer) Mark(name string) {
	now := time.Now()
	t.stages = append(t.stages, Stage{Name: name, Took: now.Sub(t.last)})
	t.last = now
}

// Stages gives the stages that have ended.
func (t *Timer) Stages() []Stage { return t.stages }

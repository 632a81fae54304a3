// Package sched makes the choices of a node: pure functions of figures that
// others have measured. It has no clock, does no I/O and remembers nothing, so
// each choice is a table in its test.
//
// Reclaim chooses the sandboxes that are paused so that the node gets memory
// back, Levels when to begin with that and when to end. Whoever calls them
// carries the choice out; see package edge, pressure.go.
package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

// Candidate is a sandbox that may be paused for its memory.
type Candidate struct {
	ID     dsec.SandboxID
	Idle   time.Duration // since its last use
	Memory int64         // bytes that it would give back at most
	Busy   bool          // in use now: a running command, a call, a commit
}

// Reclaim chooses from the longest idle on until need bytes would come back. It
// never chooses a busy one, nor one that has nothing to give; where all of them
// do not suffice it gives all.
func Reclaim(candidates []Candidate, need int64) []dsec.SandboxID {
	able := slices.DeleteFunc(slices.Clone(candidates), func(c Candidate) bool { return c.Busy || c.Memory <= 0 })
	slices.SortFunc(able, func(a, b Candidate) int {
		return cmp.Or(cmp.Compare(b.Idle, a.Idle), cmp.Compare(b.Memory, a.Memory), cmp.Compare(a.ID, b.ID))
	})
	var out []dsec.SandboxID
	for _, c := range able {
		if need <= 0 {
			break
		}
		out = append(out, c.ID)
		need -= c.Memory
	}
	return out
}

// Levels switch something on when a figure reaches High, and off when it has
// come down to Low: between them it stays as it is.
type Levels struct {
	Low, High float64
}

// Next gives the state that follows from the last one and the figure.
func (l Levels) Next(on bool, figure float64) bool {
	if on {
		return figure > l.Low
	}
	return figure >= l.High
}

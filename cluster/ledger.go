package cluster

import (
	"math"
	"sync"

	"github.com/dsec-go/dsec"
)

// Ledger counts what projects have and holds them to their quotas. What a sandbox has counts
// for its project and for every one above. It asks no one and writes nowhere: the counts are
// those of the living sandboxes of this process's node, which tells them again after a restart,
// and the quotas come from the mirror.
//
// The project of a sandbox with a Delegation is known here alone: it is there from the
// sandbox's Take to its Give, with the quota of the Delegation.
type Ledger struct {
	mirror *mirror

	mu     sync.Mutex // before mirror.mu
	used   map[dsec.ProjectID]share
	owned  map[dsec.ProjectID]dsec.Quota // of sandboxes
	closed map[dsec.ProjectID]int        // being removed
}

// share is what counts, in whole numbers: sums of them are exact.
type share struct{ sandboxes, milli, memory int64 }

func shareOf(s *dsec.Spec) share {
	return share{1, milli(s.Resources.CPU), s.Resources.Memory}
}

func milli(cores float64) int64 { return int64(math.Round(cores * 1000)) }

func newLedger(m *mirror) *Ledger {
	return &Ledger{
		mirror: m, used: map[dsec.ProjectID]share{}, owned: map[dsec.ProjectID]dsec.Quota{}, closed: map[dsec.ProjectID]int{},
	}
}

// Ledger returns the counts of what this process's node has.
func (c *Cluster) Ledger() *Ledger { return c.ledger }

// Take counts a sandbox that is to be created. It is Exhausted when a quota has no room for it
// now, NotFound when its project is gone, Invalid when it wants to live longer than it may.
func (l *Ledger) Take(id dsec.SandboxID, s *dsec.Spec) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	more := shareOf(s)
	for p := range s.Project.Line() {
		q, err := l.quota(p)
		if err == nil {
			err = lives(p, q, s)
		}
		if err == nil {
			err = l.used[p].room(p, q, more)
		}
		if err != nil {
			return err
		}
	}
	l.add(id, s, 1)
	return nil
}

// Keep counts a sandbox that is there, whatever the quotas say.
func (l *Ledger) Keep(id dsec.SandboxID, s *dsec.Spec) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(id, s, 1)
}

// Give takes back what Take or Keep counted.
func (l *Ledger) Give(id dsec.SandboxID, s *dsec.Spec) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(id, s, -1)
}

// Extend is Invalid if a sandbox may not be given s.TTL to live.
func (l *Ledger) Extend(s *dsec.Spec) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range s.Project.Line() {
		if q, err := l.quota(p); err == nil {
			if err := lives(p, q, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// Used tells what a project and all below it have.
func (l *Ledger) Used(p dsec.ProjectID) dsec.Share {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.used[p]
	return dsec.Share{Sandboxes: int(u.sandboxes), CPU: float64(u.milli) / 1000, Memory: u.memory}
}

// Quota gives the quota of a project, or of what is made through the API of a sandbox; NotFound when
// the project is gone.
func (l *Ledger) Quota(p dsec.ProjectID) (dsec.Quota, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.quota(p)
}

// quota finds the quota of a project. Requires: l.mu held.
func (l *Ledger) quota(p dsec.ProjectID) (dsec.Quota, error) {
	q, ok := l.owned[p]
	if !ok {
		l.mirror.read(func(s *state) {
			var pr project
			pr, ok = s.projects[p]
			q = pr.Quota
		})
	}
	if !ok || l.closed[p] > 0 {
		return q, dsec.Errorf(dsec.NotFound, "project %s is gone", p)
	}
	return q, nil
}

// add counts. Requires: l.mu held.
func (l *Ledger) add(id dsec.SandboxID, s *dsec.Spec, sign int64) {
	one := shareOf(s)
	for p := range s.Project.Line() {
		u := l.used[p]
		u.sandboxes += sign * one.sandboxes
		u.milli += sign * one.milli
		u.memory += sign * one.memory
		if l.used[p] = u; u == (share{}) {
			delete(l.used, p)
		}
	}
	if s.API == nil {
		return
	}
	if own := dsec.SandboxProject(s.Project, id); sign > 0 {
		l.owned[own] = s.API.Quota
	} else {
		delete(l.owned, own)
	}
}

// close keeps creates away from a project that is to be removed, until open is called. It is
// Conflict if it has sandboxes.
func (l *Ledger) close(p dsec.ProjectID) (open func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.used[p].sandboxes; n > 0 {
		return nil, dsec.Errorf(dsec.Conflict, "project %s still has %d living sandboxes", p, n)
	}
	l.closed[p]++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.closed[p]--; l.closed[p] == 0 {
			delete(l.closed, p)
		}
	}, nil
}

// room is Exhausted when what is asked for does not fit beside what is used.
func (u share) room(p dsec.ProjectID, q dsec.Quota, more share) error {
	switch {
	case q.Sandboxes > 0 && u.sandboxes+more.sandboxes > int64(q.Sandboxes):
		return dsec.Errorf(dsec.Exhausted, "project %s has %d of the %d sandboxes of its quota", p, u.sandboxes, q.Sandboxes)
	case q.CPU > 0 && u.milli+more.milli > milli(q.CPU):
		return dsec.Errorf(dsec.Exhausted, "project %s has given out %g of the %g cores of its quota, %g more do not fit",
			p, float64(u.milli)/1000, q.CPU, float64(more.milli)/1000)
	case q.Memory > 0 && u.memory+more.memory > q.Memory:
		return dsec.Errorf(dsec.Exhausted, "project %s has given out %d of the %d MiB of memory of its quota, %d more do not fit",
			p, u.memory>>20, q.Memory>>20, more.memory>>20)
	}
	return nil
}

func lives(p dsec.ProjectID, q dsec.Quota, s *dsec.Spec) error {
	if q.TTL > 0 && s.TTL > q.TTL {
		return dsec.Errorf(dsec.Invalid, "ttl %v is longer than the %v that project %s allows", s.TTL, q.TTL, p)
	}
	return nil
}

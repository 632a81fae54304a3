package edge

import (
	"context"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

// take counts a sandbox that is to be created for its projects.
func (n *Node) take(req *request) error {
	if n.cfg.Quota == nil {
		return nil
	}
	return n.cfg.Quota.Take(req.id, &req.spec.spec)
}

// keep counts a sandbox that an earlier process had.
func (n *Node) keep(e *entry) {
	if n.cfg.Quota != nil {
		n.cfg.Quota.Keep(e.id, &e.rec.spec.spec)
	}
}

// give takes back what take or keep counted: once for each sandbox, when it is
// decided that it does not live.
func (n *Node) give(id dsec.SandboxID, s *sharedSpec) {
	if n.cfg.Quota != nil {
		n.cfg.Quota.Give(id, &s.spec)
	}
}

// mayExtend asks whether a sandbox may have a new time to live.
func (n *Node) mayExtend(e *entry, ttl time.Duration) error {
	if n.cfg.Quota == nil {
		return nil
	}
	s := e.record().spec.spec
	s.TTL = ttl
	return n.cfg.Quota.Extend(&s)
}

// until says how long the API of a sandbox to be created may be used: as long as
// the token that asks for it, in nanoseconds since 1970; 0 for ever.
func until(ctx context.Context, s dsec.Spec) int64 {
	c, _ := dsec.CallerFrom(ctx)
	if s.API == nil || c.Expires.IsZero() {
		return 0
	}
	return c.Expires.UnixNano()
}

// delegable is about what a Spec with an API needs, known before anything is
// begun.
func (n *Node) delegable(s dsec.Spec) error {
	switch {
	case s.API == nil:
	case n.cfg.Door == nil:
		return dsec.Errorf(dsec.Unsupported, "this node gives sandboxes no API")
	case s.Project.Depth() >= dsec.MaxProjectDepth:
		return dsec.Errorf(dsec.Invalid, "project %s is %d deep; sandboxes in it can have no API", s.Project, dsec.MaxProjectDepth)
	}
	return nil
}

// orphaned finds out whether a project is that of a sandbox of this node, or
// below one, which does not live any more. Requires: n.mu held.
func (n *Node) orphaned(p dsec.ProjectID) (owner dsec.SandboxID, gone bool) {
	for part := range p.Line() {
		id, ok := part.Owner()
		if !ok {
			continue
		}
		if place, err := n.cfg.Keys.Place(id); err == nil && place.Node != n.cfg.Place.Node {
			continue // its own node knows
		}
		if e := n.byID[id]; e == nil || e.record().state.Ended() {
			return id, true
		}
	}
	return "", false
}

// endOrphans ends what was made through the API of a sandbox that has ended;
// of all such sandboxes if owner is empty.
//
// A create that is under way is found here, or finds its owner gone when it
// comes into the table: both look under n.mu.
func (n *Node) endOrphans(owner dsec.SandboxID) {
	var left []*entry
	n.mu.RLock()
	if n.open { // Open does it at its end
		for _, e := range n.order {
			r := e.record()
			if r.state.Ended() || r.spec.spec.Project == "" {
				continue
			}
			if id, gone := n.orphaned(r.spec.spec.Project); gone && (owner == "" || id == owner) {
				left = append(left, e)
			}
		}
	}
	n.mu.RUnlock()
	for _, e := range slices.Backward(left) { // the newest first: its owner may be among them
		n.end(e, judge(dsec.CauseOwner, "the sandbox that had made it has ended"), nobodyWaits)
	}
}

package edge

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

var _ dsec.Sandboxes = (*Node)(nil)

// glance gives the record of e without asking the machine what it uses: on the
// way of a create even a few file reads count.
func (n *Node) glance(e *entry) dsec.Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.rec.sandbox(e.id, n.cfg.Name)
	sb.LastUsed = stamp(e.lastUsed)
	return sb
}

// view gives the record of e as of now.
func (n *Node) view(ctx context.Context, e *entry) dsec.Sandbox {
	e.mu.Lock()
	rec, m, used, running, disk := e.rec, e.machine, e.lastUsed, e.running, e.disk
	e.mu.Unlock()
	sb := rec.sandbox(e.id, n.cfg.Name)
	sb.LastUsed = stamp(used)
	if m != nil && !rec.state.Ended() {
		// A machine that does not say what it uses is shown without.
		if u, err := m.Usage(ctx); err == nil {
			sb.Usage = u
		}
		sb.Usage.Fetched, sb.Usage.Waited = n.fetched(m)
		sb.Usage.Commands = int(max(running, 0))
		sb.Usage.Disk = max(sb.Usage.Disk, disk)
	}
	return sb
}

// fetched gives what the processes of a machine have waited for.
func (n *Node) fetched(m driver.Machine) (int64, time.Duration) {
	if c, ok := m.(driver.Charged); ok && n.cfg.Ledger != nil {
		return n.cfg.Ledger.Get(c.Group())
	}
	return 0, 0
}

// Fetched gives the bytes of its images that a sandbox has waited for so far; 0
// of one that is not known.
func (n *Node) Fetched(id dsec.SandboxID) int64 {
	if n.cfg.Ledger == nil {
		return 0
	}
	e, err := n.get(id)
	if err != nil {
		return 0
	}
	e.mu.Lock()
	m := e.machine
	e.mu.Unlock()
	bytes, _ := n.fetched(m)
	return bytes
}

// Get returns the record with its present usage. It is no use of the sandbox:
// looking does not keep it from being idle.
func (n *Node) Get(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	e, err := n.get(id)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp("edge.Get", id, err)
	}
	return n.view(ctx, e), nil
}

// List returns what f selects, newest first. A caller in ctx sees those of its
// project and below: asked here, a limit counts them alone and no others are measured.
func (n *Node) List(ctx context.Context, f dsec.Filter) ([]dsec.Sandbox, error) {
	const op = "edge.List"
	if f.Limit < 0 {
		return nil, dsec.WithOp(op, "", dsec.Errorf(dsec.Invalid, "limit %d is negative", f.Limit))
	}
	end := -1
	if f.After != "" {
		e, err := n.get(f.After)
		if err != nil {
			return nil, dsec.WithOp(op, f.After, err)
		}
		n.mu.RLock()
		end, _ = n.position(e.ord)
		n.mu.RUnlock()
	}
	caller, bound := dsec.CallerFrom(ctx)
	bound = bound && !caller.Admin
	var found []*entry
	n.mu.RLock()
	if end < 0 || end > len(n.order) {
		end = len(n.order)
	}
	for i := end - 1; i >= 0 && (f.Limit == 0 || len(found) < f.Limit); i-- {
		if e := n.order[i]; e.matches(f) && (!bound || caller.Sees(e.record().spec.spec.Project)) {
			found = append(found, e)
		}
	}
	n.mu.RUnlock()
	out := make([]dsec.Sandbox, 0, len(found))
	for _, e := range found {
		if ctx.Err() != nil {
			return nil, dsec.WithOp(op, "", context.Cause(ctx))
		}
		out = append(out, n.view(ctx, e))
	}
	return out, nil
}

// matches reports whether f selects e.
func (e *entry) matches(f dsec.Filter) bool {
	e.mu.Lock()
	rec := e.rec
	e.mu.Unlock()
	spec := &rec.spec.spec
	switch {
	case f.State != "" && rec.state != f.State:
		return false
	case f.State == "" && !f.All && rec.state.Ended():
		return false
	case f.Job != "" && spec.Job != f.Job:
		return false
	}
	for k, v := range f.Labels {
		if have, ok := rec.label(k); !ok || have != v {
			return false
		}
	}
	return true
}

// Extend moves the end of the sandbox's time to live; it counts as a use.
func (n *Node) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	const op = "edge.Extend"
	if ttl < dsec.MinTTL || ttl > dsec.MaxTTL {
		return dsec.Sandbox{}, dsec.WithOp(op, id, dsec.Errorf(dsec.Invalid, "ttl %v is not between %v and %v", ttl, dsec.MinTTL, dsec.MaxTTL))
	}
	e, _, err := n.touch(id)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	defer e.finish()
	if err := n.mayExtend(e, ttl); err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	expires := n.clock.now().Add(ttl).UnixNano()
	over := false
	err = n.append(change{Op: opExtended, ID: id, Expires: expires}, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if over = e.rec.state.Ended() || e.ending != nil; over {
			return
		}
		r := *e.rec
		r.expires = expires
		e.rec = &r
	})
	if err == nil && over {
		e.mu.Lock()
		err = e.usable()
		e.mu.Unlock()
	}
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	n.schedule(e)
	return n.view(ctx, e), nil
}

// Stop ends the sandbox and returns once nothing of it is left. The end goes
// on if the caller goes away.
func (n *Node) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	const op = "edge.Stop"
	e, err := n.get(id)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	why := dsec.ReasonFrom(ctx)
	if end := n.end(e, judge(why.Cause, why.Detail), somebodyWaits); end != nil {
		select {
		case <-end.done:
			if end.err != nil {
				return dsec.Sandbox{}, dsec.WithOp(op, id, end.err)
			}
		case <-ctx.Done():
			return dsec.Sandbox{}, dsec.WithOp(op, id, context.Cause(ctx))
		}
	}
	return n.view(ctx, e), nil
}

// Wait returns the record once the sandbox has ended.
func (n *Node) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	const op = "edge.Wait"
	e, err := n.get(id)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	e.mu.Lock()
	over := e.awaitEnd()
	e.mu.Unlock()
	if over != nil {
		select {
		case <-over:
		case <-ctx.Done():
			return dsec.Sandbox{}, dsec.WithOp(op, id, context.Cause(ctx))
		case <-n.life.Done():
			return dsec.Sandbox{}, dsec.WithOp(op, id, errClosing)
		}
	}
	return n.view(ctx, e), nil
}

package trajectory

import (
	"context"

	"github.com/dsec-go/dsec"
)

// lineage is where the line of a copy branches off. The copy's trajectory begins
// anew with it; what was answered in the original is not answered here.
type lineage struct {
	Sandbox  dsec.SandboxID
	Sequence uint64 // of the record of the snapshot or fork; 0 where nothing was recorded
	Branch   uint64 // added to the numbers under which its guest knows requests
}

// branchGap is more than the requests that can be under way while a copy is made:
// the guest may know those too.
const branchGap = 1 << 20

// lineageOf gives the lineage of a sandbox that was made from a snapshot; nil for
// any other, and where it cannot be found.
func (r *Recorder) lineageOf(ctx context.Context, from string) *lineage {
	if from == "" || r.inner.Snapshots == nil {
		return nil
	}
	s, err := r.inner.Snapshots.Get(ctx, dsec.SnapshotID(from))
	if err != nil {
		return nil
	}
	return r.branch(s.Sandbox, s.Sequence)
}

// branch begins a line at a record of a sandbox. Where that sandbox is itself a
// copy of which nothing is known any more, the numbers are only likely to be new.
func (r *Recorder) branch(id dsec.SandboxID, seq uint64) *lineage {
	o := &lineage{Sandbox: id, Sequence: seq, Branch: seq + branchGap}
	if c := r.log.chain(id); c != nil {
		c.mu.Lock()
		o.Branch += c.defaults.Branch
		c.mu.Unlock()
	}
	return o
}

// snapshots is the recorded dsec.Snapshots. What only reads goes through, and so
// does the removal of a snapshot, which is no change of a sandbox.
type snapshots struct {
	dsec.Snapshots
	r *Recorder
}

type takeParam struct {
	Key string `json:"key,omitempty"`
}

type takeAnswer struct {
	ID     dsec.SnapshotID `json:"id"`
	Memory bool            `json:"memory,omitempty"`
	Size   int64           `json:"size"`
}

// Take saves a sandbox; the snapshot has the number of the record.
func (s snapshots) Take(ctx context.Context, id dsec.SandboxID, opt dsec.SnapshotOptions) (dsec.Snapshot, error) {
	b, err := s.r.copied(ctx, id, dsec.RecordSave, takeParam{opt.Key})
	if err == errNoChain { //nolint:errorlint // it is never wrapped
		return s.Snapshots.Take(ctx, id, opt)
	}
	if err != nil {
		return dsec.Snapshot{}, dsec.WithOp("trajectory.Take", id, err)
	}
	opt.Sequence = b.flight.request
	snap, err := s.Snapshots.Take(ctx, id, opt)
	if e := s.r.finish(b, takeAnswer{snap.ID, snap.Memory, snap.Size}, body{}, err); err == nil {
		err = e
	}
	return snap, err
}

type forkParam struct {
	Count  int               `json:"count"`
	Key    string            `json:"key,omitempty"`
	TTL    int64             `json:"ttl,omitempty"` // nanoseconds
	Labels map[string]string `json:"labels,omitempty"`
}

type forkAnswer struct {
	Sandboxes []dsec.SandboxID `json:"sandboxes"`
}

// Fork copies a sandbox and begins the trajectories of the copies. One that
// cannot be begun takes all of them with it.
func (s snapshots) Fork(ctx context.Context, id dsec.SandboxID, n int, opt dsec.ForkOptions) ([]dsec.Sandbox, error) {
	const op = "trajectory.Fork"
	b, err := s.r.copied(ctx, id, dsec.RecordFork, forkParam{n, opt.Key, int64(opt.TTL), opt.Labels})
	recorded := err != errNoChain //nolint:errorlint // it is never wrapped
	if recorded && err != nil {
		return nil, dsec.WithOp(op, id, err)
	}
	if recorded {
		opt.Sequence = b.flight.request
	}
	all, err := s.Snapshots.Fork(ctx, id, n, opt)
	if err == nil {
		from := s.r.branch(id, opt.Sequence)
		for _, sb := range all {
			if err = s.r.log.created(sb, whoOf(ctx), from); err != nil {
				break
			}
		}
		if err != nil {
			for _, sb := range all {
				s.r.inner.Sandboxes.Stop(s.r.carry(ctx), sb.ID) //nolint:errcheck // its time to live ends it
			}
			all, err = nil, dsec.WithOp(op, id, err)
		}
	}
	if recorded {
		a := forkAnswer{}
		for _, sb := range all {
			a.Sandboxes = append(a.Sandboxes, sb.ID)
		}
		if e := s.r.finish(b, a, body{}, err); err == nil {
			err = e
		}
	}
	return all, err
}

// copied begins the record of a snapshot or a fork.
func (r *Recorder) copied(ctx context.Context, id dsec.SandboxID, op dsec.RecordOp, param any) (begun, error) {
	p, err := marshal(param)
	if err != nil {
		return begun{}, err
	}
	return r.log.begin(ctx, request{on: dsec.Call{Sandbox: id}, who: whoOf(ctx), op: op, param: p})
}

// screens is the recorded dsec.Screens. Looking is not recorded.
type screens struct {
	dsec.Screens
	r *Recorder
}

// Input plays events.
func (s screens) Input(ctx context.Context, id dsec.SandboxID, events []dsec.InputEvent) error {
	return doNothing(ctx, s.r, dsec.Call{Sandbox: id}, dsec.RecordInput, struct {
		Events []dsec.InputEvent `json:"events"`
	}{events}, func(ctx context.Context) error { return s.Screens.Input(ctx, id, events) })
}

package trajectory

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// sandboxes is the recorded dsec.Sandboxes. What only reads goes through.
type sandboxes struct {
	dsec.Sandboxes
	r *Recorder
}

// Create makes a sandbox and begins its trajectory. A trajectory that cannot
// be begun takes the sandbox with it.
func (s sandboxes) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	sb, err := s.Sandboxes.Create(ctx, spec, opt)
	if err != nil {
		return sb, err
	}
	if err := s.r.log.created(sb, whoOf(ctx)); err != nil {
		s.Sandboxes.Stop(s.r.carry(ctx), sb.ID) //nolint:errcheck // its time to live ends it
		return dsec.Sandbox{}, dsec.WithOp("trajectory.Create", sb.ID, err)
	}
	return sb, nil
}

// Stop records who asked for the end, and ends the sandbox. The record of the
// end itself comes from the node.
func (s sandboxes) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if c := s.r.log.chain(id); c != nil {
		who := whoOf(ctx)
		// A full disk must not keep anybody from stopping what fills it.
		if err := s.r.log.note(c, &head{Op: dsec.RecordStop, Project: who.Project, Token: who.Token}); err != nil {
			s.r.log.cfg.Fault(err)
		}
		s.r.salvage(ctx, c)
	}
	return s.Sandboxes.Stop(ctx, id)
}

// What is saved of a command that a stop interrupts, and how long that may take.
const (
	salvageBytes = 16 << 10 // of each stream, from its beginning
	salvageTime  = 200 * time.Millisecond
)

// salvage keeps what running commands have printed so far: their guest goes with
// the sandbox. One that stands still is not woken for it.
func (r *Recorder) salvage(ctx context.Context, c *chain) {
	c.mu.Lock()
	open := map[dsec.Step]uint64{}
	for seq, o := range c.open {
		if o.op == dsec.RecordCommand {
			open[o.step] = seq
		}
	}
	c.mu.Unlock()
	if len(open) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, salvageTime)
	defer cancel()
	if sb, err := r.inner.Sandboxes.Get(ctx, c.id); err != nil || sb.State != dsec.Running {
		return
	}
	on := dsec.Call{Sandbox: c.id}
	all, err := r.inner.Commands.List(ctx, on)
	if err != nil {
		return // nothing depends on it
	}
	found := map[uint64]partial{}
	for _, st := range all {
		seq, ok := open[st.Step]
		if !ok {
			continue
		}
		p := partial{id: st.ID, stdout: st.Stdout, stderr: st.Stderr}
		for _, stream := range []dsec.Stream{dsec.Stdout, dsec.Stderr} {
			stat := &p.stdout
			if stream == dsec.Stderr {
				stat = &p.stderr
			}
			b, err := r.inner.Commands.Read(ctx, on, st.ID, stream, 0, salvageBytes)
			if err != nil {
				b = nil
			}
			p.output = dsec.AppendOutput(p.output, dsec.Output{Stream: stream, Data: b})
			stat.Kept = int64(len(b))
		}
		found[seq] = p
	}
	c.mu.Lock()
	c.partial = found
	c.mu.Unlock()
}

type extendParam struct {
	TTL time.Duration `json:"ttl"` // nanoseconds
}

// Extend moves the end of the time to live.
func (s sandboxes) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordExtend, extendParam{ttl}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Extend(ctx, id, ttl)
	})
}

// Pause lets the workload stand still.
func (s sandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordPause, struct{}{}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Pause(ctx, id)
	})
}

// Resume lets it go on.
func (s sandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return change(ctx, s.r, id, dsec.RecordResume, struct{}{}, func(ctx context.Context) (dsec.Sandbox, error) {
		return s.Sandboxes.Resume(ctx, id)
	})
}

type commitParam struct {
	Name string `json:"name"`
}

type commitAnswer struct {
	Digest string   `json:"digest"`
	Layers []string `json:"layers,omitempty"`
}

// Commit makes an image of what changed.
func (s sandboxes) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	p, err := marshal(commitParam{name})
	if err != nil {
		return dsec.Image{}, err
	}
	b, err := s.r.log.begin(ctx, request{on: dsec.Call{Sandbox: id}, who: whoOf(ctx), op: dsec.RecordCommit, param: p})
	if err == errNoChain { //nolint:errorlint // it is never wrapped
		return s.Sandboxes.Commit(ctx, id, name)
	}
	if err != nil {
		return dsec.Image{}, dsec.WithOp("trajectory.Commit", id, err)
	}
	img, err := s.Sandboxes.Commit(ctx, id, name)
	if e := s.r.finish(b, commitAnswer{Digest: img.Digest}, body{}, err); err == nil {
		err = e
	}
	return img, err
}

// change records a call on the sandbox as a whole; its answer is the record
// that the caller gets and is not repeated here.
func change(ctx context.Context, r *Recorder, id dsec.SandboxID, op dsec.RecordOp, param any, f func(ctx context.Context) (dsec.Sandbox, error)) (dsec.Sandbox, error) {
	var sb dsec.Sandbox
	err := doNothing(ctx, r, dsec.Call{Sandbox: id}, op, param, func(ctx context.Context) (err error) {
		sb, err = f(ctx)
		return err
	})
	return sb, err
}

package trajectory

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// partial is what is known of a command that will be interrupted.
type partial struct {
	id             dsec.CommandID
	stdout, stderr dsec.StreamStat
	output         body // what it had printed, as far as there was time
}

// salvageTime is how long the end of a sandbox waits for what its running
// commands have printed.
const salvageTime = 500 * time.Millisecond

// Salvage keeps what the running commands of a sandbox have printed so far: it
// is about to be ended, and its guest goes with it. It does not block for long.
func (r *Recorder) Salvage(id dsec.SandboxID, guest dsec.Commands) {
	c := r.log.chain(id)
	if c == nil {
		return
	}
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
	ctx, cancel := context.WithTimeout(r.life, salvageTime)
	defer cancel()
	all, err := guest.List(ctx, dsec.Call{Sandbox: id})
	if err != nil {
		return // nothing depends on it
	}
	found := map[uint64]partial{}
	for _, st := range all {
		if seq, ok := open[st.Step]; ok {
			found[seq] = r.salvage(ctx, id, guest, st)
		}
	}
	c.mu.Lock()
	c.partial = found
	c.mu.Unlock()
}

// salvage takes the output of one command, up to where it is now.
func (r *Recorder) salvage(ctx context.Context, id dsec.SandboxID, guest dsec.Commands, st dsec.CommandStatus) partial {
	p := partial{id: st.ID, stdout: st.Stdout, stderr: st.Stderr}
	p.stdout.Kept, p.stderr.Kept = 0, 0
	until := st.Stdout.Total + st.Stderr.Total
	if until == 0 {
		return p
	}
	s := r.log.spool(r.life, dsec.BodyOutput) // what is there at the end of ctx is stored all the same
	defer s.abort()
	var frame []byte
	whole := true // what is kept is a beginning
	for o, err := range guest.Attach(ctx, dsec.Call{Sandbox: id}, st.ID, 0) {
		if err != nil {
			break
		}
		frame = dsec.AppendOutput(frame[:0], o)
		if _, err := s.Write(frame); err != nil {
			return p
		}
		if whole = whole && o.Gap == 0; whole {
			kept := &p.stdout.Kept
			if o.Stream == dsec.Stderr {
				kept = &p.stderr.Kept
			}
			*kept += int64(len(o.Data))
		}
		if o.Status != nil || o.Offset+int64(len(o.Data)) >= until {
			break
		}
	}
	// It may have printed more than the list said.
	p.stdout.Total, p.stderr.Total = max(p.stdout.Total, p.stdout.Kept), max(p.stderr.Total, p.stderr.Kept)
	b, err := s.finish()
	if err != nil {
		p.stdout.Kept, p.stderr.Kept = 0, 0
		return p
	}
	p.output = b
	return p
}

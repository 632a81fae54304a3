package edge

import (
	"context"

	"github.com/dsec-go/dsec"
)

// Forget tells the guest of a sandbox that the answers of steps are safe. It
// is no use of the sandbox: it moves no idle time and wakes nothing.
func (n *Node) Forget(ctx context.Context, id dsec.SandboxID, steps []dsec.Step) error {
	e, err := n.get(id)
	if err != nil {
		return err
	}
	e.mu.Lock()
	m, err := e.machine, e.usable()
	e.mu.Unlock()
	if err != nil {
		return dsec.WithOp("edge.Forget", id, err)
	}
	return dsec.WithOp("edge.Forget", id, m.Guest().Forget(ctx, steps))
}

package edge

import (
	"context"

	"github.com/dsec-go/dsec"
)

// Pause stops the workload of a sandbox.
func (n *Node) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return dsec.Sandbox{}, dsec.WithOp("edge.Pause", id, dsec.Errorf(dsec.Unsupported, "sandboxes of this node cannot be paused"))
}

// Resume lets a paused sandbox go on.
func (n *Node) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return dsec.Sandbox{}, dsec.WithOp("edge.Resume", id, dsec.Errorf(dsec.Unsupported, "sandboxes of this node cannot be paused"))
}

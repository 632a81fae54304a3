package edge

import (
	"context"
	"slices"

	"github.com/dsec-go/dsec"
)

var _ dsec.Nodes = (*Node)(nil)

// Nodes gives this node alone, as it is now.
func (n *Node) Nodes(context.Context) ([]dsec.Node, error) {
	h, err := n.gauge.sample()
	if err != nil {
		return nil, dsec.WithOp("edge.Nodes", "", dsec.Errorf(dsec.Unavailable, "measure host: %w", err))
	}
	node := dsec.Node{
		Name: n.cfg.Name, Place: n.cfg.Place, Version: dsec.Version,
		CPUs: h.CPUs, Load: h.Load, Memory: h.Memory, Available: max(0, h.Available-n.limits.MemoryReserve),
		Disk: h.Disk, DiskFree: h.DiskFree, Pressure: h.Pressure,
	}
	for _, k := range dsec.Kinds {
		if n.drivers[k] != nil {
			node.Kinds = append(node.Kinds, k)
		}
	}
	n.mu.RLock()
	node.Sandboxes = n.alive
	n.mu.RUnlock()
	if n.cfg.Features != nil {
		node.Features = slices.Clone(n.cfg.Features())
	}
	return []dsec.Node{node}, nil
}

// Counts is how many things a node has, for metrics.
type Counts struct {
	Alive    int  // being created or running
	Ended    int  // records kept
	Starting int  // creates that have a start
	Queued   int  // creates that wait for one
	Commands int  // running
	Broken   bool // the journal cannot be written
}

// Counts counts.
func (n *Node) Counts() Counts {
	c := Counts{Starting: len(n.gate.starts), Queued: len(n.gate.queue), Broken: n.broken.Load()}
	n.mu.RLock()
	defer n.mu.RUnlock()
	c.Alive = n.alive
	for _, e := range n.order {
		e.mu.Lock()
		if e.rec.state.Ended() {
			c.Ended++
		}
		c.Commands += int(max(e.running, 0))
		e.mu.Unlock()
	}
	return c
}

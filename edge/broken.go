package edge

// Distrust tells the node that its journal failed for another of the journal's
// owners: it refuses what would need the journal, as after a failure of its own,
// until a checkpoint succeeds. One that failed for good never does.
func (n *Node) Distrust() { n.broken.Store(true) }

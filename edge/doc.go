// Package edge is the authority on what lives on one node: a table of
// sandboxes, the machines behind them, when they begin and end. Node satisfies
// dsec.Sandboxes and dsec.Nodes and wraps each machine's guest as
// dsec.Commands, dsec.Files and dsec.Ports.
//
// It starts nothing itself: drivers do. It knows no wire, no token, no
// telemetry and no image format; what it needs of those are the small
// interfaces of depend.go, composed in cmd/dsec. It makes no network listener.
//
// The table is a projection of the journal. Every change is appended before it
// is visible; nothing is waited for on the disk, so the table survives kill -9
// of the edge and not always the power of the node. After a power loss a young
// sandbox may have no record. Its ID still carries a valid tag and the current
// epoch, which tells it from one that was never given out: such an ID is Lost.
// IDs of records that were forgotten a day after their end are kept as
// tombstones and are NotFound; only the newest maxTombstones are, an older one
// is called Lost as well.
//
// What a restart finds (Open):
//
//	record        machine   becomes
//	alive         there     running again; paused if both say so
//	ending        there     stopped now, with the cause it was to have
//	ending        gone      ended with that cause
//	alive         gone      failed guest-died; lost node-lost if the node was rebooted
//	of an earlier epoch     lost node-lost, its machine is stopped
//	none, ended   there     the machine is stopped and removed
//
// Invariants:
//   - A sandbox that can be seen as running has a record in the journal and a
//     machine. A create that fails leaves neither.
//   - A sandbox that is recorded as paused stands still, and nothing is asked of
//     its guest before it was resumed. It turns to a state once however many
//     ask for it.
//   - A sandbox ends once, with one cause: the first that asks for the end.
//   - No lock is held across I/O, save logMu and labeling across the append of a record.
//   - Lock order: labeling, logMu, Node.mu, entry.mu, timers.mu.
//   - An idle sandbox has no goroutine here if its machine is a DoneNotifier,
//     and shares its Spec with those that asked for the same.
//   - A node whose journal cannot be written refuses creates and goes on with
//     everything else.
//
// The caller opens and closes the journal and the drivers. Read next: node.go,
// create.go, life.go; then package driver.
package edge

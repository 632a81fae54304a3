// Package trajectory keeps the ordered, durable record of everything asked of
// a sandbox and what it answered, and answers repeated steps from it.
//
// Log is a projection of the node's journal: for each sandbox a chain of
// records, their places and the steps among them. Recorder wraps a node's
// services so that every operation which can change a sandbox is in its chain.
// Records whose sandbox is over, and long tails of living ones, move to the
// blob store as segments (segment.go). The package knows no wire and no
// token, does not run or place anything, and leaves replaying a session in a
// fresh sandbox to cmd/dsec.
//
// What holds:
//   - The request is appended before the guest sees it, the answer is synced
//     before anybody sees the end. The guest keeps an answer until then.
//   - A step is begun once. Whoever repeats it waits for the one under way, or
//     gets its answer; another request under its name is Diverged.
//   - A call that failed changed nothing and is carried out when it is
//     repeated. A command whose guest is gone is Interrupted, and never run
//     again.
//   - The records of a chain are in the journal in the order of their numbers;
//     chain.mu is held across the append.
//   - A journal that cannot be written refuses what would begin something, with
//     Unavailable. What runs goes on, and its answer is recorded once that is
//     possible again.
//
// Locks, in this order: Log.mu, chain.mu, Log.places. Log.mu and chain.mu are held across an
// append to the journal, never across a sync, a read or a call to the guest.
//
// Read next: docs/decisions/trajectory.md, record.go, log.go, recorder.go.
package trajectory

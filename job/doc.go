// Package job owns sandboxes by the thousand for trainers that come and go:
// jobs, the leases on them, what happens when a lease ends, what happened to
// their sandboxes, and who may still call.
//
// Jobs satisfies dsec.Jobs over any dsec.Sandboxes. Fence wraps a node's
// services so that a call of an owner that was followed by another is refused,
// and so that a job exists for every sandbox that names one. What becomes of
// sandboxes is told to Jobs by Note; at every start, and where telling failed,
// the listing of sandboxes has the last word, so that no event is missing after
// a kill -9. The package starts no sandbox by itself, knows no edge, no wire and
// no token, and keeps the jobs of one node; jobs over several nodes are for
// whoever owns those.
//
// Jobs is a projection of the journal. A lease runs by the clock that nobody
// sets; its renewals are not written, therefore each lease begins anew when the
// node does.
//
// What holds:
//   - An epoch is given out once: Open is on the disk before it answers.
//   - An event is on the disk before anybody sees it, and has one number for
//     ever. A change of a job and its event are one record.
//   - What an owner had in hand when it lost the lease (a create, a bulk create)
//     has ended before the policy looks at the sandboxes, so none slips through.
//   - A policy that was begun is finished after a restart; one whose owner comes
//     back goes no further.
//
// Locks, in this order: Jobs.logMu, Jobs.mu, feed.mu. logMu is held over the
// append to the journal and the change that it describes, and no lock across a
// sync or a call on a sandbox.
//
// Read next: job.go, lease.go, feed.go, fence.go; docs/jobs.md.
package job

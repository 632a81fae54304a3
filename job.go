package dsec

import (
	"context"
	"iter"
	"strings"
	"time"
	"unicode/utf8"
)

// Job is the record of one job: the sandboxes of one trainer run, and who owns
// them. An owner holds a lease that it renews; when the lease ends the node does
// what OnDisconnect says, by itself. Whoever opens the job is its next owner and
// has the next epoch; calls that carry an earlier one are refused.
type Job struct {
	ID           JobID
	Project      ProjectID
	OnDisconnect OnDisconnect
	Lease        time.Duration // 0: none, for a job that came to be by a sandbox that named it
	Epoch        uint64        // of the present owner; 0 before there was one
	State        JobState
	LeaseEnds    time.Time // zero without a lease, and once it has ended
	Created      time.Time
	Labels       map[string]string
	Counts       map[State]int // its sandboxes, those that ended in the last 24 h included
	Events       uint64        // number of its last event
}

// JobState is whether a job has an owner.
type JobState string

// The states of a job. It goes to and fro between the first two; the third is
// final.
const (
	JobActive       JobState = "active"
	JobDisconnected JobState = "disconnected" // the lease ended and nobody came
	JobStopped      JobState = "stopped"      // by Jobs.Stop
)

// OnDisconnect says what becomes of a job's sandboxes when its lease ends.
type OnDisconnect string

// What can become of them.
const (
	DisconnectPause OnDisconnect = "pause" // they stand still and give their memory back; a request wakes each
	DisconnectKeep  OnDisconnect = "keep"  // nothing
	DisconnectStop  OnDisconnect = "stop"  // they end
)

// Limits of jobs.
const (
	MinLease     = time.Second
	MaxLease     = 24 * time.Hour
	MaxJobBytes  = 128    // of a JobID
	MaxJobItems  = 32_000 // in one CreateMany
	MaxJobEvents = 131_072
	MaxItemKey   = MaxKeyBytes - MaxJobBytes - 1
)

// JobSpec says what job is wanted.
type JobSpec struct {
	ID           JobID         // default one is made
	Project      ProjectID     // default the token's
	OnDisconnect OnDisconnect  // default DisconnectPause
	Lease        time.Duration // MinLease to MaxLease; there is no default
	Labels       map[string]string
}

// Check validates s. Every fault is Invalid.
func (s JobSpec) Check() error {
	if s.ID != "" {
		if err := s.ID.Check(); err != nil {
			return err
		}
	}
	switch s.OnDisconnect {
	case "", DisconnectPause, DisconnectKeep, DisconnectStop:
	default:
		return Errorf(Invalid, "on-disconnect policy %q is not one of pause, keep, stop", clip(string(s.OnDisconnect)))
	}
	if s.Lease < MinLease || s.Lease > MaxLease {
		return Errorf(Invalid, "lease %v is not between %v and %v", s.Lease, MinLease, MaxLease)
	}
	return checkLabels(s.Labels)
}

// Check validates the ID: any text of 1 to MaxJobBytes bytes without control
// characters.
func (id JobID) Check() error {
	s := string(id)
	if s == "" || len(s) > MaxJobBytes || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return Errorf(Invalid, "job %q is not 1 to %d bytes of text", clip(s), MaxJobBytes)
	}
	return nil
}

// JobItem is one sandbox of a CreateMany.
type JobItem struct {
	Key  string // unique in its job, at most MaxItemKey bytes; without one a repeated call creates another
	Spec Spec   // its Job may be left empty
}

// JobResult is what became of one sandbox in a call on many.
type JobResult struct {
	Index   int // of the item, or of the sandbox in the order of IDs
	Key     string
	Sandbox Sandbox // its ID alone if Err is set
	Err     error   // an *Error
}

// JobEvent is something that happened to a job or to a sandbox of it. Events of
// a job are numbered from 1 without gaps.
type JobEvent struct {
	Seq     uint64
	Time    time.Time
	Type    JobEventType
	Sandbox SandboxID // empty for what concerns the job as a whole
	Key     string    // of the sandbox's item, if it came by CreateMany
	Cause   Cause     // of an end
	Detail  string    // a sentence for people
	Retry   bool      // creating it again may lead to a better end
	Epoch   uint64    // of the owner, for EventOwner and EventLease
	Missed  uint64    // of EventGap: how many events are not kept any more
}

// JobEventType says what happened.
type JobEventType string

// The types of events.
const (
	EventCreated JobEventType = "created"
	EventPaused  JobEventType = "paused"
	EventResumed JobEventType = "resumed"
	EventStopped JobEventType = "stopped"       // ended as somebody or a limit of time said; of the job without a sandbox
	EventFailed  JobEventType = "failed"        // ended by a fault, or an item that could not be created
	EventOOM     JobEventType = "oom"           // ended for want of memory
	EventLost    JobEventType = "lost"          // gone with its node
	EventLease   JobEventType = "lease-lost"    // the owner did not renew in time
	EventOwner   JobEventType = "owner-changed" // opened, or taken up again by the same owner
	EventGap     JobEventType = "gap"           // Missed events before the next one are not kept; never stored itself
)

// JobEventOptions say which events are wanted.
type JobEventOptions struct {
	After  uint64 // those behind this one; one that was never given out is Invalid
	Follow bool   // wait for more, until the job is stopped and all of it has ended
}

// Jobs owns sandboxes by the thousand. A job that is named by no call but by
// the Spec of a sandbox exists as well: with DisconnectKeep, no lease and no
// owner. A job of another project is NotFound. Pause, Resume, Stop, Label and
// CreateMany work on when the caller goes away; each yields one result for each
// sandbox, in the order in which they come. All methods are safe for concurrent
// use.
type Jobs interface {
	// Create makes a job whose first owner is the caller: it has epoch 1 and its
	// lease begins. Exists for an ID that is taken; a repeated Create with the
	// same Key returns the job of the first.
	Create(ctx context.Context, spec JobSpec, opt CreateOptions) (Job, error)

	// Open makes the caller the owner: the epoch grows, a new lease begins, the
	// owner before is fenced. It resumes nothing: a paused sandbox wakes at its
	// first request. Conflict for a stopped job.
	Open(ctx context.Context, id JobID) (Job, error)

	// Renew begins the lease anew, also one that has ended when nobody opened the
	// job since. Conflict for an owner that is fenced and for a stopped job;
	// Invalid for an epoch that was never given out.
	Renew(ctx context.Context, id JobID, epoch uint64) (Job, error)

	// Get returns the record.
	Get(ctx context.Context, id JobID) (Job, error)

	// List returns all jobs, newest first.
	List(ctx context.Context) ([]Job, error)

	// Pause pauses all that run, Resume lets all go on.
	Pause(ctx context.Context, id JobID) iter.Seq2[JobResult, error]
	Resume(ctx context.Context, id JobID) iter.Seq2[JobResult, error]

	// Stop ends all and the job itself, which can not be opened again.
	Stop(ctx context.Context, id JobID) iter.Seq2[JobResult, error]

	// Label sets labels of the job and of all its sandboxes that have not ended;
	// an empty value takes a label away.
	Label(ctx context.Context, id JobID, labels map[string]string) iter.Seq2[JobResult, error]

	// CreateMany creates up to MaxJobItems sandboxes. It ends early, the rest
	// with Conflict, when the owner of that epoch loses the lease or the job;
	// what was created by then follows the policy. Epoch 0 is an operator's,
	// which no lease ends. Repeated with the same keys it creates nothing twice.
	CreateMany(ctx context.Context, id JobID, epoch uint64, items []JobItem) iter.Seq2[JobResult, error]

	// Events yields what happened. An event is durable before it is yielded. The
	// newest MaxJobEvents are kept; in the place of older ones is an EventGap.
	Events(ctx context.Context, id JobID, opt JobEventOptions) iter.Seq2[JobEvent, error]
}

type epochKey struct{}

// WithEpoch gives a context whose calls carry the epoch of a job's owner, so
// that they are refused with Conflict once the job has another. It has no effect
// on sandboxes without a job.
func WithEpoch(ctx context.Context, epoch uint64) context.Context {
	return context.WithValue(ctx, epochKey{}, epoch)
}

// EpochFrom gives the epoch that ctx carries, 0 for none.
func EpochFrom(ctx context.Context) uint64 {
	epoch, _ := ctx.Value(epochKey{}).(uint64)
	return epoch
}

package dsec

import (
	"context"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// State is where a sandbox is in its life:
//
//	creating -> running <-> paused, and from any of them
//	finally one of stopped, failed, lost.
type State string

// The states of a sandbox.
const (
	Creating State = "creating"
	Running  State = "running"
	Paused   State = "paused"
	Stopped  State = "stopped" // ended as somebody asked or a limit of time said
	Failed   State = "failed"  // ended by a fault in it or around it
	LostGone State = "lost"    // its node is gone, or forgot it
)

// Ended reports whether s is final.
func (s State) Ended() bool { return s == Stopped || s == Failed || s == LostGone }

// Cause says why a sandbox ended. A sandbox that ended has exactly one.
type Cause string

// The causes of an end.
const (
	CauseUser      Cause = "user"       // a stop call
	CauseTTL       Cause = "ttl"        // its time to live passed
	CauseIdle      Cause = "idle"       // its idle time passed
	CauseOOM       Cause = "oom"        // the kernel ended its guest for want of memory
	CauseDisk      Cause = "disk"       // its writable layer grew beyond its limit
	CauseGuestDied Cause = "guest-died" // the agent inside ended or closed its channel
	CauseNodeLost  Cause = "node-lost"  // its node rebooted, or was declared lost
	CauseAdmission Cause = "admission"  // it was never started
	CauseEvicted   Cause = "evicted"    // the node needed its room
	CauseNodeDown  Cause = "node-down"  // the node was taken down on purpose
	CauseLease     Cause = "lease"      // nobody held the lease of its job, whose policy is stop
	CauseOwner     Cause = "owner"      // the sandbox that had made it through its API ended
)

// Sandbox is the record of one sandbox, as its node knows it.
type Sandbox struct {
	ID       SandboxID
	Spec     Spec // with defaults filled in and references as they were asked
	State    State
	Cause    Cause  // set once State.Ended
	Detail   string // a sentence for people, with Cause
	Node     string
	Created  time.Time
	Expires  time.Time     // Created plus TTL, moved by Extend
	Ended    time.Time     // zero while it lives
	LastUsed time.Time     // last call or end of a running command
	Stages   []Stage       // how long each step of its creation took
	Usage    Usage         // as of the call; final figures once ended
	Layers   []string      // digests of the layers of its root, lowest first
	Key      string        // the client's key of its creation, if any
	Took     time.Duration // its creation, from the request's arrival to running

	Paused    time.Time // since when it stands still; zero unless State is Paused
	Reclaimed int64     // bytes of memory it has given back since; 0 unless State is Paused
}

// Stage is one timed step of a creation.
type Stage struct {
	Name string
	Took time.Duration
}

// Usage is what a sandbox has used.
type Usage struct {
	CPU        time.Duration // of all its processes so far
	Memory     int64         // bytes charged to it now
	MemoryPeak int64         // bytes, the highest seen
	Disk       int64         // bytes of its writable layer
	Pids       int           // processes and threads now
	Commands   int           // commands running now
	OOMKills   int           // processes the kernel ended at its memory limit

	// What it read of its images that was not on the node. A host before Linux
	// 6.12 does not say who reads: there both are 0.
	Fetched int64         // bytes that came from the store while it waited, in chunks of 256 KiB
	Waited  time.Duration // for them, summed over its processes
}

// Activity is a guest's own count of the commands it runs.
type Activity struct {
	Running int       // commands that have not ended
	Last    time.Time // when the last one ended; zero if none did
}

// Call names the sandbox that an operation is for, and what makes it
// repeatable. The zero Step and Key mean that it is not.
type Call struct {
	Sandbox SandboxID
	Step    Step
	Epoch   uint64 // of the owner of the sandbox's job, 0 for none; default that of the context, see WithEpoch
}

// Step is a client's name for one operation in one sandbox: a session and a
// number. Repeating a step returns the recorded answer; nothing runs twice.
// A repeated step that asks for something else is Diverged.
type Step struct {
	Session string // the zero Step has none
	Number  uint64
}

// MaxSession is the most bytes of a session's name.
const MaxSession = 128

// Check validates s: a session is readable text.
func (s Step) Check() error {
	switch {
	case len(s.Session) > MaxSession:
		return Errorf(Invalid, "session %q has %d bytes, more than %d", clip(s.Session), len(s.Session), MaxSession)
	case !utf8.ValidString(s.Session) || strings.ContainsFunc(s.Session, unicode.IsControl):
		return Errorf(Invalid, "session %q is no readable text", clip(s.Session))
	}
	return nil
}

// IsZero reports whether s names nothing.
func (s Step) IsZero() bool { return s.Session == "" }

// CreateOptions say how a creation is to be done; they are no part of the
// Spec.
type CreateOptions struct {
	Key string // repeating a create with the same key gives the same sandbox; at most MaxKeyBytes
}

// Filter selects sandboxes. Empty fields select all.
type Filter struct {
	All    bool // include ended ones, kept for 24 h
	Job    JobID
	Labels map[string]string // all must match
	State  State
	Limit  int       // at most this many, the newest first; 0 means no limit
	After  SandboxID // continue a listing after this one
}

// Sandboxes is the life of sandboxes. All methods are safe for concurrent use.
type Sandboxes interface {
	// Create makes a sandbox and returns it running. With a Key, a repeated
	// call returns the sandbox of the first one, ended or not; the same key
	// with another Spec is Conflict. It is Invalid for a bad Spec, NotFound for
	// an image that does not exist, Exhausted at once when no node has room.
	// A Create that fails leaves nothing behind.
	Create(ctx context.Context, spec Spec, opt CreateOptions) (Sandbox, error)

	// Get returns the record. An ID that was never given out, or ended more
	// than 24 h ago, is NotFound; one of an earlier epoch of its node is Lost.
	Get(ctx context.Context, id SandboxID) (Sandbox, error)

	// List returns the sandboxes that f selects, newest first.
	List(ctx context.Context, f Filter) ([]Sandbox, error)

	// Extend moves the end of its time to live to ttl from now. It is Conflict
	// when the sandbox has ended.
	Extend(ctx context.Context, id SandboxID, ttl time.Duration) (Sandbox, error)

	// Stop ends the sandbox and everything in it and returns once nothing of
	// it is left. Stopping an ended one returns its record.
	Stop(ctx context.Context, id SandboxID) (Sandbox, error)

	// Pause stops every process of the workload where it is and returns once all
	// stand still; their memory is given back to the node behind that. Commands
	// in hand go on where they were when the sandbox is resumed, and their
	// timeouts do not count meanwhile. Its time to live goes on, its idle time
	// does not count. Pausing a paused sandbox returns its record; an ended one
	// is Conflict, one whose kind cannot pause Unsupported. The record may say
	// running: a call that came meanwhile has resumed it.
	//
	// Any call on commands, files or ports of a paused sandbox resumes it first;
	// the methods here, Resume apart, leave it as it is.
	Pause(ctx context.Context, id SandboxID) (Sandbox, error)

	// Resume lets a paused sandbox go on and returns once it answers. Resuming a
	// running one returns its record.
	Resume(ctx context.Context, id SandboxID) (Sandbox, error)

	// Wait returns the record once the sandbox has ended.
	Wait(ctx context.Context, id SandboxID) (Sandbox, error)

	// Commit writes what changed in the sandbox's root since its creation as a
	// workspace layer named name@version. The sandbox is frozen while its files
	// are read. A taken version is Exists.
	Commit(ctx context.Context, id SandboxID, name string) (Image, error)
}

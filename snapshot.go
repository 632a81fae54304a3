package dsec

import (
	"context"
	"crypto/sha256"
	"strings"
	"time"
)

// SnapshotID names a saved state of a sandbox for ever. It is "sn" and 52
// lower-case base32 characters, the SHA-256 of what describes the state, a
// secret in it: nobody can guess it, and any node that has the same store finds
// the state by it.
type SnapshotID string

const snapshotPrefix = "sn"

// SnapshotIDOf gives the ID of a state that is described by bytes of this sum.
func SnapshotIDOf(sum [sha256.Size]byte) SnapshotID {
	return SnapshotID(snapshotPrefix + idEncoding.EncodeToString(sum[:]))
}

// Sum is the inverse of SnapshotIDOf; NotFound for what no snapshot can be
// called.
func (id SnapshotID) Sum() (sum [sha256.Size]byte, err error) {
	s, ok := strings.CutPrefix(string(id), snapshotPrefix)
	b, err := idEncoding.DecodeString(s)
	if !ok || err != nil || len(b) != len(sum) || SnapshotIDOf([sha256.Size]byte(b)) != id {
		return sum, Errorf(NotFound, "no snapshot has the id %q", clip(string(id)))
	}
	return [sha256.Size]byte(b), nil
}

// Check reports whether id has the form of a snapshot ID.
func (id SnapshotID) Check() error {
	_, err := id.Sum()
	return err
}

// Snapshot is a saved state of a sandbox. It outlives the sandbox and its node,
// until it is removed.
type Snapshot struct {
	ID       SnapshotID
	Project  ProjectID // of the sandbox
	Sandbox  SandboxID
	Spec     Spec     // of the sandbox
	Layers   []string // digests of the layers below what was saved, lowest first
	Created  time.Time
	Size     int64  // bytes in the store
	Memory   bool   // running processes are in it, not files alone
	Sequence uint64 // of the record in the sandbox's trajectory; 0 where nothing is recorded
	Key      string // the client's key of its making, if any
}

// SnapshotOptions say how a snapshot is to be taken.
type SnapshotOptions struct {
	Key string // repeating it with the same key gives the same snapshot; at most MaxKeyBytes

	// Sequence is for the keeper of the trajectory, not for callers.
	Sequence uint64
}

// ForkOptions say what the children of a fork have of their own. What is empty
// is as the parent has it.
type ForkOptions struct {
	Key    string            // repeating it with the same key gives the same children; at most MaxKeyBytes
	TTL    time.Duration     // counted from the fork
	Labels map[string]string // set over those of the parent

	// Sequence is for the keeper of the trajectory, not for callers.
	Sequence uint64
}

// Limits of snapshots and forks.
const (
	MaxForks     = 64   // children of one call
	MaxSnapshots = 1000 // of a project
)

// Snapshots saves and copies sandboxes. A new sandbox is made from a snapshot by
// Sandboxes.Create with Spec.From. All methods are safe for concurrent use.
//
// What is in a copy depends on the kind: of a virtual machine memory and disk,
// of a container its files. In any case it has an identity of its own: ID, host
// name, random numbers, and for virtual machines clock and machine ID. Copies
// have their own records; what was answered to steps of the original is not
// answered in a copy.
type Snapshots interface {
	// Take saves the state of a sandbox, which runs on; one that is paused
	// stays so. Unsupported, before anything is done, where its kind cannot be
	// saved; Exhausted when the project has MaxSnapshots or the disk is full.
	Take(ctx context.Context, sandbox SandboxID, opt SnapshotOptions) (Snapshot, error)

	// Fork makes n sandboxes that begin as copies of this one as it is now. All
	// are made, or none. The parent runs on; each child counts as a create.
	Fork(ctx context.Context, sandbox SandboxID, n int, opt ForkOptions) ([]Sandbox, error)

	// List gives the snapshots of the caller's project and below, newest first.
	List(ctx context.Context) ([]Snapshot, error)

	// Get gives one; NotFound if there is none or only another project's.
	Get(ctx context.Context, id SnapshotID) (Snapshot, error)

	// Remove deletes one. Sandboxes that were made from it are not touched.
	Remove(ctx context.Context, id SnapshotID) error
}

// Screens is the display, the keyboard and the pointer of sandboxes that have
// them; for others all is Unsupported. All methods are safe for concurrent use.
type Screens interface {
	// Screenshot gives what the display shows, as PNG.
	Screenshot(ctx context.Context, sandbox SandboxID) ([]byte, error)

	// Input plays at most MaxInputEvents events one after the other. If one is
	// Invalid, none is played.
	Input(ctx context.Context, sandbox SandboxID, events []InputEvent) error
}

// CheckInput validates what can be known without the machine.
func CheckInput(events []InputEvent) error {
	if len(events) == 0 || len(events) > MaxInputEvents {
		return Errorf(Invalid, "%d input events are not between 1 and %d", len(events), MaxInputEvents)
	}
	for i, e := range events {
		n := 0
		for _, set := range []bool{e.Key != "", e.Text != "", e.Move != nil, e.Button != ""} {
			if set {
				n++
			}
		}
		switch {
		case n != 1:
			return Errorf(Invalid, "input event %d is not exactly one of key, text, move and button", i)
		case len(e.Text) > MaxInputText:
			return Errorf(Invalid, "input event %d has %d characters of text, more than %d", i, len(e.Text), MaxInputText)
		case len(e.Key) > 256 || len(e.Button) > 64:
			return Errorf(Invalid, "input event %d: no key or button has so long a name", i)
		case e.Move != nil && (e.Move.X < 0 || e.Move.Y < 0):
			return Errorf(Invalid, "input event %d: a point of the screen is not negative", i)
		}
	}
	return nil
}

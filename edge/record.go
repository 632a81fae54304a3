package edge

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// recordVersion is the format of the edge's journal records. A journal of a
// newer format is refused, never guessed at.
const recordVersion = 1

// The changes that the journal holds. Applying one twice, or one that a
// checkpoint reflects already, changes nothing.
const (
	opBoot      = "boot"      // the edge was opened; Boot names the life of the kernel
	opCreated   = "created"   // a sandbox, as a whole; in checkpoints with its end
	opEnding    = "ending"    // its end was decided
	opEnded     = "ended"     // nothing of it is left
	opExtended  = "extended"  // its time to live was moved
	opPaused    = "paused"    // it stands still since At
	opReclaimed = "reclaimed" // so much memory came back of the pause that began at At
	opLabeled   = "labeled"   // labels were set, all that ever were are in it
	opResumed   = "resumed"   // it goes on
	opCommitted = "committed" // an image was made from it; for people
	opForgotten = "forgotten" // tombstones, in checkpoints only
)

// change is one record of the journal. Times are nanoseconds since 1970.
type change struct {
	V        int             `json:"v"`
	Op       string          `json:"op"`
	ID       dsec.SandboxID  `json:"id,omitempty"`
	At       int64           `json:"at,omitempty"`
	Spec     json.RawMessage `json:"spec,omitempty"`
	Layers   []string        `json:"layers,omitempty"`
	Key      string          `json:"key,omitempty"`
	Stages   []stage         `json:"stages,omitempty"`
	Took     time.Duration   `json:"took,omitempty"`
	Expires  int64           `json:"expires,omitempty"`
	Until    int64           `json:"until,omitempty"`
	LastUsed int64           `json:"used,omitempty"`
	State    dsec.State      `json:"state,omitempty"`
	Cause    dsec.Cause      `json:"cause,omitempty"`
	Detail   string          `json:"detail,omitempty"`
	Ended    int64           `json:"ended,omitempty"`
	Usage    *dsec.Usage     `json:"usage,omitempty"`
	Boot     string          `json:"boot,omitempty"`
	Image    string          `json:"image,omitempty"`
	Digest   string          `json:"digest,omitempty"`
	Tombs    []uint64        `json:"tombs,omitempty"`

	Paused    int64 `json:"paused,omitempty"`
	Reclaimed int64 `json:"reclaimed,omitempty"`

	Labels map[string]string `json:"labels,omitempty"` // set over those of Spec

	// Guest is what commands of a copy have by default; of others it follows from
	// Spec and images.
	Guest *driver.GuestConfig `json:"guest,omitempty"`
}

type stage struct {
	Name string        `json:"n"`
	Took time.Duration `json:"d"`
}

// encode gives the record's bytes.
func (c change) encode() []byte {
	c.V = recordVersion
	b, err := json.Marshal(c)
	if err != nil {
		// Only a RawMessage that is no JSON could do this, and Spec is made by
		// json.Marshal.
		panic(fmt.Sprintf("edge: encode %s record: %v", c.Op, err))
	}
	return b
}

// decodeChange reads a record.
func decodeChange(b []byte) (change, error) {
	var c change
	if err := json.Unmarshal(b, &c); err != nil {
		return change{}, fmt.Errorf("decode record: %w", err)
	}
	if c.V != recordVersion {
		return change{}, fmt.Errorf("record of format %d, this build reads %d", c.V, recordVersion)
	}
	switch c.Op {
	case opBoot, opForgotten:
		return c, nil
	case opCreated:
		if c.ID == "" || len(c.Spec) == 0 || c.At == 0 {
			return change{}, fmt.Errorf("created record without id, spec or time")
		}
	case opEnding, opEnded, opExtended, opCommitted, opPaused, opReclaimed, opResumed, opLabeled:
		if c.ID == "" {
			return change{}, fmt.Errorf("%s record without id", c.Op)
		}
	default:
		return change{}, fmt.Errorf("record of unknown change %q", c.Op)
	}
	return c, nil
}

// record is what the table knows of a sandbox. It is immutable: a change
// replaces it, so a checkpoint reads it without a lock.
type record struct {
	spec    *sharedSpec
	layers  *[]string // shared, never nil
	key     string
	state   dsec.State
	verdict verdict // set once state.Ended, or once an end was decided
	created int64
	expires int64
	until   int64 // of its API's token; 0 for ever
	ended   int64
	stages  []dsec.Stage
	took    time.Duration
	usage   *dsec.Usage // final figures

	paused    int64 // since when, while state is Paused
	reclaimed int64 // bytes, while state is Paused

	labels map[string]string // set over those of spec, an empty one takes it away; immutable

	from *driver.GuestConfig // of a copy; immutable
}

// pausedAt gives r as it is while it stands still.
func (r *record) pausedAt(at int64) *record {
	c := *r
	c.state, c.paused, c.reclaimed = dsec.Paused, at, 0
	return &c
}

// gaveBack gives r with what came back of the pause that began at a time.
func (r *record) gaveBack(since, bytes int64) *record {
	c := *r
	if c.paused == since {
		c.reclaimed = bytes
	}
	return &c
}

// goingOn gives r as it is after a pause.
func (r *record) goingOn() *record {
	c := *r
	c.state, c.paused, c.reclaimed = dsec.Running, 0, 0
	return &c
}

// verdict says how a sandbox is to end.
type verdict struct {
	state  dsec.State
	cause  dsec.Cause
	detail string
}

// judge gives the verdict that a cause leads to.
func judge(cause dsec.Cause, detail string) verdict {
	v := verdict{dsec.Failed, cause, detail}
	switch cause {
	case dsec.CauseUser, dsec.CauseTTL, dsec.CauseIdle, dsec.CauseEvicted, dsec.CauseNodeDown, dsec.CauseLease, dsec.CauseOwner:
		v.state = dsec.Stopped
	case dsec.CauseNodeLost:
		v.state = dsec.LostGone
	case "":
		v.cause = dsec.CauseGuestDied
	}
	return v
}

// change gives the record of r as one created change.
func (r *record) change(id dsec.SandboxID, lastUsed int64) change {
	c := change{
		Op: opCreated, ID: id, At: r.created, Spec: r.spec.json, Layers: *r.layers, Key: r.key, Took: r.took,
		Expires: r.expires, Until: r.until, LastUsed: lastUsed, Cause: r.verdict.cause, Detail: r.verdict.detail,
		Ended: r.ended, Usage: r.usage, Paused: r.paused, Reclaimed: r.reclaimed, Labels: r.labels, Guest: r.from,
	}
	if r.verdict.cause != "" {
		c.State = r.verdict.state
	}
	for _, s := range r.stages {
		c.Stages = append(c.Stages, stage(s))
	}
	return c
}

// sandbox gives r in the words of the contract, without usage and last use.
// Nothing in it is shared with the table.
func (r *record) sandbox(id dsec.SandboxID, node string) dsec.Sandbox {
	sb := dsec.Sandbox{
		ID: id, Spec: cloneSpec(r.spec.spec), State: r.state, Node: node,
		Created: stamp(r.created), Expires: stamp(r.expires), Ended: stamp(r.ended),
		Stages: append([]dsec.Stage(nil), r.stages...), Layers: append([]string(nil), *r.layers...),
		Key: r.key, Took: r.took, Paused: stamp(r.paused), Reclaimed: r.reclaimed,
	}
	if r.labels != nil {
		sb.Spec.Labels = r.effectiveLabels(nil)
	}
	if r.state.Ended() {
		sb.Cause, sb.Detail = r.verdict.cause, r.verdict.detail
	}
	if r.usage != nil {
		sb.Usage = *r.usage
	}
	return sb
}

// stamp gives nanoseconds since 1970 as a time; 0 is the zero time.
func stamp(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

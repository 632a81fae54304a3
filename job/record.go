package job

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// recordVersion is the format of the records. A newer one is refused, never
// guessed at.
const recordVersion = 1

// The changes that the journal holds. Each gives values, not differences, so
// applying one that a checkpoint reflects already changes nothing.
const (
	opMade      = "made"      // a job, as a whole; in checkpoints too
	opOpened    = "opened"    // an owner, the same one after a lease that ended
	opExpired   = "expired"   // the lease ended
	opStopped   = "stopped"   // for good
	opSettled   = "settled"   // the policy, or the stop, was carried out
	opLabeled   = "labeled"   //
	opHappened  = "happened"  // events of sandboxes
	opKept      = "kept"      // events, in checkpoints only: what they changed is in members
	opMembers   = "members"   // in checkpoints only
	opForgotten = "forgotten" // nothing of it is left
)

// change is one record. Times are nanoseconds since 1970.
type change struct {
	V        int               `json:"v"`
	Op       string            `json:"op"`
	Project  dsec.ProjectID    `json:"p,omitempty"`
	Job      dsec.JobID        `json:"j"`
	At       int64             `json:"at,omitempty"`
	Policy   dsec.OnDisconnect `json:"policy,omitempty"`
	Lease    time.Duration     `json:"lease,omitempty"`
	Epoch    uint64            `json:"epoch,omitempty"`
	State    dsec.JobState     `json:"state,omitempty"`
	Settled  bool              `json:"settled,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	Key      string            `json:"key,omitempty"`
	LeaseEnd int64             `json:"leaseEnd,omitempty"`
	LastEnd  int64             `json:"lastEnd,omitempty"`
	Events   []event           `json:"ev,omitempty"`
	Members  []memberRecord    `json:"m,omitempty"`
}

type memberRecord struct {
	ID    dsec.SandboxID `json:"i"`
	Key   string         `json:"k,omitempty"`
	State dsec.State     `json:"s"`
	Ended int64          `json:"t,omitempty"`
}

// encode gives the record's bytes.
func (c change) encode() []byte {
	c.V = recordVersion
	b, err := json.Marshal(c)
	if err != nil {
		panic(fmt.Sprintf("job: encode %s record: %v", c.Op, err)) // plain data
	}
	return b
}

// decode reads a record.
func decode(b []byte) (change, error) {
	var c change
	if err := json.Unmarshal(b, &c); err != nil {
		return change{}, fmt.Errorf("decode job record: %w", err)
	}
	if c.V != recordVersion {
		return change{}, fmt.Errorf("job record of format %d, this build reads %d", c.V, recordVersion)
	}
	switch c.Op {
	case opMade, opOpened, opExpired, opStopped, opSettled, opLabeled, opHappened, opKept, opMembers, opForgotten:
	default:
		return change{}, fmt.Errorf("job record of unknown change %q", c.Op)
	}
	if c.Job == "" {
		return change{}, fmt.Errorf("job record %q without a job", c.Op)
	}
	return c, nil
}

// apply changes the jobs as c says, in a replay as in life. Requires: mu held,
// or nothing else runs yet.
func (j *Jobs) apply(c change) {
	k := key{c.Project, c.Job}
	e := j.jobs[k]
	if c.Op == opMade && e == nil {
		e = &entry{
			key: k, policy: c.Policy, lease: c.Lease, token: c.Key, created: time.Unix(0, c.At).UTC(),
			members: map[dsec.SandboxID]*member{}, counts: map[dsec.State]int{}, log: newEvents(j.cfg.Events),
		}
		e.epoch, e.state, e.settled, e.labels = c.Epoch, c.State, c.Settled, c.Labels
		e.leaseEnd, e.lastEnd = unstamp(c.LeaseEnd), unstamp(c.LastEnd)
		j.jobs[k] = e
	}
	if e == nil {
		return // forgotten
	}
	switch c.Op {
	case opOpened:
		e.epoch, e.state, e.settled = max(e.epoch, c.Epoch), dsec.JobActive, false
	case opExpired:
		e.state, e.settled, e.leaseEnd = dsec.JobDisconnected, false, time.Unix(0, c.At)
	case opStopped:
		e.state, e.settled = dsec.JobStopped, false
	case opSettled:
		e.settled = true
	case opLabeled:
		e.labels = c.Labels
	case opForgotten:
		for id := range e.members {
			delete(j.members, id)
		}
		delete(j.jobs, k)
	case opMembers:
		for _, m := range c.Members {
			j.enroll(e, m.ID, m.Key, m.State, unstamp(m.Ended))
		}
	}
	for _, ev := range c.Events {
		if ev.Seq <= e.log.last {
			continue
		}
		e.log.add(ev)
		if c.Op != opKept && ev.Sandbox != "" {
			j.happened(e, ev)
		}
	}
}

// enroll makes a sandbox a member. Requires: mu held.
func (j *Jobs) enroll(e *entry, id dsec.SandboxID, k string, s dsec.State, ended time.Time) *member {
	m := j.members[id]
	if m == nil {
		m = &member{id: id, job: e, key: k}
		j.members[id], e.members[id] = m, m
	} else {
		e.counts[m.state]--
	}
	m.state, m.ended = s, ended
	e.counts[s]++
	return m
}

// happened keeps the members as the events tell. Requires: mu held.
func (j *Jobs) happened(e *entry, ev event) {
	state, ended := stateAfter(ev.Type), time.Time{}
	if state.Ended() {
		ended = time.Unix(0, ev.At)
		e.lastEnd = ended
	}
	j.enroll(e, ev.Sandbox, ev.Key, state, ended)
}

// stateAfter is the state of a sandbox once an event happened to it.
func stateAfter(t dsec.JobEventType) dsec.State {
	switch t {
	case dsec.EventPaused:
		return dsec.Paused
	case dsec.EventStopped:
		return dsec.Stopped
	case dsec.EventFailed, dsec.EventOOM:
		return dsec.Failed
	case dsec.EventLost:
		return dsec.LostGone
	}
	return dsec.Running
}

// saveChunk is how many events or members share a record of a checkpoint.
const saveChunk = 500

// save adds records that stand for all jobs, for a checkpoint.
func (j *Jobs) save(cut func(), add func([]byte) error) error {
	j.logMu.Lock()
	cut()
	j.mu.Lock()
	var all []change
	for _, e := range j.jobs {
		k := change{Project: e.project, Job: e.id}
		made := k
		made.Op, made.At, made.Policy, made.Lease, made.Epoch = opMade, e.created.UnixNano(), e.policy, e.lease, e.epoch
		made.State, made.Settled, made.Labels, made.Key = e.state, e.settled, e.labels, e.token
		made.LeaseEnd, made.LastEnd = stampOf(e.leaseEnd), stampOf(e.lastEnd)
		kept := k
		kept.Op, kept.Events = opKept, slices.Clone(e.log.list)
		members := k
		members.Op = opMembers
		for _, m := range e.members {
			members.Members = append(members.Members, memberRecord{m.id, m.key, m.state, stampOf(m.ended)})
		}
		all = append(all, made, kept, members)
	}
	j.appended = 0
	j.mu.Unlock()
	j.logMu.Unlock()

	for _, c := range all {
		switch c.Op {
		case opMade:
			if err := add(c.encode()); err != nil {
				return err
			}
		case opKept:
			for part := range slices.Chunk(c.Events, saveChunk) {
				c.Events = part
				if err := add(c.encode()); err != nil {
					return err
				}
			}
		case opMembers:
			for part := range slices.Chunk(c.Members, saveChunk) {
				c.Members = part
				if err := add(c.encode()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// withLabels gives old with the values of set; an empty one takes a label away.
// It never changes old, which a checkpoint may be reading.
func withLabels(old, set map[string]string) map[string]string {
	m := maps.Clone(old)
	if m == nil {
		m = make(map[string]string, len(set))
	}
	for k, v := range set {
		if v == "" {
			delete(m, k)
		} else {
			m[k] = v
		}
	}
	return m
}

// madeID gives an ID for a job whose caller has none.
func madeID() dsec.JobID { return dsec.JobID("job-" + strings.ToLower(rand.Text()[:16])) }

func stampOf(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func unstamp(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns)
}

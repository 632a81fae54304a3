package job

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Change is what Note is told of a sandbox. What is no news needs no more than
// the sandbox: one without a Job is looked for among the members.
type Change struct {
	Sandbox dsec.SandboxID
	Project dsec.ProjectID
	Job     dsec.JobID
	Key     string     // of its creation
	State   dsec.State // it is in now
	Cause   dsec.Cause // of an end
	Detail  string
	At      time.Time // default now

	retry bool // of an item that led to no sandbox
}

// feed carries what is told to the one goroutine that makes events of it.
type feed struct {
	wake chan struct{} // has room for one

	mu    sync.Mutex
	queue []Change
	put   uint64        // told so far
	done  uint64        // made events of
	known bool          // what happened before Run is known too
	stuck bool          // the journal did not take the last of them
	moved chan struct{} // closed when done or stuck change; nil while nobody waits
}

// Note takes what became of a sandbox. It does not block, and may be called
// before Run and with any lock held. Whoever asks afterwards sees it.
func (j *Jobs) Note(c Change) {
	if c.At.IsZero() {
		c.At = time.Now()
	}
	f := &j.feed
	f.mu.Lock()
	f.queue = append(f.queue, c)
	f.put++
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// flush waits until all that was told before is known. It reports false if ctx
// or the jobs ended first; with a journal that cannot be written it does not
// wait.
func (j *Jobs) flush(ctx context.Context) bool {
	f := &j.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	for want := f.put; !f.stuck && (!f.known || f.done < want); {
		if f.moved == nil {
			f.moved = make(chan struct{})
		}
		moved := f.moved
		f.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
		case <-j.life.Done():
		}
		f.mu.Lock()
		if ctx.Err() != nil || j.life.Err() != nil {
			return false
		}
	}
	return ctx.Err() == nil
}

// progress notes that n changes are done, or that the journal is stuck.
func (f *feed) progress(n int, stuck bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done += uint64(n)
	f.stuck = stuck
	if f.moved != nil {
		close(f.moved)
		f.moved = nil
	}
}

// feedRetry is the pause before events are written again.
const feedRetry = time.Second

// follow makes events of what is told, until ctx ends. First it asks for all
// there is, since nobody was told what happened around a kill -9.
func (j *Jobs) follow(ctx context.Context) {
	wait := func() {
		select {
		case <-time.After(feedRetry):
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		err := j.reconcile(ctx)
		if err == nil {
			j.feed.mu.Lock()
			j.feed.known = true
			j.feed.mu.Unlock()
			break
		}
		if ctx.Err() == nil {
			j.cfg.Error(fmt.Errorf("list sandboxes of jobs: %w", err))
			j.feed.progress(0, true)
			wait()
		}
	}
	for ctx.Err() == nil {
		if err := j.drain(); err != nil {
			j.cfg.Error(err)
			wait()
			continue
		}
		select {
		case <-j.feed.wake:
		case <-ctx.Done():
		}
	}
}

// drain makes events of what is in the queue, and leaves it there if that fails.
func (j *Jobs) drain() error {
	f := &j.feed
	for {
		f.mu.Lock()
		list := f.queue
		f.mu.Unlock()
		if len(list) == 0 {
			f.progress(0, false)
			return nil
		}
		if err := j.digest(list); err != nil {
			f.progress(0, true)
			return err
		}
		f.mu.Lock()
		if f.queue = f.queue[len(list):]; len(f.queue) == 0 {
			f.queue = nil // its array is not kept
		}
		f.mu.Unlock()
		f.progress(len(list), false)
	}
}

// reconcile tells itself of all sandboxes, so that jobs know what happened while
// nobody told them, and of members that are nowhere any more.
func (j *Jobs) reconcile(ctx context.Context) error {
	s, err := j.node()
	if err != nil {
		return err
	}
	all, err := s.List(ctx, dsec.Filter{All: true})
	if err != nil {
		return err
	}
	there := make(map[dsec.SandboxID]bool, len(all))
	var told []Change
	for i := len(all) - 1; i >= 0; i-- { // oldest first
		b := all[i]
		there[b.ID] = true
		if b.Spec.Job == "" || b.State == dsec.Creating {
			continue
		}
		told = append(told, Change{
			Sandbox: b.ID, Project: b.Spec.Project, Job: b.Spec.Job, Key: b.Key, State: b.State, Cause: b.Cause, Detail: b.Detail,
			At: firstTime(b.Ended, b.Paused, b.Created),
		})
	}
	j.mu.Lock()
	for id, m := range j.members {
		if !m.state.Ended() && !there[id] {
			told = append(told, Change{
				Sandbox: id, Project: m.job.project, Job: m.job.id, State: dsec.LostGone, Cause: dsec.CauseNodeLost,
				Detail: "its node has no record of it", At: time.Now(),
			})
		}
	}
	j.mu.Unlock()
	return j.digest(told)
}

func firstTime(list ...time.Time) time.Time {
	for _, t := range list {
		if !t.IsZero() {
			return t
		}
	}
	return time.Now()
}

// digest makes events of what was told, in order, one record for each job, and
// makes them durable. What is known already makes none, so repeating it is safe.
func (j *Jobs) digest(list []Change) error {
	order := []key{}
	groups := map[key][]Change{}
	met := map[dsec.SandboxID]key{} // in this list
	for _, c := range list {
		k := key{c.Project, c.Job}
		if c.Job == "" {
			k = j.jobOf(c.Sandbox, met)
		}
		if k.id == "" {
			continue
		}
		met[c.Sandbox] = k
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], c)
	}
	var seq uint64
	last := map[*entry]uint64{}
	for _, k := range order {
		_, err := j.ensure(k)
		if err != nil && dsec.KindOf(err) == dsec.Exhausted {
			continue // it has no job, so nobody waits for its events
		}
		if err != nil && dsec.KindOf(err) != dsec.Conflict {
			return err
		}
		for part := groups[k]; len(part) > 0; {
			now := part[:min(len(part), saveChunk)]
			part = part[len(now):]
			n, err := j.append(func() (change, error) { return j.eventsOf(k, now), nil }, func() {
				last[j.jobs[k]] = j.jobs[k].log.last
			})
			if err != nil {
				return err
			}
			seq = max(seq, n)
		}
	}
	if seq == 0 {
		return nil
	}
	if err := j.cfg.Journal.Sync(context.WithoutCancel(j.life), seq); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for e, n := range last {
		e.log.show(n)
	}
	return nil
}

// jobOf gives the job of a sandbox, the zero key if it has none.
func (j *Jobs) jobOf(id dsec.SandboxID, met map[dsec.SandboxID]key) key {
	j.mu.Lock()
	defer j.mu.Unlock()
	if m := j.members[id]; m != nil {
		return m.job.key
	}
	return met[id]
}

// ensure gives the job of a sandbox, which is made where it was only named.
// Conflict for a stopped one.
func (j *Jobs) ensure(k key) (*entry, error) {
	var e *entry
	_, err := j.append(func() (change, error) {
		if e = j.jobs[k]; e != nil {
			if e.state == dsec.JobStopped {
				return change{}, errStopped(e)
			}
			return change{}, nil
		}
		if len(j.jobs) >= j.cfg.Max {
			return change{}, dsec.Errorf(dsec.Exhausted, "there are %d jobs", len(j.jobs))
		}
		return change{
			Op: opMade, Project: k.project, Job: k.id, At: time.Now().UnixNano(), Policy: dsec.DisconnectKeep, State: dsec.JobActive,
		}, nil
	}, func() { e = j.jobs[k] })
	return e, err
}

// eventsOf gives the events of what was told of a job's sandboxes, as they
// follow from what is known of each. Requires: mu held.
func (j *Jobs) eventsOf(k key, list []Change) change {
	e := j.jobs[k]
	if e == nil {
		return change{}
	}
	c := change{Op: opHappened, Project: k.project, Job: k.id}
	seq := e.log.last
	states := map[dsec.SandboxID]dsec.State{} // as of the events made so far
	add := func(t dsec.JobEventType, n Change, itemKey string) {
		seq++
		ev := event{Seq: seq, At: n.At.UnixNano(), Type: t, Sandbox: n.Sandbox, Key: itemKey, Detail: clip(n.Detail), Retry: n.retry}
		if stateAfter(t).Ended() {
			ev.Cause, ev.Retry = n.Cause, n.retry || worthAgain(n.Cause)
		}
		c.Events = append(c.Events, ev)
		if n.Sandbox != "" {
			states[n.Sandbox] = stateAfter(t)
		}
	}
	for _, n := range list {
		itemKey := ItemKey(k.id, n.Key)
		if n.Sandbox == "" {
			add(dsec.EventFailed, n, itemKey)
			continue
		}
		was, known := states[n.Sandbox]
		if m := j.members[n.Sandbox]; !known && m != nil {
			was, known = m.state, true
		}
		if m := j.members[n.Sandbox]; m != nil && m.key != "" {
			itemKey = m.key
		}
		if known && was.Ended() {
			continue
		}
		if !known {
			add(dsec.EventCreated, Change{Sandbox: n.Sandbox, At: n.At}, itemKey)
			was = dsec.Running
		}
		switch {
		case n.State.Ended():
			add(endOf(n), n, itemKey)
		case n.State == dsec.Paused && was != dsec.Paused:
			add(dsec.EventPaused, n, itemKey)
		case n.State == dsec.Running && was == dsec.Paused:
			add(dsec.EventResumed, n, itemKey)
		}
	}
	if len(c.Events) == 0 {
		return change{}
	}
	return c
}

// endOf is the type of event that an end is.
func endOf(n Change) dsec.JobEventType {
	switch {
	case n.Cause == dsec.CauseOOM:
		return dsec.EventOOM
	case n.State == dsec.LostGone:
		return dsec.EventLost
	case n.State == dsec.Failed:
		return dsec.EventFailed
	}
	return dsec.EventStopped
}

// separator stands between job and item; no job has it in its ID.
const separator = "\x1f"

// SandboxKey is the key of the create that an item leads to: items of different
// jobs have nothing to do with each other.
func SandboxKey(id dsec.JobID, item string) string { return string(id) + separator + item }

// ItemKey is the inverse: the item's key, "" for a sandbox that was created by
// itself.
func ItemKey(id dsec.JobID, sandbox string) string {
	item, _ := strings.CutPrefix(sandbox, string(id)+separator)
	if len(item) == len(sandbox) {
		return ""
	}
	return item
}

func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxDetail)], "\uFFFD") }

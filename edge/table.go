package edge

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

// append adds c to the journal and then lets apply change the table, both as
// one step. If the record cannot be written the table stays as it is, and the
// node counts as broken until a checkpoint succeeds.
func (n *Node) append(c change, apply func()) error {
	b := c.encode()
	n.logMu.Lock()
	err := n.cfg.Journal.Append(b)
	if err == nil {
		n.appended++
		apply()
	}
	n.logMu.Unlock()
	if err != nil {
		n.broken.Store(true)
		n.events.JournalError(err)
		return &dsec.Error{Kind: dsec.Unavailable, Sandbox: c.ID, Err: fmt.Errorf("write journal: %w", err)}
	}
	return nil
}

// maintain compacts a journal that has grown, and heals one that was broken:
// a checkpoint holds also what could not be appended. It reports false if that
// was tried without success.
func (n *Node) maintain() bool {
	n.logMu.Lock()
	grown := n.appended >= n.cfg.Compact
	n.logMu.Unlock()
	if !grown && !n.broken.Load() {
		return true
	}
	err := n.checkpoint()
	if err != nil {
		n.events.JournalError(err)
	}
	return err == nil
}

// checkpoint replaces the journal's records by the table.
func (n *Node) checkpoint() error {
	wasBroken := n.broken.Load()
	if err := n.cfg.Journal.Checkpoint(); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if wasBroken && n.broken.CompareAndSwap(true, false) {
		n.events.JournalHeal()
	}
	return nil
}

// saving is what save has added, until saved. The journal calls the two in
// turns, so it needs no lock.
type saving struct {
	begin   time.Time
	records int
	covered int
}

// save adds the table to a checkpoint. It waits for an Open under way: before
// that the table does not say yet what became of its sandboxes.
func (n *Node) save(add func([]byte) error) error {
	select {
	case <-n.settled:
	case <-n.life.Done():
		select {
		case <-n.settled: // closed later
		default:
			return errors.New("the table is half adopted")
		}
	}
	type kept struct {
		id   dsec.SandboxID
		rec  *record
		used int64
	}
	s := saving{begin: time.Now()}
	n.logMu.Lock()
	n.mu.RLock()
	all := make([]kept, 0, len(n.order))
	for _, e := range n.order {
		e.mu.Lock()
		if e.rec.state != dsec.Creating {
			all = append(all, kept{e.id, e.rec, e.lastUsed})
		}
		e.mu.Unlock()
	}
	tombs := n.tombs.list()
	s.covered = n.appended
	n.mu.RUnlock()
	n.logMu.Unlock()

	for _, c := range []change{{Op: opForgotten, Tombs: tombs}, {Op: opBoot, Boot: n.cfg.Boot}} {
		if err := add(c.encode()); err != nil {
			return err
		}
	}
	for _, k := range all {
		if err := add(k.rec.change(k.id, k.used).encode()); err != nil {
			return err
		}
	}
	s.records = len(all)
	n.saving = s
	return nil
}

// saved is called when what save added has replaced the records before.
func (n *Node) saved() {
	n.logMu.Lock()
	n.appended -= n.saving.covered
	n.logMu.Unlock()
	n.events.Checkpoint(CheckpointEvent{Records: n.saving.records, Took: time.Since(n.saving.begin)})
}

// replay rebuilds the table from the journal. It returns the boot that the
// journal was written under last, "" if it is new.
func (n *Node) replay() (boot string, err error) {
	err = n.cfg.Journal.Replay(func(b []byte) error {
		if b == nil {
			n.doubt()
			return nil
		}
		c, err := decodeChange(b)
		if err != nil {
			return err
		}
		n.appended++
		if c.Op == opBoot {
			boot = c.Boot
			return nil
		}
		return n.apply(c)
	})
	slices.SortStableFunc(n.order, func(a, b *entry) int { return int(a.rec.created - b.rec.created) })
	for i, e := range n.order {
		e.ord = uint64(i)
	}
	n.nextOrd = uint64(len(n.order))
	return boot, err
}

// doubt ends what lives at a place of the journal where records are gone: any
// of them may have been of it. What was created behind that place has lost
// nothing.
func (n *Node) doubt() {
	for _, e := range n.order {
		if !e.rec.state.Ended() && e.rec.verdict.cause == "" {
			e.rec = e.rec.with(judge(dsec.CauseNodeLost, "the journal of node "+n.cfg.Name+" was damaged, records of the sandbox may be missing"))
		}
	}
}

// apply changes the table as c says; nothing else runs yet.
func (n *Node) apply(c change) error {
	if c.Op == opForgotten {
		for _, h := range c.Tombs {
			n.tombs.add(h)
		}
		return nil
	}
	e := n.byID[c.ID]
	if c.Op == opCreated {
		if e != nil || n.tombs.has(c.ID) {
			return nil // a checkpoint had it
		}
		e, err := n.revive(c)
		if err != nil {
			return err
		}
		n.insert(e)
		if !e.rec.state.Ended() {
			n.alive++
		}
		return nil
	}
	if e == nil || e.rec.state.Ended() {
		return nil // forgotten, or a checkpoint had its end
	}
	r := *e.rec
	switch c.Op {
	case opExtended:
		r.expires = c.Expires
	case opPaused:
		r = *r.pausedAt(c.At)
	case opReclaimed:
		r = *r.gaveBack(c.At, c.Reclaimed)
	case opResumed:
		r = *r.goingOn()
	case opLabeled:
		r = *r.labeled(c.Labels)
	case opEnding:
		r.verdict = verdict{c.State, c.Cause, n.intern.name(c.Detail)}
	case opEnded:
		r.verdict = verdict{c.State, c.Cause, n.intern.name(c.Detail)}
		r.state, r.ended, r.usage = c.State, c.Ended, c.Usage
		r.paused, r.reclaimed = 0, 0
		n.alive--
	}
	e.rec = &r
	return nil
}

// revive makes an entry from a created record.
func (n *Node) revive(c change) (*entry, error) {
	var spec dsec.Spec
	if err := json.Unmarshal(c.Spec, &spec); err != nil {
		return nil, fmt.Errorf("decode spec of %s: %w", c.ID, err)
	}
	r := &record{
		spec: n.intern.spec(spec), layers: n.intern.digests(c.Layers), key: c.Key, state: dsec.Running,
		created: c.At, expires: c.Expires, until: c.Until, ended: c.Ended, took: c.Took, usage: c.Usage, labels: c.Labels, from: c.Guest,
	}
	if c.Cause != "" {
		r.verdict = verdict{c.State, c.Cause, n.intern.name(c.Detail)}
	}
	switch {
	case c.Ended != 0:
		r.state = c.State
	case c.Paused != 0:
		r = r.pausedAt(c.Paused)
		r.reclaimed = c.Reclaimed
	}
	for _, s := range c.Stages {
		r.stages = append(r.stages, dsec.Stage{Name: n.intern.name(s.Name), Took: s.Took})
	}
	return &entry{id: c.ID, clock: n.clock, rec: r, lastUsed: max(c.LastUsed, c.At)}, nil
}

// insert puts e into the table as its newest. Requires: n.mu held, or nothing
// else runs yet.
func (n *Node) insert(e *entry) {
	e.ord = n.nextOrd
	n.nextOrd++
	n.byID[e.id] = e
	n.order = append(n.order, e)
	if e.rec.state != dsec.Creating {
		n.takeKey(e)
	}
}

// takeKey makes the key of e stand for it. Requires: n.mu held.
func (n *Node) takeKey(e *entry) {
	if e.rec.key != "" {
		n.keys[e.keyID()] = e
	}
}

func (e *entry) keyID() keyID { return keyID{e.rec.spec.spec.Project, e.rec.key} }

// remove takes e out of the table and leaves a tombstone. Requires: n.mu held.
func (n *Node) remove(e *entry) {
	n.forget(e)
	if i, ok := n.position(e.ord); ok {
		n.order = slices.Delete(n.order, i, i+1)
	}
}

// forget is remove without the order. Requires: n.mu held.
func (n *Node) forget(e *entry) {
	delete(n.byID, e.id)
	if k := e.keyID(); n.keys[k] == e {
		delete(n.keys, k)
	}
	n.tombs.add(tombstone(e.id))
}

// position finds an entry in order. Requires: n.mu held.
func (n *Node) position(ord uint64) (int, bool) {
	return slices.BinarySearchFunc(n.order, ord, func(e *entry, ord uint64) int {
		switch {
		case e.ord < ord:
			return -1
		case e.ord > ord:
			return 1
		}
		return 0
	})
}

// prune forgets records that ended longer than Config.Keep ago.
func (n *Node) prune(now time.Time) {
	// Nothing is appended: a replay drops them by their time as well.
	limit := now.Add(-n.cfg.Keep).UnixNano()
	n.logMu.Lock()
	n.mu.Lock()
	n.order = slices.DeleteFunc(n.order, func(e *entry) bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		old := e.rec.state.Ended() && e.rec.ended <= limit
		if old {
			n.forget(e)
		}
		return old
	})
	n.mu.Unlock()
	n.logMu.Unlock()
	n.intern.sweep()
}

// get finds a sandbox; the error says what became of one that is not there.
func (n *Node) get(id dsec.SandboxID) (*entry, error) {
	n.mu.RLock()
	e := n.byID[id]
	forgotten := e == nil && n.tombs.has(id)
	n.mu.RUnlock()
	if e != nil && !e.earlier {
		return e, nil
	}
	place, err := n.cfg.Keys.Place(id)
	switch {
	case err != nil:
		return nil, err
	case place.Node != n.cfg.Place.Node:
		return nil, dsec.Errorf(dsec.NotFound, "the sandbox is of node %d, this is node %d", place.Node, n.cfg.Place.Node)
	case place.Epoch > n.cfg.Place.Epoch:
		return nil, dsec.Errorf(dsec.NotFound, "no sandbox has the id %q", string(id))
	case place.Epoch < n.cfg.Place.Epoch:
		return nil, dsec.Errorf(dsec.Lost, "the sandbox was lost with an earlier life of node %s", n.cfg.Name)
	case forgotten:
		return nil, dsec.Errorf(dsec.NotFound, "the sandbox ended more than %v ago and is forgotten", n.cfg.Keep)
	}
	return nil, dsec.Errorf(dsec.Lost, "node %s lost the sandbox, with power or with records of its journal", n.cfg.Name)
}

// record gives what is known of e now.
func (e *entry) record() *record {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.rec
}

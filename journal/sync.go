package journal

import (
	"context"
	"fmt"
	"time"
)

// hintDelay is how far the hint may lag behind what is durable.
const hintDelay = 100 * time.Millisecond

// round is a sync that somebody waits for.
type round struct {
	done chan struct{} // closed when it has been carried out, or the journal has failed
	lead chan struct{} // holds a token when it can begin; capacity 1
}

func newRound() *round { return &round{done: make(chan struct{}), lead: make(chan struct{}, 1)} }

// Sync returns when record seq and all before it survive a power cut. If nobody syncs, the caller
// does, for all; who comes meanwhile waits, and one of those does it next for all of them. The end
// of ctx ends a wait, but not the sync of the disk.
func (j *Journal) Sync(ctx context.Context, seq uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if seq >= j.next {
		return fmt.Errorf("sync journal record %d: the last one is %d", seq, j.next-1)
	}
	return j.sync(ctx, seq)
}

// sync is Sync.
// Requires: j.mu held; it is released meanwhile.
func (j *Journal) sync(ctx context.Context, seq uint64) error {
	for {
		switch {
		case seq <= j.durable: // stays so, also in a failed journal
			return nil
		case j.failed != nil:
			return j.failed
		case j.closed:
			return ErrClosed
		case !j.syncing:
			j.lead()
			continue
		}
		r := j.join(seq)
		j.mu.Unlock()
		err := j.wait(ctx, r)
		j.mu.Lock()
		if err != nil && seq > j.durable {
			return fmt.Errorf("sync journal record %d: %w", seq, err)
		}
	}
}

// join returns the round that serves seq: the one under way or the next.
// Requires: j.mu held; j.syncing.
func (j *Journal) join(seq uint64) *round {
	r := &j.round
	if seq <= j.target {
		r = &j.running
	}
	if *r == nil {
		*r = newRound()
	}
	return *r
}

// wait returns when r is over, or when the caller is to lead it. The token only wakes: another may
// have begun r already, who then serves the caller too. So a token is never lost with a caller
// that gives up: either it still lies there, or r has begun.
func (j *Journal) wait(ctx context.Context, r *round) error {
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.lead:
	}
	j.mu.Lock()
	if !j.syncing {
		// Nobody else may come in between and leave the others of r without a leader.
		if j.failed == nil && j.round == r {
			j.lead()
		}
		j.mu.Unlock()
		return nil
	}
	j.mu.Unlock()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// lead makes everything appended so far durable, and wakes those whose round this is and one of
// the next.
// Requires: j.mu held, which is released meanwhile; not j.syncing.
func (j *Journal) lead() {
	full, active, names := j.unsynced, j.active(), j.newNames
	j.unsynced, j.newNames = nil, false
	j.syncing, j.target = true, j.next-1
	j.running, j.round = j.round, nil
	// A checkpoint may remove a segment whose records are durable while it is synced once more.
	for _, s := range append(full, active) {
		s.file.users.Add(1)
	}
	j.mu.Unlock()
	err := j.syncFiles(full, active, names)
	for _, s := range append(full, active) {
		s.file.release()
	}
	j.mu.Lock()
	j.syncing = false
	if err != nil {
		j.fail(err) //nolint:errcheck // the waiters get it
	} else {
		j.durable = j.target
		j.hintSoon()
	}
	if j.running != nil {
		close(j.running.done)
		j.running = nil
	}
	if j.round != nil {
		select {
		case j.round.lead <- struct{}{}:
		default:
		}
	}
}

// syncFiles syncs full segments from old to new, then the active one, then the folder.
func (j *Journal) syncFiles(full []*segment, active *segment, names bool) error {
	for _, s := range full {
		s.file.Truncate(s.size) //nolint:errcheck // the room that is left costs only space
		if err := s.file.Sync(); err != nil {
			return fmt.Errorf("sync %s: %w", s.file.name, err)
		}
	}
	if err := active.file.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", active.file.name, err)
	}
	if names {
		if err := j.fs.SyncDir(j.dir); err != nil {
			return fmt.Errorf("sync %s: %w", j.dir, err)
		}
	}
	return nil
}

// hintSoon has the hint written within hintDelay, by nobody who waits for it.
// Requires: j.mu held.
func (j *Journal) hintSoon() {
	if !j.hintDue {
		j.hintDue = true
		j.hintTimer.Reset(hintDelay)
	}
}

// writeHint writes the hint. It is not synced: it may be late but never says too much.
func (j *Journal) writeHint() {
	j.hintMu.Lock()
	defer j.hintMu.Unlock()
	j.mu.Lock()
	durable, closed := j.durable, j.closed
	j.hintDue = false
	j.mu.Unlock()
	if !closed {
		j.hint.WriteAt(appendHint(nil, durable), 0) //nolint:errcheck // only a hint
	}
}

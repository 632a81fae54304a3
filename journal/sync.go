package journal

import (
	"context"
	"fmt"
)

// Sync returns when record seq and all before it survive a power cut. All who wait at the
// same time are served by one sync of the disk. It goes on when ctx ends; only the wait ends.
func (j *Journal) Sync(ctx context.Context, seq uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if seq >= j.next {
		return fmt.Errorf("sync journal record %d: the last one is %d", seq, j.next-1)
	}
	for {
		// What is durable stays so, also in a failed journal.
		if seq <= j.durable {
			return nil
		}
		if j.failed != nil {
			return j.failed
		}
		if j.wanted < seq {
			j.wanted = seq
			if j.closing {
				return ErrClosed
			}
			j.wake()
		}
		changed := j.changed
		j.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			j.mu.Lock()
			return fmt.Errorf("sync journal record %d: %w", seq, context.Cause(ctx))
		}
		j.mu.Lock()
	}
}

// wake makes the syncer look, now or when it is done with what it does.
// Requires: not after Close has closed kick.
func (j *Journal) wake() {
	select {
	case j.kick <- struct{}{}:
	default:
	}
}

// broadcast wakes all waiters.
// Requires: j.mu held.
func (j *Journal) broadcast() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// syncLoop is the one goroutine that syncs.
func (j *Journal) syncLoop() {
	defer close(j.stopped)
	for range j.kick {
		for j.syncOnce() {
		}
	}
}

// syncOnce makes everything appended so far durable if somebody waits for some of it. It
// reports whether it made progress.
func (j *Journal) syncOnce() bool {
	j.mu.Lock()
	if j.failed != nil || j.wanted <= j.durable {
		j.mu.Unlock()
		return false
	}
	target := j.next - 1
	full, active, file, names := j.unsynced, j.active(), j.active().file, j.newNames
	j.unsynced, j.newNames = nil, false
	j.mu.Unlock()

	var err error
	for _, s := range full {
		if err == nil {
			if err = s.file.Sync(); err != nil {
				err = fmt.Errorf("sync %s: %w", s.name, err)
			}
		}
	}
	if err == nil {
		if err = file.Sync(); err != nil {
			err = fmt.Errorf("sync %s: %w", active.name, err)
		}
	}
	if err == nil && names {
		if err = j.fs.SyncDir(j.dir); err != nil {
			err = fmt.Errorf("sync %s: %w", j.dir, err)
		}
	}

	j.mu.Lock()
	for _, s := range full {
		s.close()
	}
	if err != nil {
		j.fail(err) //nolint:errcheck // the waiters get it
		j.mu.Unlock()
		return false
	}
	j.durable = target
	j.broadcast()
	j.mu.Unlock()

	// Not synced, and after the waiters have gone: it costs them nothing. It may be late
	// but never says too much.
	j.hint.WriteAt(appendHint(nil, target), 0) //nolint:errcheck // only a hint
	return true
}

package job

import (
	"context"

	"github.com/dsec-go/dsec/journal"
)

// JournalKind marks the records of jobs in the node's journal.
const JournalKind journal.Kind = 4

// Log makes a journal fit jobs: they own the records of JournalKind.
type Log struct {
	Journal *journal.Journal

	owner *journal.Owner // set by Own
}

var _ Journal = (*Log)(nil)

// Own makes jobs an owner in the journal.
func (l *Log) Own(save func(cut func(), add func([]byte) error) error) error {
	o, err := l.Journal.Own(journal.Claim{
		Kinds: []journal.Kind{JournalKind},
		Save: func(s *journal.Section) error {
			return save(func() { s.Cut() }, func(b []byte) error {
				_, err := s.Add(JournalKind, b)
				return err
			})
		},
	})
	l.owner = o
	return err
}

// Replay gives the records of JournalKind. Where some are gone jobs come to agree
// with what sandboxes there are, as after any restart.
func (l *Log) Replay(f func([]byte) error) error {
	return l.owner.Replay(context.Background(), func(r journal.Record) error {
		if r.Kind == journal.KindLost {
			return nil
		}
		return f(r.Payload)
	})
}

// Append adds a record of JournalKind.
func (l *Log) Append(payload []byte) (uint64, error) {
	seq, _, err := l.owner.Append(JournalKind, payload)
	return seq, err
}

// Sync waits until a record is durable.
func (l *Log) Sync(ctx context.Context, seq uint64) error { return l.owner.Sync(ctx, seq) }

// Checkpoint compacts the journal, for all its owners.
func (l *Log) Checkpoint() error { return l.owner.Checkpoint(context.Background()) }

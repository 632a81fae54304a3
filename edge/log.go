package edge

import (
	"context"

	"github.com/dsec-go/dsec/journal"
)

// JournalKind marks the edge's records in the node's journal.
const JournalKind journal.Kind = 1

// Log makes a journal fit the edge: the edge owns the records of JournalKind.
type Log struct {
	Journal *journal.Journal

	owner *journal.Owner // set by Own
}

var _ Journal = (*Log)(nil)

// Own makes the edge an owner in the journal.
func (l *Log) Own(save func(add func([]byte) error) error, saved func()) error {
	// The table can take a record twice, so it needs no cut.
	o, err := l.Journal.Own(journal.Claim{
		Kinds: []journal.Kind{JournalKind},
		Save: func(s *journal.Section) error {
			return save(func(b []byte) error {
				_, err := s.Add(JournalKind, b)
				return err
			})
		},
		Moved: saved,
	})
	l.owner = o
	return err
}

// Append adds a record of JournalKind.
func (l *Log) Append(payload []byte) error {
	_, _, err := l.owner.Append(JournalKind, payload)
	return err
}

// Replay gives the records of JournalKind, and nil where some are gone. What a
// checkpoint has lost may have been of any sandbox it has.
func (l *Log) Replay(f func([]byte) error) error {
	gone := false
	err := l.owner.Replay(context.Background(), func(r journal.Record) error {
		if gone && !r.Snapshot {
			gone = false
			if err := f(nil); err != nil {
				return err
			}
		}
		switch {
		case r.Kind != journal.KindLost:
			return f(r.Payload)
		case r.Snapshot:
			gone = true
			return nil
		}
		return f(nil)
	})
	if err == nil && gone {
		err = f(nil)
	}
	return err
}

// Checkpoint compacts the journal, for all its owners.
func (l *Log) Checkpoint() error { return l.owner.Checkpoint(context.Background()) }

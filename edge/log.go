package edge

import (
	"context"

	"github.com/dsec-go/dsec/journal"
)

// JournalKind marks the edge's records in the node's journal.
const JournalKind journal.Kind = 1

// Log makes a journal fit the edge: the edge's records are those of
// JournalKind.
type Log struct {
	Journal *journal.Journal

	// Others adds to a checkpoint what the other owners of the journal need;
	// whatever has the effect of all they appended before the call. nil means
	// that there are none: a checkpoint drops the records it does not carry.
	Others func(*journal.Snapshot) error
}

var _ Journal = Log{}

// Append adds a record of JournalKind.
func (l Log) Append(payload []byte) error {
	_, err := l.Journal.Append(JournalKind, payload)
	return err
}

// Replay gives the records of JournalKind.
func (l Log) Replay(f func([]byte) error) error {
	return l.Journal.Replay(context.Background(), 0, func(r journal.Record) error {
		if r.Kind != JournalKind {
			return nil
		}
		return f(r.Payload)
	})
}

// Checkpoint compacts the journal. The number up to which it covers is taken
// before save looks at the state, so the state has the effect of all of them.
func (l Log) Checkpoint(save func(add func([]byte) error) error) error {
	upTo := l.Journal.Last()
	if upTo == 0 {
		return nil
	}
	return l.Journal.Checkpoint(context.Background(), upTo, func(s *journal.Snapshot) error {
		if err := save(func(b []byte) error { return s.Add(JournalKind, b) }); err != nil {
			return err
		}
		if l.Others == nil {
			return nil
		}
		return l.Others(s)
	})
}

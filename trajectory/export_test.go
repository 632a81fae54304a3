package trajectory

import (
	"bytes"
	"context"

	"github.com/dsec-go/dsec/blob"
)

// CheckSegment reads all that a segment holds.
func CheckSegment(ctx context.Context, b []byte) error {
	store := new(blob.Memory)
	d := blob.Of(b)
	if err := store.Put(ctx, d, bytes.NewReader(b)); err != nil {
		return err
	}
	x, err := readIndex(ctx, store, d)
	if err != nil {
		return err
	}
	for _, s := range x.Sections {
		v := NewVerifier(s.ID)
		for _, at := range s.At {
			r, err := readRecord(ctx, store, d, at)
			if err != nil {
				return err
			}
			if s.First == 1 {
				if err := v.Add(r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Compact has the journal compacted.
func (l *Log) Compact(ctx context.Context) error { return l.cfg.Journal.Checkpoint(ctx) }

package journal_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/dsec-go/dsec/journal"
)

// A checkpoint of what is durable already removes a segment that no sync has
// looked at since it was full; those who sync meanwhile and afterwards do not
// miss it.
func TestSyncBesideCheckpoint(t *testing.T) {
	j, err := journal.Open(t.TempDir(), journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o, err := j.Own(journal.Claim{Kinds: []journal.Kind{1}, Save: func(s *journal.Section) error {
		s.Cut()
		_, err := s.Add(1, []byte("all"))
		return err
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if err := o.Replay(ctx, func(journal.Record) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range 20 { // alone: what is appended, synced, saved, and then goes on
		if _, _, err := o.AppendSync(ctx, 1, fmt.Append(nil, i)); err != nil {
			t.Fatalf("append %d: %v", i, err)
		}
		if err := o.Checkpoint(ctx); err != nil {
			t.Fatalf("checkpoint %d: %v", i, err)
		}
	}
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for i := range 50 {
				if _, _, err := o.AppendSync(ctx, 1, fmt.Append(nil, i)); err != nil {
					t.Errorf("append beside checkpoints: %v", err)
					return
				}
			}
		})
	}
	for range 30 {
		if err := o.Checkpoint(ctx); err != nil {
			t.Errorf("checkpoint beside appends: %v", err)
		}
	}
	wait.Wait()
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

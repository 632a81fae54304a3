package journal

import (
	"context"
	"encoding/binary"
	"fmt"
	"path/filepath"
)

// Snapshot takes the records of a checkpoint. It belongs to the callback of Checkpoint.
type Snapshot struct {
	file File
	name string
	salt uint64
	off  int64 // written to the file
	buf  []byte
	n    uint64
}

// snapshotBuffer is how much of a snapshot is gathered for one write.
const snapshotBuffer = 256 << 10

// Add adds one record to the snapshot.
func (s *Snapshot) Add(kind Kind, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("add %d bytes to snapshot: %w", len(payload), ErrTooLarge)
	}
	if kind == kindEnd {
		return fmt.Errorf("add kind %d to snapshot: %w", kind, ErrKind)
	}
	return s.add(kind, payload)
}

func (s *Snapshot) add(kind Kind, payload []byte) error {
	s.n++
	s.buf = appendRecord(s.buf, s.salt, record{seq: s.n, lag: lagUnknown, kind: kind, payload: payload})
	if len(s.buf) >= snapshotBuffer {
		return s.flush()
	}
	return nil
}

func (s *Snapshot) flush() error {
	if _, err := s.file.WriteAt(s.buf, s.off); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrWrite, s.name, err)
	}
	s.off += int64(len(s.buf))
	s.buf = s.buf[:0]
	return nil
}

// Checkpoint replaces all records up to number upTo by those that write adds, and removes the
// files that are no longer needed once that is durable. What write adds must have the effect
// of all these records. To have also the effect of later ones is harmless only if the owner
// can apply them twice, since Replay gives them after the snapshot.
//
// The usual caller copies its state and notes Last under the lock that it holds over
// Append and the change of its state, and then calls Checkpoint without that lock.
//
// Append and Sync go on meanwhile. On an error the journal is as it was; a full disk is
// ErrWrite.
func (j *Journal) Checkpoint(ctx context.Context, upTo uint64, write func(*Snapshot) error) error {
	j.checkpoint.Lock()
	defer j.checkpoint.Unlock()
	if err := j.beginCheckpoint(upTo); err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}
	// The log must never end before what a snapshot covers: numbers would be used twice.
	if err := j.Sync(ctx, upTo); err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}
	if err := j.writeSnapshot(ctx, upTo, write); err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}

	j.mu.Lock()
	old := j.snapshot
	j.snapshot = upTo
	var gone []*segment
	for len(j.segments) > 1 && j.segments[1].first <= upTo+1 {
		gone = append(gone, j.segments[0])
		j.segments = j.segments[1:]
	}
	j.mu.Unlock()

	// Recovery does the same for what stays here, so an error only costs space.
	for _, s := range gone {
		j.fs.Remove(s.name) //nolint:errcheck // see above
	}
	if old != upTo && old != 0 {
		j.fs.Remove(filepath.Join(j.dir, snapshotName(old))) //nolint:errcheck // see above
	}
	return nil
}

// beginCheckpoint begins a new segment, so that the one which is active now can go.
func (j *Journal) beginCheckpoint(upTo uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.usable(); err != nil {
		return err
	}
	if upTo >= j.next || upTo < j.snapshot || upTo == 0 {
		return fmt.Errorf("records that can be covered: %d to %d", max(j.snapshot, 1), j.next-1)
	}
	if j.active().size > headerSize {
		return j.rotate()
	}
	return nil
}

// writeSnapshot writes the file under a temporary name and renames it when it is durable.
func (j *Journal) writeSnapshot(ctx context.Context, upTo uint64, write func(*Snapshot) error) (err error) {
	name := filepath.Join(j.dir, snapshotName(upTo))
	temp := name + tempSuffix
	f, err := j.fs.Create(temp)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrWrite, err)
	}
	defer func() {
		f.Close()
		if err != nil {
			j.fs.Remove(temp) //nolint:errcheck // Open removes it too
		}
	}()
	s := &Snapshot{file: f, name: temp, salt: newSalt()}
	s.buf = appendHeader(s.buf, header{typ: typeSnapshot, seq: upTo, salt: s.salt})
	if err := write(s); err != nil {
		return err
	}
	if err := s.add(kindEnd, binary.LittleEndian.AppendUint64(nil, s.n)); err != nil {
		return err
	}
	if err := s.flush(); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("%w: sync %s: %w", ErrWrite, temp, err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	j.mu.Lock()
	err = j.usable()
	j.mu.Unlock()
	if err != nil {
		return err
	}
	if err := j.fs.Rename(temp, name); err != nil {
		return fmt.Errorf("%w: %w", ErrWrite, err)
	}
	if err := j.fs.SyncDir(j.dir); err != nil {
		return fmt.Errorf("%w: sync %s: %w", ErrWrite, j.dir, err)
	}
	return nil
}

package journal

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
)

// Snapshot takes the records of a checkpoint. It belongs to the callback of Checkpoint.
type Snapshot struct {
	file *openFile
	upTo uint64
	cuts map[Kind]uint64 // above upTo
	off  int64           // written to the file
	buf  []byte
	n    uint64
}

// snapshotBuffer is how much of a snapshot is gathered for one write.
const snapshotBuffer = 256 << 10

// Add adds one record to the snapshot. The place can be read once the checkpoint has succeeded.
func (s *Snapshot) Add(kind Kind, payload []byte) (Place, error) {
	if err := allowed(kind, payload); err != nil {
		return Place{}, fmt.Errorf("add to snapshot: %w", err)
	}
	return s.add(kind, payload)
}

func (s *Snapshot) add(kind Kind, payload []byte) (Place, error) {
	s.n++
	p := Place{s.file.id, uint32(recordSize + len(payload)), uint64(s.off) + uint64(len(s.buf))}
	s.buf = appendRecord(s.buf, s.file.salt, record{seq: s.n, lag: lagUnknown, kind: kind, payload: payload})
	if len(s.buf) >= snapshotBuffer {
		return p, s.flush()
	}
	return p, nil
}

func (s *Snapshot) flush() error {
	if _, err := s.file.WriteAt(s.buf, s.off); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrWrite, s.file.name, err)
	}
	s.off += int64(len(s.buf))
	s.buf = s.buf[:0]
	return nil
}

// addCuts adds the cuts, those that are the same in one record.
func (s *Snapshot) addCuts() error {
	kinds := map[uint64][]Kind{}
	for _, k := range slices.Sorted(maps.Keys(s.cuts)) {
		kinds[s.cuts[k]] = append(kinds[s.cuts[k]], k)
	}
	for _, cut := range slices.Sorted(maps.Keys(kinds)) {
		if _, err := s.add(kindCut, appendCut(nil, cut, kinds[cut])); err != nil {
			return err
		}
	}
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
// ErrWrite. A journal that has owners refuses it: they have a Checkpoint of their own.
func (j *Journal) Checkpoint(ctx context.Context, upTo uint64, write func(*Snapshot) error) error {
	j.checkpoint.Lock()
	defer j.checkpoint.Unlock()
	j.mu.Lock()
	owned := len(j.owners) > 0
	j.mu.Unlock()
	if owned {
		return fmt.Errorf("checkpoint journal at %d: its owners save their records: %w", upTo, ErrKind)
	}
	return j.compact(ctx, upTo, write, func() {})
}

// everything is a checkpoint up to the last record there is.
const everything = math.MaxUint64

// compact makes a checkpoint. moved is called when it is in force and what it replaces can still
// be read.
// Requires: j.checkpoint held.
func (j *Journal) compact(ctx context.Context, upTo uint64, write func(*Snapshot) error, moved func()) error {
	upTo, err := j.beginCheckpoint(upTo)
	if err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}
	// The log must never end before what a snapshot covers: numbers would be used twice.
	if err := j.Sync(ctx, upTo); err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}
	s, err := j.writeSnapshot(ctx, upTo, write)
	if err != nil {
		return fmt.Errorf("checkpoint journal at %d: %w", upTo, err)
	}

	j.mu.Lock()
	old, oldFile := j.snapshot, j.snap
	j.snapshot, j.snap, j.cuts = upTo, s.file, s.cuts
	var gone []*segment
	for len(j.segments) > 1 && j.segments[1].first <= upTo+1 {
		gone = append(gone, j.segments[0])
		j.segments = j.segments[1:]
	}
	// Where all was durable already, the one that was active is full and not synced since.
	j.unsynced = slices.DeleteFunc(j.unsynced, func(s *segment) bool { return slices.Contains(gone, s) })
	j.mu.Unlock()
	j.files.publish(s.file)
	moved()

	// Recovery does the same for what stays here, so an error only costs space.
	for _, s := range gone {
		j.files.forget(s.file)
		j.fs.Remove(s.file.name) //nolint:errcheck // see above
	}
	if oldFile != nil {
		j.files.forget(oldFile)
		if old != upTo {
			j.fs.Remove(oldFile.name) //nolint:errcheck // see above
		}
	}
	return nil
}

// beginCheckpoint begins a new segment, so that the one which is active now can go. It returns the
// number that is covered.
func (j *Journal) beginCheckpoint(upTo uint64) (uint64, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if upTo == everything {
		upTo = j.next - 1
	}
	if err := j.usable(); err != nil {
		return upTo, err
	}
	if upTo >= j.next || upTo < j.snapshot || upTo == 0 {
		return upTo, fmt.Errorf("records that can be covered: %d to %d", max(j.snapshot, 1), j.next-1)
	}
	if j.active().size > headerSize {
		return upTo, j.rotate()
	}
	return upTo, nil
}

// writeSnapshot writes the file under a temporary name and renames it when it is durable.
func (j *Journal) writeSnapshot(ctx context.Context, upTo uint64, write func(*Snapshot) error) (_ *Snapshot, err error) {
	name := filepath.Join(j.dir, snapshotName(upTo))
	temp := name + tempSuffix
	f, err := j.fs.Create(temp)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrWrite, err)
	}
	s := &Snapshot{file: j.files.adopt(f, name, newSalt()), upTo: upTo, cuts: map[Kind]uint64{}}
	defer func() {
		if err != nil {
			s.file.release()
			j.fs.Remove(temp) //nolint:errcheck // Open removes it too
		}
	}()
	s.buf = appendHeader(s.buf, header{typ: typeSnapshot, seq: upTo, salt: s.file.salt})
	if err := write(s); err != nil {
		return nil, err
	}
	// Neither must the log end before a cut, or before a record that write has seen behind it.
	if err := j.Sync(ctx, j.Last()); err != nil {
		return nil, err
	}
	if err := s.addCuts(); err != nil {
		return nil, err
	}
	if _, err := s.add(kindEnd, binary.LittleEndian.AppendUint64(nil, s.n)); err != nil {
		return nil, err
	}
	if err := s.flush(); err != nil {
		return nil, err
	}
	if err := f.Sync(); err != nil {
		return nil, fmt.Errorf("%w: sync %s: %w", ErrWrite, temp, err)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	j.mu.Lock()
	err = j.usable()
	j.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := j.fs.Rename(temp, name); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrWrite, err)
	}
	if err := j.fs.SyncDir(j.dir); err != nil {
		return nil, fmt.Errorf("%w: sync %s: %w", ErrWrite, j.dir, err)
	}
	return s, nil
}

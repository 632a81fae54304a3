// Package journal is the write-ahead log of a node: the only one.
//
// It appends records (a kind and opaque bytes) under contiguous sequence numbers, makes
// them durable in groups, replays them after a restart and forgets those that a checkpoint
// covers. It does not know what records mean: the edge's table, trajectories and
// idempotency keys are projections that their owners rebuild from Replay. It keeps no index.
//
// What holds, whatever happens:
//
//   - When Append has returned, the record survives a kill of the process. When Sync (or
//     AppendSync) has returned nil for it, it survives a power cut. Records survive in
//     order: with one, all before it.
//   - Open ends at the last whole record before the first torn one. It cuts a tail only if
//     nothing shows that the tail was synced; otherwise it is ErrCorrupt with file and
//     offset, and nothing is changed.
//   - What Open recovers is durable before Open returns.
//   - A write that fails (a full disk) is ErrWrite: the record is not there, the tail has
//     been repaired, the next Append may succeed. If the repair or any sync fails, the
//     journal is ErrFailed from then on: after a failed sync nobody knows what the disk has.
//   - One process has a journal open at a time (ErrLocked).
//
// Locks, in this order:
//
//	checkpoint  one Checkpoint at a time
//	mu          everything else; held over write(2), since order on disk is the order
//	            of numbers, and never over a sync, except to repair a failed write
//
// One goroutine does all syncs; Close ends it and waits for it. Read docs/formats/journal.md
// for the bytes, then recover.go.
package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
)

// The errors a caller may look for. Causes of the system below are wrapped beside them:
// errors.Is(err, syscall.ENOSPC) works.
var (
	ErrCorrupt  = errors.New("journal corrupt")           // see CorruptError
	ErrVersion  = errors.New("journal of another format") // written by another version; nothing was changed
	ErrLocked   = errors.New("journal is open elsewhere") // in this process or another
	ErrClosed   = errors.New("journal closed")            //
	ErrWrite    = errors.New("journal write refused")     // the record is not in the journal, which goes on
	ErrFailed   = errors.New("journal failed")            // for good: only a new Open helps
	ErrTooLarge = errors.New("record too large")          // above MaxPayload
	ErrKind     = errors.New("reserved record kind")      // the last kind belongs to the journal
)

// CorruptError says where a journal is broken. It is an ErrCorrupt.
type CorruptError struct {
	File   string
	Offset int64
	Seq    uint64 // the record that should be there
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("%v: %s at offset %d (record %d): %s", ErrCorrupt, e.File, e.Offset, e.Seq, e.Reason)
}

// Unwrap returns ErrCorrupt.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }

// Kind tells the owner of a record how to read it. The journal reserves the last value.
type Kind uint16

// MaxPayload is the most bytes that a record carries. What may be larger belongs in a blob.
const MaxPayload = 32 << 20

// Record is one entry. Its Payload is only lent to the callback of Replay.
type Record struct {
	Seq      uint64 // of a snapshot record: that of the last record which the snapshot covers
	Kind     Kind
	Snapshot bool // written by a Checkpoint, not by Append
	Payload  []byte
}

// Options of Open. The zero value is right.
type Options struct {
	SegmentSize int64 // bytes after which a new file is begun; 0 means 64 MiB
	FS          FS    // nil means the host's
}

// Stats is what a journal knows of itself.
type Stats struct {
	Last     uint64 // last record appended, 0 if none ever was
	Durable  uint64 // last record that survives a power cut
	Snapshot uint64 // last record that the newest checkpoint covers, 0 if there is none
	Segments int
	Bytes    int64 // in segments: what a Checkpoint could give back
}

// Journal is an open journal. It is safe for concurrent use.
type Journal struct {
	dir     string
	fs      FS
	limit   int64 // of a segment
	lock    io.Closer
	hint    File          // the file "durable"; only the syncer and Close write to it
	kick    chan struct{} // wakes the syncer; capacity 1
	stopped chan struct{} // closed when the syncer has ended

	checkpoint sync.Mutex

	mu       sync.Mutex
	segments []*segment // oldest first; the last is the one appended to
	unsynced []*segment // full, with an open file, not yet synced
	newNames bool       // the folder has names that are not yet synced
	snapshot uint64     // what the newest snapshot covers
	next     uint64     // number of the next record
	durable  uint64
	wanted   uint64        // the highest number somebody waits for
	changed  chan struct{} // closed and replaced when durable or failed changes
	failed   error         // why nothing works any more
	closing  bool
	buf      []byte // the record being written
}

// segment is one log file.
type segment struct {
	name  string // full path
	first uint64
	size  int64
	salt  uint64
	file  File // nil once it is full and synced
}

// Open opens the journal in dir, creating it if it is not there, and recovers it. The caller
// then calls Replay for what it missed, and Close at the end.
func Open(dir string, o Options) (*Journal, error) {
	j := &Journal{
		dir: dir, fs: o.FS, limit: o.SegmentSize,
		kick: make(chan struct{}, 1), stopped: make(chan struct{}), changed: make(chan struct{}),
	}
	if j.fs == nil {
		j.fs = HostFS
	}
	if j.limit <= 0 {
		j.limit = 64 << 20
	}
	if err := j.open(); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	go j.syncLoop()
	return j, nil
}

func (j *Journal) open() (err error) {
	if err := j.fs.MkdirAll(j.dir); err != nil {
		return err
	}
	if j.lock, err = j.fs.Lock(filepath.Join(j.dir, lockName)); err != nil {
		return err
	}
	if err := j.recover(); err != nil {
		j.closeFiles()
		return err
	}
	return nil
}

// Append adds a record and returns its number. The payload is the caller's again afterwards.
func (j *Journal) Append(kind Kind, payload []byte) (uint64, error) {
	if len(payload) > MaxPayload {
		return 0, fmt.Errorf("append %d bytes: %w", len(payload), ErrTooLarge)
	}
	if kind == kindEnd {
		return 0, fmt.Errorf("append kind %d: %w", kind, ErrKind)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.usable(); err != nil {
		return 0, err
	}
	need := int64(recordSize + len(payload))
	if s := j.active(); s.size+need > j.limit && s.size > headerSize {
		if err := j.rotate(); err != nil {
			return 0, err
		}
	}
	s := j.active()
	j.buf = appendRecord(j.buf[:0], s.salt, record{seq: j.next, lag: j.next - j.durable, kind: kind, payload: payload})
	if _, err := s.file.WriteAt(j.buf, s.size); err != nil {
		return 0, j.repair(s, err)
	}
	s.size += need
	seq := j.next
	j.next++
	if cap(j.buf) > 1<<20 {
		j.buf = nil // one huge record must not keep its memory
	}
	return seq, nil
}

// AppendSync adds a record and waits until it is durable. After an error of Sync the record
// may still be there.
func (j *Journal) AppendSync(ctx context.Context, kind Kind, payload []byte) (uint64, error) {
	seq, err := j.Append(kind, payload)
	if err != nil {
		return 0, err
	}
	return seq, j.Sync(ctx, seq)
}

// repair takes back what a failed write may have left. It is synced, so that the leftover
// cannot come back after a power cut and be taken for the record that now gets its number.
// Requires: j.mu held.
func (j *Journal) repair(s *segment, cause error) error {
	err := s.file.Truncate(s.size)
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return j.fail(fmt.Errorf("repair %s after %w: %w", s.name, cause, err))
	}
	return fmt.Errorf("%w: %s: %w", ErrWrite, s.name, cause)
}

// rotate begins a new segment.
// Requires: j.mu held; the active segment has a record.
func (j *Journal) rotate() error {
	s, err := j.create(j.next)
	if err != nil {
		return fmt.Errorf("%w: begin segment: %w", ErrWrite, err)
	}
	j.unsynced = append(j.unsynced, j.active())
	j.segments = append(j.segments, s)
	j.newNames = true
	return nil
}

// create makes the file of a segment. A file of that name can only be left from an attempt
// that failed before it had a record.
func (j *Journal) create(first uint64) (*segment, error) {
	s := &segment{name: filepath.Join(j.dir, segmentName(first)), first: first, size: headerSize, salt: newSalt()}
	f, err := j.fs.Create(s.name)
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteAt(appendHeader(nil, header{typ: typeSegment, seq: first, salt: s.salt}), 0); err != nil {
		f.Close()
		j.fs.Remove(s.name) //nolint:errcheck // it is taken for what it is if it stays
		return nil, err
	}
	s.file = f
	return s, nil
}

// active returns the segment that is appended to.
// Requires: j.mu held.
func (j *Journal) active() *segment { return j.segments[len(j.segments)-1] }

// usable returns why records cannot be added.
// Requires: j.mu held.
func (j *Journal) usable() error {
	if j.failed != nil {
		return j.failed
	}
	if j.closing {
		return ErrClosed
	}
	return nil
}

// fail ends the use of the journal and tells all who wait.
// Requires: j.mu held.
func (j *Journal) fail(cause error) error {
	if j.failed == nil {
		j.failed = fmt.Errorf("%w: %w", ErrFailed, cause)
		j.broadcast()
	}
	return j.failed
}

// Stats returns the present figures.
func (j *Journal) Stats() Stats {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := Stats{Last: j.next - 1, Durable: j.durable, Snapshot: j.snapshot, Segments: len(j.segments)}
	for _, seg := range j.segments {
		s.Bytes += seg.size
	}
	return s
}

// Last returns the number of the last record, 0 if there never was one.
func (j *Journal) Last() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.next - 1
}

// Close makes all records durable and lets go of the files. It returns the error that kept
// it from doing so. It may be called again and then does nothing.
func (j *Journal) Close() error {
	j.mu.Lock()
	if j.closing {
		j.mu.Unlock()
		<-j.stopped
		return nil
	}
	j.closing = true
	j.wanted = max(j.wanted, j.next-1)
	j.mu.Unlock()
	j.wake()
	close(j.kick)
	<-j.stopped

	// A Checkpoint in progress sees closing at its next step and ends.
	j.checkpoint.Lock()
	defer j.checkpoint.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.failed == nil {
		// The hint is worth a sync here: it shows the loss of records at rest.
		j.hint.Sync() //nolint:errcheck // only a hint
	}
	j.closeFiles()
	return j.failed
}

// closeFiles closes all that is open and releases the lock at the end.
func (j *Journal) closeFiles() {
	for _, s := range j.segments {
		s.close()
	}
	for _, s := range j.unsynced {
		s.close()
	}
	if j.hint != nil {
		j.hint.Close()
	}
	j.lock.Close()
}

// close closes the file if it is open. What must be durable has been synced before.
func (s *segment) close() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

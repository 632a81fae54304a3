// Package journal is the write-ahead log of a node: the only one.
//
// It appends records (a kind and opaque bytes) under contiguous sequence numbers, makes
// them durable in groups, reads them again at their Place, replays them after a restart and
// forgets those that a checkpoint covers. It does not know what records mean: the edge's table
// and trajectories are projections that their owners rebuild from Replay. It keeps no index.
//
// Several owners share a journal: each has kinds of its own and sees no others (Own). They take
// part in one checkpoint. Append, Replay and Checkpoint of the Journal itself are for the one who
// has it alone.
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
//   - A checkpoint drops a record only if its owner has saved its effect. Records of owners
//     that are not there, or have not replayed yet, are copied as they are.
//   - An owner is given each record once: in what it saved, or by Replay after it.
//   - A write that fails (a full disk) is ErrWrite: the record is not there, the tail has
//     been repaired, the next Append may succeed. If the repair or any sync fails, the
//     journal is ErrFailed from then on: after a failed sync nobody knows what the disk has.
//   - One process has a journal open at a time (ErrLocked).
//
// Locks, in this order:
//
//	checkpoint  one checkpoint, or one replay of an owner, at a time
//	            (here come the locks of owners, which they hold over Append)
//	hintMu      writes of the hint
//	mu          everything else; held over write(2), since order on disk is the order
//	            of numbers, and never over a sync, except to repair a failed write
//	files.mu    which files are open
//
// The package runs no goroutine of its own but a timer for the hint. Read
// docs/formats/journal.md for the bytes, then recover.go.
package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"time"
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
	ErrKind     = errors.New("record kind not yours")     // of another owner, or of the journal itself
	ErrGone     = errors.New("journal record gone")       // a checkpoint has removed the file of this Place
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

// Kind tells the owner of a record how to read it. The journal reserves the last three values.
type Kind uint16

// MaxPayload is the most bytes that a record carries. What may be larger belongs in a blob.
const MaxPayload = 32 << 20

// Record is one entry. Its Payload is only lent to the callback of Replay.
type Record struct {
	Seq      uint64 // of a snapshot record: that of the last record which the snapshot covers
	Kind     Kind
	Snapshot bool // written by a Checkpoint, not by Append
	Place    Place
	Payload  []byte
}

// Entry is a record to append.
type Entry struct {
	Kind    Kind
	Payload []byte
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
	dir   string
	fs    FS
	limit int64 // of a segment
	lock  io.Closer
	files fileTable

	checkpoint sync.Mutex

	hintMu    sync.Mutex
	hint      File // the file "durable"
	hintTimer *time.Timer

	mu       sync.Mutex
	segments []*segment // oldest first; the last is the one appended to
	unsynced []*segment // full, not yet synced
	newNames bool       // the folder has names that are not yet synced
	snapshot uint64     // what the newest snapshot covers
	snap     *openFile  // nil if there is none
	cuts     map[Kind]uint64
	next     uint64 // number of the next record
	durable  uint64
	syncing  bool   // somebody syncs
	target   uint64 // up to here
	running  *round // that sync, if others wait for it
	round    *round // the next, if somebody waits for it
	hintDue  bool   // hintTimer runs
	failed   error  // why nothing works any more
	closing  bool
	closed   bool
	stopped  chan struct{} // closed after closed is set
	buf      []byte        // the records being written
	seen     kindSet       // kinds that there may be records of
	owners   map[Kind]*Owner
	begun    uint64 // checkpoints of the owners
	finished uint64 // the last of them that succeeded
}

// segment is one log file.
type segment struct {
	file  *openFile
	first uint64
	size  int64 // of header and records
	room  int64 // of the file: behind size it has zeros
	full  bool  // room is not made any more: the disk had none
}

// Open opens the journal in dir, creating it if it is not there, and recovers it. The caller
// then calls Replay for what it missed, and Close at the end.
func Open(dir string, o Options) (*Journal, error) {
	j := &Journal{dir: dir, fs: o.FS, limit: o.SegmentSize, stopped: make(chan struct{}), owners: map[Kind]*Owner{}}
	if j.fs == nil {
		j.fs = HostFS
	}
	if j.limit <= 0 {
		j.limit = 64 << 20
	}
	if err := j.open(); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	return j, nil
}

func (j *Journal) open() (err error) {
	if err := j.fs.MkdirAll(j.dir); err != nil {
		return err
	}
	if j.lock, err = j.fs.Lock(filepath.Join(j.dir, lockName)); err != nil {
		return err
	}
	j.hintTimer = time.AfterFunc(time.Hour, j.writeHint)
	j.hintTimer.Stop()
	if err := j.recover(); err != nil {
		j.closeFiles()
		return err
	}
	return nil
}

// Append adds a record and returns its number and place. The payload is the caller's again
// afterwards.
func (j *Journal) Append(kind Kind, payload []byte) (uint64, Place, error) {
	var places [1]Place
	seq, err := j.append([]Entry{{kind, payload}}, places[:])
	return seq, places[0], err
}

// AppendMany adds records, numbered up to last, with one write: all of them or none. A power cut
// before Sync may leave the first of them only.
func (j *Journal) AppendMany(entries []Entry) (last uint64, places []Place, err error) {
	places = make([]Place, len(entries))
	if last, err = j.append(entries, places); err != nil {
		return 0, nil, err
	}
	return last, places, nil
}

// AppendSync adds a record and waits until it is durable. After an error of Sync the record
// may still be there.
func (j *Journal) AppendSync(ctx context.Context, kind Kind, payload []byte) (uint64, Place, error) {
	seq, place, err := j.Append(kind, payload)
	if err != nil {
		return 0, Place{}, err
	}
	return seq, place, j.Sync(ctx, seq)
}

// append adds entries, says where they are and returns the number of the last one.
func (j *Journal) append(entries []Entry, places []Place) (last uint64, err error) {
	var need int64
	for _, e := range entries {
		if err := allowed(e.Kind, e.Payload); err != nil {
			return 0, fmt.Errorf("append to journal: %w", err)
		}
		need += int64(recordSize + len(e.Payload))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.usable(); err != nil {
		return 0, err
	}
	if s := j.active(); s.size+need > j.limit && s.size > headerSize {
		if err := j.rotate(); err != nil {
			return 0, err
		}
	}
	s := j.active()
	j.makeRoom(s, need)
	j.buf = j.buf[:0]
	for i, e := range entries {
		seq := j.next + uint64(i)
		places[i] = Place{s.file.id, uint32(recordSize + len(e.Payload)), uint64(s.size) + uint64(len(j.buf))}
		j.buf = appendRecord(j.buf, s.file.salt, record{seq: seq, lag: seq - j.durable, kind: e.Kind, payload: e.Payload})
		j.seen.add(e.Kind)
	}
	if _, err := s.file.WriteAt(j.buf, s.size); err != nil {
		return 0, j.repair(s, err)
	}
	s.size += need
	s.room = max(s.room, s.size)
	j.next += uint64(len(entries))
	if cap(j.buf) > 1<<20 {
		j.buf = nil // one huge record must not keep its memory
	}
	return j.next - 1, nil
}

// allowed tells what no record can be.
func allowed(kind Kind, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("%d bytes: %w", len(payload), ErrTooLarge)
	}
	if kind >= KindLost {
		return fmt.Errorf("kind %d: %w", kind, ErrKind)
	}
	return nil
}

// zeros are what room is made of.
var zeros [256 << 10]byte

// makeRoom writes zeros behind the records if there are none for the next. A sync of bytes that
// the file has already costs half of one that must note also a new size, or that a block which was
// only reserved is in use now; that is why the room is written and not reserved. Without room the
// file grows with its records.
// Requires: j.mu held.
func (j *Journal) makeRoom(s *segment, need int64) {
	end := s.size + need
	if end <= s.room || s.full || need >= int64(len(zeros)) || end >= j.limit {
		return
	}
	from := max(s.room, s.size)
	n := min(int64(len(zeros)), j.limit-from)
	if _, err := s.file.WriteAt(zeros[:n], from); err != nil {
		s.full = true // what was written of it are zeros, too
		return
	}
	s.room = from + n
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
		return j.fail(fmt.Errorf("repair %s after %w: %w", s.file.name, cause, err))
	}
	s.room = s.size
	return fmt.Errorf("%w: %s: %w", ErrWrite, s.file.name, cause)
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
	name := filepath.Join(j.dir, segmentName(first))
	f, err := j.fs.Create(name)
	if err != nil {
		return nil, err
	}
	salt := newSalt()
	if _, err := f.WriteAt(appendHeader(nil, header{typ: typeSegment, seq: first, salt: salt}), 0); err != nil {
		f.Close()
		j.fs.Remove(name) //nolint:errcheck // it is taken for what it is if it stays
		return nil, err
	}
	s := &segment{file: j.files.adopt(f, name, salt), first: first, size: headerSize, room: headerSize}
	j.files.publish(s.file)
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
		if j.round != nil {
			close(j.round.done)
			j.round = nil
		}
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
	j.sync(context.Background(), j.next-1) //nolint:errcheck // it is j.failed
	j.mu.Unlock()

	// A checkpoint in progress sees closing at its next step and ends.
	j.checkpoint.Lock()
	defer j.checkpoint.Unlock()
	j.hintMu.Lock()
	defer j.hintMu.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.syncing {
		r := j.join(0)
		j.mu.Unlock()
		<-r.done
		j.mu.Lock()
	}
	j.hintTimer.Stop()
	if j.failed == nil {
		if s := j.active(); s.room > s.size {
			s.file.Truncate(s.size) //nolint:errcheck // the room that is left costs only space
		}
		// The hint is worth a sync here: it shows the loss of records at rest.
		if _, err := j.hint.WriteAt(appendHint(nil, j.durable), 0); err == nil {
			j.hint.Sync() //nolint:errcheck // only a hint
		}
	}
	j.closeFiles()
	j.closed = true
	close(j.stopped)
	return j.failed
}

// closeFiles closes all that is open and releases the lock at the end.
func (j *Journal) closeFiles() {
	j.files.close()
	for _, s := range j.segments {
		j.files.forget(s.file)
	}
	if j.snap != nil {
		j.files.forget(j.snap)
	}
	if j.hint != nil {
		j.hint.Close()
	}
	j.lock.Close()
}

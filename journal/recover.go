package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// recover reads what is in the folder, decides where the journal ends, and leaves it so that
// Append can go on there.
//
// After a power cut the unsynced part of the log can be anything: sectors written in any
// order, whole files missing. So a record that is not whole does not tell whether the disk
// is broken or the record just was never synced. What tells is evidence that it was: a later
// record, written when the number in question was known to be durable, or the hint file.
// With evidence it is ErrCorrupt and nothing is touched. Without, the log ends there.
func (j *Journal) recover() error {
	names, err := j.fs.ReadDir(j.dir)
	if err != nil {
		return err
	}
	var firsts, snaps []uint64
	var temps []string
	for _, name := range names {
		if n, ok := parseName(name, segmentSuffix); ok {
			firsts = append(firsts, n)
		} else if n, ok := parseName(name, snapSuffix); ok {
			snaps = append(snaps, n)
		} else if strings.HasSuffix(name, tempSuffix) {
			temps = append(temps, name)
		}
	}
	slices.Sort(firsts)
	slices.Sort(snaps)
	if err := j.checkVersions(firsts, snaps); err != nil {
		return err
	}
	for _, name := range temps {
		if err := j.fs.Remove(filepath.Join(j.dir, name)); err != nil {
			return err
		}
	}
	if err := j.openHint(); err != nil {
		return err
	}
	if len(snaps) > 0 {
		j.snapshot = snaps[len(snaps)-1]
		if err := j.checkSnapshot(); err != nil {
			return err
		}
	}
	// A crash may have come between the new snapshot and the removal of what it covers.
	for len(firsts) > 1 && firsts[1] <= j.snapshot+1 {
		if err := j.fs.Remove(filepath.Join(j.dir, segmentName(firsts[0]))); err != nil {
			return err
		}
		firsts = firsts[1:]
	}
	for _, n := range snaps {
		if n != j.snapshot {
			if err := j.fs.Remove(filepath.Join(j.dir, snapshotName(n))); err != nil {
				return err
			}
		}
	}
	if err := j.recoverSegments(firsts); err != nil {
		return err
	}
	return j.settle()
}

// checkVersions looks at all files before anything is changed.
func (j *Journal) checkVersions(firsts, snaps []uint64) error {
	check := func(name string, typ uint32) error {
		f, err := j.fs.Open(filepath.Join(j.dir, name))
		if err != nil {
			return err
		}
		defer f.Close()
		size, err := f.Size()
		if err != nil {
			return err
		}
		if _, _, err := readHeader(f, size, typ); err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		return nil
	}
	for _, n := range firsts {
		if err := check(segmentName(n), typeSegment); err != nil {
			return err
		}
	}
	for _, n := range snaps {
		if err := check(snapshotName(n), typeSnapshot); err != nil {
			return err
		}
	}
	return nil
}

// openHint opens the hint file and sets j.durable to what it says.
func (j *Journal) openHint() error {
	name := filepath.Join(j.dir, hintName)
	f, err := j.fs.Open(name)
	if isAbsent(err) {
		f, err = j.fs.Create(name)
	}
	if err != nil {
		return err
	}
	j.hint = f
	var b [hintSize]byte
	n, err := f.ReadAt(b[:], 0)
	if err != nil && err != io.EOF {
		return err
	}
	j.durable = parseHint(b[:n])
	return nil
}

// checkSnapshot reads the snapshot and keeps it open.
func (j *Journal) checkSnapshot() error {
	name := filepath.Join(j.dir, snapshotName(j.snapshot))
	f, err := j.fs.Open(name)
	if err != nil {
		return err
	}
	j.cuts = map[Kind]uint64{}
	err = scanSnapshot(f, name, j.snapshot, func(_ int64, rec record) error { j.seen.add(rec.kind); return nil }, j.cuts)
	var h header
	if err == nil {
		h, _, err = readHeader(f, headerSize, typeSnapshot)
	}
	if err != nil {
		f.Close()
		return err
	}
	j.snap = j.files.adopt(f, name, h.salt)
	j.files.publish(j.snap)
	// What a snapshot has the effect of was durable before it.
	for _, cut := range j.cuts {
		j.durable = max(j.durable, cut)
	}
	return nil
}

// broken is the place where the log is not as it should be.
type broken struct {
	index  int   // of the segment
	off    int64 // all before it is good; 0 if even the header is not
	reason string
}

// recoverSegments opens the segments, finds the end of the log and cuts what lies behind.
func (j *Journal) recoverSegments(firsts []uint64) error {
	for _, first := range firsts {
		name := filepath.Join(j.dir, segmentName(first))
		f, err := j.fs.Open(name)
		if err != nil {
			return err
		}
		s := &segment{file: j.files.adopt(f, name, 0), first: first}
		j.files.publish(s.file)
		j.segments = append(j.segments, s)
		if s.room, err = f.Size(); err != nil {
			return err
		}
		s.size = s.room
	}
	j.next = j.snapshot + 1
	if len(firsts) > 0 {
		// The names of the snapshot and of the segment after it have been synced together.
		if firsts[0] > j.next {
			return &CorruptError{File: j.dir, Seq: j.next, Reason: fmt.Sprintf("first segment begins at %d", firsts[0])}
		}
		j.next = firsts[0]
	}
	b, err := j.scan()
	if err != nil {
		return err
	}
	if b != nil {
		if err := j.cut(b); err != nil {
			return err
		}
	}
	if last := max(j.next-1, j.snapshot); j.durable > last {
		e := &CorruptError{File: j.dir, Seq: last + 1, Reason: fmt.Sprintf("records up to %d were durable and are missing", j.durable)}
		if n := len(j.segments); n > 0 {
			e.File, e.Offset = j.segments[n-1].file.name, j.segments[n-1].size
		}
		return e
	}
	if j.next <= j.snapshot {
		// All that is left is covered, and has lost its end. The numbers go on behind it.
		if err := j.drop(0); err != nil {
			return err
		}
		j.next = j.snapshot + 1
	}
	return nil
}

// scan reads all segments, sets j.next behind the last good record and returns the first
// place that is broken, if any.
func (j *Journal) scan() (*broken, error) {
	for i, s := range j.segments {
		if s.first != j.next {
			// The end of the segment before is missing.
			return &broken{i - 1, j.segments[i-1].size, fmt.Sprintf("next segment begins at %d", s.first)}, nil
		}
		h, ok, err := readHeader(s.file, s.size, typeSegment)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", s.file.name, err)
		}
		if !ok || h.seq != s.first {
			return &broken{i, 0, "no valid header"}, nil
		}
		s.file.salt = h.salt
		sc := newScanner(s.file, s.file.salt, headerSize, s.size, s.first)
		for {
			rec, err := sc.next()
			j.next = sc.seq
			if err == io.EOF {
				break
			}
			if errors.Is(err, errTorn) {
				// Only the size is not known yet if there is nothing but room.
				empty, err2 := isZero(s.file, sc.off, s.size)
				if err2 != nil {
					return nil, fmt.Errorf("read %s: %w", s.file.name, err2)
				}
				if empty {
					s.size = sc.off
					break
				}
				return &broken{i, sc.off, err.Error()}, nil
			}
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", s.file.name, err)
			}
			j.seen.add(rec.kind)
		}
	}
	return nil, nil
}

// isZero reports whether f has nothing but zeros from off to end. No record is all zeros.
func isZero(f File, off, end int64) (bool, error) {
	buf := make([]byte, min(end-off, 64<<10))
	for off < end {
		b := buf[:min(int64(len(buf)), end-off)]
		if _, err := f.ReadAt(b, off); err != nil {
			return false, unexpected(err)
		}
		for _, c := range b {
			if c != 0 {
				return false, nil
			}
		}
		off += int64(len(b))
	}
	return true, nil
}

// cut ends the log at b, unless there is evidence that a record which is cut was durable.
func (j *Journal) cut(b *broken) error {
	// What a snapshot covers may be gone, if nothing is needed behind it.
	need := max(j.next, j.snapshot+1)
	evidence := j.durable
	for i := b.index; i < len(j.segments) && evidence < need; i++ {
		from := int64(headerSize)
		if i == b.index {
			from = max(b.off, headerSize)
		}
		n, err := j.evidence(j.segments[i], from)
		if err != nil {
			return err
		}
		evidence = max(evidence, n)
	}
	if evidence >= need {
		return &CorruptError{File: j.segments[b.index].file.name, Offset: b.off, Seq: j.next,
			Reason: fmt.Sprintf("%s, but records up to %d were durable", b.reason, evidence)}
	}
	keep := b.index + 1
	if b.off == 0 {
		keep = b.index
	}
	if err := j.drop(keep); err != nil {
		return err
	}
	if b.off == 0 {
		return nil
	}
	s := j.segments[b.index]
	if err := s.file.Truncate(b.off); err != nil {
		return fmt.Errorf("cut %s: %w", s.file.name, err)
	}
	s.size, s.room = b.off, b.off
	// Synced at once, so that what is cut cannot come back behind new records.
	if err := s.file.Sync(); err != nil {
		return fmt.Errorf("cut %s: %w", s.file.name, err)
	}
	return nil
}

// drop removes all segments from index keep on. The last goes first, so that a crash in
// between leaves a log that ends early and not one with a gap.
func (j *Journal) drop(keep int) error {
	if keep == len(j.segments) {
		return nil
	}
	for len(j.segments) > keep {
		s := j.segments[len(j.segments)-1]
		j.segments = j.segments[:len(j.segments)-1]
		j.files.forget(s.file)
		if err := j.fs.Remove(s.file.name); err != nil {
			return err
		}
	}
	return j.fs.SyncDir(j.dir)
}

// evidence returns the highest number that valid records of s from off on claim to have
// been durable. Their framing is lost, so every offset is tried; the number of a record is
// a strong filter before its sum is taken.
func (j *Journal) evidence(s *segment, off int64) (uint64, error) {
	salt := s.file.salt
	if salt == 0 {
		h, ok, err := readHeader(s.file, s.size, typeSegment)
		if err != nil || !ok {
			return 0, err
		}
		salt = h.salt
	}
	if off >= s.size {
		return 0, nil
	}
	b := make([]byte, s.size-off)
	if _, err := s.file.ReadAt(b, off); err != nil && err != io.EOF {
		return 0, fmt.Errorf("read %s: %w", s.file.name, err)
	}
	var most uint64
	for ; len(b) >= recordSize; b = b[1:] {
		// Only a later record is evidence; a segment has far fewer than 2^32 of them.
		if binary.LittleEndian.Uint64(b[8:])-j.next >= 1<<32 {
			continue
		}
		rec, n, want, ok := parseRecord(b)
		if !ok || n > len(b)-recordSize || rec.claims() <= most {
			continue
		}
		if sum(salt, b[4:recordSize], b[recordSize:recordSize+n]) == want {
			most = rec.claims()
		}
	}
	return most, nil
}

// settle makes what was recovered durable and opens the end for Append.
func (j *Journal) settle() error {
	for i, s := range j.segments {
		end := j.next
		if i+1 < len(j.segments) {
			end = j.segments[i+1].first
		}
		if end-1 > j.durable {
			if err := rewrite(s); err != nil {
				return fmt.Errorf("settle %s: %w", s.file.name, err)
			}
		}
	}
	if len(j.segments) == 0 {
		s, err := j.create(j.next)
		if err != nil {
			return err
		}
		j.segments = append(j.segments, s)
		if err := s.file.Sync(); err != nil {
			return err
		}
	}
	if err := j.fs.SyncDir(j.dir); err != nil {
		return err
	}
	j.durable = j.next - 1
	j.hint.WriteAt(appendHint(nil, j.durable), 0) //nolint:errcheck // only a hint
	return nil
}

// rewrite writes a segment over itself and syncs it. If a sync failed before the restart,
// the kernel may hold pages that it takes for clean and the disk does not have: a sync alone
// would then promise what is not so.
func rewrite(s *segment) error {
	buf := make([]byte, min(s.size, 1<<20))
	for off := int64(0); off < s.size; {
		n, err := s.file.ReadAt(buf[:min(int64(len(buf)), s.size-off)], off)
		if n == 0 {
			return unexpected(err)
		}
		if _, err := s.file.WriteAt(buf[:n], off); err != nil {
			return err
		}
		off += int64(n)
	}
	return s.file.Sync()
}

package journal

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
)

// errTorn is what a scanner says of bytes that are not the record that should come next.
var errTorn = errors.New("not a whole record")

// scanner reads the records of one file in order.
type scanner struct {
	r     *bufio.Reader
	salt  uint64
	off   int64 // of the record that comes next
	size  int64 // of the file
	seq   uint64
	fixed [recordSize]byte
	buf   []byte
}

// newScanner reads the records from off on; the first one should have number seq.
func newScanner(f io.ReaderAt, salt uint64, off, size int64, seq uint64) *scanner {
	r := bufio.NewReaderSize(io.NewSectionReader(f, off, size-off), int(min(size-off, 256<<10)))
	return &scanner{r: r, salt: salt, off: off, size: size, seq: seq}
}

// next returns the next record, whose payload is good until the next call; io.EOF exactly
// at the end of the file; errTorn, with a reason, if what is there is no whole record; or
// an error of the file system.
func (s *scanner) next() (record, error) {
	if s.off == s.size {
		return record{}, io.EOF
	}
	left := s.size - s.off
	if left < recordSize {
		return record{}, fmt.Errorf("%w: %d bytes", errTorn, left)
	}
	if _, err := io.ReadFull(s.r, s.fixed[:]); err != nil {
		return record{}, unexpected(err)
	}
	rec, n, want, ok := parseRecord(s.fixed[:])
	switch {
	case !ok:
		return record{}, fmt.Errorf("%w: malformed", errTorn)
	case rec.seq != s.seq:
		return record{}, fmt.Errorf("%w: has number %d", errTorn, rec.seq)
	case int64(n) > left-recordSize:
		return record{}, fmt.Errorf("%w: %d bytes of %d", errTorn, left, recordSize+n)
	}
	// The length is no larger than the file: what is torn does not make us ask for much.
	if cap(s.buf) < n {
		s.buf = make([]byte, n)
	}
	rec.payload = s.buf[:n]
	if _, err := io.ReadFull(s.r, rec.payload); err != nil {
		return record{}, unexpected(err)
	}
	if sum(s.salt, s.fixed[4:], rec.payload) != want {
		return record{}, fmt.Errorf("%w: wrong sum", errTorn)
	}
	s.off += int64(recordSize + n)
	s.seq++
	return rec, nil
}

// unexpected keeps the end of a file that shrinks while it is read from being taken for
// the end of its records.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Replay calls fn for every record from number from on that is there when it is called, in
// order. If from lies in what the newest checkpoint covers, the records of that checkpoint
// come first, and then those of the log that it does not cover. An error of fn ends the
// replay and is returned as it is. fn must not keep the payload. Append and Checkpoint may
// go on meanwhile.
func (j *Journal) Replay(ctx context.Context, from uint64, fn func(Record) error) error {
	j.mu.Lock()
	if j.closing {
		j.mu.Unlock()
		return ErrClosed
	}
	covered, end := j.snapshot, j.next
	type part struct {
		segment
		end uint64 // number after the last record to read
	}
	var parts []part
	for i, s := range j.segments {
		p := part{segment: *s, end: end}
		if i+1 < len(j.segments) {
			p.end = j.segments[i+1].first
		}
		if p.end <= from || p.end <= covered+1 {
			continue
		}
		p.file.users.Add(1) // under the lock, so that no checkpoint closes it before
		defer p.file.release()
		parts = append(parts, p)
	}
	var snap *openFile
	var cuts map[Kind]uint64
	if from <= covered && covered > 0 {
		snap, cuts = j.snap, maps.Clone(j.cuts)
		snap.users.Add(1)
		defer snap.release()
	}
	j.mu.Unlock()

	if snap != nil {
		err := scanSnapshot(snap, snap.name, covered, func(off int64, rec record) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fn(Record{Seq: covered, Kind: rec.kind, Snapshot: true, Place: rec.place(snap, off), Payload: rec.payload})
		}, nil)
		if err != nil {
			return err
		}
	}
	from = max(from, covered+1)
	for _, p := range parts {
		sc := newScanner(p.file, p.file.salt, headerSize, p.size, p.first)
		for sc.seq < p.end {
			if ctx.Err() != nil {
				return fmt.Errorf("replay journal: %w", context.Cause(ctx))
			}
			at := sc.off
			rec, err := sc.next()
			if err == io.EOF || errors.Is(err, errTorn) {
				// Open saw it whole, or Append wrote it.
				return &CorruptError{File: p.file.name, Offset: at, Seq: sc.seq, Reason: err.Error()}
			}
			if err != nil {
				return fmt.Errorf("replay journal: %w", err)
			}
			if rec.seq < from || rec.seq <= cuts[rec.kind] {
				continue
			}
			if err := fn(Record{Seq: rec.seq, Kind: rec.kind, Place: rec.place(p.file, at), Payload: rec.payload}); err != nil {
				return err
			}
		}
	}
	return nil
}

// place returns where r is, which begins at off of f.
func (r record) place(f *openFile, off int64) Place {
	return Place{f.id, uint32(recordSize + len(r.payload)), uint64(off)}
}

// scanSnapshot reads a snapshot from start to end and calls fn for each record and where it
// begins. A snapshot got its name only after it was durable: whatever is wrong with it is
// corruption. seq is the number in its name. The cuts are added to cuts unless that is nil.
func scanSnapshot(f File, name string, seq uint64, fn func(int64, record) error, cuts map[Kind]uint64) error {
	size, err := f.Size()
	if err != nil {
		return fmt.Errorf("read snapshot: %w", err)
	}
	h, ok, err := readHeader(f, size, typeSnapshot)
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if !ok || h.seq != seq {
		return &CorruptError{File: name, Seq: seq, Reason: "no valid header"}
	}
	sc := newScanner(f, h.salt, headerSize, size, 1)
	for {
		at, n := sc.off, sc.seq-1
		rec, err := sc.next()
		switch {
		case err == io.EOF:
			return &CorruptError{File: name, Offset: at, Seq: seq, Reason: "snapshot has no end"}
		case errors.Is(err, errTorn):
			return &CorruptError{File: name, Offset: at, Seq: seq, Reason: err.Error()}
		case err != nil:
			return fmt.Errorf("read snapshot: %w", err)
		case rec.kind == kindEnd:
			if len(rec.payload) != 8 || binary.LittleEndian.Uint64(rec.payload) != n || sc.off != size {
				return &CorruptError{File: name, Offset: at, Seq: seq, Reason: "snapshot has a wrong end"}
			}
			return nil
		case rec.kind == kindCut:
			if cuts != nil && !parseCut(rec.payload, cuts) {
				return &CorruptError{File: name, Offset: at, Seq: seq, Reason: "malformed cut"}
			}
			continue
		}
		if err := fn(at, rec); err != nil {
			return err
		}
	}
}

// readHeader reads the header of a file that has size bytes.
func readHeader(f io.ReaderAt, size int64, typ uint32) (h header, ok bool, err error) {
	var b [headerSize]byte
	if size < headerSize {
		return header{}, false, nil
	}
	if _, err := f.ReadAt(b[:], 0); err != nil {
		return header{}, false, unexpected(err)
	}
	return parseHeader(b[:], typ)
}

// isAbsent tells an absent file from other trouble.
func isAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

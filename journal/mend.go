package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// Mended is one file that Mend wrote anew, or made where one was missing.
type Mended struct {
	File   string
	Aside  string // where what was there lies now; empty if nothing was
	Offset int64  // of the first byte that is not as it should be
	Lost   uint64 // records that are gone: marks of KindLost stand for them
	Kept   uint64 // records that are still there
}

// Mend makes a journal that Open refuses as ErrCorrupt one that it opens. Each file that is
// damaged is copied to a name that ends with ".damaged" and written anew: what can be verified of
// it stays, and for every record that cannot there is a mark of KindLost under its number, which
// Replay gives to each owner. Where nothing was damaged it changes nothing and returns nothing. A
// torn tail is left to Open.
//
// Records behind a mark may stand for changes of what was lost. Owners have to expect that.
func Mend(dir string, o Options) ([]Mended, error) {
	j := &Journal{dir: dir, fs: o.FS}
	if j.fs == nil {
		j.fs = HostFS
	}
	lock, err := j.fs.Lock(filepath.Join(dir, lockName))
	if err != nil {
		return nil, fmt.Errorf("mend journal: %w", err)
	}
	defer lock.Close()
	m := mender{j: j}
	if err := m.all(); err != nil {
		return m.done, fmt.Errorf("mend journal: %w", err)
	}
	return m.done, nil
}

type mender struct {
	j     *Journal
	names []string // in the folder
	done  []Mended
}

func (m *mender) all() error {
	var err error
	if m.names, err = m.j.fs.ReadDir(m.j.dir); err != nil {
		return err
	}
	var firsts, snaps []uint64
	for _, name := range m.names {
		if n, ok := parseName(name, segmentSuffix); ok {
			firsts = append(firsts, n)
		} else if n, ok := parseName(name, snapSuffix); ok {
			snaps = append(snaps, n)
		}
	}
	slices.Sort(firsts)
	slices.Sort(snaps)
	if err := m.j.checkVersions(firsts, snaps); err != nil {
		return err
	}
	if err := m.j.openHint(); err != nil {
		return err
	}
	defer m.j.hint.Close()
	next := uint64(1)
	if len(snaps) > 0 {
		m.j.snapshot = snaps[len(snaps)-1]
		if err := m.snapshot(); err != nil {
			return err
		}
		next = m.j.snapshot + 1
	}
	for len(firsts) > 1 && firsts[1] <= next { // Open removes what the snapshot covers
		firsts = firsts[1:]
	}
	files, durable, err := m.read(firsts)
	if err != nil {
		return err
	}
	for i, f := range files {
		if f.first > next {
			if durable < next {
				return nil // a torn tail
			}
			if err := m.fill(next, f.first); err != nil {
				return err
			}
		}
		end := uint64(0) // not known
		if i+1 < len(files) {
			end = files[i+1].first
		}
		var torn bool
		if next, torn, err = m.segment(f, end, durable); err != nil || torn {
			return err
		}
	}
	if durable >= next {
		return m.fill(next, durable+1)
	}
	return nil
}

// found is a file as it was found.
type found struct {
	name   string
	first  uint64
	salt   uint64
	header bool
	bytes  []byte
}

// read reads all segments, and says up to which number anything shows records to have been durable.
func (m *mender) read(firsts []uint64) (all []found, durable uint64, err error) {
	durable = m.j.durable
	for _, first := range firsts {
		f, err := m.file(segmentName(first), typeSegment, first)
		if err != nil {
			return nil, 0, err
		}
		for _, p := range f.pieces(first) {
			durable = max(durable, p.rec.claims())
		}
		all = append(all, f)
	}
	return all, durable, nil
}

func (m *mender) file(base string, typ uint32, seq uint64) (found, error) {
	name := filepath.Join(m.j.dir, base)
	f, err := m.j.fs.Open(name)
	if err != nil {
		return found{}, err
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return found{}, err
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); err != nil && (err != io.EOF || int64(n) < size) {
		return found{}, fmt.Errorf("read %s: %w", name, err)
	}
	h, ok, err := parseHeader(b, typ)
	if err != nil {
		return found{}, fmt.Errorf("read %s: %w", name, err)
	}
	return found{name: name, first: seq, salt: h.salt, header: ok && h.seq == seq, bytes: b}, nil
}

// piece is a record that can be verified.
type piece struct {
	rec      record
	from, to int
}

// pieces finds the records of a file that can be verified, in the order of their numbers, from seq
// on. Where the framing is lost every offset is tried; the number of a record is a strong filter
// before its sum is taken, and the salt keeps out what only looks like one.
func (f found) pieces(seq uint64) []piece {
	if !f.header {
		return nil
	}
	var out []piece
	for at := headerSize; at+recordSize <= len(f.bytes); {
		rec, n, want, ok := parseRecord(f.bytes[at:])
		// No more records can be missing than have room in what was passed over.
		room := at - headerSize
		if len(out) > 0 {
			room = at - out[len(out)-1].to
		}
		to := at + recordSize + n
		if ok && rec.seq >= seq && rec.seq-seq <= uint64(room/recordSize) && to <= len(f.bytes) &&
			sum(f.salt, f.bytes[at+4:at+recordSize], f.bytes[at+recordSize:to]) == want {
			rec.payload = f.bytes[at+recordSize : to]
			out = append(out, piece{rec, at, to})
			seq, at = rec.seq+1, to
			continue
		}
		at++
	}
	return out
}

// segment mends one segment, if it needs to be, and returns the number behind its last record. It
// ends before end, or where the log does if that is 0. torn says that the log ends in it, or
// behind it, since nothing shows that what should follow was durable: Open cuts it there.
func (m *mender) segment(f found, end, durable uint64) (next uint64, torn bool, err error) {
	w := m.writer(f, typeSegment)
	// What a snapshot covers may be gone, if nothing is needed behind it.
	needed := func() bool { return durable >= max(w.next, m.j.snapshot+1) }
	for _, p := range f.pieces(f.first) {
		if !w.follows(p) && !needed() {
			return w.next, true, nil
		}
		w.add(p)
	}
	if end == 0 {
		end = max(w.next, durable+1)
	}
	switch clean := f.header && (w.broke || isZeros(f.bytes[w.offset:])); {
	case w.next == end && clean:
	case end <= m.j.snapshot+1 && f.header && !w.broke: // its end is gone, and not needed
		return end, false, nil
	case !needed():
		return w.next, true, nil
	default:
		w.broke = true
		w.lose(end - w.next)
	}
	if !w.broke {
		return w.next, false, nil
	}
	return w.next, false, m.write(w)
}

// isZeros is isZero of what is in memory.
func isZeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// fill makes a segment of marks where one is missing.
func (m *mender) fill(first, end uint64) error {
	w := m.writer(found{name: filepath.Join(m.j.dir, segmentName(first)), first: first}, typeSegment)
	w.lose(end - first)
	return m.write(w)
}

// snapshot mends the newest snapshot, if it needs to be.
func (m *mender) snapshot() error {
	f, err := m.file(snapshotName(m.j.snapshot), typeSnapshot, m.j.snapshot)
	if err != nil {
		return err
	}
	m.j.cuts = map[Kind]uint64{}
	err = scanSnapshot(bytesFile{bytes: bytes.NewReader(f.bytes)}, f.name, m.j.snapshot, func(int64, record) error { return nil }, m.j.cuts)
	for _, cut := range m.j.cuts {
		m.j.durable = max(m.j.durable, cut)
	}
	if err == nil || !errors.Is(err, ErrCorrupt) {
		return err
	}
	w := m.writer(f, typeSnapshot)
	w.next = 1
	for _, p := range f.pieces(1) {
		if p.rec.kind != kindEnd {
			w.add(p)
			continue
		}
		w.lose(p.rec.seq - w.next)
		w.ended = true
	}
	if !w.ended && w.lost == 0 {
		w.lose(1) // nobody knows how many there were
	}
	w.mark(kindEnd, binary.LittleEndian.AppendUint64(nil, w.next-1))
	return m.write(w)
}

// bytesFile is a File to read from.
type bytesFile struct {
	File
	bytes *bytes.Reader
}

func (f bytesFile) ReadAt(b []byte, off int64) (int, error) { return f.bytes.ReadAt(b, off) }
func (f bytesFile) Size() (int64, error)                    { return f.bytes.Size(), nil }

// anew is a file that is being written anew.
type anew struct {
	was        found
	out        []byte
	salt       uint64
	next       uint64
	lost, kept uint64
	offset     int64 // behind what was good from the start on
	broke      bool
	ended      bool // a snapshot whose end was found
}

func (m *mender) writer(f found, typ uint32) *anew {
	w := &anew{was: f, salt: newSalt(), next: f.first}
	w.out = appendHeader(nil, header{typ: typ, seq: f.first, salt: w.salt})
	if w.broke = !f.header; !w.broke {
		w.offset = headerSize
	}
	return w
}

// add takes a record, and marks those that are missing before it.
func (w *anew) add(p piece) {
	if !w.follows(p) {
		w.broke = true
		w.lose(p.rec.seq - w.next)
	}
	if !w.broke {
		w.offset = int64(p.to)
	}
	w.kept++
	w.out = appendRecord(w.out, w.salt, p.rec)
	w.next++
}

// follows reports whether p comes right behind what was added.
func (w *anew) follows(p piece) bool {
	return p.rec.seq == w.next && (w.broke || int64(p.from) == w.offset)
}

// lose adds marks for n records.
func (w *anew) lose(n uint64) {
	for range n {
		w.lost++
		w.mark(KindLost, nil)
	}
}

func (w *anew) mark(kind Kind, payload []byte) {
	w.out = appendRecord(w.out, w.salt, record{seq: w.next, lag: lagUnknown, kind: kind, payload: payload})
	w.next++
}

// write puts the new file into the place of the old one, which is copied aside first: a crash in
// between leaves the old one where it was.
func (m *mender) write(w *anew) error {
	done := Mended{File: w.was.name, Offset: w.offset, Lost: w.lost, Kept: w.kept}
	if w.was.bytes != nil {
		done.Aside = m.free(w.was.name + damagedSuffix)
		if err := m.put(done.Aside, w.was.bytes); err != nil {
			return err
		}
	}
	temp := w.was.name + tempSuffix
	if err := m.put(temp, w.out); err != nil {
		return err
	}
	if err := m.j.fs.Rename(temp, w.was.name); err != nil {
		return err
	}
	if err := m.j.fs.SyncDir(m.j.dir); err != nil {
		return err
	}
	m.done = append(m.done, done)
	return nil
}

// free gives a name that no file has.
func (m *mender) free(name string) string {
	for i, try := 2, name; ; i++ {
		if !slices.Contains(m.names, filepath.Base(try)) {
			m.names = append(m.names, filepath.Base(try))
			return try
		}
		try = fmt.Sprintf("%s%d", name, i)
	}
}

// put writes a whole file and makes it durable.
func (m *mender) put(name string, b []byte) error {
	f, err := m.j.fs.Create(name)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, 0)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = m.j.fs.SyncDir(m.j.dir)
	}
	if err != nil && !strings.HasSuffix(name, tempSuffix) {
		m.j.fs.Remove(name) //nolint:errcheck // the first error says more
	}
	return err
}

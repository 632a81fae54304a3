package guest

import (
	"encoding/binary"
	"sort"
	"sync"

	"github.com/dsec-go/dsec"
)

// record keeps the output of one command: the beginning of each stream up to a
// limit in a log, in the order in which it came, and the last bytes beyond the
// limit in a tail for each stream.
//
// The log is a run of entries, each a header of four bytes and data. The two
// top bits of a header are the kind, the others a length:
//
//	00 data of stdout   01 data of stderr
//	10 bytes of stdout that are not here   11 bytes of stderr that are not here
//
// Its beginning is in the arena, its end in memory until it is long enough; a
// command that says little never touches a file. A mark every 64 KiB of log
// makes any offset cheap to find.
//
// When the arena cannot be written the log ends as if the limits were reached,
// and Kept says so.
type record struct {
	limit int64

	mu    sync.Mutex
	log   span
	mem   []byte // of the log, after log.size
	marks []mark
	last  int    // offset in mem of the last entry's header; -1 if it is not there
	kind  uint32 // of the last entry
	total [2]int64
	kept  [2]int64
	tails [2]*tail
	full  bool // nothing more is kept
	ended bool
	news  chan struct{} // closed at the next change; made by who waits
	refs  int           // readers at work, and one until free
}

// mark is a place in the log where an entry begins.
type mark struct {
	pos int64    // in the log
	off int64    // bytes of both streams before it
	str [2]int64 // bytes of each stream before it
}

const (
	memLog    = 4 << 10 // of a log in memory at most, before it goes to the arena
	memEnded  = 256     // of the log of a finished command
	markEvery = 64 << 10
	entryMax  = 1<<30 - 1
	headSize  = 4
)

func newRecord(a *arena, limit int64) *record {
	return &record{limit: limit, log: span{a: a}, last: -1, refs: 1}
}

// append records p as the newest bytes of a stream (0 stdout, 1 stderr).
func (r *record) append(stream int, p []byte) {
	if len(p) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	keep := 0
	if !r.full {
		keep = int(min(int64(len(p)), r.limit-r.kept[stream]))
	}
	if r.total[stream] != r.kept[stream] {
		keep = 0 // what is kept is a beginning, without holes
	}
	if keep > 0 {
		if r.add(uint32(stream), p[:keep]) {
			r.kept[stream] += int64(keep)
			r.total[stream] += int64(keep)
			p = p[keep:]
		} else {
			r.full = true
		}
	}
	if len(p) > 0 {
		if r.tails[stream] == nil {
			r.tails[stream] = new(tail)
		}
		off := r.total[0] + r.total[1]
		r.tails[stream].append(off, r.total[stream], p)
		r.total[stream] += int64(len(p))
		// Only the other stream can still add to the log and needs to know.
		if !r.full && r.kept[1-stream] < r.limit {
			r.skip(uint32(stream), len(p))
		}
	}
	r.wake()
}

// wake tells those who wait. Requires: r.mu held.
func (r *record) wake() {
	if r.news != nil {
		close(r.news)
		r.news = nil
	}
}

// changed gives a channel that is closed at the next change. Requires: r.mu
// held.
func (r *record) changed() <-chan struct{} {
	if r.news == nil {
		r.news = make(chan struct{})
	}
	return r.news
}

func (r *record) logSize() int64 { return r.log.size + int64(len(r.mem)) }

// entry begins an entry or goes on in the last one. Requires: r.mu held.
func (r *record) entry(kind uint32, n int) {
	if r.last >= 0 && r.kind == kind {
		h := binary.LittleEndian.Uint32(r.mem[r.last:])
		if int(h&entryMax)+n <= entryMax {
			binary.LittleEndian.PutUint32(r.mem[r.last:], h+uint32(n))
			return
		}
	}
	pos := r.logSize()
	if len(r.marks) == 0 || pos >= r.marks[len(r.marks)-1].pos+markEvery {
		r.marks = append(r.marks, mark{pos, r.total[0] + r.total[1], r.total})
	}
	r.last, r.kind = len(r.mem), kind
	r.mem = binary.LittleEndian.AppendUint32(r.mem, kind<<30|uint32(n))
}

// skip notes bytes that are not in the log. Requires: r.mu held, and that the
// totals still count without them or with them: it is the mark's concern only.
func (r *record) skip(stream uint32, n int) {
	r.total[stream] -= int64(n) // for a mark at this entry
	r.entry(2|stream, n)
	r.total[stream] += int64(n)
	if len(r.mem) > memLog && !r.flush() {
		r.full = true
	}
}

// add puts data in the log, all of it or nothing. Requires: r.mu held.
func (r *record) add(kind uint32, p []byte) bool {
	if len(r.mem)+headSize+len(p) > memLog {
		if !r.flush() {
			return false
		}
	}
	if headSize+len(p) <= memLog {
		r.entry(kind, len(p))
		r.mem = append(r.mem, p...)
		return true
	}
	// Long data does not pass through memory.
	for len(p) > 0 {
		q := p[:min(len(p), entryMax)]
		marks := len(r.marks)
		r.entry(kind, len(q))
		size := r.log.size
		err := r.log.write(r.mem)
		if err == nil {
			err = r.log.write(q)
		}
		r.mem, r.last = r.mem[:0], -1
		if err != nil {
			r.log.size, r.marks = size, r.marks[:marks]
			return false
		}
		p = p[len(q):]
	}
	return true
}

// flush moves the memory part into the arena. Requires: r.mu held.
func (r *record) flush() bool {
	if len(r.mem) == 0 {
		return true
	}
	if r.log.write(r.mem) != nil {
		return false // it stays where it is, as the log's end
	}
	r.mem, r.last = r.mem[:0], -1
	return true
}

// end says that no more will be appended, and gives memory back.
func (r *record) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mem) > memEnded {
		r.flush() // if it cannot, the memory stays
	}
	r.mem = append([]byte(nil), r.mem...)
	r.last = -1
	for _, t := range r.tails {
		if t != nil {
			t.store(r.log.a)
		}
	}
	r.ended = true
	r.wake()
}

// stats gives the counts of both streams.
func (r *record) stats() (out, err dsec.StreamStat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return dsec.StreamStat{Total: r.total[0], Kept: r.kept[0]}, dsec.StreamStat{Total: r.total[1], Kept: r.kept[1]}
}

// free gives the room back once no reader is at work.
func (r *record) free() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unref()
}

// unref. Requires: r.mu held.
func (r *record) unref() {
	if r.refs--; r.refs > 0 {
		return
	}
	r.log.a.release(r.log.chunks)
	r.log.chunks, r.log.size, r.mem = nil, 0, nil
	for i, t := range r.tails {
		if t != nil {
			r.log.a.release(t.file.chunks)
		}
		r.tails[i] = nil
	}
}

// piece is a run of bytes of one stream found in a record.
type piece struct {
	stream int
	off    int64 // of data, counting both streams
	str    int64 // of data, in its stream
	n      int64
	pos    int64 // in the log, of the data; or
	tail   *tail // the tail that has it
	at     mark  // of its entry, to go on from
}

// find gives the first piece that reaches beyond an offset: of both streams
// (stream -1), or in one. ok is false if there is none yet. hint is where an
// earlier search on the same record and stream ended. Requires: r.mu held.
func (r *record) find(stream int, offset int64, hint mark) (p piece, ok bool) {
	p, ok = r.findLog(stream, offset, hint)
	for i, t := range r.tails {
		if t == nil || stream >= 0 && stream != i {
			continue
		}
		if q, found := t.find(stream, offset); found && (!ok || q.off < p.off) {
			q.stream, q.at = i, hint
			p, ok = q, true
		}
	}
	return p, ok
}

func (m mark) count(stream int) int64 {
	if stream < 0 {
		return m.off
	}
	return m.str[stream]
}

func (r *record) findLog(stream int, offset int64, hint mark) (piece, bool) {
	at := hint
	if i := sort.Search(len(r.marks), func(i int) bool { return r.marks[i].count(stream) > offset }); i > 0 {
		if m := r.marks[i-1]; m.pos > at.pos || at.count(stream) > offset {
			at = m
		}
	} else if at.count(stream) > offset {
		at = mark{}
	}
	size := r.logSize()
	var head [headSize]byte
	for at.pos < size {
		if r.readLog(head[:], at.pos) != nil {
			return piece{}, false
		}
		h := binary.LittleEndian.Uint32(head[:])
		kind, n := h>>30, int64(h&entryMax)
		s := int(kind & 1)
		if kind < 2 && (stream < 0 || stream == s) && at.count(stream)+n > offset {
			skip := max(0, offset-at.count(stream))
			return piece{
				stream: s,
				off:    at.off + skip,
				str:    at.str[s] + skip,
				n:      n - skip,
				pos:    at.pos + headSize + skip,
				at:     at,
			}, true
		}
		at.pos += headSize
		if kind < 2 {
			at.pos += n
		}
		at.off += n
		at.str[s] += n
	}
	return piece{}, false
}

// readLog reads within the log. Requires: r.mu held.
func (r *record) readLog(p []byte, pos int64) error {
	if pos < r.log.size {
		n := min(int64(len(p)), r.log.size-pos)
		if err := r.log.read(p[:n], pos); err != nil {
			return err
		}
		p, pos = p[n:], pos+n
	}
	if len(p) > 0 {
		copy(p, r.mem[pos-r.log.size:])
	}
	return nil
}

// fetch copies a piece's data, as much as fits in b. It takes and drops r.mu
// around reading the arena, so that a slow disk does not hold up the command.
// Requires: r.mu held.
func (r *record) fetch(p piece, b []byte) ([]byte, error) {
	b = b[:min(int64(len(b)), p.n)]
	if p.tail != nil {
		return b, p.tail.read(b, p.str)
	}
	if p.pos+int64(len(b)) > r.log.size { // short, and in memory in part
		return b, r.readLog(b, p.pos)
	}
	log := r.log // its chunks do not change while refs is held
	r.refs++
	r.mu.Unlock()
	err := log.read(b, p.pos)
	r.mu.Lock()
	r.unref()
	return b, err
}

// tail is the last bytes of one stream beyond its limit.
type tail struct {
	ring  []byte // of OutputTail bytes; position is the offset in the stream modulo its size
	segs  []seg  // what of it is there, oldest first
	file  span   // where the ring went at the command's end
	start int64  // offset in the stream of the file's first byte
}

// seg is a run of bytes adjacent in both orders.
type seg struct {
	off int64 // counting both streams
	str int64 // in the stream
	n   int64
}

// maxSegs bounds a tail's memory when two streams alternate in tiny pieces.
const maxSegs = 1024

func (t *tail) append(off, str int64, p []byte) {
	if t.ring == nil {
		t.ring = make([]byte, dsec.OutputTail)
	}
	if d := len(p) - len(t.ring); d > 0 {
		p, off, str = p[d:], off+int64(d), str+int64(d)
		t.segs = t.segs[:0]
	}
	for q, at := p, str; len(q) > 0; {
		n := copy(t.ring[at%int64(len(t.ring)):], q)
		q, at = q[n:], at+int64(n)
	}
	if n := len(t.segs); n > 0 && t.segs[n-1].off+t.segs[n-1].n == off && t.segs[n-1].str+t.segs[n-1].n == str {
		t.segs[n-1].n += int64(len(p))
	} else {
		t.segs = append(t.segs, seg{off, str, int64(len(p))})
	}
	oldest := str + int64(len(p)-len(t.ring))
	drop := 0
	for drop < len(t.segs) && (t.segs[drop].str+t.segs[drop].n <= oldest || len(t.segs)-drop > maxSegs) {
		drop++
	}
	if drop > 0 {
		t.segs = t.segs[:copy(t.segs, t.segs[drop:])]
	}
	if s := &t.segs[0]; s.str < oldest {
		d := oldest - s.str
		s.off, s.str, s.n = s.off+d, s.str+d, s.n-d
	}
}

func (t *tail) find(stream int, offset int64) (piece, bool) {
	for _, s := range t.segs {
		from := s.off
		if stream >= 0 {
			from = s.str
		}
		if from+s.n > offset {
			skip := max(0, offset-from)
			return piece{off: s.off + skip, str: s.str + skip, n: s.n - skip, tail: t}, true
		}
	}
	return piece{}, false
}

// read copies bytes that find has found.
func (t *tail) read(p []byte, str int64) error {
	if t.ring == nil {
		return t.file.read(p, str-t.start)
	}
	for len(p) > 0 {
		n := copy(p, t.ring[str%int64(len(t.ring)):])
		p, str = p[n:], str+int64(n)
	}
	return nil
}

// store moves the ring to the arena; if it cannot it stays.
func (t *tail) store(a *arena) {
	first, last := t.segs[0], t.segs[len(t.segs)-1]
	b := make([]byte, last.str+last.n-first.str)
	t.read(b, first.str) //nolint:errcheck // from memory
	t.file.a = a
	if t.file.write(b) == nil {
		t.ring, t.start = nil, first.str
	}
	t.segs = append([]seg(nil), t.segs...)
}

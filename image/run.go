package image

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"os"
	"slices"

	"github.com/dsec-go/dsec/erofs"
)

const (
	runMagic    = "dsecrun1"
	runHeader   = 16 // magic, number of records
	runRecord   = 16 // key, blob, block
	perFan      = 128
	maxRunCount = 1 << 31
)

// A runKey is the beginning of a SHA-256: enough to be right nearly always, and
// being wrong is found out.
type runKey uint64

func keyOf(sum erofs.Sum) runKey { return runKey(binary.BigEndian.Uint64(sum[:])) }

// A record says that a blob, by its number, has a piece at a block.
type record struct {
	key         runKey
	blob, block uint32
}

func (r record) compare(o record) int {
	return cmp.Or(cmp.Compare(r.key, o.key), cmp.Compare(r.blob, o.blob), cmp.Compare(r.block, o.block))
}

func sortRecords(list []record) { slices.SortFunc(list, record.compare) }

// A run is a file of sorted records, with a table behind them that says where
// those begin whose keys begin with certain bits. One look-up is one read.
//
// Nothing in the file is trusted: a damaged one gives wrong records or an error,
// and never more than was asked for.
type run struct {
	path  string
	f     *os.File
	count uint32
	shift uint     // of a key, to its place in fan
	fan   []uint32 // and the count at its end
	buf   []byte
}

// shiftFor gives the bits of a key that a run of n records leaves to the search.
func shiftFor(n int) uint { return 64 - uint(bits.Len(uint(n/perFan))) }

// writeRun makes a run of sorted records, of which there are at most n.
func writeRun(path string, n int, records func(yield func(record) bool)) (err error) {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		f.Close() //nolint:errcheck // a torn file is found out when it is opened
		if err != nil {
			os.Remove(tmp) //nolint:errcheck // the first error counts
		}
	}()
	w := bufio.NewWriterSize(f, 1<<20)
	w.Write(make([]byte, runHeader)) //nolint:errcheck // Flush says so
	shift := shiftFor(n)
	fan := make([]uint32, 1, 1<<(64-shift)+1)
	count := uint32(0)
	var b [runRecord]byte
	for r := range records {
		for uint64(len(fan)) <= uint64(r.key)>>shift {
			fan = append(fan, count)
		}
		binary.BigEndian.PutUint64(b[:], uint64(r.key))
		binary.BigEndian.PutUint32(b[8:], r.blob)
		binary.BigEndian.PutUint32(b[12:], r.block)
		w.Write(b[:]) //nolint:errcheck // Flush says so
		count++
	}
	for len(fan) < 1<<(64-shift) {
		fan = append(fan, count)
	}
	b[0] = byte(shift)
	w.Write(b[:1]) //nolint:errcheck // Flush says so
	if err := binary.Write(w, binary.BigEndian, fan); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	head := binary.BigEndian.AppendUint64([]byte(runMagic), uint64(count))
	if _, err := f.WriteAt(head, 0); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// openRun opens a run. What is not one is an error.
func openRun(path string) (_ *run, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	head := make([]byte, runHeader)
	if _, err := io.ReadFull(f, head); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint64(head[8:])
	if !bytes.HasPrefix(head, []byte(runMagic)) || n > maxRunCount || int64(n) > (st.Size()-runHeader)/runRecord {
		return nil, fmt.Errorf("no run of records: %w", ErrCorrupt)
	}
	tail := make([]byte, st.Size()-runHeader-int64(n)*runRecord)
	if _, err := f.ReadAt(tail, runHeader+int64(n)*runRecord); err != nil {
		return nil, err
	}
	if len(tail) == 0 || tail[0] > 64 || tail[0] < 64-31 || len(tail) != 1+4<<(64-tail[0]) {
		return nil, fmt.Errorf("table of a run: %w", ErrCorrupt)
	}
	r := &run{path: path, f: f, count: uint32(n), shift: uint(tail[0])}
	for e := range slices.Chunk(tail[1:], 4) {
		r.fan = append(r.fan, binary.BigEndian.Uint32(e))
	}
	r.fan = append(r.fan, r.count)
	return r, nil
}

// find calls f with every record of a key.
func (r *run) find(k runKey, f func(record)) error {
	i := uint64(k) >> r.shift
	lo, hi := r.fan[i], r.fan[i+1]
	if lo >= hi || hi > r.count || hi-lo > 64*perFan {
		return nil
	}
	n := int(hi-lo) * runRecord
	r.buf = slices.Grow(r.buf[:0], n)[:n]
	if _, err := r.f.ReadAt(r.buf, runHeader+int64(lo)*runRecord); err != nil {
		return err
	}
	for e := range slices.Chunk(r.buf, runRecord) {
		if rec := parseRecord(e); rec.key == k {
			f(rec)
		}
	}
	return nil
}

func parseRecord(e []byte) record {
	return record{
		key: runKey(binary.BigEndian.Uint64(e)), blob: binary.BigEndian.Uint32(e[8:]), block: binary.BigEndian.Uint32(e[12:]),
	}
}

// all yields the records in order. It ends early at an error.
func (r *run) all(yield func(record) bool) {
	in := bufio.NewReaderSize(io.NewSectionReader(r.f, runHeader, int64(r.count)*runRecord), 1<<20)
	var b [runRecord]byte
	for {
		if _, err := io.ReadFull(in, b[:]); err != nil || !yield(parseRecord(b[:])) {
			return
		}
	}
}

func (r *run) close() { r.f.Close() } //nolint:errcheck // it was read only

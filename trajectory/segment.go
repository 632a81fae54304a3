package trajectory

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// A segment is a blob with records of one or more sandboxes: a header, then each
// record behind its length and check sum, then an index as JSON, then a footer
// that says where the index is. docs/formats/trajectory.md has the bytes.
const (
	segmentMagic  = "dsectraj"
	segmentEnd    = "dsectend"
	segmentHeader = len(segmentMagic) + 4
	segmentFooter = 8 + 4 + 4 + len(segmentEnd)
	recordFrame   = 4 + 4

	maxIndex  = 256 << 20
	maxRecord = 64 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrCorrupt is a segment whose bytes are not what was written.
var ErrCorrupt = errors.New("segment is corrupt")

// section is the part of a segment that has one sandbox's records.
type section struct {
	ID    dsec.SandboxID `json:"id"`
	First uint64         `json:"first"` // number of its first record
	At    []int64        `json:"at"`    // where each record's frame begins
	Head  string         `json:"head"`  // hash of its last record
	Over  bool           `json:"over,omitempty"`
	Ended int64          `json:"ended,omitempty"` // nanoseconds since 1970, with Over

	// The steps and commands among the records, so that nothing is read to find
	// them; with Over those of the earlier segments as well.
	Steps    []stepRow    `json:"steps,omitempty"`
	Commands []commandRow `json:"commands,omitempty"`

	Blobs   []string `json:"blobs,omitempty"`   // bodies that records here name
	Earlier []extent `json:"earlier,omitempty"` // where the records before First are, oldest first; with Over
}

func (s *section) last() uint64 { return s.First + uint64(len(s.At)) - 1 }

// stepRow is one step of a sandbox.
type stepRow struct {
	Session string `json:"s"`
	Number  uint64 `json:"n"`
	Request uint64 `json:"q"`
	Answer  uint64 `json:"a,omitempty"`
	Sum     uint64 `json:"x,omitempty"` // of the request
}

type commandRow struct {
	ID     dsec.CommandID `json:"c"`
	Answer uint64         `json:"a"`
}

// extent says in which segment a run of records is.
type extent struct {
	Segment blob.Digest `json:"segment"`
	First   uint64      `json:"first"`
	Last    uint64      `json:"last"`
}

// segmentOf finds the segment that has a record; "" if none has. Extents are in
// order.
func segmentOf(extents []extent, seq uint64) blob.Digest {
	i := sort.Search(len(extents), func(i int) bool { return extents[i].Last >= seq })
	if i == len(extents) || seq < extents[i].First {
		return ""
	}
	return extents[i].Segment
}

type index struct {
	Sections []section `json:"sections"`
}

// segmentWriter builds a segment.
type segmentWriter struct {
	w   io.Writer
	n   int64
	idx index
}

func newSegmentWriter(w io.Writer) (*segmentWriter, error) {
	s := &segmentWriter{w: w}
	return s, s.write(binary.LittleEndian.AppendUint32([]byte(segmentMagic), FormatVersion))
}

func (s *segmentWriter) write(b []byte) error {
	n, err := s.w.Write(b)
	s.n += int64(n)
	return err
}

// add writes one record and gives where.
func (s *segmentWriter) add(b []byte) (at int64, err error) {
	at = s.n
	f := binary.LittleEndian.AppendUint32(make([]byte, 0, recordFrame), uint32(len(b)))
	f = binary.LittleEndian.AppendUint32(f, crc32.Checksum(b, castagnoli))
	if err := s.write(f); err != nil {
		return 0, err
	}
	return at, s.write(b)
}

// finish writes the index.
func (s *segmentWriter) finish() error {
	j, err := marshal(s.idx)
	if err != nil {
		return fmt.Errorf("encode segment index: %w", err)
	}
	at := s.n
	if err := s.write(j); err != nil {
		return err
	}
	f := binary.LittleEndian.AppendUint64(make([]byte, 0, segmentFooter), uint64(at))
	f = binary.LittleEndian.AppendUint32(f, uint32(len(j)))
	f = binary.LittleEndian.AppendUint32(f, crc32.Checksum(j, castagnoli))
	return s.write(append(f, segmentEnd...))
}

// readIndex reads what a segment holds.
func readIndex(ctx context.Context, store blob.Store, d blob.Digest) (*index, error) {
	info, err := store.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	if info.Size < int64(segmentHeader+segmentFooter) {
		return nil, corrupt(d, "it has %d bytes", info.Size)
	}
	h, err := readRange(ctx, store, d, 0, int64(segmentHeader))
	if err != nil {
		return nil, err
	}
	if string(h[:len(segmentMagic)]) != segmentMagic {
		return nil, corrupt(d, "it begins with %q", h)
	}
	if v := binary.LittleEndian.Uint32(h[len(segmentMagic):]); v != FormatVersion {
		return nil, fmt.Errorf("segment %s has format %d, this build reads %d", d, v, FormatVersion)
	}
	f, err := readRange(ctx, store, d, info.Size-int64(segmentFooter), int64(segmentFooter))
	if err != nil {
		return nil, err
	}
	at, size, sum := binary.LittleEndian.Uint64(f), binary.LittleEndian.Uint32(f[8:]), binary.LittleEndian.Uint32(f[12:])
	if string(f[16:]) != segmentEnd || size > maxIndex || at+uint64(size)+uint64(segmentFooter) != uint64(info.Size) {
		return nil, corrupt(d, "its footer does not fit")
	}
	j, err := readRange(ctx, store, d, int64(at), int64(size))
	if err != nil {
		return nil, err
	}
	if crc32.Checksum(j, castagnoli) != sum {
		return nil, corrupt(d, "its index has a wrong sum")
	}
	x := new(index)
	if err := json.Unmarshal(j, x); err != nil {
		return nil, corrupt(d, "its index: %v", err)
	}
	for i := range x.Sections {
		s := &x.Sections[i]
		if s.First == 0 || len(s.At) == 0 || s.ID == "" {
			return nil, corrupt(d, "section %d has no records", i)
		}
		for _, a := range s.At {
			if a < int64(segmentHeader) || uint64(a)+recordFrame > at {
				return nil, corrupt(d, "a record of %s lies at %d", clip(string(s.ID)), a)
			}
		}
	}
	return x, nil
}

// readRecord reads one record of a segment.
func readRecord(ctx context.Context, store blob.Store, d blob.Digest, at int64) ([]byte, error) {
	f, err := readRange(ctx, store, d, at, recordFrame)
	if err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(f)
	if n > maxRecord {
		return nil, corrupt(d, "a record at %d of %d bytes", at, n)
	}
	b, err := readRange(ctx, store, d, at+recordFrame, int64(n))
	if err != nil {
		return nil, err
	}
	if crc32.Checksum(b, castagnoli) != binary.LittleEndian.Uint32(f[4:]) {
		return nil, corrupt(d, "the record at %d has a wrong sum", at)
	}
	return b, nil
}

func readRange(ctx context.Context, store blob.Store, d blob.Digest, at, n int64) ([]byte, error) {
	r, err := store.Get(ctx, d, at, n)
	if err != nil {
		if errors.Is(err, blob.ErrRange) {
			return nil, corrupt(d, "it ends before %d", at+n)
		}
		return nil, err
	}
	defer r.Close()
	b := bytes.NewBuffer(make([]byte, 0, n))
	if _, err := io.Copy(b, r); err != nil {
		return nil, fmt.Errorf("read segment %s: %w", d, err)
	}
	if int64(b.Len()) != n {
		return nil, corrupt(d, "%d bytes at %d instead of %d", b.Len(), at, n)
	}
	return b.Bytes(), nil
}

func corrupt(d blob.Digest, format string, args ...any) error {
	return fmt.Errorf("%w: %s: "+format, append([]any{ErrCorrupt, d}, args...)...)
}

// indexes remembers the last indexes that were read.
type indexes struct {
	store blob.Store

	mu    sync.Mutex
	known map[blob.Digest]*index
	order []blob.Digest
}

const maxIndexes = 64

func (x *indexes) get(ctx context.Context, d blob.Digest) (*index, error) {
	x.mu.Lock()
	i := x.known[d]
	x.mu.Unlock()
	if i != nil {
		return i, nil
	}
	i, err := readIndex(ctx, x.store, d)
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.known == nil {
		x.known = map[blob.Digest]*index{}
	}
	if x.known[d] == nil {
		if len(x.order) >= maxIndexes {
			delete(x.known, x.order[0])
			x.order = append(x.order[:0], x.order[1:]...)
		}
		x.known[d], x.order = i, append(x.order, d)
	}
	return i, nil
}

// section finds the part of a segment that has record seq of a sandbox.
func (x *indexes) section(ctx context.Context, d blob.Digest, id dsec.SandboxID, seq uint64) (*section, error) {
	i, err := x.get(ctx, d)
	if err != nil {
		return nil, err
	}
	for k := range i.Sections {
		if s := &i.Sections[k]; s.ID == id && seq >= s.First && seq <= s.last() {
			return s, nil
		}
	}
	return nil, corrupt(d, "it has no record %d of sandbox %s", seq, id)
}

// record reads a record of a sandbox from a segment.
func (x *indexes) record(ctx context.Context, d blob.Digest, id dsec.SandboxID, seq uint64) ([]byte, error) {
	s, err := x.section(ctx, d, id, seq)
	if err != nil {
		return nil, err
	}
	return readRecord(ctx, x.store, d, s.At[seq-s.First])
}

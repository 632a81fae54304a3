package journal

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"strconv"
	"strings"
)

// The bytes on disk; docs/formats/journal.md says the same in words. All numbers are
// little-endian.
const (
	formatVersion = 1
	magic         = "dsecjrnl"

	typeSegment  = 1
	typeSnapshot = 2

	headerSize = 40
	recordSize = 24 // before the payload
	hintSize   = 20

	lockName      = "lock"
	hintName      = "durable"
	segmentSuffix = ".log"
	snapSuffix    = ".snap"
	tempSuffix    = ".tmp"
	damagedSuffix = ".damaged" // what Mend has put aside

	kindCut Kind = math.MaxUint16 - 1 // in a snapshot; see appendCut
	kindEnd Kind = math.MaxUint16     // last record of a snapshot; payload: how many came before

	lagUnknown = math.MaxUint32
)

// KindLost marks, in a journal that was mended, a record that is gone. Replay gives it to every
// owner, without a payload.
const KindLost Kind = math.MaxUint16 - 2

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// header begins a file.
type header struct {
	typ  uint32
	seq  uint64 // segment: number of the first record; snapshot: of the last one covered
	salt uint64 // mixed into every sum of the file
}

func appendHeader(b []byte, h header) []byte {
	start := len(b)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, formatVersion)
	b = binary.LittleEndian.AppendUint32(b, h.typ)
	b = binary.LittleEndian.AppendUint64(b, h.seq)
	b = binary.LittleEndian.AppendUint64(b, h.salt)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// parseHeader reads a header. ok is false if it is torn. An unknown version is ErrVersion:
// such a file must not be mistaken for a torn one and thrown away.
func parseHeader(b []byte, typ uint32) (h header, ok bool, err error) {
	if len(b) < headerSize || string(b[:8]) != magic {
		return header{}, false, nil
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != formatVersion {
		return header{}, false, fmt.Errorf("version %d: %w", v, ErrVersion)
	}
	if crc32.Checksum(b[:headerSize-4], castagnoli) != binary.LittleEndian.Uint32(b[headerSize-4:]) {
		return header{}, false, nil
	}
	h = header{
		typ:  binary.LittleEndian.Uint32(b[12:]),
		seq:  binary.LittleEndian.Uint64(b[16:]),
		salt: binary.LittleEndian.Uint64(b[24:]),
	}
	return h, h.typ == typ, nil
}

// record is one entry as it lies in a file.
type record struct {
	seq     uint64
	lag     uint64 // seq minus the last number known to be durable when this was written
	kind    Kind
	payload []byte
}

// appendRecord encodes r.
func appendRecord(b []byte, salt uint64, r record) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(b, 0) // the sum, below
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.payload)))
	b = binary.LittleEndian.AppendUint64(b, r.seq)
	b = binary.LittleEndian.AppendUint32(b, uint32(min(r.lag, lagUnknown)))
	b = binary.LittleEndian.AppendUint16(b, uint16(r.kind))
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = append(b, r.payload...)
	binary.LittleEndian.PutUint32(b[start:], sum(salt, b[start+4:start+recordSize], b[start+recordSize:]))
	return b
}

// parseRecord reads the fixed part of a record; payload is nil. It returns the length of the
// payload and its sum, which is still to be checked. It is false for what no record can be.
func parseRecord(b []byte) (r record, n int, want uint32, ok bool) {
	if len(b) < recordSize {
		return record{}, 0, 0, false
	}
	want = binary.LittleEndian.Uint32(b)
	length := binary.LittleEndian.Uint32(b[4:])
	r.seq = binary.LittleEndian.Uint64(b[8:])
	r.lag = uint64(binary.LittleEndian.Uint32(b[16:]))
	r.kind = Kind(binary.LittleEndian.Uint16(b[20:]))
	if length > MaxPayload || b[22] != 0 || b[23] != 0 {
		return record{}, 0, 0, false
	}
	return r, int(length), want, true
}

// claims returns the number that r proves to have been durable when r was written.
func (r record) claims() uint64 {
	if r.lag >= lagUnknown || r.lag > r.seq {
		return 0
	}
	return r.seq - r.lag
}

// sum is the check sum of a record. The salt is secret to those whose bytes end up in
// payloads: they cannot write what recovery would take for a record.
func sum(salt uint64, fixed, payload []byte) uint32 {
	var s [8]byte
	binary.LittleEndian.PutUint64(s[:], salt)
	c := crc32.Update(0, castagnoli, s[:])
	c = crc32.Update(c, castagnoli, fixed)
	return crc32.Update(c, castagnoli, payload)
}

// appendCut encodes a record of kindCut: what the snapshot has of the kinds covers also their
// records in the log up to and with number cut.
func appendCut(b []byte, cut uint64, kinds []Kind) []byte {
	b = binary.LittleEndian.AppendUint64(b, cut)
	for _, k := range kinds {
		b = binary.LittleEndian.AppendUint16(b, uint16(k))
	}
	return b
}

// parseCut adds what a record of kindCut says to cuts.
func parseCut(b []byte, cuts map[Kind]uint64) bool {
	if len(b) < 10 || len(b)%2 != 0 {
		return false
	}
	cut := binary.LittleEndian.Uint64(b)
	for b = b[8:]; len(b) > 0; b = b[2:] {
		cuts[Kind(binary.LittleEndian.Uint16(b))] = cut
	}
	return true
}

// kindSet is a set of kinds.
type kindSet [1 << 16 / 64]uint64

// add adds a kind that an owner can have.
func (s *kindSet) add(k Kind) {
	if k < KindLost {
		s[k/64] |= 1 << (k % 64)
	}
}

func (s *kindSet) remove(k Kind) { s[k/64] &^= 1 << (k % 64) }

func (s *kindSet) has(k Kind) bool { return s[k/64]&(1<<(k%64)) != 0 }

func newSalt() uint64 {
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// appendHint encodes the content of the file "durable".
func appendHint(b []byte, seq uint64) []byte {
	start := len(b)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, seq)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// parseHint returns what the hint says, or 0 if it is torn.
func parseHint(b []byte) uint64 {
	if len(b) < hintSize || string(b[:8]) != magic ||
		crc32.Checksum(b[:16], castagnoli) != binary.LittleEndian.Uint32(b[16:]) {
		return 0
	}
	return binary.LittleEndian.Uint64(b[8:])
}

func segmentName(first uint64) string { return fmt.Sprintf("%016x%s", first, segmentSuffix) }

func snapshotName(seq uint64) string { return fmt.Sprintf("%016x%s", seq, snapSuffix) }

// parseName returns the number in a file name.
func parseName(name, suffix string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 16 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 64)
	return n, err == nil
}

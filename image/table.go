package image

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// Packing is how the chunks of data blobs are stored.
type Packing int

const (
	// None stores data blobs as they are: plain files that can be mounted.
	None Packing = iota
	// Zstd stores each chunk compressed by itself, so that it can be fetched
	// by itself. A packed blob has to be unpacked, whole or as it is read,
	// before it is mounted.
	Zstd
)

const endSize = 8 // of the end of a frame in a chunk table

// A Table is the chunk table of one data blob: what each chunk's content is, and
// where the stored blob has it. It does not change and may be shared.
type Table struct {
	size   int64 // of the plain blob
	sums   []byte
	ends   []byte // of frames; none if the blob is stored plain
	stored int64
}

// ParseTable reads the chunk table of d. Whatever the bytes, ranges that the
// result gives lie within the stored blob, one after another, and none is longer
// than its chunk.
func ParseTable(d Data, b []byte) (*Table, error) {
	if d.Size <= 0 || int64(len(b)) != tableSize(d) {
		return nil, fmt.Errorf("chunk table of %d bytes for a blob of %d: %w", len(b), d.Size, ErrCorrupt)
	}
	n := chunksOf(d.Size)
	t := &Table{size: d.Size, sums: b[:n*sha256.Size], stored: d.Size}
	if d.Packed == nil {
		return t, nil
	}
	t.ends, t.stored = b[n*sha256.Size:], d.Packed.Size
	last := uint64(0)
	for i := range int(n) {
		end := binary.LittleEndian.Uint64(t.ends[i*endSize:])
		if end <= last || end-last > uint64(t.Size(i)) || end > uint64(t.stored) {
			return nil, fmt.Errorf("chunk table: frame %d is from %d to %d of %d: %w", i, last, end, t.stored, ErrCorrupt)
		}
		last = end
	}
	if last != uint64(t.stored) {
		return nil, fmt.Errorf("chunk table: frames end at %d of %d: %w", last, t.stored, ErrCorrupt)
	}
	return t, nil
}

// ReadTable fetches, checks and reads the chunk table of d.
func ReadTable(ctx context.Context, s blob.Store, d Data) (*Table, error) {
	b, err := readPart(ctx, s, d.Chunks)
	if err != nil {
		return nil, fmt.Errorf("chunk table: %w", err)
	}
	return ParseTable(d, b)
}

// readPart reads and checks a part that fits into memory.
func readPart(ctx context.Context, s blob.Store, p Part) ([]byte, error) {
	b, err := readSmall(ctx, s, p.Digest, p.Size)
	if err == nil && int64(len(b)) != p.Size {
		err = fmt.Errorf("blob %s has %d bytes, should have %d: %w", p.Digest, len(b), p.Size, ErrCorrupt)
	}
	return b, err
}

// Len is the number of chunks.
func (t *Table) Len() int { return len(t.sums) / sha256.Size }

// Size is the length of chunk i of the plain blob: erofs.ChunkSize, or less for
// the last.
func (t *Table) Size(i int) int {
	return int(min(erofs.ChunkSize, t.size-int64(i)*erofs.ChunkSize))
}

// Sum is the SHA-256 of chunk i of the plain blob.
func (t *Table) Sum(i int) erofs.Sum { return erofs.Sum(t.sums[i*sha256.Size:]) }

// Is reports whether b is chunk i.
func (t *Table) Is(i int, b []byte) bool {
	return len(b) == t.Size(i) && sha256.Sum256(b) == t.Sum(i)
}

// Range is where Data.Stored has chunk i: the n bytes at off are what Open
// takes.
func (t *Table) Range(i int) (off, n int64) {
	if t.ends == nil {
		return int64(i) * erofs.ChunkSize, int64(t.Size(i))
	}
	if i > 0 {
		off = int64(binary.LittleEndian.Uint64(t.ends[(i-1)*endSize:]))
	}
	return off, int64(binary.LittleEndian.Uint64(t.ends[i*endSize:])) - off
}

// Open gives chunk i of the plain blob, from the bytes that Range names: it
// unpacks them if they are packed, and checks them. The chunk is appended to
// dst[:0] if it has the room, and may be frame itself where that was stored
// plain. What does not match the table is ErrCorrupt.
func (t *Table) Open(i int, frame, dst []byte) ([]byte, error) {
	n := t.Size(i)
	if _, want := t.Range(i); int64(len(frame)) != want {
		return nil, fmt.Errorf("chunk %d in %d bytes, should be %d: %w", i, len(frame), want, ErrCorrupt)
	}
	out := frame
	if len(frame) != n {
		if cap(dst) < n {
			dst = make([]byte, 0, n)
		}
		var err error
		if out, err = unpackInto(dst[:0:n], frame, n); err != nil {
			return nil, fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	if sha256.Sum256(out) != t.Sum(i) {
		return nil, fmt.Errorf("chunk %d has other content than its sum says: %w", i, ErrCorrupt)
	}
	return out, nil
}

// unpacker decodes frames, for any number of callers, into no more room than
// they give.
var unpacker = sync.OnceValue(func() *zstd.Decoder {
	z, err := zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(0),
		zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		panic(err) // the options are constants
	}
	return z
})

// packer encodes chunks. The same chunk gives the same frame, whoever else uses
// it at the time: a frame depends on nothing that came before.
var packer = sync.OnceValue(func() *zstd.Encoder {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)),
		zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true), zstd.WithWindowSize(erofs.ChunkSize))
	if err != nil {
		panic(err)
	}
	return z
})

// Pack compresses bytes by themselves, as chunks are; it may give b itself.
func Pack(b []byte) []byte { return Zstd.frameOf(b, nil) }

// Unpack gives the n bytes that Pack made stored of; what it did not is ErrCorrupt.
func Unpack(stored []byte, n int) ([]byte, error) {
	if len(stored) == n {
		return stored, nil
	}
	return unpackInto(make([]byte, 0, max(n, 0)), stored, n)
}

// unpackInto is Unpack into the room of dst.
func unpackInto(dst, frame []byte, n int) ([]byte, error) {
	out, err := unpacker().DecodeAll(frame, dst)
	if err == nil && len(out) != n {
		err = fmt.Errorf("%d bytes, should be %d", len(out), n)
	}
	if err != nil {
		return nil, fmt.Errorf("unpack: %w: %w", ErrCorrupt, err)
	}
	return out, nil
}

// frameOf gives what is stored for a chunk, maybe the chunk itself. A frame as
// long as its chunk is the chunk: that is how a reader tells.
func (p Packing) frameOf(chunk, dst []byte) []byte {
	if p == None {
		return chunk
	}
	if f := packer().EncodeAll(chunk, dst[:0]); len(f) < len(chunk) {
		return f
	}
	return chunk
}

func chunksOf(size int64) int64 { return (size-1)/erofs.ChunkSize + 1 }

// tableSize is the length of d's chunk table.
func tableSize(d Data) int64 {
	if d.Packed != nil {
		return chunksOf(d.Size) * (sha256.Size + endSize)
	}
	return chunksOf(d.Size) * sha256.Size
}

// Unpack writes the plain bytes of one data blob to w, chunk by chunk, each
// checked. What w got before an error is right, as far as it goes.
func (l *Library) Unpack(ctx context.Context, d Data, w io.Writer) error {
	return stored("image.Unpack", l.unpackData(ctx, d, w))
}

func (l *Library) unpackData(ctx context.Context, d Data, w io.Writer) error {
	t, err := ReadTable(ctx, l.store, d)
	if err != nil {
		return fmt.Errorf("data %s: %w", d.Digest, err)
	}
	from := d.Stored()
	r, err := l.store.Get(ctx, from.Digest, 0, -1)
	if err != nil {
		return fmt.Errorf("data %s: %w", d.Digest, err)
	}
	defer r.Close()
	frame, plain := make([]byte, erofs.ChunkSize), make([]byte, 0, erofs.ChunkSize)
	for i := range t.Len() {
		_, n := t.Range(i)
		if _, err := io.ReadFull(r, frame[:n]); err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				err = fmt.Errorf("%w: %w", ErrCorrupt, err)
			}
			return fmt.Errorf("data %s: chunk %d: %w", from.Digest, i, err)
		}
		b, err := t.Open(i, frame[:n], plain)
		if err != nil {
			return fmt.Errorf("data %s: %w", from.Digest, err)
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// unpacked gives the plain blob of packed data as a file, from opts.Plain. A copy
// that is damaged is made anew.
func (l *Library) unpacked(ctx context.Context, d Data) (string, error) {
	plain := l.opts.Plain
	if plain == nil {
		return "", fmt.Errorf("data %s: %w", d.Digest, errPacked)
	}
	path, err := l.checked(ctx, plain, d.Part)
	if err == nil || !isCorrupt(err) {
		return path, err
	}
	if err := plain.Delete(ctx, d.Digest); err != nil {
		return "", err
	}
	if err := l.plainCopy(ctx, d); err != nil {
		return "", err
	}
	return l.checked(ctx, plain, d.Part)
}

// plainCopy unpacks a blob into opts.Plain.
func (l *Library) plainCopy(ctx context.Context, d Data) error {
	s, err := l.opts.Plain.Stage(ctx)
	if err != nil {
		return err
	}
	defer s.Abort() //nolint:errcheck // swept when the folder is opened
	if err := l.unpackData(ctx, d, s); err != nil {
		return err
	}
	info, err := s.Commit(ctx)
	if err == nil && info.Digest != d.Digest {
		err = fmt.Errorf("data %s unpacks to %s: %w", d.Digest, info.Digest, ErrCorrupt)
		err = errors.Join(err, l.opts.Plain.Delete(ctx, info.Digest))
	}
	return err
}

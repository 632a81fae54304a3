package image

import (
	"context"
	"fmt"
	"io"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	heldChunks = 128 // 32 MiB, of all blobs together
	maxAhead   = 16  // chunks fetched at once
)

// A contentReader reads ranges of the plain bytes of several data blobs, wherever
// and however they are stored, each chunk checked. It serves one goroutine.
type contentReader struct {
	ctx   context.Context
	store blob.Store
	held  map[chunkOf][]byte
	order []chunkOf // the last fetched last
}

type chunkOf struct {
	blob  *contentBlob
	chunk int
}

// A contentBlob is one of them: an io.ReaderAt.
type contentBlob struct {
	reader *contentReader
	data   Data
	table  *Table // nil until it is wanted
	last   int    // the chunk after the last fetch
	ahead  int    // how many were fetched then
}

// contents gives readers of data blobs by tag.
func (l *Library) contents(ctx context.Context, data []Data) map[string]io.ReaderAt {
	r := &contentReader{ctx: ctx, store: l.store, held: map[chunkOf][]byte{}}
	out := map[string]io.ReaderAt{}
	for _, d := range data {
		out[d.Digest.Hex()] = &contentBlob{reader: r, data: d}
	}
	return out
}

// ReadAt implements io.ReaderAt.
func (b *contentBlob) ReadAt(p []byte, off int64) (int, error) {
	n := 0
	for n < len(p) {
		if off >= b.data.Size {
			return n, io.EOF
		}
		c, err := b.chunk(int(off / erofs.ChunkSize))
		if err != nil {
			return n, fmt.Errorf("data %s: %w", b.data.Digest, err)
		}
		k := copy(p[n:], c[off%erofs.ChunkSize:])
		n += k
		off += int64(k)
	}
	return n, nil
}

func (b *contentBlob) chunk(i int) ([]byte, error) {
	if c := b.reader.held[chunkOf{b, i}]; c != nil {
		return c, nil
	}
	if b.table == nil {
		t, err := ReadTable(b.reader.ctx, b.reader.store, b.data)
		if err != nil {
			return nil, err
		}
		b.table = t
	}
	// Who reads in order gets more at a time.
	if i == b.last && b.ahead > 0 {
		b.ahead = min(2*b.ahead, maxAhead)
	} else {
		b.ahead = 1
	}
	n := min(b.ahead, b.table.Len()-i)
	b.last = i + n
	return b.fetch(i, n)
}

// fetch reads n chunks from i on, and gives the first.
func (b *contentBlob) fetch(i, n int) ([]byte, error) {
	off, _ := b.table.Range(i)
	end, k := b.table.Range(i + n - 1)
	r, err := b.reader.store.Get(b.reader.ctx, b.data.Stored().Digest, off, end+k-off)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var first []byte
	for j := i; j < i+n; j++ {
		_, k := b.table.Range(j)
		frame := make([]byte, k)
		if _, err := io.ReadFull(r, frame); err != nil {
			return nil, err
		}
		c, err := b.table.Open(j, frame, b.reader.room())
		if err != nil {
			return nil, err
		}
		b.reader.put(chunkOf{b, j}, c)
		if j == i {
			first = c
		}
	}
	return first, nil
}

// room gives memory for a chunk, of the one that was held for the longest time
// when there are enough.
func (r *contentReader) room() []byte {
	if len(r.order) < heldChunks {
		return nil
	}
	k := r.order[0]
	r.order = r.order[1:]
	b := r.held[k]
	delete(r.held, k)
	return b[:0]
}

func (r *contentReader) put(k chunkOf, c []byte) {
	if _, ok := r.held[k]; !ok {
		r.order = append(r.order, k)
	}
	r.held[k] = c
}

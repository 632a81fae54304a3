package image

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// A dataWriter takes the bytes of a data blob, cuts them into chunks, and writes
// what is stored of each to a staged part. Chunks are summed and packed by as
// many goroutines as there are cores and written in order by one; a bounded
// number is in hand.
type dataWriter struct {
	packing Packing
	out     *part
	cur     *chunkJob
	free    chan *chunkJob
	todo    chan *chunkJob // to be summed and packed, by anybody
	order   chan *chunkJob // the same, in order, to be written
	workers sync.WaitGroup
	writer  sync.WaitGroup
	stop    sync.Once
	err     atomic.Pointer[error] // of a write; nothing is written after it

	// Of the writer until it has ended.
	plain hash.Hash // of a packed blob
	size  int64     // of the plain blob
	sums  []byte
	ends  []byte
}

type chunkJob struct {
	b     []byte // up to a chunk
	buf   []byte // room for a frame
	frame []byte // what is stored: b or in buf
	sum   erofs.Sum
	done  chan struct{}
}

func newDataWriter(out *part, packing Packing) *dataWriter {
	cores := runtime.GOMAXPROCS(0)
	depth := 2*cores + 2
	w := &dataWriter{
		packing: packing, out: out,
		free: make(chan *chunkJob, depth), todo: make(chan *chunkJob, depth), order: make(chan *chunkJob, depth),
	}
	if packing != None {
		w.plain = sha256.New()
	}
	for range depth {
		w.free <- &chunkJob{done: make(chan struct{}, 1)}
	}
	for range cores {
		w.workers.Go(w.work)
	}
	w.writer.Go(w.write)
	return w
}

// Write implements io.Writer.
func (w *dataWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if w.cur == nil {
			w.cur = <-w.free
			if w.cur.b == nil {
				w.cur.b = make([]byte, 0, erofs.ChunkSize)
			}
			w.cur.b = w.cur.b[:0]
		}
		k := copy(w.cur.b[len(w.cur.b):erofs.ChunkSize], p)
		w.cur.b = w.cur.b[:len(w.cur.b)+k]
		p = p[k:]
		if len(w.cur.b) == erofs.ChunkSize {
			w.send()
		}
		if err := w.err.Load(); err != nil {
			return 0, *err
		}
	}
	return n, nil
}

func (w *dataWriter) send() {
	j := w.cur
	w.cur = nil
	w.order <- j
	w.todo <- j
}

func (w *dataWriter) work() {
	for j := range w.todo {
		j.sum = sha256.Sum256(j.b)
		j.frame = j.b
		if w.packing != None {
			if j.buf == nil {
				j.buf = make([]byte, 0, erofs.ChunkSize+erofs.ChunkSize/64)
			}
			j.frame = w.packing.frameOf(j.b, j.buf)
		}
		j.done <- struct{}{}
	}
}

func (w *dataWriter) write() {
	for j := range w.order {
		<-j.done
		w.put(j)
		w.free <- j
	}
}

func (w *dataWriter) put(j *chunkJob) {
	if w.err.Load() != nil {
		return
	}
	if _, err := w.out.Write(j.frame); err != nil {
		err = fmt.Errorf("write blob: %w", err)
		w.err.Store(&err)
		return
	}
	w.size += int64(len(j.b))
	w.sums = append(w.sums, j.sum[:]...)
	if w.packing != None {
		w.plain.Write(j.b)
		w.ends = binary.LittleEndian.AppendUint64(w.ends, uint64(w.out.size))
	}
}

// Close ends the goroutines. It may be called twice.
func (w *dataWriter) Close() {
	w.stop.Do(func() {
		close(w.todo)
		close(w.order)
		w.workers.Wait()
		w.writer.Wait()
	})
}

// finish writes what is left and describes the blob, and what its chunk table
// holds. An empty blob is no data.
func (w *dataWriter) finish() (d Data, table []byte, err error) {
	if w.cur != nil && len(w.cur.b) > 0 {
		w.send()
	}
	w.Close()
	if err := w.err.Load(); err != nil {
		return Data{}, nil, *err
	}
	stored := Part{Digest: w.out.name(), Size: w.out.size}
	d.Part = stored
	if w.packing != None {
		d.Part = Part{Digest: blob.FromHash(w.plain), Size: w.size}
		d.Packed = &stored
	}
	return d, append(w.sums, w.ends...), nil
}

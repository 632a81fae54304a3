package image_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// A catalogue is a store of many layers, of which it has the manifests alone: what
// else would be in it is computed from a number.
type catalogue struct {
	layers  map[blob.Digest]int32
	files   [][]byte // manifests
	garbage int
	now     atomic.Int64 // reads at this moment, and the most there were
	most    atomic.Int64
	deleted atomic.Int64
	listing func() // called when a listing begins
}

// parts of a layer: metadata, and of each data blob what is packed, the chunk
// table and the list of pieces.
func layerOf(i int32) *image.Manifest {
	part := func(kind string, size int64) image.Part {
		return image.Part{Digest: blob.Of(fmt.Append(nil, kind, i)), Size: size}
	}
	m := &image.Manifest{
		Format: "dsec-layer", Version: 2, Role: dsec.Base, Meta: part("meta", 1<<20), Entries: 1000,
		Config: image.Config{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, Cwd: "/work"},
	}
	for j := range 2 {
		packed, pieces := part(fmt.Sprint("packed", j), 1000), part(fmt.Sprint("pieces", j), 34)
		m.Data = append(m.Data, image.Data{
			Part: part(fmt.Sprint("data", j), 4096), Chunks: part(fmt.Sprint("chunks", j), 40), Packed: &packed, Pieces: &pieces,
		})
	}
	return m
}

func newCatalogue(n, garbage int) (*catalogue, []blob.Digest) {
	c := &catalogue{layers: make(map[blob.Digest]int32, n), garbage: garbage}
	roots := make([]blob.Digest, n)
	for i := range roots {
		b, err := json.Marshal(layerOf(int32(i)))
		if err != nil {
			panic(err)
		}
		roots[i] = blob.Of(b)
		c.layers[roots[i]] = int32(i)
		c.files = append(c.files, b)
	}
	return c, roots
}

func (c *catalogue) Stat(_ context.Context, d blob.Digest) (blob.Info, error) {
	return blob.Info{}, blob.ErrNotFound
}

func (c *catalogue) Get(_ context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	i, ok := c.layers[d]
	if !ok {
		return io.NopCloser(bytes.NewReader(make([]byte, max(n, 0)))), nil
	}
	if now := c.now.Add(1); now > c.most.Load() {
		c.most.Store(now)
	}
	return &counted{bytes.NewReader(c.files[i]), c}, nil
}

type counted struct {
	io.Reader
	c *catalogue
}

func (r *counted) Close() error {
	r.c.now.Add(-1)
	return nil
}

func (c *catalogue) Put(context.Context, blob.Digest, io.Reader) error { return nil }

func (c *catalogue) Delete(context.Context, blob.Digest) error { return nil }

func (c *catalogue) Touch(context.Context, blob.Digest) error { return nil }

func (c *catalogue) DeleteIdle(context.Context, blob.Digest, time.Duration) (bool, error) {
	c.deleted.Add(1)
	return true, nil
}

func (c *catalogue) List(context.Context) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		c.listing()
		for d, i := range c.layers {
			if !yield(blob.Info{Digest: d, Size: 1000}, nil) {
				return
			}
			for _, p := range layerOf(i).Parts() {
				if !yield(blob.Info{Digest: p.Digest, Size: p.Size}, nil) {
					return
				}
			}
		}
		for i := range c.garbage {
			if !yield(blob.Info{Digest: blob.Of(fmt.Append(nil, "garbage", i)), Size: 2 << 20}, nil) {
				return
			}
		}
	}
}

// The original's production has some 113,000 layers. What a collection keeps of
// them in memory is far below a gigabyte, and it reads no more manifests at a time
// than a store can take.
func TestCollectAtScale(t *testing.T) {
	n := 113000
	if testing.Short() {
		n = 5000
	}
	c, roots := newCatalogue(n, n/10)
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, during := heap(), int64(0)
	c.listing = func() { during = heap() } // all is marked
	lib := image.New(c, image.LibraryOptions{})
	if _, err := lib.Collect(t.Context(), roots, image.CollectOptions{}); err != nil {
		t.Fatal(err)
	}
	used := max(during, heap()) - before
	t.Logf("%d layers: %d MiB, %d manifests at a time", n, used>>20, c.most.Load())
	if limit := int64(n) * 2048; used > limit { // 220 MiB of 113,000
		t.Errorf("%d MiB in memory, want at most %d", used>>20, limit>>20)
	}
	if most := c.most.Load(); most > 32 || most < 1 {
		t.Errorf("%d manifests were read at a time", most)
	}
	if got := c.deleted.Load(); got != int64(n/10) {
		t.Errorf("%d blobs deleted, want %d", got, n/10)
	}
}

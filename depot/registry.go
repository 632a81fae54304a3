package depot

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/fuse"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/lazy"
)

// registry knows the data blobs of all layers that were told, since a successor is asked for
// any of them: the kernel has them open and does not say what they are but for their node.
type registry struct {
	dir   string
	store blob.Store // whole blobs, near
	cache *lazy.Cache
	limit time.Duration // of fetching a chunk table

	mu     sync.Mutex
	layers map[blob.Digest]*told
	nodes  map[uint64]*known
}

// told is a layer that was told.
type told struct {
	data    []image.Data
	at      time.Time // when last
	release func()    // of its metadata, once its path was told
}

// known is one data blob.
type known struct {
	blob image.Part // its plain bytes

	// Layers may have the same bytes plain and packed, and one way to them may go while others
	// are there: the first is taken. Guarded by registry.mu.
	ways  []image.Data
	turns atomic.Int64 // how often another became the first

	added atomic.Bool        // to the cache
	turn  singleflight.Group // who adds it
}

// node gives the number of a blob in the FUSE folder: the beginning of its digest, never one
// of the numbers that mean something.
func node(d blob.Digest) uint64 {
	sum := d.Sum()
	return binary.BigEndian.Uint64(sum[:8]) | 1<<63
}

func (k *known) file() fuse.File {
	return fuse.File{Name: k.blob.Digest.Hex(), Node: node(k.blob.Digest), Size: k.blob.Size}
}

// openRegistry reads what was written by earlier processes. A file that is torn belongs to a
// layer that was not told.
func openRegistry(dir string, store blob.Store, cache *lazy.Cache, limit time.Duration) (*registry, error) {
	r := &registry{dir: dir, store: store, cache: cache, limit: limit, layers: map[blob.Digest]*told{}, nodes: map[uint64]*known{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open registry of layers: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open registry of layers: %w", err)
	}
	for _, e := range entries {
		d, err := blob.Parse("sha256:" + e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		var data []image.Data
		if err != nil || json.Unmarshal(b, &data) != nil || !sound(data) {
			os.Remove(filepath.Join(dir, e.Name())) //nolint:errcheck // the next start tries again
			continue
		}
		at := time.Time{}
		if info, err := e.Info(); err == nil {
			at = info.ModTime()
		}
		r.enter(d, data, at) //nolint:errcheck // then nobody was told of it
	}
	return r, nil
}

func sound(data []image.Data) bool {
	for _, d := range data {
		if d.Digest.Check() != nil || d.Chunks.Digest.Check() != nil || d.Size <= 0 || d.Packed != nil && d.Packed.Digest.Check() != nil {
			return false
		}
	}
	return true
}

// add writes a layer down and makes its blobs known.
func (r *registry) add(layer blob.Digest, data []image.Data) error {
	now, path := time.Now(), filepath.Join(r.dir, layer.Hex())
	r.mu.Lock()
	l := r.layers[layer]
	if l != nil {
		if now.Sub(l.at) > retell {
			os.Chtimes(path, now, now) //nolint:errcheck // it is forgotten sooner
		}
		l.at = now
	}
	r.mu.Unlock()
	if l != nil {
		return nil
	}
	b, err := json.Marshal(data)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return fmt.Errorf("write down layer: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write down layer: %w", err)
	}
	return r.enter(layer, data, now)
}

func (r *registry) enter(layer blob.Digest, data []image.Data, at time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range data {
		// Whoever finds two blobs whose names begin with the same 63 bits gets no use of it.
		if k := r.nodes[node(d.Digest)]; k != nil && k.blob.Digest != d.Digest {
			return fmt.Errorf("blobs %s and %s have one number: %w", d.Digest, k.blob.Digest, image.ErrCorrupt)
		}
	}
	for _, d := range data {
		k := r.nodes[node(d.Digest)]
		if k == nil {
			k = &known{blob: d.Part}
			r.nodes[node(d.Digest)] = k
		}
		if !slices.ContainsFunc(k.ways, func(w image.Data) bool { return sameWay(w, d) }) {
			k.ways = append(k.ways, d)
		}
	}
	r.layers[layer] = &told{data: data, at: at}
	return nil
}

// hold keeps what release gives back for as long as a layer is known.
func (r *registry) hold(layer blob.Digest, release func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.layers[layer]; l != nil && l.release == nil {
		l.release = release
		return
	}
	release() // it is held already, or was forgotten meanwhile
}

const (
	retell = time.Hour        // after which a layer's file is told that it was told again
	fresh  = 10 * time.Minute // a layer that was told may be about to be mounted
)

// forget forgets layers until no more than most are known: those that were told longest ago, and
// none that is in use or was told just now. It gives how many went.
func (r *registry) forget(inUse map[blob.Digest]bool, most int, fresh time.Duration) int {
	r.mu.Lock()
	var old []blob.Digest
	for d, l := range r.layers {
		if !inUse[d] && time.Since(l.at) > fresh {
			old = append(old, d)
		}
	}
	slices.SortFunc(old, func(a, b blob.Digest) int { return r.layers[a].at.Compare(r.layers[b].at) })
	old = old[:max(0, min(len(old), len(r.layers)-most))]
	gone := map[uint64]*known{}
	for _, d := range old {
		if err := os.Remove(filepath.Join(r.dir, d.Hex())); err != nil && !errors.Is(err, os.ErrNotExist) {
			continue // a successor would know it again
		}
		l := r.layers[d]
		delete(r.layers, d)
		if l.release != nil {
			l.release()
		}
		for _, b := range l.data {
			gone[node(b.Digest)] = r.nodes[node(b.Digest)]
		}
	}
	for _, l := range r.layers {
		for _, b := range l.data {
			delete(gone, node(b.Digest))
		}
	}
	for n := range gone {
		delete(r.nodes, n)
	}
	r.mu.Unlock()
	for _, k := range gone {
		r.cache.Forget(k.blob.Digest)
	}
	return len(old)
}

// get gives a blob by its node.
func (r *registry) get(n uint64) *known {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.nodes[n]
}

// data gives the blobs of a layer that was told.
func (r *registry) data(layer blob.Digest) []image.Data {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.layers[layer]; l != nil {
		return l.data
	}
	return nil
}

func (r *registry) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.layers)
}

// ready has a blob in the cache, so that it can be read: its chunk table is fetched first.
func (r *registry) ready(ctx context.Context, k *known) error {
	if k.added.Load() {
		return nil
	}
	// Those who wait for a store that is away wait together, each for as long as it wants.
	wait := k.turn.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.limit)
		defer cancel()
		r.mu.Lock()
		ways := slices.Clone(k.ways)
		r.mu.Unlock()
		var errs []error
		for _, w := range ways {
			t, err := image.ReadTable(ctx, r.store, w)
			if err == nil {
				err = r.cache.Add(w, t)
			}
			if err == nil {
				k.added.Store(true)
				return nil, nil
			}
			errs = append(errs, err)
		}
		return nil, errors.Join(errs...)
	})
	select {
	case got := <-wait:
		return got.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// detour puts the first way to a blob, which led nowhere, behind the others, unless that was done
// since turn. It reports whether a read that was tried so often has one left.
func (r *registry) detour(k *known, turn int64, tries int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if tries >= len(k.ways) {
		return false
	}
	if k.turns.CompareAndSwap(turn, turn+1) {
		k.ways = append(slices.Clone(k.ways[1:]), k.ways[0])
		k.added.Store(false)
	}
	return true
}

func sameWay(a, b image.Data) bool {
	return a.Chunks == b.Chunks && (a.Packed == nil) == (b.Packed == nil) && (a.Packed == nil || *a.Packed == *b.Packed)
}

// Lookup implements fuse.Folder.
func (r *registry) Lookup(name string) (fuse.File, bool) {
	d, err := blob.Parse("sha256:" + strings.ToLower(name))
	if err != nil || d.Hex() != name {
		return fuse.File{}, false
	}
	k := r.get(node(d))
	if k == nil || k.blob.Digest != d {
		return fuse.File{}, false
	}
	return k.file(), true
}

// File implements fuse.Folder.
func (r *registry) File(n uint64) (fuse.File, bool) {
	k := r.get(n)
	if k == nil {
		return fuse.File{}, false
	}
	return k.file(), true
}

// Files implements fuse.Folder.
func (r *registry) Files() []fuse.File {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]fuse.File, 0, len(r.nodes))
	for _, k := range r.nodes {
		out = append(out, k.file())
	}
	return out
}

// errUnknown is the error of a node that no layer has.
var errUnknown = errors.New("no layer has such a file")

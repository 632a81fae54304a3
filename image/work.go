package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// A Library makes, opens and collects the layers of one store. It is safe for
// concurrent use.
type Library struct {
	store blob.Store
	opts  LibraryOptions

	flight singleflight.Group // checks of content in progress, by digest

	// sweeping is held by a collection while it decides on one blob and deletes
	// it, and shared by imports while they publish: what one of them finds in
	// the store must not vanish before it is done. It is held across I/O for
	// that reason, and taken before mu.
	sweeping sync.RWMutex

	mu       sync.Mutex
	verified map[blob.Digest]string    // what the file looked like when it was checked
	used     map[blob.Digest]time.Time // when a call last wrote or found it here
	idle     map[blob.Digest]time.Time // since when collections see it unreferenced
}

// LibraryOptions are what is optional about a Library.
type LibraryOptions struct {
	// Verified is a folder of this node that remembers which files were
	// checked, so that a restart does not check them again. Without it the
	// memory ends with the process.
	Verified string
	// Temp is a folder for archives that have to be read more than once;
	// default os.TempDir.
	Temp string
}

// New returns the library of a store.
func New(store blob.Store, opts LibraryOptions) *Library {
	return &Library{
		store: store, opts: opts, verified: map[blob.Digest]string{},
		used: map[blob.Digest]time.Time{}, idle: map[blob.Digest]time.Time{},
	}
}

// Options are what is optional about an import.
type Options struct {
	// Role is the layer's place in an environment; default dsec.Base. A base
	// has nothing below it, so its whiteouts are resolved and gone.
	Role dsec.Role
	// Ref chooses one image of an archive or layout that holds several.
	Ref string
	// MaxBytes bounds the bytes of all data blobs; 0 is no bound.
	MaxBytes int64
	// Progress, if set, is called now and then, never twice at a time.
	Progress func(dsec.Progress)
}

// The stages of a dsec.Progress.
const (
	stageFetch = "fetch"
	stageStore = "store"
)

const reportEvery = 1 << 20

// A work is one layer being made. What it writes is staged, and seen by nobody
// until publish.
type work struct {
	lib    *Library
	stager blob.Stager
	opts   Options
	parts  []*part // everything staged, in the order of publishing
	space  int64   // of MaxBytes
	prog   dsec.Progress
	told   int64
}

// A part is one staged blob. It hashes what passes, although the store does so
// too: publish must know all names before the first becomes visible.
type part struct {
	blob.Staged
	hash   hash.Hash
	digest blob.Digest
	size   int64
	chunks []erofs.Sum // of a data blob
	failed bool        // a write failed
}

func (p *part) Write(b []byte) (int, error) {
	n, err := p.Staged.Write(b)
	p.hash.Write(b[:n])
	p.size += int64(n)
	p.failed = p.failed || err != nil
	return n, err
}

func (l *Library) begin(opts Options) (*work, error) {
	if opts.Role == "" {
		opts.Role = dsec.Base
	}
	if err := opts.Role.Check(); err != nil {
		return nil, err
	}
	stager, ok := l.store.(blob.Stager)
	if !ok {
		return nil, dsec.Errorf(dsec.Unsupported, "the blob store takes no bytes of unknown digest")
	}
	return &work{lib: l, stager: stager, opts: opts, space: opts.MaxBytes}, nil
}

// abort throws away what was not published. It is deferred by every import.
func (w *work) abort() {
	for _, p := range w.parts {
		p.Abort() //nolint:errcheck // the store sweeps what it could not remove
	}
}

func (w *work) stage(ctx context.Context) (*part, error) {
	s, err := w.stager.Stage(ctx)
	if err != nil {
		return nil, fmt.Errorf("stage blob: %w", err)
	}
	p := &part{Staged: s, hash: sha256.New()}
	w.parts = append(w.parts, p)
	return p, nil
}

// bytes stages a small blob.
func (w *work) bytes(ctx context.Context, b []byte) (Part, error) {
	p, err := w.stage(ctx)
	if err != nil {
		return Part{}, err
	}
	if _, err := p.Write(b); err != nil {
		return Part{}, fmt.Errorf("write blob: %w", err)
	}
	p.digest = blob.FromHash(p.hash)
	return Part{Digest: p.digest, Size: p.size}, nil
}

// tree stages one data blob with the file contents that read finds.
func (w *work) tree(ctx context.Context, read func(*erofs.Blob) (*erofs.Tree, error)) (*erofs.Tree, error) {
	p, err := w.stage(ctx)
	if err != nil {
		return nil, err
	}
	if w.opts.MaxBytes > 0 && w.space < erofs.BlockSize {
		w.space = erofs.BlockSize // 0 would be no limit; a block more is no harm
	}
	b := erofs.NewBlob(p, erofs.BlobOptions{Limit: w.space})
	t, err := read(b)
	if err == nil {
		_, p.chunks, err = b.Finish()
	}
	if err != nil {
		return nil, err
	}
	p.digest = blob.FromHash(p.hash)
	b.SetTag(p.digest.Hex())
	if w.opts.MaxBytes > 0 {
		w.space -= p.size
	}
	return t, nil
}

// finish encodes the tree, whose data was staged here or, with what older
// layers hold, is in old by tag; and publishes the layer.
func (w *work) finish(ctx context.Context, t *erofs.Tree, m Manifest, old map[string]Data) (Layer, error) {
	im, err := t.Encode()
	if err != nil {
		return Layer{}, err
	}
	data := map[string]*part{}
	for _, p := range w.parts {
		if data[p.digest.Hex()] == nil {
			data[p.digest.Hex()] = p
		}
	}
	all := w.parts
	w.parts = nil
	defer func() { // what no file refers to
		for _, p := range all {
			p.Abort() //nolint:errcheck // does nothing to published ones
		}
	}()
	m.Format, m.Version, m.Role = manifestFormat, manifestVersion, w.opts.Role
	m.Data = []Data{}
	for _, d := range im.Devices {
		if o, ok := old[d.Tag]; ok && data[d.Tag] == nil {
			m.Data = append(m.Data, o)
			continue
		}
		p := data[d.Tag]
		if p == nil {
			return Layer{}, fmt.Errorf("tree names unknown blob %q", d.Tag)
		}
		w.parts = append(w.parts, p)
		table := make([]byte, 0, len(p.chunks)*sha256.Size)
		for _, sum := range p.chunks {
			table = append(table, sum[:]...)
		}
		chunks, err := w.bytes(ctx, table)
		if err != nil {
			return Layer{}, err
		}
		m.Data = append(m.Data, Data{Part: Part{Digest: p.digest, Size: p.size}, Chunks: chunks})
	}
	if m.Meta, err = w.bytes(ctx, im.Meta); err != nil {
		return Layer{}, err
	}
	m.Entries, m.Size = count(t)
	last, err := w.bytes(ctx, m.encode())
	if err != nil {
		return Layer{}, err
	}
	if err := w.publish(ctx, old); err != nil {
		return Layer{}, err
	}
	return Layer{Digest: last.Digest, Manifest: &m}, nil
}

// count gives the number of names and the bytes of files, hard links once.
func count(t *erofs.Tree) (entries, size int64) {
	seen := map[*erofs.Inode]bool{}
	for _, n := range t.Walk() {
		entries++
		if !seen[n] {
			seen[n] = true
			size += n.Size
		}
	}
	return entries, size
}

// publish makes all parts visible, the manifest last. If it fails half way it
// takes back those that were not there before.
func (w *work) publish(ctx context.Context, old map[string]Data) (err error) {
	w.prog = dsec.Progress{Stage: stageStore}
	for _, p := range w.parts {
		w.prog.Total += p.size
	}
	w.told = -reportEvery
	w.advance(0)
	w.lib.sweeping.RLock()
	defer w.lib.sweeping.RUnlock()
	var made []blob.Digest
	defer func() {
		if err == nil {
			return
		}
		// The caller's context may be what ended us.
		ctx := context.WithoutCancel(ctx)
		for _, d := range made {
			err = errors.Join(err, w.lib.store.Delete(ctx, d))
		}
	}()
	seen := map[blob.Digest]bool{}
	need := map[blob.Digest]bool{}
	for _, d := range old {
		for _, p := range []blob.Digest{d.Digest, d.Chunks.Digest} {
			w.lib.touch(ctx, p)
			need[p] = true
		}
	}
	for _, p := range w.parts {
		if !seen[p.digest] {
			seen[p.digest], need[p.digest] = true, true
			fresh, err := w.publishPart(ctx, p)
			if fresh {
				made = append(made, p.digest)
			}
			if err != nil {
				return fmt.Errorf("store blob %s: %w", p.digest, err)
			}
		}
		w.advance(p.size)
	}
	// A collection of another node may have deleted what was found, just before
	// it was touched.
	for d := range need {
		if _, err := w.lib.store.Stat(ctx, d); err != nil {
			return fmt.Errorf("store blob %s: %w", d, err)
		}
	}
	return nil
}

func (w *work) publishPart(ctx context.Context, p *part) (fresh bool, err error) {
	w.lib.touch(ctx, p.digest)
	info, err := w.lib.store.Stat(ctx, p.digest)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		fresh = true
	case err != nil:
		return false, err
	case info.Size != p.size:
		// What lies there is damaged, and we hold the cure.
		if err := w.lib.store.Delete(ctx, p.digest); err != nil {
			return false, err
		}
	}
	info, err = p.Commit(ctx)
	if err != nil {
		return false, err // what another may have written meanwhile is not ours
	}
	if info.Digest != p.digest || info.Size != p.size {
		return fresh, fmt.Errorf("store wrote %s of %d bytes: %w", info.Digest, info.Size, ErrCorrupt)
	}
	if f, ok := w.lib.store.(*blob.Folder); ok && fresh {
		if path, err := f.LocalPath(ctx, p.digest); err == nil {
			w.lib.trust(p.digest, path) // it was hashed on its way there
		}
	}
	return fresh, nil
}

// touch keeps a blob from being collected for a while, in this process and, for
// stores of plain files, on every node.
func (l *Library) touch(ctx context.Context, d blob.Digest) {
	now := time.Now()
	l.mu.Lock()
	l.used[d] = now
	l.mu.Unlock()
	// Of a cache the local file says nothing, and asking for it would fill it.
	if f, ok := l.store.(*blob.Folder); ok {
		if path, err := f.LocalPath(ctx, d); err == nil {
			look, _ := inspect(path)
			checked := look != "" && l.wasVerified(d, look)
			os.Chtimes(path, time.Time{}, now) //nolint:errcheck // gone, or not ours: its age then stands
			if checked {
				l.trust(d, path)
			}
		}
	}
}

// advance reports n more bytes done.
func (w *work) advance(n int64) {
	w.prog.Done += n
	if w.opts.Progress == nil || w.prog.Done-w.told < reportEvery && w.prog.Done != w.prog.Total {
		return
	}
	w.told = w.prog.Done
	w.opts.Progress(w.prog)
}

package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"slices"
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

	// point, which tests set, is told where the work is: between any two of them a
	// process may die or another step in.
	point func(name string)

	flight singleflight.Group // checks of content in progress, by digest

	indexing sync.Mutex
	index    *fileIndex // nil until it is wanted

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
	// Pack is how new data blobs are stored.
	Pack Packing
	// Plain is where packed data blobs are kept unpacked, whole, for Open.
	// Without it Open takes layers that are stored plain.
	Plain *blob.Folder
	// MergeBelow is how large a data blob must be before the next OCI layer begins
	// another; default DefaultMergeBelow. Blobs are made from the lowest layer up,
	// so each depends on the layers up to its own alone, and images that begin with
	// the same layers share the blobs of these. Smaller ones would make more
	// devices of each mount than what they let be shared is worth: equal files are
	// found by the index anyway.
	MergeBelow int64
	// Index is a folder of this node that remembers which files the store has, so
	// that a new layer can point to what older ones hold. Losing it costs space.
	// Without it equal files are found within a layer only.
	Index string
	// Verified is a folder of this node that remembers which files were
	// checked, so that a restart does not check them again. Without it the
	// memory ends with the process.
	Verified string
	// Temp is a folder for archives that have to be read more than once;
	// default os.TempDir.
	Temp string
}

// DefaultMergeBelow is the default of LibraryOptions.MergeBelow.
const DefaultMergeBelow = 128 << 20

// New returns the library of a store.
func New(store blob.Store, opts LibraryOptions) *Library {
	if opts.MergeBelow == 0 {
		opts.MergeBelow = DefaultMergeBelow
	}
	return &Library{
		store: store, opts: opts, verified: map[blob.Digest]string{},
		used: map[blob.Digest]time.Time{}, idle: map[blob.Digest]time.Time{},
	}
}

// at says that the work has come to a point.
func (l *Library) at(point string) {
	if l.point != nil {
		l.point(point)
	}
}

// Options are what is optional about an import.
type Options struct {
	// Role is the layer's place in an environment; default dsec.Base. A base
	// has nothing below it, so its whiteouts are resolved and gone.
	Role dsec.Role
	// Ref chooses one image of an archive or layout that holds several.
	Ref string
	// MaxBytes bounds the bytes of all data blobs; 0 is no bound but MaxInput.
	MaxBytes int64
	// MaxInput bounds the uncompressed bytes that are read, and MaxEntries the
	// files and folders, of all layers of an image together; defaults
	// DefaultMaxInput and DefaultMaxEntries. Names and attributes have a bound of
	// their own, 1 GiB.
	MaxInput   int64
	MaxEntries int64
	// Progress, if set, is called now and then, never twice at a time.
	Progress func(dsec.Progress)
}

// Bounds of what one import may make of its input, however small that is.
const (
	DefaultMaxInput   = 256 << 30
	DefaultMaxEntries = 4 << 20
)

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
	find   *finder
	open   *dataBlob // the one being laid, if any
	blobs  int       // begun so far
	parts  []*part   // everything staged, in the order of publishing
	space  int64     // of MaxBytes
	input  int64     // of MaxInput
	budget *erofs.Budget
	prog   dsec.Progress
	told   int64
}

// A part is one staged blob. It hashes what passes, unless the store says what
// it has hashed: publish must know all names before the first becomes visible.
type part struct {
	blob.Staged
	hash   hash.Hash // nil if the store is asked
	digest blob.Digest
	size   int64
	data   *Data  // of a data blob, without Chunks
	table  []byte // its chunk table
	pieces []byte // and its list of pieces
}

func (p *part) Write(b []byte) (int, error) {
	n, err := p.Staged.Write(b)
	if p.hash != nil {
		p.hash.Write(b[:n])
	}
	p.size += int64(n)
	return n, err
}

// name is the digest of what was written.
func (p *part) name() blob.Digest {
	if p.hash != nil {
		return blob.FromHash(p.hash)
	}
	return p.Staged.(blob.Named).Digest()
}

func (l *Library) newWork(ctx context.Context, opts Options) (*work, error) {
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
	if opts.MaxInput == 0 {
		opts.MaxInput = DefaultMaxInput
	}
	if opts.MaxEntries == 0 {
		opts.MaxEntries = DefaultMaxEntries
	}
	budget := erofs.DefaultBudget()
	budget.Entries, budget.Bytes = opts.MaxEntries, opts.MaxInput
	return &work{
		lib: l, stager: stager, opts: opts, space: opts.MaxBytes, input: opts.MaxInput, budget: budget,
		find: l.newFinder(ctx),
	}, nil
}

// abort throws away what was not published. It is deferred by every import.
func (w *work) abort() {
	if w.open != nil {
		w.open.writer.Close()
	}
	for _, p := range w.parts {
		p.Abort() //nolint:errcheck // the store sweeps what it could not remove
	}
}

func (w *work) stage(ctx context.Context) (*part, error) {
	s, err := w.stager.Stage(ctx)
	if err != nil {
		return nil, fmt.Errorf("stage blob: %w", err)
	}
	p := &part{Staged: s}
	if _, ok := s.(blob.Named); !ok {
		p.hash = sha256.New()
	}
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
	p.digest = p.name()
	return Part{Digest: p.digest, Size: p.size}, nil
}

// tree lays the file contents that read finds into the data blob at hand,
// beginning one if there is none.
func (w *work) tree(ctx context.Context, read func(*erofs.Blob) (*erofs.Tree, error)) (*erofs.Tree, error) {
	if w.open == nil {
		if err := w.begin(ctx); err != nil {
			return nil, err
		}
	}
	return read(w.open.blob)
}

// A dataBlob is a data blob being laid.
type dataBlob struct {
	part   *part
	blob   *erofs.Blob
	writer *dataWriter
	pieces []byte // the list of them
}

// begin begins a data blob.
func (w *work) begin(ctx context.Context) error {
	p, err := w.stage(ctx)
	if err != nil {
		return err
	}
	if w.opts.MaxBytes > 0 && w.space < erofs.BlockSize {
		w.space = erofs.BlockSize // 0 would be no limit; a block more is no harm
	}
	o := &dataBlob{part: p, writer: newDataWriter(p, w.lib.opts.Pack)}
	o.blob = erofs.NewBlob(o.writer, erofs.BlobOptions{
		Limit: w.space, Sums: erofs.Unsummed, Lookup: w.find.lookup,
		Laid: func(sum erofs.Sum, size int) { o.pieces = appendPiece(o.pieces, sum, size) },
	})
	w.open = o
	w.blobs++
	w.lib.at("stage")
	return nil
}

// end completes the data blob at hand, if there is one.
func (w *work) end() error {
	o := w.open
	if o == nil {
		return nil
	}
	w.open = nil
	defer o.writer.Close()
	size, _, err := o.blob.Finish()
	if err != nil {
		return err
	}
	d, table, err := o.writer.finish()
	if err != nil {
		return err
	}
	o.part.data, o.part.table, o.part.pieces, o.part.digest = &d, table, o.pieces, d.Stored().Digest
	o.blob.SetTag(d.Digest.Hex())
	if w.opts.MaxBytes > 0 {
		w.space -= size
	}
	w.find.laid(o.blob.Device(), o.pieces)
	w.lib.at("laid")
	return nil
}

// finish encodes the tree, whose data was staged here or, with what older
// layers hold, is in old by tag; and publishes the layer. If the store has a layer
// of the same content it is that.
func (w *work) finish(ctx context.Context, t *erofs.Tree, m Manifest, old map[string]Data) (Layer, error) {
	if err := w.end(); err != nil {
		return Layer{}, err
	}
	if l, ok := w.existing(ctx, m.Content); ok {
		return l, nil
	}
	im, err := t.Encode()
	if err != nil {
		return Layer{}, err
	}
	data := map[string]*part{}
	for _, p := range w.parts {
		if p.data != nil && data[p.data.Digest.Hex()] == nil {
			data[p.data.Digest.Hex()] = p
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
	found := w.find.data()
	var older []Data
	var lists []*part
	for _, d := range im.Devices {
		if p := data[d.Tag]; p != nil {
			if err := w.describe(ctx, p); err != nil {
				return Layer{}, err
			}
			m.Data = append(m.Data, *p.data)
			lists = append(lists, p)
			continue
		}
		o, ok := old[d.Tag]
		if !ok {
			if o, ok = found[d.Tag]; !ok {
				return Layer{}, fmt.Errorf("tree names unknown blob %q", d.Tag)
			}
		}
		m.Data = append(m.Data, o)
		older = append(older, o)
	}
	if m.Meta, err = w.bytes(ctx, im.Meta); err != nil {
		return Layer{}, err
	}
	m.Entries, m.Size = count(t)
	last, err := w.bytes(ctx, m.encode())
	if err != nil {
		return Layer{}, err
	}
	w.lib.at("publish")
	if err := w.publish(ctx, older); err != nil {
		return Layer{}, err
	}
	w.lib.at("index")
	l := Layer{Digest: last.Digest, Manifest: &m}
	w.remember(l, lists)
	w.lib.at("done")
	return l, nil
}

// describe stages what is stored beside a data blob.
func (w *work) describe(ctx context.Context, p *part) (err error) {
	w.parts = append(w.parts, p)
	if p.data.Chunks, err = w.bytes(ctx, p.table); err != nil {
		return err
	}
	list, err := w.bytes(ctx, p.pieces)
	p.data.Pieces = &list
	return err
}

// existing gives the layer of a content, if there is one and nothing of it is
// missing.
func (w *work) existing(ctx context.Context, content blob.Digest) (Layer, bool) {
	if w.find.index == nil || content == "" {
		return Layer{}, false
	}
	digest, ok := w.find.index.layerOf(content)
	if !ok {
		return Layer{}, false
	}
	l := w.lib
	l.sweeping.RLock()
	defer l.sweeping.RUnlock()
	l.touch(ctx, digest)
	m, err := l.manifest(ctx, digest)
	if err != nil || m.Content != content || m.Role != w.opts.Role {
		return Layer{}, false
	}
	if slices.ContainsFunc(m.Data, func(d Data) bool { return !l.takes(d) }) {
		return Layer{}, false
	}
	parts := m.Parts()
	for _, p := range parts {
		l.touch(ctx, p.Digest)
	}
	for _, p := range parts {
		if info, err := l.store.Stat(ctx, p.Digest); err != nil || info.Size != p.Size {
			return Layer{}, false
		}
	}
	return Layer{Digest: digest, Manifest: m}, true
}

// remember takes a new layer into the file index. What that cannot take is stored
// again by others.
func (w *work) remember(l Layer, made []*part) {
	x := w.find.index
	if x == nil {
		return
	}
	for _, p := range made {
		list, err := parsePieces(p.pieces, p.data.Size)
		if err == nil {
			err = x.add(*p.data, list)
		}
		if err != nil {
			return
		}
	}
	x.addLayer(l.Digest, l.Manifest.Content)
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
func (w *work) publish(ctx context.Context, old []Data) (err error) {
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
		for _, p := range d.parts() {
			w.lib.touch(ctx, p.Digest)
			need[p.Digest] = true
		}
	}
	for _, p := range w.parts {
		if !seen[p.digest] {
			seen[p.digest], need[p.digest] = true, true
			w.lib.at("part")
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

// touch keeps a blob from being collected for a while, in this process and, if the
// store can be told, on every node.
func (l *Library) touch(ctx context.Context, d blob.Digest) {
	now := time.Now()
	l.mu.Lock()
	l.used[d] = now
	l.mu.Unlock()
	k, ok := l.store.(blob.Keeper)
	if !ok {
		return
	}
	// A new time of the file is no new content. Of a cache the local file says
	// nothing, and asking for it would fill it.
	path, checked := "", false
	files, local := l.store.(blob.LocalPather)
	if _, drops := l.store.(blob.Holder); local && !drops {
		if p, err := files.LocalPath(ctx, d); err == nil {
			look, _ := inspect(p)
			path, checked = p, look != "" && l.wasVerified(d, look)
		}
	}
	k.Touch(ctx, d) //nolint:errcheck // it is gone, or not ours to touch: its age then stands
	if checked {
		l.trust(d, path)
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

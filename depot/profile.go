package depot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/lazy"
)

// MaxProfile bounds the bytes of a profile.
const MaxProfile = 1 << 20

// profileVersion is that of docs/formats/profile.md.
const profileVersion = 2

// profile is which pages of a layer were read first, in order, and where these pages lie
// together: chunks are what can be checked, and a task that reads small files here and there
// wants far less than the chunks that these are in.
type profile struct {
	V      int           `json:"v"`
	Data   []blob.Digest `json:"data"`
	Pack   blob.Digest   `json:"pack"`
	Frames []frame       `json:"frames"` // of the pack, one behind the other
}

// frame is a part of a pack that is checked and unpacked by itself.
type frame struct {
	Sum     string   `json:"sum"`    // SHA-256 of its bytes in the pack, in hex
	Stored  int      `json:"stored"` // their number; as many as there are pages' bytes if they lie there plain
	Extents []extent `json:"extents"`
}

// Bounds of frames.
const (
	frameSize    = 512 << 10 // bytes of pages in one; a row of pages may go on in the next
	frameTimeout = 10 * time.Second
	packsAtATime = 8
)

// PackOf gives the blob of pages that a profile names.
func PackOf(b []byte) (blob.Digest, error) {
	p, err := decodeProfile(b)
	return p.Pack, err
}

// decodeProfile reads a profile. It is a hint, but what it brings is what sandboxes read: who
// names it for a layer is trusted as who names the layer is.
func decodeProfile(b []byte) (profile, error) {
	var p profile
	if len(b) > MaxProfile {
		return p, fmt.Errorf("a profile of %d bytes", len(b))
	}
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&p); err != nil {
		return p, fmt.Errorf("read profile: %w", err)
	}
	if p.V != profileVersion {
		return p, fmt.Errorf("read profile: version %d", p.V)
	}
	if err := p.Pack.Check(); err != nil {
		return p, fmt.Errorf("read profile: %w", err)
	}
	for i, d := range p.Data {
		if slices.Contains(p.Data[:i], d) {
			return p, fmt.Errorf("read profile: blob %s twice", d)
		}
	}
	for i, f := range p.Frames {
		if f.Stored <= 0 || f.Stored > frameSize || len(f.Sum) != 2*sha256.Size {
			return p, fmt.Errorf("read profile: frame %d has %d bytes", i, f.Stored)
		}
		pages, ends := 0, map[int]bool{} // each blob ends within a page
		for _, x := range f.Extents {
			ends[x[0]] = true
			if x[0] < 0 || x[0] >= len(p.Data) || x[1] < 0 || x[2] <= 0 || x[1] > maxNotedBlob/lazy.PageSize || x[2] > frameSize/lazy.PageSize {
				return p, fmt.Errorf("read profile: pages %d to %d of blob %d", x[1], x[1]+x[2], x[0])
			}
			pages += x[2]
		}
		if pages > frameSize/lazy.PageSize+len(ends) {
			return p, fmt.Errorf("read profile: frame %d has %d pages", i, pages)
		}
	}
	return p, nil
}

// pack writes the pages that were noted of a layer into a blob of the store, and gives the
// profile. Pages that are gone from the cache by now are left out.
func (s *server) pack(ctx context.Context, n *note) ([]byte, error) {
	select {
	case s.packing <- struct{}{}:
		defer func() { <-s.packing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	stager, ok := s.cfg.Store.(blob.Stager)
	if !ok {
		return nil, nil
	}
	out, err := stager.Stage(ctx)
	if err != nil {
		return nil, fmt.Errorf("pack pages: %w", err)
	}
	defer out.Abort() //nolint:errcheck // nothing once it is committed
	p := profile{V: profileVersion, Data: n.data}
	buf := make([]byte, 0, frameSize)
	var rows []extent
	flush := func() error {
		if len(buf) == 0 {
			return nil
		}
		stored := image.Pack(buf)
		sum := sha256.Sum256(stored)
		p.Frames = append(p.Frames, frame{Sum: hex.EncodeToString(sum[:]), Stored: len(stored), Extents: rows})
		_, err := out.Write(stored)
		buf, rows = buf[:0], nil
		return err
	}
	// Pages are taken from chunks that are what their table says: one bit that this disk has
	// changed would be everybody's.
	var last struct {
		blob, chunk int
		data        []byte
	}
	last.chunk = -1
	take := func(b int, off int64, p []byte) bool {
		for len(p) > 0 {
			i := int(off / erofs.ChunkSize)
			if last.blob != b || last.chunk != i {
				last.blob, last.chunk, last.data = b, i, s.cache.Chunk(n.data[b], i)
			}
			from := off - int64(i)*erofs.ChunkSize
			if from >= int64(len(last.data)) {
				return false
			}
			k := copy(p, last.data[from:])
			p, off = p[k:], off+int64(k)
		}
		return true
	}
	for _, x := range n.extents {
		size := s.sizeOf(n.data[x[0]])
		for x[2] > 0 {
			part := extent{x[0], x[1], min(x[2], (frameSize-len(buf))/lazy.PageSize)}
			off := int64(part[1]) * lazy.PageSize
			at, many := len(buf), int(min(int64(part[2])*lazy.PageSize, size-off))
			if many <= 0 {
				break
			}
			if buf = buf[:at+many]; take(x[0], off, buf[at:]) {
				rows = append(rows, part)
			} else {
				buf = buf[:at]
			}
			x[1], x[2] = x[1]+part[2], x[2]-part[2]
			if frameSize-len(buf) < lazy.PageSize {
				if err := flush(); err != nil {
					return nil, fmt.Errorf("pack pages: %w", err)
				}
			}
		}
	}
	if err := flush(); err != nil || len(p.Frames) == 0 {
		return nil, err
	}
	info, err := out.Commit(ctx)
	if err != nil {
		return nil, fmt.Errorf("pack pages: %w", err)
	}
	p.Pack = info.Digest
	b, err := json.Marshal(p)
	if err != nil || len(b) > MaxProfile {
		return nil, err // not with maxExtents
	}
	return b, nil
}

// sizeOf is the bytes of a blob that is known; 0 for others.
func (s *server) sizeOf(d blob.Digest) int64 {
	if k := s.folder.get(node(d)); k != nil {
		return k.blob.Size
	}
	return 0
}

// prefetch brings what a profile of a layer names, as far as it is of that layer. It returns
// when reads know what is coming.
func (s *server) prefetch(ctx context.Context, layer blob.Digest, b []byte) error {
	p, err := decodeProfile(b)
	if err != nil {
		return dsec.Errorf(dsec.Invalid, "%w", err)
	}
	of := map[blob.Digest]bool{}
	for _, d := range s.folder.data(layer) {
		if err := s.folder.ready(ctx, s.folder.get(node(d.Digest))); err != nil {
			return err
		}
		of[d.Digest] = true
	}
	for _, d := range p.Data {
		if !of[d] {
			return dsec.Errorf(dsec.Invalid, "the profile is of another layer: it has none of blob %s", d)
		}
	}
	s.folder.noted.dismiss(layer)
	var wanted []int
	var expected []lazy.Extent
	for i, f := range p.Frames {
		if rows := p.pages(f); s.cache.Wants(rows) {
			wanted, expected = append(wanted, i), append(expected, rows...)
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	select {
	case s.packs <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	done := s.cache.Expect(expected)
	go func() {
		defer func() { <-s.packs }()
		defer done()
		err := s.bring(s.life, p, wanted)
		if err == nil || s.life.Err() != nil {
			return
		}
		s.cfg.Log.Warn("the pages of a profile did not come; they are fetched when they are read", "layer", layer, "err", err)
		if errors.Is(err, image.ErrCorrupt) || errors.Is(err, blob.ErrNotFound) || errors.Is(err, blob.ErrRange) {
			s.folder.noted.spoil(layer)
		}
	}()
	return nil
}

// pages gives the extents of a frame as the cache has them.
func (p profile) pages(f frame) []lazy.Extent {
	out := make([]lazy.Extent, 0, len(f.Extents))
	for _, x := range f.Extents {
		out = append(out, lazy.Extent{Blob: p.Data[x[0]], First: x[1], Many: x[2]})
	}
	return out
}

// bring reads frames of the pack of a profile and keeps their pages.
func (s *server) bring(ctx context.Context, p profile, wanted []int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	slow := time.AfterFunc(frameTimeout, func() { cancel(errors.New("the store did not answer in time")) })
	defer slow.Stop()
	offsets := make([]int64, len(p.Frames)+1)
	for i, f := range p.Frames {
		offsets[i+1] = offsets[i] + int64(f.Stored)
	}
	for len(wanted) > 0 {
		n := 1
		for n < len(wanted) && wanted[n] == wanted[0]+n {
			n++
		}
		first, last := wanted[0], wanted[n-1]
		body, err := s.cfg.Store.Get(ctx, p.Pack, offsets[first], offsets[last+1]-offsets[first])
		if err != nil {
			return lazy.Because(ctx, err)
		}
		for i := first; i <= last && err == nil; i++ {
			if err = s.bringFrame(ctx, p, i, body); err == nil {
				slow.Reset(frameTimeout)
				s.cache.GiveWay(ctx)
			} else {
				err = fmt.Errorf("frame %d: %w", i, err)
			}
		}
		body.Close()
		if err != nil {
			return err
		}
		wanted = wanted[n:]
	}
	return nil
}

// bringFrame reads frame i of a pack, checks it, and keeps its pages.
func (s *server) bringFrame(ctx context.Context, p profile, i int, body io.Reader) error {
	f := p.Frames[i]
	stored := make([]byte, f.Stored)
	n, err := io.ReadFull(body, stored)
	s.cache.Count(int64(n))
	if err != nil {
		return lazy.Because(ctx, err)
	}
	if sum := sha256.Sum256(stored); hex.EncodeToString(sum[:]) != f.Sum {
		return fmt.Errorf("other content than its sum says: %w", image.ErrCorrupt)
	}
	rows := p.pages(f)
	size, sizes := 0, make([]int, len(rows))
	for j, x := range rows {
		n := min(int64(x.Many)*lazy.PageSize, s.sizeOf(x.Blob)-int64(x.First)*lazy.PageSize)
		if n <= int64(x.Many-1)*lazy.PageSize {
			return fmt.Errorf("blob %s ends before page %d: %w", x.Blob, x.First+x.Many-1, image.ErrCorrupt)
		}
		sizes[j] = int(n)
		size += sizes[j]
	}
	data, err := image.Unpack(stored, size)
	if err != nil {
		return err
	}
	for j, x := range rows {
		if !s.cache.Bring(x, data[:sizes[j]]) {
			return errors.New("there is no room")
		}
		data = data[sizes[j]:]
	}
	return nil
}

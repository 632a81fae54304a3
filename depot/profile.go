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
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
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
	for i, f := range p.Frames {
		if f.Stored <= 0 || f.Stored > frameSize || len(f.Sum) != 2*sha256.Size {
			return p, fmt.Errorf("read profile: frame %d has %d bytes", i, f.Stored)
		}
		pages := 0
		for _, x := range f.Extents {
			if x[0] < 0 || x[0] >= len(p.Data) || x[1] < 0 || x[2] <= 0 || x[1] > maxNotedBlob/lazy.PageSize || x[2] > frameSize/lazy.PageSize {
				return p, fmt.Errorf("read profile: pages %d to %d of blob %d", x[1], x[1]+x[2], x[0])
			}
			pages += x[2]
		}
		if pages > frameSize/lazy.PageSize+len(p.Data) { // each blob ends within a page
			return p, fmt.Errorf("read profile: frame %d has %d pages", i, pages)
		}
	}
	return p, nil
}

// pack writes the pages that were noted of a layer into a blob of the store, and gives the
// profile. Pages that are gone from the cache by now are left out.
func (s *server) pack(ctx context.Context, n *note) ([]byte, error) {
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
	for _, x := range n.extents {
		size := s.sizeOf(n.data[x[0]])
		for x[2] > 0 {
			part := extent{x[0], x[1], min(x[2], (frameSize-len(buf))/lazy.PageSize)}
			off := int64(part[1]) * lazy.PageSize
			at, many := len(buf), int(min(int64(part[2])*lazy.PageSize, size-off))
			if many <= 0 {
				break
			}
			if buf = buf[:at+many]; s.cache.Peek(n.data[x[0]], off, buf[at:]) {
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
	select {
	case s.packs <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	var expected []lazy.Extent
	for _, f := range p.Frames {
		expected = append(expected, p.pages(f)...)
	}
	done := s.cache.Expect(expected)
	go func() {
		defer func() { <-s.packs }()
		defer done()
		if err := s.bring(s.life, p); err != nil && s.life.Err() == nil {
			s.cfg.Log.Warn("the pages of a profile did not come; they are fetched when they are read", "layer", layer, "err", err)
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

// bring reads the pack of a profile and keeps its pages.
func (s *server) bring(ctx context.Context, p profile) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	slow := time.AfterFunc(frameTimeout, func() { cancel(errors.New("the store did not answer in time")) })
	defer slow.Stop()
	total := int64(0)
	for _, f := range p.Frames {
		total += int64(f.Stored)
	}
	body, err := s.cfg.Store.Get(ctx, p.Pack, 0, total)
	if err != nil {
		return lazy.Because(ctx, err)
	}
	defer body.Close()
	stored := make([]byte, frameSize)
	for i, f := range p.Frames {
		n, err := io.ReadFull(body, stored[:f.Stored])
		s.cache.Count(int64(n))
		if err != nil {
			return lazy.Because(ctx, fmt.Errorf("frame %d: %w", i, err))
		}
		slow.Reset(frameTimeout)
		if sum := sha256.Sum256(stored[:f.Stored]); hex.EncodeToString(sum[:]) != f.Sum {
			return fmt.Errorf("frame %d has other content than its sum says: %w", i, image.ErrCorrupt)
		}
		rows := p.pages(f)
		size, sizes := 0, make([]int, len(rows))
		for j, x := range rows {
			n := min(int64(x.Many)*lazy.PageSize, s.sizeOf(x.Blob)-int64(x.First)*lazy.PageSize)
			if n <= 0 {
				return fmt.Errorf("frame %d: blob %s has no page %d: %w", i, x.Blob, x.First, image.ErrCorrupt)
			}
			sizes[j] = int(n)
			size += sizes[j]
		}
		data, err := image.Unpack(stored[:f.Stored], size)
		if err != nil {
			return fmt.Errorf("frame %d: %w", i, err)
		}
		for j, x := range rows {
			if !s.cache.Bring(x, data[:sizes[j]]) {
				return fmt.Errorf("frame %d: there is no room", i)
			}
			data = data[sizes[j]:]
		}
		s.cache.GiveWay(ctx)
	}
	return nil
}

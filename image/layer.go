package image

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

const (
	manifestFormat  = "dsec-layer"
	manifestVersion = 2 // what is written; all from 1 on are read
	// The file system allows no more blobs, nor larger ones.
	maxData     = 65535
	maxPart     = 16 << 40
	maxManifest = 32 << 20 // holds maxData
)

// A Part is one blob of a layer.
type Part struct {
	Digest blob.Digest `json:"digest"`
	Size   int64       `json:"size"`
}

// Data is one data blob, known by the digest and size of its plain bytes, which
// are what the metadata image's device is.
type Data struct {
	Part
	// Chunks is the blob's chunk table; see Table.
	Chunks Part `json:"chunks"`
	// Packed, if set, is the blob that is stored instead of the plain one: its
	// chunks, each compressed by itself, end to end. Then the plain blob is in no
	// store, and the chunk table says where each chunk's frame ends.
	Packed *Part `json:"packed,omitempty"`
	// Pieces, if set, is a list of the contents that the blob holds; see
	// pieceList. Nothing needs it but an import that looks for equal files.
	Pieces *Part `json:"pieces,omitempty"`
}

// Stored is the blob that a store has of d.
func (d Data) Stored() Part {
	if d.Packed != nil {
		return *d.Packed
	}
	return d.Part
}

// parts lists the blobs that d is stored in.
func (d Data) parts() []Part {
	parts := []Part{d.Stored(), d.Chunks}
	if d.Pieces != nil {
		parts = append(parts, *d.Pieces)
	}
	return parts
}

func (d Data) check(version int) error {
	switch {
	case d.Digest.Check() != nil:
		return fmt.Errorf("%w: %w", d.Digest.Check(), ErrCorrupt)
	case d.Size <= 0 || d.Size > maxPart || d.Size%erofs.BlockSize != 0 || d.Chunks.Size != tableSize(d):
		return fmt.Errorf("blob %s of %d bytes with a chunk table of %d: %w", d.Digest, d.Size, d.Chunks.Size, ErrCorrupt)
	case d.Packed != nil && (version < 2 || d.Packed.Size <= 0 || d.Packed.Size > d.Size):
		return fmt.Errorf("blob %s packed into %d bytes: %w", d.Digest, d.Packed.Size, ErrCorrupt)
	case d.Pieces != nil && (version < 2 || d.Pieces.Size <= 0 || d.Pieces.Size%pieceSize != 0 ||
		d.Pieces.Size/pieceSize > d.Size/erofs.BlockSize):
		return fmt.Errorf("blob %s with a list of pieces of %d bytes: %w", d.Digest, d.Pieces.Size, ErrCorrupt)
	}
	return nil
}

// Origin is what an OCI image said of itself.
type Origin struct {
	Config  blob.Digest   `json:"config"`
	DiffIDs []blob.Digest `json:"diff_ids"`
}

// Config is how an image wants things run in it.
type Config struct {
	Env        []string `json:"env,omitempty"`
	Cwd        string   `json:"cwd,omitempty"`
	User       string   `json:"user,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
}

// A Manifest describes one layer. It is stored as JSON under its own digest,
// which is the layer's digest; fields therefore are only ever added, and a new
// one that readers must know makes a new version.
type Manifest struct {
	Format  string    `json:"format"`
	Version int       `json:"version"`
	Role    dsec.Role `json:"role"`
	Meta    Part      `json:"meta"` // the EROFS metadata image
	Data    []Data    `json:"data"` // in the order of its device table
	Size    int64     `json:"size"` // sum of file sizes
	Entries int64     `json:"entries"`
	Config  Config    `json:"config"`
	Origin  *Origin   `json:"origin,omitempty"`
	// Content names what the layer was made of, whatever the store had already:
	// the digest of a layer depends on which older blobs it points into. It is
	// absent from commits.
	Content blob.Digest `json:"content,omitempty"`
}

// Parts lists every blob the layer needs, without its manifest.
func (m *Manifest) Parts() []Part {
	parts := []Part{m.Meta}
	for _, d := range m.Data {
		parts = append(parts, d.parts()...)
	}
	return parts
}

// Stored is the number of bytes the layer's parts take in a store, without
// regard to parts that other layers share.
func (m *Manifest) Stored() int64 {
	var n int64
	for _, p := range m.Parts() {
		n += p.Size
	}
	return n
}

// Check reports what cannot be true of a layer.
func (m *Manifest) Check() error {
	switch {
	case m.Format != manifestFormat:
		return fmt.Errorf("format %.40q: %w", m.Format, ErrCorrupt)
	case m.Version < 1 || m.Version > manifestVersion:
		return dsec.Errorf(dsec.Unsupported, "layer manifest of version %d", m.Version)
	case m.Role.Check() != nil:
		return fmt.Errorf("role %.40q: %w", m.Role, ErrCorrupt)
	case m.Size < 0 || m.Entries < 1:
		return fmt.Errorf("%d bytes in %d entries: %w", m.Size, m.Entries, ErrCorrupt)
	case m.Meta.Size < erofs.BlockSize || m.Meta.Size%erofs.BlockSize != 0:
		return fmt.Errorf("metadata image of %d bytes: %w", m.Meta.Size, ErrCorrupt)
	}
	if m.Content != "" && (m.Version < 2 || m.Content.Check() != nil) {
		return fmt.Errorf("content %.80q: %w", m.Content, ErrCorrupt)
	}
	if len(m.Data) > maxData {
		return fmt.Errorf("%d data blobs: %w", len(m.Data), ErrCorrupt)
	}
	for _, p := range m.Parts() {
		if err := p.Digest.Check(); err != nil {
			return fmt.Errorf("%w: %w", err, ErrCorrupt)
		}
		if p.Size < 0 || p.Size > maxPart {
			return fmt.Errorf("blob %s of %d bytes: %w", p.Digest, p.Size, ErrCorrupt)
		}
	}
	for _, d := range m.Data {
		if err := d.check(m.Version); err != nil {
			return err
		}
	}
	return nil
}

// encode gives the one byte form of m.
func (m *Manifest) encode() []byte {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // plain data marshals
	}
	return b
}

// ParseManifest reads a manifest. Unknown fields are refused: a layer that
// needs them would be misread without.
func ParseManifest(b []byte) (*Manifest, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var m Manifest
	if err := d.Decode(&m); err != nil {
		return nil, fmt.Errorf("parse layer manifest: %w: %w", ErrCorrupt, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("parse layer manifest: more than one value: %w", ErrCorrupt)
	}
	if err := m.Check(); err != nil {
		return nil, fmt.Errorf("parse layer manifest: %w", err)
	}
	return &m, nil
}

// A Layer is a manifest with its digest.
type Layer struct {
	Digest   blob.Digest
	Manifest *Manifest
}

// Image gives what the layer says of an image made of it. Name, Version,
// Created and Source are the caller's to fill in.
func (l Layer) Image() dsec.Image {
	m := l.Manifest
	return dsec.Image{
		Role: m.Role, Digest: string(l.Digest), Size: m.Size, Stored: m.Stored(), Entries: m.Entries,
		Config: dsec.ImageConfig{
			Env: m.Config.Env, Cwd: m.Config.Cwd, User: m.Config.User,
			Shell: append(append([]string(nil), m.Config.Entrypoint...), m.Config.Cmd...),
		},
	}
}

// Stat reads and checks a layer's manifest.
func (l *Library) Stat(ctx context.Context, digest blob.Digest) (Layer, error) {
	m, err := l.manifest(ctx, digest)
	if err != nil {
		return Layer{}, stored("image.Stat", fmt.Errorf("layer %s: %w", digest, err))
	}
	return Layer{Digest: digest, Manifest: m}, nil
}

func (l *Library) manifest(ctx context.Context, digest blob.Digest) (*Manifest, error) {
	b, err := readSmall(ctx, l.store, digest, maxManifest)
	if err != nil {
		return nil, err
	}
	return ParseManifest(b)
}

// readSmall reads and checks a blob that is not larger than most.
func readSmall(ctx context.Context, s blob.Store, d blob.Digest, most int64) ([]byte, error) {
	r, err := s.Get(ctx, d, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	case int64(len(b)) > most:
		return nil, fmt.Errorf("blob %s of more than %d bytes: %w", d, most, ErrCorrupt)
	}
	if got := blob.Of(b); got != d {
		return nil, fmt.Errorf("blob %s has content %s: %w", d, got, ErrCorrupt)
	}
	return b, nil
}

// stored is fault for what lies in the store: corruption there is no caller's, and
// what was there is lost.
func stored(op string, err error) error {
	if err == nil {
		return nil
	}
	if isCorrupt(err) {
		err = &dsec.Error{Kind: dsec.Lost, Err: fmt.Errorf("%w: %w", ErrCorrupt, err)}
	}
	return fault(op, err)
}

// Package snapshot keeps saved states of sandboxes in a blob store: the files
// that a driver wrote, in chunks, and a manifest that describes them. The name of
// a state is the digest of its manifest.
//
// It does not know what is in the files, which the driver checks itself, nor who
// may see a state; it does not save or restore anything that runs.
//
// Invariants:
//   - No two states share a chunk: each begins with its state's secret. So
//     removing a state needs to know of no other, on any node.
//   - A manifest is written after its chunks and deleted before them: a state
//     that can be found is whole.
//   - What a Put that failed, or a process that died in one, has written is
//     deleted, at the latest when the next Store is opened on the same Drafts.
//   - Runs of zeros, and holes, are not stored.
//
// Read next: store.go for the work, docs/formats/snapshot.md for the format.
package snapshot

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// State is a snapshot with what a node needs to go on from it.
type State struct {
	dsec.Snapshot
	Guest Guest
}

// Guest is what the commands of the sandbox have by default.
type Guest struct {
	Env  []string `json:"env,omitempty"` // NAME=value
	Cwd  string   `json:"cwd,omitempty"`
	User string   `json:"user,omitempty"`
}

// The manifest's format. A later version is refused by its number.
const (
	manifestFormat  = "dsec-snapshot"
	manifestVersion = 1
	maxManifest     = 64 << 20
)

// Bounds of a chunk: what it holds of a file, and what it begins with.
const (
	chunkBytes  = 4 << 20
	secretBytes = 32
	prefixBytes = secretBytes + 16 // and the numbers of file and byte
)

// manifest describes one state.
type manifest struct {
	Format  string    `json:"format"`
	Version int       `json:"version"`
	Secret  []byte    `json:"secret"`
	State   stateJSON `json:"state"`
	Files   []file    `json:"files"`
}

// stateJSON is a State without what follows from the manifest itself.
type stateJSON struct {
	Project  dsec.ProjectID `json:"project,omitempty"`
	Sandbox  dsec.SandboxID `json:"sandbox"`
	Spec     dsec.Spec      `json:"spec"`
	Layers   []string       `json:"layers"`
	Created  time.Time      `json:"created"`
	Memory   bool           `json:"memory,omitempty"`
	Sequence uint64         `json:"sequence,omitempty"`
	Key      string         `json:"key,omitempty"`
	Guest    Guest          `json:"guest"`
}

// file is one file by its path in the folder. What no chunk covers is zero.
type file struct {
	Name   string  `json:"name"`
	Size   int64   `json:"size"`
	Chunks []chunk `json:"chunks,omitempty"`
}

type chunk struct {
	At   int64       `json:"at"`
	Size int64       `json:"size"`
	Blob blob.Digest `json:"blob"`
}

func (m *manifest) state(id dsec.SnapshotID) State {
	s := m.State
	out := State{Guest: s.Guest, Snapshot: dsec.Snapshot{
		ID: id, Project: s.Project, Sandbox: s.Sandbox, Spec: s.Spec, Layers: s.Layers, Created: s.Created,
		Memory: s.Memory, Sequence: s.Sequence, Key: s.Key,
	}}
	for _, f := range m.Files {
		for _, c := range f.Chunks {
			out.Size += c.Size
		}
	}
	return out
}

// decode reads a manifest and trusts nothing in it but its digest.
func decode(b []byte) (*manifest, error) {
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil || head.Format != manifestFormat {
		return nil, fmt.Errorf("it is no manifest of a snapshot")
	}
	if head.Version != manifestVersion {
		return nil, fmt.Errorf("it has version %d, this build reads %d", head.Version, manifestVersion)
	}
	var m manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	if len(m.Secret) != secretBytes {
		return nil, fmt.Errorf("its secret has %d bytes", len(m.Secret))
	}
	for _, f := range m.Files {
		if !filepath.IsLocal(f.Name) || f.Size < 0 {
			return nil, fmt.Errorf("file %q of %d bytes is impossible", f.Name, f.Size)
		}
		end := int64(0)
		for _, c := range f.Chunks {
			if c.At < end || c.Size <= 0 || c.Size > chunkBytes || c.At > f.Size-c.Size {
				return nil, fmt.Errorf("file %q of %d bytes has no room for %d bytes at %d", f.Name, f.Size, c.Size, c.At)
			}
			if err := c.Blob.Check(); err != nil {
				return nil, err
			}
			end = c.At + c.Size
		}
	}
	return &m, nil
}

package synthetic

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// copyMachine is a machine that can be saved and forked, and has a screen; a
// separate type because powers are found by assertion.
type copyMachine struct{ *machine }

var (
	_ driver.Snapshotter = copyMachine{}
	_ driver.Forker      = copyMachine{}
	_ driver.Screen      = copyMachine{}
	_ driver.Restorer    = (*Driver)(nil)
)

// savedVersion is that of the file of a snapshot.
const savedVersion = 1

const savedFile = "snapshot.json"

type saved struct {
	Version int               `json:"version"`
	Files   map[string][]byte `json:"files"` // by path; folders follow from them
}

// contents copies the files of a machine.
func (m *machine) contents() map[string][]byte {
	m.mu.Lock()
	t := m.files
	m.mu.Unlock()
	out := map[string][]byte{}
	if t == nil {
		return out
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for p, f := range t.files {
		if !f.dir {
			out[p] = slices.Clone(f.data)
		}
	}
	return out
}

// fill gives a machine files.
func (m *machine) fill(contents map[string][]byte) error {
	t, err := files{m}.table()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for p, b := range contents {
		if err := t.parents(p); err != nil {
			return err
		}
		t.files[p] = &file{mode: 0o644, data: slices.Clone(b), mod: m.born}
	}
	return nil
}

// Snapshot writes the files of the machine.
func (m copyMachine) Snapshot(ctx context.Context, dir string) (driver.SnapshotInfo, error) {
	if err := m.alive(); err != nil {
		return driver.SnapshotInfo{}, err
	}
	if err := m.host.hit(ctx, OpSnapshot); err != nil {
		return driver.SnapshotInfo{}, err
	}
	b, err := json.Marshal(saved{savedVersion, m.contents()})
	if err != nil {
		return driver.SnapshotInfo{}, err
	}
	return driver.SnapshotInfo{Bytes: int64(len(b))}, os.WriteFile(filepath.Join(dir, savedFile), b, 0o600)
}

// Restore starts a machine with the files of a snapshot.
func (d *Driver) Restore(ctx context.Context, c driver.Config, dir string) (driver.Machine, error) {
	b, err := os.ReadFile(filepath.Join(dir, savedFile))
	if err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "snapshot: %w", err)
	}
	var s saved
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "snapshot: %w", err)
	}
	if s.Version != savedVersion {
		return nil, dsec.Errorf(dsec.Invalid, "snapshot: it has version %d, this build reads %d", s.Version, savedVersion)
	}
	return d.copied(ctx, c, s.Files)
}

func (d *Driver) copied(ctx context.Context, c driver.Config, contents map[string][]byte) (driver.Machine, error) {
	m, err := d.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	d.host.mu.Lock()
	inner := d.host.machines[c.ID]
	d.host.mu.Unlock()
	return m, inner.fill(contents)
}

// Fork starts machines with the files of this one.
func (m copyMachine) Fork(ctx context.Context, children []driver.Config) ([]driver.Machine, error) {
	if err := m.alive(); err != nil {
		return nil, err
	}
	if err := m.host.hit(ctx, OpFork); err != nil {
		return nil, err
	}
	contents := m.contents()
	var out []driver.Machine
	for _, c := range children {
		k, err := m.host.Driver().copied(ctx, c, contents)
		if err != nil {
			for _, k := range out {
				k.Stop(context.WithoutCancel(ctx)) //nolint:errcheck // a scripted fault of a test
			}
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

// Screenshot gives bytes that name the machine: it is no picture.
func (m copyMachine) Screenshot(context.Context) ([]byte, error) {
	if err := m.alive(); err != nil {
		return nil, err
	}
	return []byte("screen of " + m.config.ID), nil
}

// Input counts.
func (m copyMachine) Input(ctx context.Context, _ []dsec.InputEvent) error {
	if err := m.alive(); err != nil {
		return err
	}
	return m.host.hit(ctx, OpInput)
}

// wholeMachine is a machine that pauses and does not reclaim.
type wholeMachine struct {
	driver.Machine
	driver.Pauser
}

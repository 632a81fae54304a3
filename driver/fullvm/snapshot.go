package fullvm

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
)

var (
	_ driver.Snapshotter = (*machine)(nil)
	_ driver.Forker      = (*machine)(nil)
)

// snapshotVersion is that of the files of a snapshot:
//
//	snapshot.json  what it is, and checksums
//	memory         the machine as QEMU saves it, all of its memory included
//	disk           the qcow2 overlay over the image
//	vars           settings of UEFI firmware, where there are
const (
	snapshotVersion = 1
	snapshotFile    = "snapshot.json"
)

type snapshot struct {
	Version   int               `json:"version"`
	Kind      dsec.Kind         `json:"kind"`
	Image     image             `json:"image"` // but for its path
	Resources dsec.Resources    `json:"resources"`
	Agent     Agent             `json:"agent,omitempty"`
	Sums      map[string]string `json:"sums"`
}

// Snapshot implements driver.Snapshotter.
func (m *machine) Snapshot(ctx context.Context, dir string) (driver.SnapshotInfo, error) {
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return driver.SnapshotInfo{}, err
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	if err := m.saveInto(ctx, dir); err != nil {
		return driver.SnapshotInfo{}, m.judge(fmt.Errorf("snapshot: %w", err))
	}
	sums, bytes, err := sumFiles(dir)
	if err != nil {
		return driver.SnapshotInfo{}, m.judge(fmt.Errorf("snapshot: %w", err))
	}
	st := m.state()
	s := snapshot{Version: snapshotVersion, Kind: dsec.FullVM, Image: st.Image, Resources: st.Resources, Agent: st.Agent, Sums: sums}
	s.Image.Path = ""
	if err := writeJSON(filepath.Join(dir, snapshotFile), s); err != nil {
		return driver.SnapshotInfo{}, m.judge(fmt.Errorf("snapshot: %w", err))
	}
	return driver.SnapshotInfo{Memory: true, Bytes: bytes}, nil
}

// saveInto writes memory and disk as they are at one moment. A machine that ran
// runs on after it, also after a failure. Requires: m.moving held.
func (m *machine) saveInto(ctx context.Context, dir string) error {
	if m.Paused() {
		if err := copySparse(filepath.Join(dir, memoryFile), m.slot.path(memoryFile)); err != nil {
			return err
		}
		return m.slot.giveDisk(dir)
	}
	err := m.slot.save(ctx, filepath.Join(dir, memoryFile), qemu.SaveOptions{})
	if err == nil {
		err = m.slot.giveDisk(dir)
	}
	err = errors.Join(err, m.goOn())
	if err == nil {
		m.wake(ctx)
	}
	return err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumFiles gives the checksums of a snapshot's files and what they take on disk.
func sumFiles(dir string) (map[string]string, int64, error) {
	sums, bytes := map[string]string{}, int64(0)
	for _, name := range []string{memoryFile, diskFile, varsFile} {
		f, err := os.Open(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) && name == varsFile {
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		h := crc32.New(castagnoli)
		n, err := io.Copy(h, f)
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &st)
		}
		f.Close()
		if err != nil {
			return nil, 0, err
		}
		bytes += st.Blocks * 512
		sums[name] = fmt.Sprintf("%d-%08x", n, h.Sum32())
	}
	return sums, bytes, nil
}

// openSnapshot reads and checks a snapshot.
func openSnapshot(dir string) (snapshot, error) {
	var s snapshot
	err := readJSON(filepath.Join(dir, snapshotFile), &s)
	switch {
	case err != nil:
		return s, dsec.Errorf(dsec.Invalid, "the snapshot is damaged: %w", err)
	case s.Version != snapshotVersion || s.Kind != dsec.FullVM:
		return s, dsec.Errorf(dsec.Invalid, "the snapshot is of kind %q, version %d; this is %s, version %d", s.Kind, s.Version, dsec.FullVM, snapshotVersion)
	}
	sums, _, err := sumFiles(dir)
	if err != nil {
		return s, dsec.Errorf(dsec.Invalid, "the snapshot is damaged: %w", err)
	}
	for _, name := range []string{memoryFile, diskFile, varsFile} {
		if sums[name] != s.Sums[name] {
			return s, dsec.Errorf(dsec.Invalid, "the snapshot is damaged: its file %s is not what was written", name)
		}
	}
	return s, nil
}

// Restore implements driver.Restorer.
func (d *Driver) Restore(ctx context.Context, c driver.Config, dir string) (driver.Machine, error) {
	s, err := openSnapshot(dir)
	if err != nil {
		return nil, err
	}
	return d.restore(ctx, c, dir, s)
}

func (d *Driver) restore(ctx context.Context, c driver.Config, dir string, s snapshot) (driver.Machine, error) {
	i, err := check(c)
	if err != nil {
		return nil, err
	}
	switch {
	case i.Format != s.Image.Format || i.Size != s.Image.Size || i.UEFI != s.Image.UEFI:
		return nil, dsec.Errorf(dsec.Invalid, "the snapshot is of a machine with another disk image")
	case ram(c.Resources) != ram(s.Resources) || cpus(c.Resources) != cpus(s.Resources) || c.Resources.Disk != s.Resources.Disk:
		return nil, dsec.Errorf(dsec.Invalid, "the snapshot is of a machine with %v cores, %d MiB of memory and a disk of %d MiB: it cannot be restored with others",
			s.Resources.CPU, s.Resources.Memory>>20, s.Resources.Disk>>20)
	}
	t := driver.NewTimer()
	g, err := d.newSlot()
	if err != nil {
		return nil, err
	}
	g.image, g.agent = i, s.Agent
	err = g.takeDisk(dir)
	t.Mark("disk")
	if err == nil {
		err = d.at("process")
	}
	if err == nil {
		err = g.load(ctx, launch{resources: c.Resources}, filepath.Join(dir, memoryFile), qemu.SaveOptions{})
		t.Mark("machine")
	}
	var m *machine
	if err == nil {
		m, err = d.dress(ctx, g, c, t)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("restore: %w", err), g.destroy())
	}
	if s.Agent == QemuGuest {
		m.wake(ctx)
	}
	return m, nil
}

const forkDir = "fork-"

// Fork implements driver.Forker: a snapshot, restored as often as there are
// children. Their memory is their own.
func (m *machine) Fork(ctx context.Context, children []driver.Config) ([]driver.Machine, error) {
	dir, err := os.MkdirTemp(m.driver.config.Dir, forkDir)
	if err != nil {
		return nil, noSpace(err)
	}
	defer os.RemoveAll(dir)
	m.moving.Lock()
	if err = m.gone(); err == nil {
		both, cancel := m.both(ctx)
		err = m.judge(m.saveInto(both, dir))
		cancel()
	}
	m.moving.Unlock()
	if err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	st := m.state()
	s := snapshot{Image: st.Image, Resources: st.Resources, Agent: st.Agent}
	out := make([]driver.Machine, len(children))
	errs := make([]error, len(children))
	var wg sync.WaitGroup
	room := make(chan struct{}, forkAtOnce)
	for i, c := range children {
		wg.Go(func() {
			room <- struct{}{}
			out[i], errs[i] = m.driver.restore(ctx, c, dir, s)
			<-room
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, c := range out {
			if c != nil {
				err = errors.Join(err, c.Stop(context.WithoutCancel(ctx)))
			}
		}
		return nil, fmt.Errorf("fork: %w", err)
	}
	return out, nil
}

// forkAtOnce is how many children are restored at a time.
const forkAtOnce = 2

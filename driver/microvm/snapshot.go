package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

var (
	_ driver.Snapshotter = (*machine)(nil)
)

// Version is that of the form of a snapshot's folder.
const Version = 1

// Files of a snapshot's folder. Memory and disks are page files of all that is
// not zero: whoever copies them need not care for holes.
const (
	snapshotInfo   = "snapshot.json"
	snapshotFormat = "dsec-microvm"
	snapshotMemory = "memory"
	snapshotDevice = "device"
)

// manifest is the content of snapshot.json.
type manifest struct {
	Format  string              `json:"format"`
	Version int                 `json:"version"`
	Shape   shape               `json:"shape"`
	QEMU    string              `json:"qemu"`
	Accel   string              `json:"accel"`
	Layers  []string            `json:"layers"` // digests
	Pmem    []int               `json:"pmem,omitempty"`
	Disks   map[string]int64    `json:"disks"` // their sizes
	Files   map[string]fileInfo `json:"files"`
}

type fileInfo struct {
	Size int64  `json:"size"`
	CRC  uint32 `json:"crc32c"`
}

// Snapshot implements driver.Snapshotter: memory and disks of one moment.
func (m *machine) Snapshot(ctx context.Context, dir string) (driver.SnapshotInfo, error) {
	m.moving.Lock()
	defer m.moving.Unlock()
	var none driver.SnapshotInfo
	if err := m.gone(); err != nil {
		return none, err
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	p, err := m.driver.platform(ctx)
	if err != nil {
		return none, err
	}
	st := m.state()
	man := manifest{Format: snapshotFormat, Version: Version, Shape: st.Shape, QEMU: p.qemu, Accel: p.machine(), Disks: map[string]int64{}, Files: map[string]fileInfo{}}
	for i, l := range st.Layers {
		man.Layers = append(man.Layers, l.Digest)
		if slices.Contains(st.Pmem, pmemName(l)) {
			man.Pmem = append(man.Pmem, i)
		}
	}
	if st.Paused {
		err = m.copySaved(ctx, dir, man.Disks)
	} else {
		err = m.saveRunning(ctx, dir, man.Disks)
	}
	if err == nil {
		err = man.sum(dir)
	}
	if err == nil {
		var b []byte
		if b, err = json.MarshalIndent(man, "", "  "); err == nil {
			err = writeWhole(filepath.Join(dir, snapshotInfo), b)
		}
	}
	if err != nil {
		return none, m.judge(fmt.Errorf("snapshot: %w", err))
	}
	info := driver.SnapshotInfo{Memory: true}
	for _, name := range []string{snapshotMemory, snapshotDevice, upperFile, outputFile, snapshotInfo} {
		var s unix.Stat_t
		if unix.Stat(filepath.Join(dir, name), &s) == nil {
			info.Bytes += s.Blocks * 512
		}
	}
	return info, nil
}

// saveRunning saves a machine that runs, and lets it run on. Requires: m.moving
// held.
func (m *machine) saveRunning(ctx context.Context, dir string, sizes map[string]int64) (err error) {
	m.stand()
	defer func() { err = errors.Join(err, m.goOn()) }()
	if err := m.slot.process().Stop(ctx); err != nil {
		return err
	}
	if err := m.slot.saveDevices(ctx, filepath.Join(dir, snapshotDevice)); err != nil {
		return err
	}
	if err := m.slot.savePages(filepath.Join(dir, snapshotMemory), allPages); err != nil {
		return err
	}
	return m.packDisks(dir, sizes)
}

// packDisks writes the disks of a standing machine as page files.
func (m *machine) packDisks(dir string, sizes map[string]int64) error {
	for _, name := range []string{upperFile, outputFile} {
		in, err := os.Open(m.slot.path(name))
		if err != nil {
			return err
		}
		fi, err := in.Stat()
		if err == nil {
			sizes[name] = fi.Size()
			err = writePageFile(filepath.Join(dir, name), in, fi.Size())
		}
		in.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// unpack makes a file of size bytes of a page file.
func unpack(to, from string, size int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer out.Close()
	if err = out.Truncate(size); err == nil {
		err = readPages(bufio.NewReaderSize(in, 1<<20), size, memoryFile{out}.writePages)
	}
	if errors.Is(err, errPages) {
		return dsec.Errorf(dsec.Invalid, "the snapshot cannot be read: %w", err)
	}
	return noSpace(err)
}

// copyDisks copies the disks of a standing machine.
func (m *machine) copyDisks(dir string) error {
	for _, name := range []string{upperFile, outputFile} {
		if err := copyDisk(filepath.Join(dir, name), m.slot.path(name)); err != nil {
			return err
		}
	}
	return nil
}

// copyDisk copies a disk, sharing its blocks where the file system can.
func copyDisk(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer out.Close()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	if _, err := copySparse(out, in, fi.Size()); err != nil {
		return noSpace(fmt.Errorf("copy disk: %w", err))
	}
	return nil
}

// copySaved makes a snapshot of a paused machine. Requires: m.moving held.
func (m *machine) copySaved(ctx context.Context, dir string, sizes map[string]int64) error {
	saved := m.slot.path(savedDir)
	base, err := checkSaved(saved)
	if err != nil {
		return err
	}
	if _, err := copyFile(filepath.Join(dir, snapshotDevice), filepath.Join(saved, savedDevice)); err != nil {
		return err
	}
	if base == nil && !exists(filepath.Join(saved, savedBase)) {
		if _, err := copyFile(filepath.Join(dir, snapshotMemory), filepath.Join(saved, savedPages)); err != nil {
			return err
		}
		return m.packDisks(dir, sizes)
	}
	// Base and own pages make the memory that all pages of are written.
	mem, err := m.whole(saved, base)
	if err != nil {
		return err
	}
	defer mem.Close()
	if err := writePageFile(filepath.Join(dir, snapshotMemory), mem, m.slot.shape.RAM); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return m.packDisks(dir, sizes)
}

// whole puts a paused machine's memory together.
func (m *machine) whole(saved string, want *fileInfo) (*os.File, error) {
	size := m.slot.shape.RAM
	mem, err := newMemory("whole", size)
	if err != nil {
		return nil, err
	}
	fill := func() error {
		base, err := os.Open(filepath.Join(saved, savedBase))
		switch {
		case err == nil:
			err = copyBase(mem, base, size, want)
			base.Close()
			if err != nil {
				return err
			}
		case want != nil && errors.Is(err, fs.ErrNotExist):
			return errDamaged(savedBase)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		pages, err := os.Open(filepath.Join(saved, savedPages))
		if err != nil {
			return err
		}
		defer pages.Close()
		return readPages(bufio.NewReaderSize(pages, 1<<20), size, memoryFile{mem}.writePages)
	}
	if err := fill(); err != nil {
		mem.Close()
		return nil, err
	}
	return mem, nil
}

// writePageFile writes the page file of size bytes of a file.
func writePageFile(path string, from *os.File, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	p := &pageFile{w: w}
	if err := eachData(from, size, func(b []byte, off int64) error { return eachRun(b, off, p.writePages) }); err != nil {
		return noSpace(err)
	}
	return noSpace(errors.Join(p.end(size), w.Flush(), f.Close()))
}

func copyFile(to, from string) (int64, error) {
	in, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, noSpace(err)
	}
	n, err := io.Copy(out, in)
	return n, noSpace(errors.Join(err, out.Close()))
}

// sum notes what the files are.
func (man *manifest) sum(dir string) error {
	for _, name := range []string{snapshotMemory, snapshotDevice, upperFile, outputFile} {
		i, err := sumFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		man.Files[name] = i
	}
	return nil
}

func sumFile(path string) (fileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return fileInfo{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return fileInfo{}, err
	}
	i := fileInfo{Size: fi.Size()}
	i.CRC, err = checksum(f)
	return i, err
}

// readManifest reads and judges what a snapshot says of itself.
func readManifest(dir string) (manifest, error) {
	var man manifest
	f, err := os.Open(filepath.Join(dir, snapshotInfo))
	if err != nil {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot has no %s", snapshotInfo)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return man, err
	}
	return parseManifest(b)
}

func parseManifest(b []byte) (manifest, error) {
	var man manifest
	var head struct {
		Format  string
		Version json.Number
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot's %s is damaged: %w", snapshotInfo, err)
	}
	if head.Format != snapshotFormat {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot is of format %q, not %s", head.Format, snapshotFormat)
	}
	if head.Version.String() != fmt.Sprint(Version) {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot is %s version %s; this node reads version %d", snapshotFormat, head.Version, Version)
	}
	if err := json.Unmarshal(b, &man); err != nil {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot's %s is damaged: %w", snapshotInfo, err)
	}
	s := man.Shape
	if s.RAM < MinRAM || s.RAM > MaxRAM || s.RAM&(s.RAM-1) != 0 || s.CPUs < 1 || s.CPUs > maxCPUs || s.Variant != Block && s.Variant != DAX {
		return man, dsec.Errorf(dsec.Invalid, "the snapshot is of no machine: %v", s)
	}
	for _, name := range []string{upperFile, outputFile} {
		if n := man.Disks[name]; n < minDisk || n > diskSlot || n%page != 0 {
			return man, dsec.Errorf(dsec.Invalid, "the snapshot's disk %s has %d bytes", name, n)
		}
	}
	return man, nil
}

// Restore implements driver.Restorer. The machine's size is the snapshot's.
func (d *Driver) Restore(ctx context.Context, c driver.Config, dir string) (driver.Machine, error) {
	if err := checkRoot(c.Root); err != nil {
		return nil, err
	}
	man, err := readManifest(dir)
	if err != nil {
		return nil, err
	}
	if err := man.fits(c.Root); err != nil {
		return nil, err
	}
	p, err := d.platform(ctx)
	if err != nil {
		return nil, err
	}
	if man.QEMU != p.qemu || man.Accel != p.machine() {
		return nil, dsec.Errorf(dsec.Unsupported, "the snapshot was made by %s (%s); this node has %s (%s)", man.QEMU, man.Accel, p.qemu, p.machine())
	}
	for _, name := range []string{snapshotMemory, snapshotDevice, upperFile, outputFile} {
		got, err := sumFile(filepath.Join(dir, name))
		if err != nil || got != man.Files[name] {
			return nil, dsec.Errorf(dsec.Invalid, "the snapshot's file %s is damaged", name)
		}
	}
	t := driver.NewTimer()
	mem, err := newMemory("own", man.Shape.RAM)
	if err != nil {
		return nil, err
	}
	defer mem.Close()
	f, err := os.Open(filepath.Join(dir, snapshotMemory))
	if err != nil {
		return nil, err
	}
	err = readPages(bufio.NewReaderSize(f, 1<<20), man.Shape.RAM, memoryFile{mem}.writePages)
	f.Close()
	if err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "the snapshot cannot be read: %w", err)
	}
	t.Mark("memory")
	m, err := d.spawn(ctx, c, man, saved{
		memory: mem, shared: true, device: filepath.Join(dir, snapshotDevice),
		disk: func(to, name string) error { return unpack(to, filepath.Join(dir, name), man.Disks[name]) },
	}, t)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// fits says whether a root is the one that the saved machine had.
func (man *manifest) fits(r driver.Root) error {
	var have []string
	for _, l := range r.Files {
		have = append(have, l.Digest)
	}
	if !slices.Equal(have, man.Layers) {
		return dsec.Errorf(dsec.Invalid, "the snapshot is of another environment")
	}
	for _, i := range man.Pmem {
		if i < 0 || i >= len(have) {
			return dsec.Errorf(dsec.Invalid, "the snapshot's %s is damaged", snapshotInfo)
		}
	}
	return nil
}

// saved is where the state of a machine to be is.
type saved struct {
	memory *os.File
	shared bool // the machine is the memory's only user
	device string
	disk   func(to, name string) error // writes one of the disks
}

// spawn makes a machine of a saved one, with an identity of its own.
func (d *Driver) spawn(ctx context.Context, c driver.Config, man manifest, s saved, t *driver.Timer) (*machine, error) {
	if err := roomFor(man.Shape.RAM + overhead); err != nil {
		return nil, err
	}
	g, err := d.newSlot(man.Shape)
	if err != nil {
		return nil, err
	}
	m, err := d.spawnIn(ctx, g, c, man, s, t)
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	return m, nil
}

func (d *Driver) spawnIn(ctx context.Context, g *slot, c driver.Config, man manifest, s saved, t *driver.Timer) (*machine, error) {
	st := state{ID: c.ID, Shape: man.Shape, Resources: c.Resources, Layers: c.Root.Files}
	for _, i := range man.Pmem {
		one, err := d.flat.get(c.Root.Files[i])
		if err != nil {
			return nil, err
		}
		if err := g.keepPmem([]flat{one}); err != nil {
			return nil, err
		}
		st.Pmem = append(st.Pmem, one.name)
	}
	for _, name := range []string{upperFile, outputFile} {
		if err := s.disk(g.path(name), name); err != nil {
			return nil, err
		}
	}
	t.Mark("disks")
	if err := g.loadFrom(ctx, launch{memory: s.memory, shared: s.shared, pmem: g.pmemPaths(st.Pmem)}, s.device, nil, st); err != nil {
		return nil, err
	}
	t.Mark("machine")
	if err := g.process().Cont(ctx); err != nil {
		return nil, err
	}
	answer, cancel := d.answering(ctx)
	defer cancel()
	answer, stop := g.alive(answer)
	defer stop()
	if _, err := g.ctl.Restored(answer, identity(&c)); err != nil {
		return nil, fmt.Errorf("wake the guest: %w", err)
	}
	t.Mark("wake")
	if err := g.limit(c.Resources); err != nil {
		return nil, err
	}
	m := d.newMachine(g, st)
	m.stages = t.Stages()
	if err := writeState(g.dir, st); err != nil {
		return nil, errors.Join(err, m.client.Close())
	}
	return m, d.register(m)
}

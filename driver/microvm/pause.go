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
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
)

var _ driver.Pauser = (*machine)(nil)

// A paused machine has no process. Its slot's folder "saved" holds the states
// of its devices, the pages of its memory that differ from its template's, and
// a link to that template's memory, which may be dropped meanwhile. Where the
// template is not on disk any more, or the machine is no copy of one, all
// pages are there.
const (
	savedDevice = "device"
	savedPages  = "pages"
	savedBase   = "base"
	savedSums   = "sums" // of the two files that the pause wrote, as JSON
)

// undoTimeout bounds what sets right what went wrong.
const undoTimeout = 20 * time.Second

// stand makes the bytes of a machine's ports come to rest. Requires: m.moving
// held, or nobody else knows m.
func (m *machine) stand() {
	m.slot.control.Suspend()
	m.slot.frames.Suspend()
}

// Pause implements driver.Pauser. Time does not pass for the guest until
// Resume, so no command's time passes either.
func (m *machine) Pause(ctx context.Context) error {
	m.Usage(ctx) //nolint:errcheck // the last figures are as good
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return err
	}
	if m.Paused() {
		return nil
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	m.stand()
	err := m.save(ctx)
	if err == nil {
		err = m.setPaused(true)
	}
	if err != nil {
		return m.judge(errors.Join(fmt.Errorf("pause: %w", err), m.goOn()))
	}
	m.leave()
	m.mu.Lock()
	m.usage.Memory = 0
	m.mu.Unlock()
	return nil
}

// leave ends the process without the machine ending. Requires: m.moving held.
func (m *machine) leave() {
	p := m.slot.process()
	m.slot.onHush(nil)
	m.mu.Lock()
	m.leaving = p
	m.mu.Unlock()
	if p != nil {
		p.Kill()
	}
	m.slot.mu.Lock()
	m.slot.proc = nil
	m.slot.mu.Unlock()
}

// save stops the machine and writes the folder "saved". Requires: m.moving held.
func (m *machine) save(ctx context.Context) error {
	dir := m.slot.path(savedDir)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return noSpace(err)
	}
	if err := m.slot.process().Stop(ctx); err != nil {
		return err
	}
	if err := m.slot.saveDevices(ctx, filepath.Join(dir, savedDevice)); err != nil {
		return err
	}
	which, base := allPages, (*fileInfo)(nil)
	if t := m.driver.kept(m.slot.maps()); t != nil {
		if err := os.Link(filepath.Join(t.dir, templateMemory), filepath.Join(dir, savedBase)); err == nil {
			which, base = ownPages, &fileInfo{Size: m.slot.shape.RAM, CRC: t.sum}
		}
	}
	if err := m.slot.savePages(filepath.Join(dir, savedPages), which); err != nil {
		return err
	}
	sums, err := sumsOf(dir)
	if err != nil {
		return err
	}
	if base != nil {
		sums[savedBase] = *base
	}
	b, err := json.Marshal(sums)
	if err != nil {
		return err
	}
	return noSpace(writeWhole(filepath.Join(dir, savedSums), b))
}

// sumsOf gives the checksums of what a pause wrote; that of the base is the
// template's.
func sumsOf(dir string) (map[string]fileInfo, error) {
	sums := map[string]fileInfo{}
	for _, name := range []string{savedDevice, savedPages} {
		i, err := sumFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		sums[name] = i
	}
	return sums, nil
}

// checkSaved refuses a saved machine whose files are not as they were written: it
// would go on with other memory. The base is looked at where it is read; its
// checksum is given, if there is one.
func checkSaved(dir string) (base *fileInfo, err error) {
	b, err := os.ReadFile(filepath.Join(dir, savedSums))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // of a version before there were any
	}
	var want map[string]fileInfo
	if err == nil {
		err = json.Unmarshal(b, &want)
	}
	if err != nil {
		return nil, fmt.Errorf("read checksums of the saved machine: %w", err)
	}
	got, err := sumsOf(dir)
	if err != nil {
		return nil, err
	}
	for name, sum := range want {
		if name == savedBase {
			base = &sum
		} else if got[name] != sum {
			return nil, errDamaged(name)
		}
	}
	return base, nil
}

func errDamaged(name string) error {
	return dsec.Errorf(dsec.Lost, "the saved machine is damaged: file %s", name)
}

// kept gives the template of that ID if it is still on disk.
func (d *Driver) kept(id string) *template {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.templates {
		if t.ID == id && id != "" {
			return t
		}
	}
	return nil
}

// savePages writes the pages of a standing machine into a new file.
func (g *slot) savePages(path string, which choice) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	p := &pageFile{w: w}
	if err := g.eachPage(which, p); err != nil {
		return err
	}
	if err := errors.Join(p.end(g.shape.RAM), w.Flush(), f.Close()); err != nil {
		return noSpace(fmt.Errorf("save guest memory: %w", err))
	}
	return nil
}

// eachPage gives the pages of a standing machine.
func (g *slot) eachPage(which choice, w pageWriter) error {
	pid := g.process().Pid()
	addr, err := memoryAt(pid, g.shape.RAM)
	if err != nil {
		return err
	}
	return savePages(pid, addr, g.shape.RAM, which, w)
}

// goOn lets a machine that still has its process run on, and tells it how late
// it is. Requires: m.moving held.
func (m *machine) goOn() error {
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	os.RemoveAll(m.slot.path(savedDir)) //nolint:errcheck // the next pause tries again
	err := m.slot.process().Cont(ctx)
	m.slot.control.Resume()
	if err == nil {
		m.slot.ctl.Restored(ctx, identity(nil)) //nolint:errcheck // a guest that does not answer is no worse for it
	}
	m.slot.frames.Resume()
	return err
}

// Resume implements driver.Pauser.
func (m *machine) Resume(ctx context.Context) error {
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return err
	}
	if !m.Paused() {
		return nil
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	err := m.restore(ctx)
	if err == nil {
		err = m.setPaused(false) // from here on what was saved is not what is
	}
	if err == nil {
		if err = m.slot.process().Cont(ctx); err != nil {
			err = errors.Join(err, m.setPaused(true))
		}
	}
	if err != nil {
		m.leave()
		return m.judge(fmt.Errorf("resume: %w", err))
	}
	m.follow()
	os.RemoveAll(m.slot.path(savedDir)) //nolint:errcheck // the next pause does
	m.slot.control.Resume()
	wake, stop := context.WithTimeout(ctx, m.driver.config.Answer)
	_, err = m.slot.ctl.Restored(wake, identity(nil))
	stop()
	m.slot.frames.Resume()
	if err != nil {
		// It runs, and says nothing: no other end than a death.
		m.hushed(fmt.Sprintf("the guest did not come back from a pause: %v", err))
		return m.judge(fmt.Errorf("resume: %w: %w", errNoGuest, err))
	}
	return nil
}

// restore makes a process that is where the saved one was. Requires: m.moving
// held.
func (m *machine) restore(ctx context.Context) error {
	if err := roomFor(m.slot.shape.RAM + overhead); err != nil {
		return err
	}
	dir := m.slot.path(savedDir)
	sum, err := checkSaved(dir)
	if err != nil {
		return err
	}
	st := m.state()
	l := launch{pmem: m.slot.pmemPaths(st.Pmem)}
	pages, err := os.Open(filepath.Join(dir, savedPages))
	if err != nil {
		return err
	}
	defer pages.Close()
	base := filepath.Join(dir, savedBase)
	if sum != nil || exists(base) {
		if l.memory, err = m.driver.baseFor(st.Template, base, sum, m.slot.shape); err != nil {
			return err
		}
		l.template = st.Template
		defer l.memory.Close()
		return m.slot.loadFrom(ctx, l, filepath.Join(dir, savedDevice), pages, st)
	}
	if l.memory, err = newMemory("own", m.slot.shape.RAM); err != nil {
		return err
	}
	defer l.memory.Close()
	l.shared = true
	if err := readPages(bufio.NewReaderSize(pages, 1<<20), m.slot.shape.RAM, memoryFile{l.memory}.writePages); err != nil {
		return err
	}
	return m.slot.loadFrom(ctx, l, filepath.Join(dir, savedDevice), nil, st)
}

// loadFrom starts a process and loads a saved machine into it; it stands still.
// pages, if any, come on top of the launch's memory.
func (g *slot) loadFrom(ctx context.Context, l launch, device string, pages io.Reader, st state) error {
	if err := g.launch(ctx, l); err != nil {
		return err
	}
	// The ports' connections are there before the devices know of them, so that
	// the guest is told of no change.
	if err := errors.Join(g.control.Connect(), g.frames.Connect()); err != nil {
		return err
	}
	if pages != nil {
		if err := g.fill(bufio.NewReaderSize(pages, 1<<20)); err != nil {
			return err
		}
	}
	dev, err := os.Open(device)
	if err != nil {
		return err
	}
	defer dev.Close()
	if err := g.process().Load(ctx, dev, qemu.SaveOptions{}); err != nil {
		return err
	}
	return g.bind(ctx, st.disks(g))
}

// fill writes the pages of r into a standing process's memory.
func (g *slot) fill(r io.Reader) error {
	pid := g.process().Pid()
	addr, err := memoryAt(pid, g.shape.RAM)
	if err != nil {
		return err
	}
	return loadPages(pid, addr, g.shape.RAM, r)
}

// baseFor opens the memory of a template: the one that other machines map, or,
// where that is no template of this driver any more, a copy from disk.
func (d *Driver) baseFor(id, path string, want *fileInfo, s shape) (*os.File, error) {
	if t := d.kept(id); t != nil {
		return again(t.memory)
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errDamaged(savedBase)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil { // it may only not be loaded yet
		ctx, cancel := context.WithTimeout(d.life, bootTimeout)
		t, err := d.sameTemplate(ctx, s, fi)
		cancel()
		if err == nil && t.ID == id {
			return again(t.memory)
		}
	}
	mem, err := newMemory("base", s.RAM)
	if err != nil {
		return nil, err
	}
	if err = copyBase(mem, f, s.RAM, want); err == nil {
		err = seal(mem)
	}
	if err != nil {
		mem.Close()
		return nil, err
	}
	return mem, nil
}

// copyBase copies a base, and checks it where its checksum is known.
func copyBase(to, from *os.File, size int64, want *fileInfo) error {
	sum, err := copySparse(to, from, size)
	if err == nil && want != nil && sum != want.CRC {
		err = errDamaged(savedBase)
	}
	return err
}

// sameTemplate loads the template of a shape if its memory is the file that fi
// is of.
func (d *Driver) sameTemplate(ctx context.Context, s shape, fi os.FileInfo) (*template, error) {
	p, err := d.platform(ctx)
	if err != nil {
		return nil, err
	}
	other, err := os.Stat(filepath.Join(d.config.Dir, templateDir, templateKey(s, p), templateMemory))
	if err != nil || !os.SameFile(fi, other) {
		return nil, os.ErrNotExist
	}
	return d.template(ctx, s)
}

// wake lets a machine run that an earlier process may have left standing: it
// died while it saved the machine, or a moment before it let it go on.
func (m *machine) wake(ctx context.Context) error {
	status, err := m.slot.process().Status(ctx)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(m.slot.path(savedDir)); err != nil {
		return err
	}
	if status == "running" {
		return nil
	}
	return m.slot.process().Cont(ctx)
}

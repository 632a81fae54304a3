package fullvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
)

const (
	warmDir    = "warm"
	deviceFile = "device"
	metaFile   = "saved" // written last: what has none is not whole

	warmVersion = 1 // of the machine's devices; what was saved with others does not load
)

// warm keeps machines that were saved when their agent first answered: a start
// of the same image and size begins there and not at the firmware. Each is a
// folder with the states of devices, the disk, and the memory, which is mapped
// from a sealed memory file: machines share what they do not write, and none can
// change it.
//
// An image without dsec-guest is never kept: nobody could give its copies a
// clock and an identity.
type warm struct {
	driver  *Driver
	dir     string
	version func() string // of QEMU

	mu     sync.Mutex
	making map[string]chan struct{}
	key    string   // of memory
	memory *os.File // of the one used last
}

// meta is what a folder says of itself.
type meta struct {
	Image image     `json:"image"`
	Made  time.Time `json:"made"`
}

func newWarm(d *Driver) *warm {
	w := &warm{driver: d, dir: filepath.Join(d.config.Dir, warmDir), making: map[string]chan struct{}{}}
	w.version = sync.OnceValue(func() string {
		out, _ := exec.Command(qemu.Program, "--version").Output()
		return string(out)
	})
	return w
}

func (w *warm) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop()
}

// drop lets go of the memory. Machines that map it go on. Requires: w.mu held.
func (w *warm) drop() {
	if w.memory != nil {
		w.memory.Close()
	}
	w.memory, w.key = nil, ""
}

// name is the key of a machine's folder.
func (w *warm) name(ctx context.Context, c driver.Config, i image) (string, error) {
	key, err := i.key()
	if err != nil {
		return "", err
	}
	accel, err := w.driver.accelerator(ctx)
	if err != nil {
		return "", err
	}
	h := sha256.Sum256(fmt.Appendf(nil, "%d %s %q %s %s %s %d %d %d", warmVersion, accel, w.driver.config.Without, w.version(), i.Format, key, cpus(c.Resources), ram(c.Resources), c.Resources.Disk))
	return hex.EncodeToString(h[:12]), nil
}

// start gives a slot whose machine runs, from a kept one if it can be.
func (w *warm) start(ctx context.Context, c driver.Config, i image, t *driver.Timer) (*slot, error) {
	if w.driver.config.Warm < 0 || w.driver.without(DsecGuest) {
		return w.driver.boot(ctx, c, i, launch{}, t)
	}
	name, err := w.name(ctx, c, i)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(w.dir, name)
	for {
		if _, err := os.Stat(filepath.Join(dir, metaFile)); err == nil {
			g, err := w.restore(ctx, c, i, dir, t)
			if err == nil || ctx.Err() != nil || !errors.Is(err, errDamaged) {
				return g, err
			}
			w.remove(name) // made anew below
		}
		w.mu.Lock()
		others := w.making[name]
		if others == nil {
			others = make(chan struct{})
			w.making[name] = others
			w.mu.Unlock()
			g, err := w.make(ctx, c, i, dir, t)
			w.mu.Lock()
			delete(w.making, name)
			close(others)
			w.mu.Unlock()
			if g != nil || err != nil {
				return g, err
			}
			continue
		}
		w.mu.Unlock()
		select {
		case <-others:
		case <-ctx.Done():
			return nil, dsec.WithOp("", "", context.Cause(ctx))
		}
		if w.driver.isSilent(i) {
			return w.driver.boot(ctx, c, i, launch{}, t)
		}
	}
}

func (d *Driver) isSilent(i image) bool {
	key, err := i.key()
	d.mu.Lock()
	defer d.mu.Unlock()
	return err == nil && d.silent[key]
}

var errDamaged = errors.New("the kept machine is damaged")

// make boots a machine and keeps it. A guest without dsec-guest is what the
// start was for, and given as it is.
func (w *warm) make(ctx context.Context, c driver.Config, i image, dir string, t *driver.Timer) (*slot, error) {
	memory, err := newMemory(ram(c.Resources))
	if err != nil {
		return nil, err
	}
	defer memory.Close()
	again, err := reopen(memory)
	if err != nil {
		return nil, err
	}
	g, err := w.driver.boot(ctx, c, i, launch{memory: again, shared: true}, t)
	if err != nil || g.agent != DsecGuest {
		return g, err
	}
	part := dir + ".part"
	err = w.keep(ctx, g, memory, part)
	if err = errors.Join(err, g.destroy()); err == nil {
		w.evict(w.driver.config.Warm - 1)
		err = os.Rename(part, dir)
	}
	if err != nil {
		os.RemoveAll(part) //nolint:errcheck // the first error says more
		return nil, fmt.Errorf("keep the booted machine: %w", err)
	}
	t.Mark("keep")
	return nil, nil
}

// keep writes a machine into a new folder.
func (w *warm) keep(ctx context.Context, g *slot, memory *os.File, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return noSpace(err)
	}
	if err := g.ctl.Sync(ctx); err != nil {
		return err
	}
	g.ctl.Disconnect() //nolint:errcheck // the copies make their own
	if err := g.save(ctx, filepath.Join(dir, deviceFile), qemu.SaveOptions{IgnoreShared: true}); err != nil {
		return err
	}
	if err := g.giveDisk(dir); err != nil {
		return err
	}
	g.process().Kill() // and with it its last writes
	f, err := os.OpenFile(filepath.Join(dir, memoryFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer f.Close()
	if err := copyFile(f, memory); err != nil {
		return noSpace(err)
	}
	return writeJSON(filepath.Join(dir, metaFile), meta{Image: g.image, Made: time.Now()})
}

// restore makes a machine from a kept one.
func (w *warm) restore(ctx context.Context, c driver.Config, i image, dir string, t *driver.Timer) (*slot, error) {
	memory, err := w.open(dir, ram(c.Resources))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	t.Mark("memory")
	g, err := w.driver.newSlot()
	if err != nil {
		memory.Close()
		return nil, err
	}
	g.image, g.agent = i, DsecGuest
	err = g.takeDisk(dir)
	t.Mark("disk")
	if err == nil {
		err = w.driver.at("process")
	}
	if err == nil {
		err = g.load(ctx, launch{resources: c.Resources, memory: memory}, filepath.Join(dir, deviceFile), qemu.SaveOptions{IgnoreShared: true})
		if dsec.KindOf(err) == dsec.Invalid || errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errDamaged, err)
		}
	} else {
		memory.Close()
	}
	if err != nil {
		return nil, errors.Join(err, g.destroy())
	}
	now := time.Now()
	os.Chtimes(filepath.Join(dir, metaFile), now, now) //nolint:errcheck // it is evicted sooner
	t.Mark("machine")
	return g, nil
}

// open gives the memory of a kept machine, for a process to map.
func (w *warm) open(dir string, size int64) (*os.File, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.key != dir {
		w.drop()
		src, err := os.Open(filepath.Join(dir, memoryFile))
		if err != nil {
			return nil, err
		}
		defer src.Close()
		m, err := newMemory(size)
		if err != nil {
			return nil, err
		}
		if err := copyFile(m, src); err != nil {
			m.Close()
			return nil, err
		}
		if _, err := unix.FcntlInt(m.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
			m.Close()
			return nil, err
		}
		w.memory, w.key = m, dir
	}
	return reopen(w.memory)
}

// newMemory makes a memory file for a machine. Its process may open it again.
func newMemory(size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("dsec-fullvm", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	if err := errors.Join(f.Chmod(0o666), f.Truncate(size)); err != nil {
		f.Close()
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	return f, nil
}

func reopen(f *os.File) (*os.File, error) {
	return os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), os.O_RDWR, 0)
}

// evict leaves the n that were used last.
func (w *warm) evict(n int) {
	es, err := os.ReadDir(w.dir)
	if err != nil {
		return
	}
	type kept struct {
		name string
		used time.Time
	}
	var all []kept
	for _, e := range es {
		st, err := os.Stat(filepath.Join(w.dir, e.Name(), metaFile))
		if err != nil {
			if filepath.Ext(e.Name()) != ".part" {
				w.remove(e.Name())
			}
			continue
		}
		all = append(all, kept{e.Name(), st.ModTime()})
	}
	sort.Slice(all, func(i, j int) bool { return all[i].used.After(all[j].used) })
	for i, k := range all {
		if i >= n {
			w.remove(k.name)
		}
	}
}

func (w *warm) remove(name string) {
	dir := filepath.Join(w.dir, name)
	os.Remove(filepath.Join(dir, metaFile)) //nolint:errcheck // or what follows fails too
	os.RemoveAll(dir)                       //nolint:errcheck // what is left has no meta, and is removed by the next
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.key == dir {
		w.drop()
	}
}

package microvm

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm/initramfs"
)

// template is a saved guest: one that has booted and waits to be told what it
// is. Its memory is mapped by every copy.
type template struct {
	ID     string // of this boot: two boots of one key differ in their bytes
	Shape  shape
	dir    string
	memory *os.File // sealed
	device *os.File // states of its devices
	sum    uint32   // checksum of the memory
	tick   int64    // of the last use
	used   time.Time
	idle   *time.Timer // looks whether it is
}

// Files of a template's folder.
const (
	templateInfo   = "template.json"
	templateMemory = "memory"
	templateDevice = "device"
)

// info is what a template's folder says of it.
type info struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	Key     string `json:"key"`
	Shape   shape  `json:"shape"`
	Memory  uint32 `json:"memory_crc"`
	Device  uint32 `json:"device_crc"`
}

// infoVersion changes with the form of a template's folder, and with anything
// in how a machine is made that the key does not hold.
const infoVersion = 1

// bootTimeout is how long a guest may take to boot. Under emulation, on a busy
// host, it takes tens of seconds.
const bootTimeout = 3 * time.Minute

// DefaultTemplates is how many saved guests are kept: sizes that a node is
// asked for at a time. Each takes about 150 MB.
const DefaultTemplates = 6

// DefaultTemplateIdle is after how long the memory of a saved guest is given
// back. To read it again takes some tenths of a second.
const DefaultTemplateIdle = 30 * time.Minute

// platform is what all machines of a driver are made of. It is found out once,
// when the first is asked for.
type platform struct {
	accel  string
	qemu   string // version
	kernel initramfs.Kernel
	sum    string // of all of it, and of the guest
	images string // initramfs
}

// machine names what a saved state fits: accelerator and processor.
func (p *platform) machine() string { return p.accel + ", " + cpuModel(p.accel) }

// find finds out what machines are made of.
func (d *Driver) platform(ctx context.Context) (*platform, error) {
	d.finding.Lock()
	defer d.finding.Unlock()
	if d.plat != nil {
		return d.plat, nil
	}
	v, err := qemu.Accelerator(ctx, d.config.Kernel, d.config.Dir)
	if err != nil {
		return nil, err
	}
	p := &platform{accel: v.Accel, kernel: initramfs.Kernel{Image: d.config.Kernel, Modules: d.config.Modules}}
	if p.accel == qemu.TCG {
		p.accel = fmt.Sprintf("%s,tb-size=%d", qemu.TCG, codeCache)
	}
	out, err := exec.CommandContext(ctx, qemu.Program, "--version").Output()
	if err != nil {
		return nil, fmt.Errorf("ask QEMU for its version: %w", err)
	}
	p.qemu, _, _ = strings.Cut(string(out), "\n")
	h := sha256.New()
	fmt.Fprintln(h, infoVersion, p.qemu, p.accel, cpuModel(p.accel), KernelLine(p.accel))
	for _, path := range []string{d.config.Kernel, filepath.Join(d.config.Modules, initramfs.IndexFile), d.config.Guest} {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			return nil, err
		}
	}
	p.sum = hex.EncodeToString(h.Sum(nil)[:12])
	p.images = filepath.Join(d.config.Dir, "initramfs-"+p.sum)
	if !exists(p.images) {
		old, _ := filepath.Glob(filepath.Join(d.config.Dir, "initramfs-*"))
		for _, o := range old {
			os.Remove(o) //nolint:errcheck // it is in nobody's way
		}
		if err := initramfs.WriteFile(p.images, initramfs.Options{Guest: d.config.Guest, Kernel: p.kernel}); err != nil {
			return nil, err
		}
	}
	d.plat = p
	return p, nil
}

// template gives the saved guest of a shape, which is loaded from disk or
// booted when it is first asked for; those who ask meanwhile wait for it.
func (d *Driver) template(ctx context.Context, s shape) (*template, error) {
	for {
		d.mu.Lock()
		if t := d.templates[s]; t != nil {
			d.use(t)
			d.mu.Unlock()
			return t, nil
		}
		wait := d.making[s]
		if wait == nil {
			wait = &making{done: make(chan struct{})}
			d.making[s] = wait
			d.working.Add(1)
			go d.makeTemplate(s, wait)
		}
		d.mu.Unlock()
		select {
		case <-wait.done:
		case <-ctx.Done():
			return nil, dsec.WithOp("", "", context.Cause(ctx))
		}
		if wait.err != nil {
			return nil, wait.err
		}
	}
}

// making is a template that is being made.
type making struct {
	done chan struct{}
	err  error
}

// makeTemplate is what the first who asks starts; it goes on if he goes away.
func (d *Driver) makeTemplate(s shape, w *making) {
	defer d.working.Done()
	ctx, cancel := context.WithTimeout(d.life, bootTimeout)
	defer cancel()
	t, err := d.findTemplate(ctx, s)
	d.mu.Lock()
	delete(d.making, s)
	w.err = err
	if err == nil {
		d.use(t)
		d.templates[s] = t
		t.idle = time.AfterFunc(d.config.TemplateIdle, func() { d.rest(t) })
	}
	dropped := d.tooMany()
	d.mu.Unlock()
	for _, t := range dropped {
		t.close()
		os.RemoveAll(t.dir) //nolint:errcheck // the next Adopt tries again
	}
	close(w.done)
}

// use notes that t is used now. Requires: d.mu held.
func (d *Driver) use(t *template) {
	d.ticks++
	t.tick, t.used = d.ticks, time.Now()
}

// rest gives back the memory of a template that has not been used for long. That
// of one whose machines still map it would not come back, and they could not be
// paused as what they differ from it.
func (d *Driver) rest(t *template) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.templates[t.Shape] != t {
		return
	}
	left := d.config.TemplateIdle - time.Since(t.used)
	busy := d.pool.busy(t)
	for _, m := range d.machines {
		busy = busy || m.slot.process() != nil && m.slot.maps() == t.ID
	}
	if busy {
		left = d.config.TemplateIdle
	}
	if left > 0 {
		t.idle.Reset(left)
		return
	}
	delete(d.templates, t.Shape)
	t.close()
}

// tooMany takes out the templates that were not used for longest. Machines that
// run keep what they map. Requires: d.mu held.
func (d *Driver) tooMany() []*template {
	var out []*template
	for len(d.templates) > d.config.Templates {
		var oldest *template
		for _, t := range d.templates {
			if oldest == nil || t.tick < oldest.tick {
				oldest = t
			}
		}
		delete(d.templates, oldest.Shape)
		out = append(out, oldest)
	}
	return out
}

func (d *Driver) findTemplate(ctx context.Context, s shape) (*template, error) {
	p, err := d.platform(ctx)
	if err != nil {
		return nil, err
	}
	key := templateKey(s, p)
	dir := filepath.Join(d.config.Dir, templateDir, key)
	t, err := loadTemplate(dir, key)
	if err == nil {
		return t, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		d.config.Log.Warn("saved guest is damaged and made again", "template", key, "err", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	t, err = d.bootTemplate(ctx, s, p, key)
	if err != nil {
		return nil, fmt.Errorf("boot a guest of %v: %w", s, err)
	}
	return t, nil
}

// templateKey names a template's folder.
func templateKey(s shape, p *platform) string {
	return fmt.Sprintf("%s-%dm-%dc-%s", s.Variant, s.RAM>>20, s.CPUs, p.sum)
}

// loadTemplate reads what saveTemplate wrote, and checks every byte of it.
func loadTemplate(dir, key string) (*template, error) {
	b, err := os.ReadFile(filepath.Join(dir, templateInfo))
	if err != nil {
		return nil, err
	}
	var i info
	if err := json.Unmarshal(b, &i); err != nil {
		return nil, err
	}
	if i.Version != infoVersion || i.Key != key || i.ID == "" {
		return nil, fmt.Errorf("it says that it is version %d of %s", i.Version, i.Key)
	}
	t := &template{ID: i.ID, Shape: i.Shape, dir: dir}
	ok := false
	defer func() {
		if !ok {
			t.close()
		}
	}()
	disk, err := os.Open(filepath.Join(dir, templateMemory))
	if err != nil {
		return nil, fmt.Errorf("%w", errPages)
	}
	defer disk.Close()
	if t.memory, err = newMemory("template", i.Shape.RAM); err != nil {
		return nil, err
	}
	sum, err := copySparse(t.memory, disk, i.Shape.RAM)
	if err != nil {
		return nil, err
	}
	if t.device, err = os.Open(filepath.Join(dir, templateDevice)); err != nil {
		return nil, fmt.Errorf("%w", errPages)
	}
	dev, err := checksum(t.device)
	if err != nil {
		return nil, err
	}
	if sum != i.Memory || dev != i.Device {
		return nil, errPages
	}
	ok, t.sum = true, sum
	return t, seal(t.memory)
}

// bootTemplate boots a guest and saves it.
func (d *Driver) bootTemplate(ctx context.Context, s shape, p *platform, key string) (_ *template, err error) {
	g, err := d.newSlot(s)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.destroy()) }()
	t := &template{ID: newID(), Shape: s, dir: filepath.Join(d.config.Dir, templateDir, key)}
	defer func() {
		if err != nil {
			t.close()
			os.RemoveAll(t.dir) //nolint:errcheck // the next try does too
		}
	}()
	if t.memory, err = newMemory("template", s.RAM); err != nil {
		return nil, err
	}
	if err := g.launch(ctx, launch{memory: t.memory, shared: true, boot: &boot{p.kernel.Image, p.images}}); err != nil {
		return nil, err
	}
	if _, err := g.ping(ctx); err != nil {
		return nil, err
	}
	// What a machine does first is done once for all copies.
	if err := d.warm(ctx, g); err != nil {
		return nil, err
	}
	g.ctl.Disconnect() //nolint:errcheck // it is over
	if err := g.proc.Stop(ctx); err != nil {
		return nil, err
	}
	if err := g.unbind(ctx); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(t.dir, 0o700); err != nil {
		return nil, err
	}
	if err := g.saveDevices(ctx, filepath.Join(t.dir, templateDevice)); err != nil {
		return nil, err
	}
	g.proc.Kill()
	if err := seal(t.memory); err != nil {
		return nil, err
	}
	return t, t.keep(key)
}

// keep writes the rest of a template's folder, what makes it valid last.
func (t *template) keep(key string) error {
	i := info{Version: infoVersion, ID: t.ID, Key: key, Shape: t.Shape}
	disk, err := os.Create(filepath.Join(t.dir, templateMemory))
	if err != nil {
		return err
	}
	defer disk.Close()
	if i.Memory, err = copySparse(disk, t.memory, t.Shape.RAM); err != nil {
		return noSpace(err)
	}
	t.sum = i.Memory
	if t.device, err = os.Open(filepath.Join(t.dir, templateDevice)); err != nil {
		return err
	}
	if i.Device, err = checksum(t.device); err != nil {
		return err
	}
	b, err := json.Marshal(i)
	if err != nil {
		return err
	}
	return writeWhole(filepath.Join(t.dir, templateInfo), b)
}

func (t *template) close() {
	if t.idle != nil {
		t.idle.Stop()
	}
	if t.memory != nil {
		t.memory.Close()
	}
	if t.device != nil {
		t.device.Close()
	}
}

func newID() string {
	var b [12]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	return hex.EncodeToString(b[:])
}

// sweepTemplates removes what an interrupted boot left, and the oldest beyond
// the bound.
func (d *Driver) sweepTemplates() error {
	dir := filepath.Join(d.config.Dir, templateDir)
	es, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type kept struct {
		path string
		at   time.Time
	}
	var all []kept
	var errs []error
	for _, e := range es {
		path := filepath.Join(dir, e.Name())
		fi, err := os.Stat(filepath.Join(path, templateInfo))
		if err != nil {
			errs = append(errs, os.RemoveAll(path))
			continue
		}
		all = append(all, kept{path, fi.ModTime()})
	}
	slices.SortFunc(all, func(a, b kept) int { return b.at.Compare(a.at) })
	for _, k := range all[min(len(all), d.config.Templates):] {
		errs = append(errs, os.RemoveAll(k.path))
	}
	return errors.Join(errs...)
}

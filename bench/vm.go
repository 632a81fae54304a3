package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/microvm"
	"github.com/dsec-go/dsec/vm/initramfs"
)

// The budgets of microVMs on a host that emulates them.
const (
	vmCreateOfFloor = 1.3
	vmExecOfFloor   = 1.5
	vmIdleMiB       = 64
	vmUsedMiB       = 100
	vmPause         = 400 // ms
	vmResume        = 450 // ms, to the first command's end
	vmFork          = 3   // s
	vmForks         = 8
	vmShared        = 1.2
)

// VMOptions size a run of VM. Zero fields have defaults.
type VMOptions struct {
	Dir    string // its own folder; required
	Guest  string // path of the dsec-guest program; required
	Kernel initramfs.Kernel
	Rounds int // of floor and microVM in turn; default 5
	Execs  int // in a round; default 20
	Pauses int // default 3
	Forks  int // children of a fork; default 8, negative none
	DAX    int // bytes of a layer that two machines read; default 200 MB, negative none

	Say func(format string, args ...any) // progress; default none
}

func (o VMOptions) withDefaults() VMOptions {
	def(&o.Rounds, 5)
	def(&o.Execs, 20)
	def(&o.Pauses, 3)
	def(&o.Forks, vmForks)
	def(&o.DAX, 200<<20)
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	return o
}

// vmWorld is what a run of VM has.
type vmWorld struct {
	VMOptions
	floor *vmFloor
	base  string // layer, as META,DATA
	num   int
	keys  dsec.IDKey
	group string // of the drivers' control groups
}

// vmResources are those of every machine measured.
var vmResources = dsec.Resources{CPU: 1, Memory: vmFloorRAM, Disk: 1 << 30, Pids: 256}

// VM measures microVMs against bare QEMU with an agent in C: creation with the
// first command in an environment never seen before, cold and from the pool,
// commands, memory, pauses, forks. It asks the driver, not a server.
func VM(ctx context.Context, o VMOptions) (_ *Report, err error) {
	w, err := newVMWorld(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := w.makeFloor(ctx); err != nil {
		return nil, err
	}
	r := NewReport("create --kind microvm")
	r.Value("load of the host before the run", load(), "")
	if err := w.creates(ctx, r); err != nil {
		return nil, err
	}
	if err := w.powers(ctx, r); err != nil {
		return nil, err
	}
	if w.DAX > 0 {
		if err := w.dax(ctx, r); err != nil {
			return nil, err
		}
	}
	r.Note("Accelerator: %s. Budgets of pauses and forks are for 256 MiB under emulation; a host with KVM has others.", w.floor.accel)
	r.Note("The floor loads a guest that QEMU saved, binds the same layers late, mounts them and executes the same program; from the pool it has done so once before. Cold, neither has.")
	return r, nil
}

// newVMWorld makes what machines of ours need.
func newVMWorld(ctx context.Context, o VMOptions) (*vmWorld, error) {
	w := &vmWorld{VMOptions: o.withDefaults(), group: "dsec-bench-vm-" + strconv.Itoa(os.Getpid())}
	floor, err := BuildFloor(ctx, w.Dir)
	if err != nil {
		return nil, err
	}
	base, err := baseTar(floor.Program)
	if err != nil {
		return nil, err
	}
	if w.base, err = writeLayer(ctx, w.Dir, "base", base); err != nil {
		return nil, err
	}
	return w, nil
}

// makeFloor makes what the machines of the floor need beside.
func (w *vmWorld) makeFloor(ctx context.Context) (err error) {
	w.Say("booting the floor's guest")
	if w.floor, err = buildVMFloor(ctx, w.Dir, w.Kernel); err != nil {
		return err
	}
	return w.floor.blank(ctx, vmResources.Disk)
}

// driver opens a driver, whose saved guest is booted. high is that of its pool.
func (w *vmWorld) driver(ctx context.Context, v microvm.Variant, high int) (*microvm.Driver, error) {
	d, err := microvm.Open(microvm.Config{
		Dir: filepath.Join(w.Dir, "node"), Guest: w.Guest, Kernel: w.Kernel.Image, Modules: w.Kernel.Modules, Name: w.group,
		Variant: v, Low: high, High: high,
	})
	if err != nil {
		return nil, err
	}
	if _, err = d.Adopt(ctx); err == nil {
		err = d.Prepare(ctx, vmResources)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// layers gives an environment that nobody has seen.
func (w *vmWorld) layers(ctx context.Context) ([]string, error) {
	w.num++
	one, err := writeLayer(ctx, w.Dir, "work"+strconv.Itoa(w.num), workspaceTar(w.num))
	return []string{w.base, one}, err
}

// config gives a machine's configuration on layers.
func (w *vmWorld) config(layers []string) driver.Config {
	var files []driver.LayerFiles
	for _, l := range layers {
		p := strings.Split(l, ",")
		files = append(files, driver.LayerFiles{Digest: p[0], Meta: p[0], Data: p[1:]})
	}
	return driver.Config{ID: w.keys.New(dsec.Place{}), Root: driver.Root{Files: files}, Resources: vmResources, Hostname: "bench"}
}

func vmTrue(ctx context.Context, m driver.Machine) error {
	r, err := m.Guest().Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{binTrue}}, nil)
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("%s ended with status %d: %s", binTrue, r.Code, r.Detail)
	}
	return err
}

// creates measures creations and commands, cold and from the pool.
func (w *vmWorld) creates(ctx context.Context, r *Report) (err error) {
	floorExec, ourExec := Millis(), Millis()
	idle, used := &Sample{Unit: "MiB"}, &Sample{Unit: "MiB"}
	for _, pool := range []int{-1, 1} {
		name := "cold"
		if pool > 0 {
			name = "from the pool"
		}
		d, err := w.driver(ctx, microvm.Block, pool)
		if err != nil {
			return err
		}
		floor, ours := Millis(), Millis()
		for i := range w.Rounds {
			w.Say("create, %s: round %d of %d", name, i+1, w.Rounds)
			if err = w.floorRound(ctx, pool > 0, floor, floorExec); err != nil {
				break
			}
			if pool > 0 {
				if err = d.Prepare(ctx, vmResources); err != nil {
					break
				}
			}
			if err = w.ourRound(ctx, d, ours, ourExec, idle, used); err != nil {
				break
			}
		}
		if err = errors.Join(err, d.Close()); err != nil {
			return err
		}
		r.Hold("create + first exec, "+name+", of the floor", ratio(ours, floor), AtMost, vmCreateOfFloor, "ratio")
		r.Add("microVM create + first exec, "+name, ours)
		r.Add("floor create + exec, "+name, floor)
	}
	r.Hold("exec, of the floor", ratio(ourExec, floorExec), AtMost, vmExecOfFloor, "ratio")
	r.Add("microVM exec", ourExec)
	r.Add("floor exec", floorExec)
	r.Hold("private memory, idle", idle.P50(), AtMost, vmIdleMiB, "MiB")
	r.Hold("private memory, after the first exec", used.P50(), AtMost, vmUsedMiB, "MiB")
	return nil
}

func (w *vmWorld) floorRound(ctx context.Context, warm bool, create, execs *Sample) error {
	layers, err := w.layers(ctx)
	if err != nil {
		return err
	}
	var b *vmBox
	begin := time.Now()
	if b, err = w.floor.load(ctx); err != nil {
		return err
	}
	defer b.end()
	if warm {
		if err := w.floor.warm(ctx, b, []string{w.base}); err != nil {
			return err
		}
		os.Remove(filepath.Join(b.dir, "upper")) //nolint:errcheck // bind makes another
		begin = time.Now()
	}
	if err := w.floor.enter(ctx, b, layers); err != nil {
		return err
	}
	create.Took(time.Since(begin))
	return b.execs(ctx, w.Execs, execs)
}

func (w *vmWorld) ourRound(ctx context.Context, d *microvm.Driver, create, execs, idle, used *Sample) (err error) {
	layers, err := w.layers(ctx)
	if err != nil {
		return err
	}
	begin := time.Now()
	m, err := d.Start(ctx, w.config(layers))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Stop(context.WithoutCancel(ctx))) }()
	created := time.Now()
	if err := vmTrue(ctx, m); err != nil {
		return err
	}
	create.Took(time.Since(begin))
	create.Stage("create").Took(created.Sub(begin))
	for _, s := range m.Stages() {
		create.Stage("create: " + s.Name).Took(s.Took)
	}
	create.Stage("first exec").Took(time.Since(created))
	after, err := vmPrivate(m)
	if err != nil {
		return err
	}
	used.Add(after)
	for range w.Execs {
		begin := time.Now()
		if err := vmTrue(ctx, m); err != nil {
			return err
		}
		execs.Took(time.Since(begin))
	}
	// Idle is one that was created and runs nothing.
	n, err := d.Start(ctx, w.config(layers))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Stop(context.WithoutCancel(ctx))) }()
	before, err := vmPrivate(n)
	idle.Add(before)
	return err
}

// vmPrivate is what a machine's process holds for itself, in MiB.
func vmPrivate(m driver.Machine) (float64, error) {
	p, ok := m.(interface{ Process() int })
	if !ok {
		return 0, errors.New("the machine does not say its process")
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.Process()) + "/smaps_rollup")
	if err != nil {
		return 0, err
	}
	total := 0.0
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 3 && strings.HasPrefix(f[0], "Private_") {
			kb, _ := strconv.ParseFloat(f[1], 64)
			total += kb / 1024
		}
	}
	return total, nil
}

// powers measures pauses and a fork.
func (w *vmWorld) powers(ctx context.Context, r *Report) (err error) {
	d, err := w.driver(ctx, microvm.Block, -1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	layers, err := w.layers(ctx)
	if err != nil {
		return err
	}
	m, err := d.Start(ctx, w.config(layers))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Stop(context.WithoutCancel(ctx))) }()
	if err := vmTrue(ctx, m); err != nil {
		return err
	}
	p := m.(driver.Pauser)
	pause, resume := Millis(), Millis()
	for i := range w.Pauses {
		w.Say("pause and resume: round %d of %d", i+1, w.Pauses)
		begin := time.Now()
		if err := p.Pause(ctx); err != nil {
			return err
		}
		pause.Took(time.Since(begin))
		begin = time.Now()
		if err := p.Resume(ctx); err != nil {
			return err
		}
		resume.Stage("resume").Took(time.Since(begin))
		if err := vmTrue(ctx, m); err != nil {
			return err
		}
		resume.Took(time.Since(begin))
	}
	r.Hold("pause", pause.P50(), AtMost, vmPause, "ms")
	r.Hold("resume to the end of the first exec", resume.P50(), AtMost, vmResume, "ms")
	r.Add("pause", pause)
	r.Add("resume + exec", resume)
	if w.Forks <= 0 {
		return nil
	}
	w.Say("fork of %d", w.Forks)
	var cs []driver.Config
	for range w.Forks {
		cs = append(cs, w.config(layers))
	}
	begin := time.Now()
	ms, err := m.(driver.Forker).Fork(ctx, cs)
	if err != nil {
		return err
	}
	took := time.Since(begin)
	private := &Sample{Unit: "MiB"}
	for _, c := range ms {
		n, e := vmPrivate(c)
		private.Add(n)
		err = errors.Join(err, e, vmTrue(ctx, c), c.Stop(ctx))
	}
	r.Hold(fmt.Sprintf("fork of %d", w.Forks), took.Seconds(), AtMost, vmFork, "s")
	r.Add("private memory of a child", private)
	return err
}

// dax measures what two machines add to the host that read the same layer.
func (w *vmWorld) dax(ctx context.Context, r *Report) (err error) {
	big := bytes.Repeat([]byte("0123456789abcde\n"), w.DAX/16)
	layer, err := writeLayer(ctx, w.Dir, "big", fileTar("big", big))
	if err != nil {
		return err
	}
	for _, v := range []microvm.Variant{microvm.Block, microvm.DAX} {
		w.Say("two machines read %d MB of a layer, %s", w.DAX/1e6, v)
		used, err := w.readTwice(ctx, v, layer)
		if err != nil {
			return err
		}
		of := used / float64(w.DAX)
		if v == microvm.DAX {
			r.Hold("memory added by two that read a layer, of its size, with DAX", of, AtMost, vmShared, "ratio")
		} else {
			r.Value("memory added by two that read a layer, of its size, on a block device", of, "ratio")
		}
	}
	return nil
}

func (w *vmWorld) readTwice(ctx context.Context, v microvm.Variant, layer string) (_ float64, err error) {
	d, err := w.driver(ctx, v, -1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	var ms []driver.Machine
	defer func() {
		for _, m := range ms {
			err = errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
		}
	}()
	for range 2 {
		m, err := d.Start(ctx, w.config([]string{layer, w.base}))
		if err != nil {
			return 0, err
		}
		ms = append(ms, m)
		if err := vmTrue(ctx, m); err != nil {
			return 0, err
		}
	}
	p := strings.Split(layer, ",")
	for _, path := range p {
		dropCache(path)
	}
	flats, _ := filepath.Glob(filepath.Join(w.Dir, "node", "flat", "*"))
	for _, path := range flats {
		dropCache(path)
	}
	before := vmShares(ms)
	for _, m := range ms {
		f, err := m.Guest().Files().Read(ctx, dsec.Call{}, dsec.FileOp{Path: "/big"}, dsec.ReadRange{})
		if err != nil {
			return 0, err
		}
		n, err := io.Copy(io.Discard, f)
		f.Close()
		if err != nil || n != int64(w.DAX) {
			return 0, fmt.Errorf("read %d bytes of %d: %w", n, w.DAX, err)
		}
	}
	// The host's own copy is there once, whoever maps it.
	return float64(vmShares(ms)-before) + float64(w.DAX), nil
}

// vmShares is the anonymous memory of machines, each shared page counted once.
func vmShares(ms []driver.Machine) int64 {
	var total int64
	for _, m := range ms {
		if p, ok := m.(interface{ Process() int }); ok {
			total += processPss(strconv.Itoa(p.Process()))
		}
	}
	return total
}

// VMDensity starts n machines, asks every one, and says what they hold.
func VMDensity(ctx context.Context, o VMOptions, n int) (_ *Report, err error) {
	w, err := newVMWorld(ctx, o)
	if err != nil {
		return nil, err
	}
	d, err := w.driver(ctx, microvm.Block, -1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	before, err := meminfo()
	if err != nil {
		return nil, err
	}
	r := NewReport("density --kind microvm")
	var ms []driver.Machine
	defer func() {
		for _, m := range ms {
			err = errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
		}
	}()
	begin := time.Now()
	for i := range n {
		w.Say("machine %d of %d", i+1, n)
		layers, err := w.layers(ctx)
		if err != nil {
			return nil, err
		}
		m, err := d.Start(ctx, w.config(layers))
		if err != nil {
			return nil, fmt.Errorf("after %d machines: %w", i, err)
		}
		ms = append(ms, m)
	}
	r.Value("creates, none destroyed", float64(n)/time.Since(begin).Seconds(), "1/s")
	idle, err := meminfo()
	if err != nil {
		return nil, err
	}
	answering, took := 0, Millis()
	for i, m := range ms {
		begin := time.Now()
		if err := vmTrue(ctx, m); err != nil {
			w.Say("machine %d: %v", i+1, err)
			continue
		}
		took.Took(time.Since(begin))
		answering++
	}
	used, err := meminfo()
	if err != nil {
		return nil, err
	}
	each := func(a map[string]int64) float64 {
		return float64(before["MemAvailable"]-a["MemAvailable"]) / float64(n) / (1 << 20)
	}
	r.Hold("alive and answering", float64(answering), AtLeast, float64(n), "machines")
	r.Value("idle machine, of the host's memory", each(idle), "MiB")
	r.Value("after its first command", each(used), "MiB")
	r.Add("first command in each", took)
	return r, nil
}

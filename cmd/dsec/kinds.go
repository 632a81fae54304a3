package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/fullvm"
	"github.com/dsec-go/dsec/driver/microvm"
	"github.com/dsec-go/dsec/qemu"
)

// Where a node keeps what is of one kind, and where the guest kernels are beside
// dsec-guest.
const (
	microvmDir  = "microvm"
	fullvmDir   = "fullvm"
	kernelDir   = "vm"
	guestKernel = "vmlinuz-6.12"
)

// kinds are the drivers of a node, and why it has no others. What a kind needs
// that the host has not costs that kind alone, never the node.
type kinds struct {
	drivers []driver.Driver
	absent  map[dsec.Kind]error
	warm    warmth
	log     *slog.Logger

	life context.Context // ends when the drivers close
	end  context.CancelFunc
	work sync.WaitGroup // goroutines that warm

	mu    sync.Mutex
	ready map[dsec.Kind]string // what became of the warming, by kind
}

// powers are what sandboxes of each kind can do beside commands; a test compares
// them with what the drivers' tests have found.
var powers = map[dsec.Kind][]string{
	dsec.Container: {"files", "ports", "terminal", "pause", "snapshot", "fork", "commit"},
	dsec.MicroVM:   {"files", "ports", "terminal", "pause", "snapshot", "fork"},
	dsec.FullVM:    {"files", "ports", "terminal", "pause", "snapshot", "fork", "screen"},
	dsec.FnCall:    {"terminal", "function calls"},
}

// kindConfig is what the drivers are opened with.
type kindConfig struct {
	data     string // folder of the node
	instance string
	guest    string // path of dsec-guest
	pool     int    // boxes kept ready; 0 means the default, negative none
	warm     warmth
	guestLog *os.File // of containers
	log      *slog.Logger
}

// vmConfig gives what microVMs are made with. Nothing of them is begun before
// the first is asked for.
func (c kindConfig) vmConfig() microvm.Config {
	v := microvm.Config{
		Dir: filepath.Join(c.data, microvmDir), Guest: c.guest, Kernel: guestKernelOf(c.guest), Name: "dsec-" + c.instance + "-microvm", Log: c.log,
	}
	if c.pool < 0 {
		v.Low, v.High = -1, -1
	}
	if n, ok := c.warm[dsec.MicroVM]; ok {
		v.Low, v.High = orNone(n), orNone(n)
	}
	return v
}

// orNone gives a number as drivers take it, whose 0 is the default.
func orNone(n int) int {
	if n == 0 {
		return -1
	}
	return n
}

// guestKernelOf gives the kernel that lies beside a dsec-guest.
func guestKernelOf(guest string) string {
	return filepath.Join(filepath.Dir(guest), kernelDir, guestKernel)
}

// openKinds opens the drivers. Containers must be possible. A failure closes
// what was opened.
func openKinds(c kindConfig) (_ *kinds, err error) {
	k := &kinds{absent: map[dsec.Kind]error{}, warm: c.warm, log: c.log, ready: map[dsec.Kind]string{}}
	k.life, k.end = context.WithCancel(context.Background())
	if n, ok := c.warm[dsec.Container]; ok {
		c.pool = orNone(n)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close())
		}
	}()
	boxes, err := container.Open(container.Config{
		Dir: filepath.Join(c.data, containerDir), Guest: c.guest, Name: "dsec-" + c.instance, Pool: c.pool, Log: c.guestLog,
	})
	if err != nil {
		return k, fmt.Errorf("open container driver: %w", err)
	}
	k.drivers = append(k.drivers, boxes)
	vms, err := microvm.Open(c.vmConfig())
	switch {
	case err == nil:
		k.drivers = append(k.drivers, vms)
	case dsec.KindOf(err) == dsec.Unsupported:
		k.absent[dsec.MicroVM] = err
	default:
		return k, fmt.Errorf("open microvm driver: %w", err)
	}
	f := fullvm.Config{Dir: filepath.Join(c.data, fullvmDir), Name: "dsec-" + c.instance + "-fullvm", Kernel: guestKernelOf(c.guest)}
	if n, ok := c.warm[dsec.FullVM]; ok {
		f.Warm = orNone(n)
	}
	full, err := fullvm.Open(f)
	switch {
	case err == nil:
		k.drivers = append(k.drivers, full)
	case dsec.KindOf(err) == dsec.Unsupported:
		k.absent[dsec.FullVM] = err
	default:
		return k, fmt.Errorf("open fullvm driver: %w", err)
	}
	return k, nil
}

// close closes the drivers, the last opened first.
func (k *kinds) close() error {
	k.end()
	k.work.Wait()
	var errs []error
	for i := len(k.drivers) - 1; i >= 0; i-- {
		if err := k.drivers[i].Close(); err != nil {
			errs = append(errs, fmt.Errorf("close %s driver: %w", k.drivers[i].Kind(), err))
		}
	}
	k.drivers = nil
	return errors.Join(errs...)
}

// preparer is a driver that can be made ready before anybody asks.
type preparer interface {
	Prepare(ctx context.Context, r dsec.Resources) error
}

// prepare makes ready what was asked for, in the background: machines of the
// usual size. It is called once the drivers have adopted what runs.
func (k *kinds) prepare() {
	for _, d := range k.drivers {
		p, ok := d.(preparer)
		kind := d.Kind()
		if !ok || k.warm[kind] == 0 {
			continue
		}
		k.setReady(kind, "being made ready")
		k.work.Go(func() {
			begin := time.Now()
			if err := p.Prepare(k.life, dsec.Spec{}.WithDefaults().Resources); err != nil {
				if k.life.Err() == nil {
					k.log.Warn("machines are not made ready", "kind", kind, logErr, err)
				}
				k.setReady(kind, "not made ready: "+err.Error())
				return
			}
			k.setReady(kind, fmt.Sprintf("%d kept ready", k.warm[kind]))
			k.log.Info("machines are ready", "kind", kind, "count", k.warm[kind], "took", time.Since(begin).Round(time.Millisecond))
		})
	}
}

func (k *kinds) setReady(kind dsec.Kind, what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ready[kind] = what
}

// features says what the node's kinds can do and how ready they are.
func (k *kinds) features(guest string) []dsec.FeatureStatus {
	list := kindFeatures(guest)
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, f := range list {
		if r := k.ready[dsec.Kind(f.Name)]; r != "" && f.OK {
			list[i].Detail += "; " + r
		}
	}
	return list
}

// kindFeatures says which kinds the host can run, and what each can do.
func kindFeatures(guest string) []dsec.FeatureStatus {
	list := append(qemu.Features(),
		dsec.FeatureStatus{Name: string(dsec.Container), OK: true, Detail: "namespaces and control groups are there"},
		microvm.Feature(kindConfig{guest: guest}.vmConfig()), fullvm.Feature(),
		dsec.FeatureStatus{Name: string(dsec.FnCall), OK: true, Detail: "as containers"})
	for i, f := range list {
		if p := powers[dsec.Kind(f.Name)]; f.OK && p != nil {
			list[i].Detail += "; can do " + strings.Join(p, ", ")
		}
	}
	return list
}

// warmth is how many machines of each kind are kept ready; what has no number
// has its driver's default.
type warmth map[dsec.Kind]int

// Limits of the numbers, by kind: what is ready takes memory of the host, and
// what is saved of its disk.
var maxWarm = map[dsec.Kind]int{dsec.Container: 4096, dsec.MicroVM: 256, dsec.FullVM: 64}

// parseWarmth reads KIND=COUNT, several with commas.
func parseWarmth(s string) (warmth, error) {
	w := warmth{}
	for part := range strings.SplitSeq(s, ",") {
		if s == "" {
			break
		}
		name, number, ok := strings.Cut(strings.TrimSpace(part), "=")
		kind := dsec.Kind(name)
		most, known := maxWarm[kind]
		n, err := strconv.Atoi(number)
		switch {
		case kind == dsec.FnCall:
			return nil, dsec.Errorf(dsec.Invalid, "--warm %s: machines of function calls are kept ready by the calls that come, for each environment", part)
		case !known:
			return nil, dsec.Errorf(dsec.Invalid, "--warm %s: %q is none of %s, %s, %s", part, name, dsec.Container, dsec.MicroVM, dsec.FullVM)
		case !ok || err != nil || n < 0 || n > most:
			return nil, dsec.Errorf(dsec.Invalid, "--warm %s: how many is a number from 0 to %d, as in %s=2", part, most, kind)
		}
		if _, twice := w[kind]; twice {
			return nil, dsec.Errorf(dsec.Invalid, "--warm names %s twice", kind)
		}
		w[kind] = n
	}
	return w, nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/bench"
	"github.com/dsec-go/dsec/vm/initramfs"
)

// benchKind chooses the kind of sandbox that is measured.
type benchKind struct {
	Kind dsec.Kind `help:"Kind of the sandboxes: container, or microvm, which is measured without a server." enum:"container,microvm" default:"container"`

	Forks int      `help:"Children of a microVM's fork; -1 leaves forks out." placeholder:"N" needs:"kind"`
	DAX   byteSize `name:"dax" help:"Bytes of a layer that two microVMs read." placeholder:"SIZE" needs:"kind"`
	NoDAX bool     `name:"no-dax" help:"Leave the reading of a layer out." not:"dax" needs:"kind"`
}

// runVM measures machines, with a driver of its own.
func (f *benchFlags) runVM(ctx context.Context, a *app, k benchKind, measure func(context.Context, bench.VMOptions) (*bench.Report, error)) (err error) {
	if os.Geteuid() != 0 {
		return dsec.Errorf(dsec.Denied, "a benchmark makes control groups: run it as root")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM)
	go func() { // a second signal ends the process at once
		select {
		case <-signals:
			cancel(errors.New("interrupted"))
		case <-ctx.Done():
		}
		unnotify()
	}()
	guest := f.Guest
	if guest == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
		guest = filepath.Join(filepath.Dir(self), "dsec-guest")
	}
	kernel, err := initramfs.Find(initramfs.DefaultVersion, filepath.Join(filepath.Dir(guest), "vm"))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(f.Dir, "dsec-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	o := bench.VMOptions{Dir: dir, Guest: guest, Kernel: kernel, Forks: k.Forks, DAX: int(k.DAX), Say: func(format string, args ...any) {
		fmt.Fprintf(a.Stderr, format+"\n", args...)
	}}
	if k.NoDAX {
		o.DAX = -1
	}
	report, err := measure(ctx, o)
	if err != nil {
		return err
	}
	if f.JSON {
		return a.json(report)
	}
	return report.Print(a.Stdout)
}

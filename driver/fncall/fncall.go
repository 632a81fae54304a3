package fncall

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Driver makes machines of kind fncall out of those of another driver. It
// implements driver.Driver.
type Driver struct {
	inner driver.Driver
}

var _ driver.Driver = (*Driver)(nil)

// New makes a Driver over inner, which must be its own: machines that it
// adopts are taken for machines of kind fncall. Close closes inner.
func New(inner driver.Driver) *Driver { return &Driver{inner: inner} }

// Kind is dsec.FnCall.
func (d *Driver) Kind() dsec.Kind { return dsec.FnCall }

// RootForm is that of the inner driver.
func (d *Driver) RootForm() driver.RootForm {
	if r, ok := d.inner.(driver.Rooted); ok {
		return r.RootForm()
	}
	return driver.FormMounts
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	c.Cells = true
	m, err := d.inner.Start(ctx, c)
	if err != nil {
		return nil, err
	}
	if _, ok := m.Guest().(driver.Celler); !ok {
		err = dsec.Errorf(dsec.Unsupported, "machines of kind %s cannot keep calls apart", d.inner.Kind())
	} else {
		_, err = m.Guest().Activity(ctx) // its rooms are ready when it answers
	}
	if err != nil {
		return nil, errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
	}
	w := wrap(m)
	w.env = c.Guest.Env
	return w, nil
}

// Adopt implements driver.Driver.
func (d *Driver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	list, err := d.inner.Adopt(ctx)
	for i, m := range list {
		list[i] = wrap(m)
	}
	return list, err
}

// Close implements driver.Driver.
func (d *Driver) Close() error { return d.inner.Close() }

// machine is one machine. Powers of the inner one that make no sense here do
// not show: only the methods of driver.Machine are passed on.
type machine struct {
	driver.Machine
	env []string // of the image; not known of a machine that was adopted, which compiles nothing

	mu    sync.Mutex
	ready map[string]bool // warm programs that were started
}

var _ driver.Caller = (*machine)(nil)

func wrap(m driver.Machine) *machine { return &machine{Machine: m, ready: map[string]bool{}} }

// AfterDone calls f once the machine is gone, see edge.DoneNotifier.
func (m *machine) AfterDone(f func()) {
	if n, ok := m.Machine.(interface{ AfterDone(func()) }); ok {
		n.AfterDone(f)
		return
	}
	go func() { <-m.Done(); f() }()
}

// Guest gives the agent with what a machine of this kind has.
func (m *machine) Guest() driver.Guest { return guest{m.Machine.Guest()} }

func (m *machine) celler() driver.Celler { return m.Machine.Guest().(driver.Celler) }

// guest is the agent of a machine whose commands have nothing in common.
type guest struct{ driver.Guest }

func (g guest) Files() dsec.Files { return files{g.Guest.Files()} }
func (g guest) Ports() dsec.Ports { return ports{} }

// errFiles says why there are none.
func errFiles() error {
	return dsec.Errorf(dsec.Unsupported, "a sandbox of kind %s has no files of its own: every command sees its images as they are; a function call brings its files along", dsec.FnCall)
}

// files refuses all that would be forgotten at once. Stat tells of the images.
type files struct{ images dsec.Files }

func (f files) Stat(ctx context.Context, on dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	return f.images.Stat(ctx, on, op)
}

func (files) List(context.Context, dsec.Call, dsec.FileOp, int) iter.Seq2[dsec.FileInfo, error] {
	return func(yield func(dsec.FileInfo, error) bool) { yield(dsec.FileInfo{}, errFiles()) }
}

func (files) Read(context.Context, dsec.Call, dsec.FileOp, dsec.ReadRange) (io.ReadCloser, error) {
	return nil, errFiles()
}

func (files) Write(context.Context, dsec.Call, dsec.FileOp, dsec.WriteOptions, io.Reader) (dsec.FileInfo, error) {
	return dsec.FileInfo{}, errFiles()
}

func (files) Mkdir(context.Context, dsec.Call, dsec.FileOp, uint32) error { return errFiles() }
func (files) Move(context.Context, dsec.Call, dsec.FileOp, string) error  { return errFiles() }
func (files) Remove(context.Context, dsec.Call, dsec.FileOp) error        { return errFiles() }
func (files) Chmod(context.Context, dsec.Call, dsec.FileOp, uint32) error { return errFiles() }
func (files) Chown(context.Context, dsec.Call, dsec.FileOp, string) error { return errFiles() }
func (files) Symlink(context.Context, dsec.Call, dsec.FileOp, string) error {
	return errFiles()
}

func (files) Watch(context.Context, dsec.Call, dsec.FileOp, dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return func(yield func(dsec.WatchEvent, error) bool) { yield(dsec.WatchEvent{}, errFiles()) }
}

func (files) Pack(context.Context, dsec.Call, dsec.FileOp) (io.ReadCloser, error) {
	return nil, errFiles()
}

func (files) Unpack(context.Context, dsec.Call, dsec.FileOp, io.Reader) error { return errFiles() }

// ports refuses: each command has a loopback of its own.
type ports struct{}

func (ports) Dial(context.Context, dsec.Call, int) (dsec.PortConn, error) {
	return nil, ErrPorts()
}

// ErrPorts says why there are none.
func ErrPorts() error {
	return dsec.Errorf(dsec.Unsupported, "a sandbox of kind %s has no ports: every command has a loopback of its own, gone with it", dsec.FnCall)
}

package job

import (
	"context"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
)

type fencedCommands struct {
	dsec.Commands
	jobs *Jobs
}

func (f fencedCommands) Start(ctx context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return dsec.CommandStatus{}, err
	}
	return f.Commands.Start(ctx, on, c)
}

func (f fencedCommands) Run(ctx context.Context, on dsec.Call, c dsec.Command, stdin []byte) (dsec.Result, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return dsec.Result{}, err
	}
	return f.Commands.Run(ctx, on, c, stdin)
}

func (f fencedCommands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	if err := f.jobs.check(ctx, on); err != nil {
		return func(yield func(dsec.Output, error) bool) { yield(dsec.Output{}, err) }
	}
	return f.Commands.Attach(ctx, on, id, offset)
}

func (f fencedCommands) Read(ctx context.Context, on dsec.Call, id dsec.CommandID, s dsec.Stream, offset int64, max int) ([]byte, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return nil, err
	}
	return f.Commands.Read(ctx, on, id, s, offset, max)
}

func (f fencedCommands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return 0, err
	}
	return f.Commands.Write(ctx, on, id, in)
}

func (f fencedCommands) Resize(ctx context.Context, on dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Commands.Resize(ctx, on, id, size)
}

func (f fencedCommands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Commands.Signal(ctx, on, id, sig)
}

func (f fencedCommands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return dsec.CommandStatus{}, err
	}
	return f.Commands.Wait(ctx, on, id)
}

func (f fencedCommands) List(ctx context.Context, on dsec.Call) ([]dsec.CommandStatus, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return nil, err
	}
	return f.Commands.List(ctx, on)
}

type fencedFiles struct {
	dsec.Files
	jobs *Jobs
}

func (f fencedFiles) Stat(ctx context.Context, on dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return dsec.FileInfo{}, err
	}
	return f.Files.Stat(ctx, on, op)
}

func (f fencedFiles) List(ctx context.Context, on dsec.Call, op dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	if err := f.jobs.check(ctx, on); err != nil {
		return func(yield func(dsec.FileInfo, error) bool) { yield(dsec.FileInfo{}, err) }
	}
	return f.Files.List(ctx, on, op, depth)
}

func (f fencedFiles) Read(ctx context.Context, on dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return nil, err
	}
	return f.Files.Read(ctx, on, op, r)
}

func (f fencedFiles) Write(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return dsec.FileInfo{}, err
	}
	return f.Files.Write(ctx, on, op, opt, r)
}

func (f fencedFiles) Mkdir(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Mkdir(ctx, on, op, mode)
}

func (f fencedFiles) Move(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Move(ctx, on, op, to)
}

func (f fencedFiles) Remove(ctx context.Context, on dsec.Call, op dsec.FileOp) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Remove(ctx, on, op)
}

func (f fencedFiles) Chmod(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Chmod(ctx, on, op, mode)
}

func (f fencedFiles) Chown(ctx context.Context, on dsec.Call, op dsec.FileOp, owner string) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Chown(ctx, on, op, owner)
}

func (f fencedFiles) Symlink(ctx context.Context, on dsec.Call, op dsec.FileOp, target string) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Symlink(ctx, on, op, target)
}

func (f fencedFiles) Watch(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	if err := f.jobs.check(ctx, on); err != nil {
		return func(yield func(dsec.WatchEvent, error) bool) { yield(dsec.WatchEvent{}, err) }
	}
	return f.Files.Watch(ctx, on, op, opt)
}

func (f fencedFiles) Pack(ctx context.Context, on dsec.Call, op dsec.FileOp) (io.ReadCloser, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return nil, err
	}
	return f.Files.Pack(ctx, on, op)
}

func (f fencedFiles) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, r io.Reader) error {
	if err := f.jobs.check(ctx, on); err != nil {
		return err
	}
	return f.Files.Unpack(ctx, on, op, r)
}

type fencedPorts struct {
	dsec.Ports
	jobs *Jobs
}

func (f fencedPorts) Dial(ctx context.Context, on dsec.Call, port int) (dsec.PortConn, error) {
	if err := f.jobs.check(ctx, on); err != nil {
		return nil, err
	}
	return f.Ports.Dial(ctx, on, port)
}

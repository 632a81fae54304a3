package wire_test

import (
	"context"
	"io"
	"iter"

	"github.com/dsec-go/dsec"
)

// nothing refuses every command.
type nothing struct{}

func (nothing) Start(context.Context, dsec.Call, dsec.Command) (s dsec.CommandStatus, err error) {
	return s, errNothing
}
func (nothing) Run(context.Context, dsec.Call, dsec.Command, []byte) (r dsec.Result, err error) {
	return r, errNothing
}
func (nothing) Attach(context.Context, dsec.Call, dsec.CommandID, int64) iter.Seq2[dsec.Output, error] {
	return refuse[dsec.Output]()
}
func (nothing) Read(context.Context, dsec.Call, dsec.CommandID, dsec.Stream, int64, int) ([]byte, error) {
	return nil, errNothing
}
func (nothing) Write(context.Context, dsec.Call, dsec.CommandID, dsec.StdinWrite) (int64, error) {
	return 0, errNothing
}
func (nothing) Resize(context.Context, dsec.Call, dsec.CommandID, dsec.WinSize) error {
	return errNothing
}
func (nothing) Signal(context.Context, dsec.Call, dsec.CommandID, string) error { return errNothing }
func (nothing) Wait(context.Context, dsec.Call, dsec.CommandID) (s dsec.CommandStatus, err error) {
	return s, errNothing
}
func (nothing) List(context.Context, dsec.Call) ([]dsec.CommandStatus, error) { return nil, errNothing }

func refuse[T any]() iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		yield(zero, errNothing)
	}
}

// nothingFiles refuses every file.
type nothingFiles struct{ dsec.Files }

func (nothingFiles) Stat(context.Context, dsec.Call, dsec.FileOp) (i dsec.FileInfo, err error) {
	return i, errNothing
}
func (nothingFiles) List(context.Context, dsec.Call, dsec.FileOp, int) iter.Seq2[dsec.FileInfo, error] {
	return refuse[dsec.FileInfo]()
}
func (nothingFiles) Watch(context.Context, dsec.Call, dsec.FileOp, dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return refuse[dsec.WatchEvent]()
}
func (nothingFiles) Mkdir(context.Context, dsec.Call, dsec.FileOp, uint32) error { return errNothing }
func (nothingFiles) Move(context.Context, dsec.Call, dsec.FileOp, string) error  { return errNothing }
func (nothingFiles) Remove(context.Context, dsec.Call, dsec.FileOp) error        { return errNothing }
func (nothingFiles) Chmod(context.Context, dsec.Call, dsec.FileOp, uint32) error { return errNothing }
func (nothingFiles) Chown(context.Context, dsec.Call, dsec.FileOp, string) error { return errNothing }
func (nothingFiles) Symlink(context.Context, dsec.Call, dsec.FileOp, string) error {
	return errNothing
}
func (nothingFiles) Pack(context.Context, dsec.Call, dsec.FileOp) (io.ReadCloser, error) {
	return nil, errNothing
}
func (nothingFiles) Unpack(_ context.Context, _ dsec.Call, _ dsec.FileOp, r io.Reader) error {
	_, err := io.Copy(io.Discard, r)
	return err
}

// nothingPorts refuses every port.
type nothingPorts struct{}

func (nothingPorts) Dial(context.Context, dsec.Call, int) (dsec.PortConn, error) {
	return nil, errNothing
}

package main

import (
	"syscall"

	"github.com/dsec-go/dsec/guest"
	"github.com/dsec-go/dsec/jail"
)

// cellBox is a guest.Box that runs every command in a cell of its own, which
// ends with the command's leader.
type cellBox struct{ *jail.Box }

func (b cellBox) Start(p guest.Process) (guest.Running, error) {
	cell, err := b.OpenCell(jail.CellConfig{})
	if err != nil {
		return nil, err
	}
	r, err := cell.Start(jail.Process{
		Path: p.Path, Argv: p.Argv, Env: p.Env, Dir: p.Dir, UID: p.UID, GID: p.GID, Groups: p.Groups,
		Stdin: p.Stdin, Stdout: p.Stdout, Stderr: p.Stderr, TTY: p.TTY,
	})
	if err != nil {
		cell.Close() //nolint:errcheck // the first error says more
		return nil, err
	}
	return &inCell{CellProcess: r, cell: cell}, nil
}

type inCell struct {
	*jail.CellProcess
	cell *jail.Cell
	oom  bool
}

// Pid is that of the first process beside pid 1.
func (*inCell) Pid() int { return 2 }

func (r *inCell) Wait() (guest.Exit, error) {
	e, err := r.CellProcess.Wait()
	r.oom = e.Signal == syscall.SIGKILL && r.cell.Usage().OOMKills > 0
	r.cell.Kill() //nolint:errcheck // what it has left holds its pipes open
	return guest.Exit{Code: e.Code, Signal: e.Signal, CPU: e.CPU, MaxRSS: e.MaxRSS}, err
}

func (r *inCell) Kill() error     { return r.cell.Kill() }
func (r *inCell) OOMKilled() bool { return r.oom }
func (r *inCell) Release()        { r.cell.Close() } //nolint:errcheck // nobody is left to tell

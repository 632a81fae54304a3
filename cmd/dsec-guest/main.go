// Command dsec-guest is the small static program that runs sandboxes from the
// inside. It is never started by a person, but by package jail:
//
//	dsec-guest hold   forks shells for the node; see jail.ServeHold
//	dsec-guest init   the guest of one container: a shell, then its agent
//
// by the kernel of a microVM, whose first program it is, and its loader of
// modules, see boot.go and machine.go:
//
//	/init
//	/sbin/modprobe NAME
//
// or by the init system of a guest operating system, see service.go:
//
//	dsec-guest agent
//
// Thousands run on a node, so what it links counts: no net/http, no protobuf.
//
// Read next: packages jail and guest.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/guest"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/vm"
)

// listenFD is the inherited socket that an edge connects to.
const listenFD = 3

func main() {
	mode := ""
	switch {
	case len(os.Args) == 2 && os.Args[1] == agentOfVM: // pid 1 too, of its namespace
		mode = agentOfVM
	case os.Getpid() == 1 && os.Args[0] == vm.InitProgram:
		mode = "boot"
	case filepath.Base(os.Args[0]) == "modprobe":
		mode = "modprobe"
	case len(os.Args) == 2:
		mode = os.Args[1]
	}
	var err error
	switch mode {
	case "boot":
		err = boot()
	case "modprobe":
		err = modprobe(os.Args[1:])
	case agentOfVM:
		err = jail.ServeSolo(serveMachine)
	case "agent":
		err = serveService()
	case "hold":
		err = jail.ServeHold()
	case "init":
		err = jail.Serve(serveBox)
	case "version":
		fmt.Println("dsec-guest", dsec.Version)
	default:
		err = fmt.Errorf("this program is started by dsec; see dsec --help")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dsec-guest:", err)
		os.Exit(1)
	}
}

// serveBox is pid 1 of a container's outer pid namespace.
func serveBox(shell *jail.Shell) error {
	runtime.MemProfileRate = 0
	if err := syscall.SetNonblock(listenFD, true); err != nil {
		return err
	}
	socket := os.NewFile(listenFD, "listener")
	b, outfit, err := shell.Dress(socket, warmUp)
	if err != nil {
		return err
	}
	setup, err := shell.Enter(socket)
	if err != nil {
		return err
	}
	l, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	socket.Close()
	opt := guest.Options{Box: box{b}, Output: outfit.Output, Env: setup.Env, Cwd: setup.Cwd, User: setup.User}
	if setup.Cells != nil {
		if err := b.UseCells(setup.Cells); err != nil {
			return err
		}
		opt.Box, opt.Cells = cellBox{b}, b
	}
	return guest.New(opt).Serve(l)
}

// warmUp runs a command that does nothing, so that the sandbox's first finds
// its way in memory.
func warmUp(b *jail.Box, o *jail.Outfit) error {
	r, err := guest.New(guest.Options{Box: box{b}, Output: o.Output, Passwd: os.DevNull, Group: os.DevNull}).
		Commands().Run(context.Background(), dsec.Call{}, dsec.Command{Argv: []string{jail.NullProgram}}, nil)
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("the null program ended with status %d: %s", r.Code, r.Detail)
	}
	return err
}

// box makes a jail.Box a guest.Box.
type box struct{ *jail.Box }

func (b box) Start(p guest.Process) (guest.Running, error) {
	r, err := b.Box.Start(jail.Process{
		Path: p.Path, Argv: p.Argv, Env: p.Env, Dir: p.Dir, UID: p.UID, GID: p.GID, Groups: p.Groups,
		Stdin: p.Stdin, Stdout: p.Stdout, Stderr: p.Stderr, TTY: p.TTY,
	})
	if err != nil {
		return nil, err
	}
	return running{r}, nil
}

type running struct{ *jail.Running }

func (r running) Wait() (guest.Exit, error) {
	e, err := r.Running.Wait()
	return guest.Exit{Code: e.Code, Signal: syscall.Signal(e.Signal), CPU: e.CPU, MaxRSS: e.MaxRSS}, err
}

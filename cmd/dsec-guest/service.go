package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/guest"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/vm"
)

// recordsDir is where the agent of a guest operating system keeps what commands
// print, in files without a name.
const recordsDir = "/var/lib/dsec-guest"

// service is the agent inside a guest operating system: it runs commands in the
// system's own namespaces, with a control group each, and makes nothing of its
// own. It satisfies vm.Handler.
type service struct {
	box    guest.Box
	groups *jail.SoloGroups // nil without cgroup v2
	meter  meter
	waker  waker
	output *os.File // nil for memory

	mu      sync.Mutex
	agent   chan *guest.Agent
	entered bool
}

var _ vm.Handler = (*service)(nil)

// serveService runs the agent until a port fails.
func serveService() error {
	// Commands inherit the score. One that the kernel may not end makes a machine
	// without memory stand still.
	os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0) //nolint:errcheck // then it is as the system wants
	groups, err := jail.OwnGroups()
	if err != nil {
		// A system without cgroup v2: trees are found by parentage.
		fmt.Fprintln(os.Stderr, "dsec-guest:", err)
		return (&service{box: guest.PlainBox{}}).serve()
	}
	return jail.ServeLoose(groups, func(b *jail.Box) error {
		s := &service{box: box{b}, groups: &groups}
		if s.meter, err = newMeter(groups.Work()); err != nil {
			return err
		}
		return s.serve()
	})
}

func (s *service) serve() (err error) {
	runtime.MemProfileRate = 0
	s.agent = make(chan *guest.Agent, 1)
	if s.waker, err = newWaker(); err != nil {
		return err
	}
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	s.meter.from(root)
	if err := os.Mkdir(recordsDir, 0o700); err == nil || errors.Is(err, os.ErrExist) {
		s.output, _ = os.Open(recordsDir)
	}
	// A port may be missing for as long as the system runs elsewhere.
	ctx, cancel := context.WithTimeout(context.Background(), portWait)
	defer cancel()
	control, err := vm.OpenPort(ctx, vm.ControlPort)
	if err != nil {
		return err
	}
	frames, err := vm.OpenPort(ctx, vm.WirePort)
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- serveControl(vm.NewPort(control), s) }()
	// Begun at once: a host that talks to an earlier agent learns that it is gone.
	port := vm.NewPort(frames)
	go func() { ended <- serveFrames(port, <-s.agent) }()
	return <-ended
}

// Ping implements vm.Handler.
func (s *service) Ping(context.Context) (vm.Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return vm.Info{Version: dsec.Version, Kernel: release(), Entered: s.entered, Boot: sinceBoot()}, nil
}

// Warm implements vm.Handler: there is nothing to mount, so it runs something.
func (s *service) Warm(ctx context.Context, _ vm.Setup) error {
	a := guest.New(guest.Options{Box: s.box})
	defer a.Close()
	_, err := a.Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{"true"}}, nil)
	return err
}

// Enter implements vm.Handler: it takes the defaults of commands.
func (s *service) Enter(_ context.Context, p vm.Setup) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entered {
		return dsec.Errorf(dsec.Conflict, "the machine is a sandbox already")
	}
	if p.Cwd != "" && !filepath.IsAbs(p.Cwd) {
		return dsec.Errorf(dsec.Invalid, "the working folder %q is not absolute", p.Cwd)
	}
	if s.groups != nil {
		l, err := newLimits(s.groups.Work())
		if err == nil {
			err = l.set(p.Limits)
		}
		if err != nil {
			return err
		}
	}
	if err := identify(p.Hostname, p.Hosts, p.Machine); err != nil {
		return err
	}
	s.entered = true
	s.agent <- guest.New(guest.Options{Box: s.box, Output: s.output, Env: p.Env, Cwd: p.Cwd, User: p.User})
	return nil
}

// identify gives a system its name and identity; what is empty stays.
func identify(hostname, hosts, machine string) error {
	if hostname != "" {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			return dsec.Errorf(dsec.Invalid, "set host name: %w", err)
		}
	}
	for _, f := range [][2]string{{"hostname", line(hostname)}, {"hosts", hosts}, {"machine-id", line(machine)}} {
		if f[1] == "" {
			continue
		}
		if err := os.WriteFile("/etc/"+f[0], []byte(f[1]), 0o644); err != nil { //nolint:gosec // all may read it
			return err
		}
	}
	return nil
}

// Restored implements vm.Handler.
func (s *service) Restored(_ context.Context, r vm.Restored) (vm.Clock, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clock, err := s.waker.wake(r)
	if err != nil {
		return clock, err
	}
	return clock, identify(r.Hostname, r.Hosts, r.Machine)
}

// Freeze implements vm.Handler.
func (s *service) Freeze(context.Context) error { return freeze(s.meter.upper) }

// Thaw implements vm.Handler.
func (s *service) Thaw(context.Context) error { return thaw(s.meter.upper) }

// Sync implements vm.Handler.
func (s *service) Sync(context.Context) error {
	unix.Sync()
	return nil
}

// Usage implements vm.Handler.
func (s *service) Usage(context.Context) (dsec.Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.meter.read()
}

// Again implements vm.Handler: what an operating system has done stays done.
func (s *service) Again(context.Context) error {
	return dsec.Errorf(dsec.Unsupported, "the guest is an operating system")
}

// powerOff is the signal that asks systemd to end the system: SIGRTMIN+4.
const powerOff = 34 + 4

// PowerOff implements vm.Handler.
func (s *service) PowerOff(context.Context) error {
	if b, err := os.ReadFile("/proc/1/comm"); err == nil && strings.TrimSpace(string(b)) == "systemd" {
		return unix.Kill(1, powerOff)
	}
	unix.Sync()
	time.AfterFunc(100*time.Millisecond, func() { unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) }) //nolint:errcheck // nobody is left to hear
	return nil
}

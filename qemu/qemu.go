// Package qemu runs one QEMU process: command line, confinement, monitor, save
// and load, disks, screen. It knows nothing of sandboxes, guests' agents or
// images, and decides no machine: what machine it is, its caller says in Args.
//
// A process is a session of its own and outlives whoever started it. It runs
// as an unprivileged user where the caller says so, without a network, may not
// fork, and opens no path of the host: disks, sockets and logs are descriptors
// that it is born with or is sent later. It is born in its control groups.
//
// Invariants:
//   - Start leaves no process when it fails.
//   - Done is closed when the kernel has ended the process, never before.
//   - What a hostile guest can make QEMU say is bounded: messages of the monitor
//     by MaxMessage, console and standard error by ConsoleSize, which are kept
//     in memory files that cannot grow.
//
// The folder of a process holds its monitor's socket, the sockets made with
// Files.Listen, and who it is (state); its owner removes it.
//
// Read next: Config, Process, then package driver/microvm.
package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
)

// Program is the QEMU that is run where Config names none.
const Program = "qemu-system-x86_64"

// StartTimeout is how long a process may take until its monitor answers.
const StartTimeout = 20 * time.Second

// Config says how a process is started.
type Config struct {
	Dir     string   // its own folder, which exists; required
	Program string   // default Program
	Args    []string // the machine and its devices
	Accel   string   // such as "kvm" or "tcg,tb-size=64"; default TCG
	Files   *Files   // that Args name; closed by Start in this process, whatever it returns

	// Incoming makes a machine that waits for Load and then for Cont.
	Incoming bool

	// Group is joined before the first instruction; nil for none. Its limits
	// are the owner's business.
	Group *jail.Group

	// UID and GID are whom it runs as; 0 means root, which only tests want.
	UID, GID int

	// Event is called for each event of the monitor, from the goroutine that
	// reads it: it must not block. Optional.
	Event func(Event)
}

// TCG is the accelerator that every host has.
const TCG = "tcg"

// Process is one running QEMU. It is safe for concurrent use.
type Process struct {
	dir   string
	pid   int
	start uint64
	pidfd *os.File
	log   logs

	monitor *Monitor

	mu     sync.Mutex
	reason string // of the last SHUTDOWN
	panic  bool   // the guest said so by its panic device
	exit   Exit

	done chan struct{}
}

// state is what the folder says about its process.
type state struct {
	Pid   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since boot; with Pid it names a process
}

const (
	stateFile   = "qemu"
	monitorFile = "qmp"
)

// OOMScore is a process's oom_score_adj: a host without memory ends a machine,
// which is one sandbox, before the node or anything else of the system.
const OOMScore = 500

// fixed are the arguments of every process.
var fixed = []string{
	"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
	"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
}

// Start starts a process and returns once its monitor answers; the machine
// runs then, unless Args say -S or it is Incoming. A command line that QEMU
// refuses is an error with QEMU's own words.
func Start(ctx context.Context, c Config) (*Process, error) {
	if c.Files == nil {
		c.Files = &Files{}
	}
	defer c.Files.Close()
	if err := c.Files.err; err != nil {
		return nil, err
	}
	if c.Program == "" {
		c.Program = Program
	}
	program, err := lookPath(c.Program)
	if err != nil {
		return nil, err
	}
	p := &Process{dir: c.Dir, done: make(chan struct{})}
	if err := p.spawn(c, program); err != nil {
		p.log.close()
		return nil, err
	}
	c.Files.Close() // or a process that is gone would still seem to listen
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	err = p.connect(ctx, c.Event)
	if err == nil {
		err = p.log.seal()
	}
	if err != nil {
		p.kill()
		<-p.done
		if e := p.Exit(); e.Reason == Failed {
			return nil, fmt.Errorf("start QEMU: %s", e.Detail)
		}
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return p, nil
}

// spawn makes the process and records it.
func (p *Process) spawn(c Config, program string) error {
	var err error
	if p.log, err = newLogs(); err != nil {
		return err
	}
	args := append([]string{program}, fixed...)
	if c.Accel == "" {
		c.Accel = TCG
	}
	args = append(args, "-accel", c.Accel)
	args = append(args, "-chardev", "socket,id=qmp,server=on,wait=off,fd="+c.Files.Listen(filepath.Join(c.Dir, monitorFile)),
		"-mon", "chardev=qmp,mode=control")
	console, err := p.log.console.writer()
	if err != nil {
		return err
	}
	args = append(args, "-chardev", "file,id=console,path="+c.Files.Set(console))
	if c.Incoming {
		args = append(args, "-S", "-incoming", "defer")
	}
	args = append(args, c.Args...)
	args = append(args, c.Files.args()...)
	if err := c.Files.err; err != nil {
		return err
	}
	stderr, err := p.log.stderr.writer()
	if err != nil {
		return err
	}
	defer stderr.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	fds := []uintptr{null.Fd(), stderr.Fd(), stderr.Fd()}
	for _, f := range c.Files.list {
		fds = append(fds, f.file.Fd())
	}
	pidfd := -1
	attr := &syscall.ProcAttr{Dir: "/", Env: []string{"PATH=/usr/bin:/bin", "HOME=/nonexistent", "LC_ALL=C"}, Files: fds, Sys: &syscall.SysProcAttr{
		Setsid: true, PidFD: &pidfd,
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
	}}
	if c.UID != 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(c.UID), Gid: uint32(c.GID), Groups: groups(c.Accel)}
	}
	pid, err := fork(c.Group, program, args, attr)
	runtime.KeepAlive(c.Files)
	if err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	p.pid, p.start, p.pidfd = pid, jail.StartTime(pid), os.NewFile(uintptr(pidfd), "pidfd")
	go p.wait()
	// A process that is gone already says why at its monitor.
	os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(OOMScore)), 0) //nolint:errcheck
	b, err := json.Marshal(state{Pid: p.pid, Start: p.start})
	if err == nil {
		err = os.WriteFile(filepath.Join(c.Dir, stateFile), b, 0o600)
	}
	if err != nil {
		p.kill()
		<-p.done
		return fmt.Errorf("record QEMU: %w", err)
	}
	return nil
}

// fork starts the program inside the groups: with cgroup v2 by the call that
// makes it, else on a thread that has joined them and that nobody uses again.
func fork(g *jail.Group, program string, args []string, attr *syscall.ProcAttr) (int, error) {
	if g == nil {
		return syscall.ForkExec(program, args, attr)
	}
	join, err := g.Join()
	if err != nil {
		return 0, err
	}
	defer join.Close()
	if join.Tasks == nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(join.Commands.Fd())
		return syscall.ForkExec(program, args, attr)
	}
	var pid int
	done := make(chan struct{})
	go onThread(func() {
		defer close(done)
		for _, t := range join.Tasks {
			if _, err = t.Write([]byte("0")); err != nil {
				err = fmt.Errorf("join cgroup: %w", err)
				return
			}
		}
		pid, err = syscall.ForkExec(program, args, attr)
	})
	<-done
	return pid, err
}

// onThread runs f on a thread that ends with it. The program's first thread
// never ends: it would stay where f has put it.
func onThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return // without unlocking
	}
	other := make(chan struct{})
	go func() {
		defer close(other)
		onThread(f)
	}()
	<-other
	runtime.UnlockOSThread()
}

// dyingTime is how long a process that does not answer has to be gone.
const dyingTime = 2 * time.Second

// Attach finds the process that was started with this folder, for a new
// process of the node. It is nil, without an error, when that one is gone. The
// monitor is connected anew; events of the time between are lost.
func Attach(ctx context.Context, dir string, event func(Event)) (*Process, error) {
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var s state
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read the record of QEMU in %s: %w", dir, err)
	}
	pidfd := jail.OpenProcess(s.Pid, s.Start)
	if pidfd == nil {
		return nil, nil
	}
	p := &Process{dir: dir, pid: s.Pid, start: s.Start, pidfd: pidfd, log: findLogs(s.Pid), done: make(chan struct{})}
	go p.wait()
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	if err := p.connect(ctx, event); err != nil {
		// One that was killed closes its connections first, and is gone a moment later.
		select {
		case <-p.done:
			return nil, nil
		case <-time.After(dyingTime):
		}
		return p, fmt.Errorf("attach to QEMU: %w", err)
	}
	return p, nil
}

// connect opens the monitor.
func (p *Process) connect(ctx context.Context, event func(Event)) error {
	conn, err := jail.DialPath(filepath.Join(p.dir, monitorFile))
	if err != nil {
		return err
	}
	// A process that ends closes its sockets, but one that it had not taken
	// from the queue yet is closed too, so reading ends by itself.
	m, err := NewMonitor(ctx, conn, func(e Event) {
		p.note(e)
		if event != nil {
			event(e)
		}
	})
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.monitor = m
	p.mu.Unlock()
	return nil
}

// Pid is the process's number.
func (p *Process) Pid() int { return p.pid }

// Dir is the folder it was started with.
func (p *Process) Dir() string { return p.dir }

// Done is closed when the process is gone.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill ends the process and returns when it is gone.
func (p *Process) Kill() {
	p.kill()
	<-p.done
}

// kill asks for the end. The process may be gone.
func (p *Process) kill() {
	if c, err := p.pidfd.SyscallConn(); err == nil {
		c.Control(func(fd uintptr) { //nolint:errcheck // closed: gone
			unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) //nolint:errcheck // gone is as good
		})
	}
}

// Release lets go of a process that runs on, as the end of this process does.
// For tests of adoption.
func (p *Process) Release() {
	if m := p.Monitor(); m != nil {
		m.Close()
	}
}

// Monitor is the connection to QEMU; nil if Attach could not make it.
func (p *Process) Monitor() *Monitor {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.monitor
}

// Execute runs one command of the monitor, see Monitor.Execute. Once the
// process is gone it is Conflict.
func (p *Process) Execute(ctx context.Context, command string, args, result any) error {
	m := p.Monitor()
	if m == nil {
		return dsec.Errorf(dsec.Unavailable, "QEMU's monitor is not connected")
	}
	return p.gone(m.Execute(ctx, command, args, result))
}

// gone makes an error of the monitor one of the process where that has ended.
func (p *Process) gone(err error) error {
	if err == nil || !errors.Is(err, ErrClosed) {
		return err
	}
	select {
	case <-p.done:
		return dsec.Errorf(dsec.Conflict, "QEMU is gone: %s", p.Exit())
	case <-time.After(time.Second): // the socket breaks a moment before the process ends
		return err
	}
}

// groups are the further groups of an unprivileged process: the owner of the
// virtualisation device, where it is to be used.
func groups(accel string) []uint32 {
	var st unix.Stat_t
	if len(accel) >= 3 && accel[:3] == "kvm" && unix.Stat("/dev/kvm", &st) == nil {
		return []uint32{st.Gid}
	}
	return nil
}

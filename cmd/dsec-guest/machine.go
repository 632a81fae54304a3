package main

import (
	"context"
	"fmt"
	"io"
	"net"
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
	"github.com/dsec-go/dsec/wire"
)

// portWait is how long a machine's ports may take to show up.
const portWait = 20 * time.Second

// machine is the agent of a microVM: pid 1 of a pid namespace, which mounts the
// environment and keeps the workload one namespace below itself. It satisfies
// vm.Handler.
type machine struct {
	shell  *jail.Shell
	box    *jail.Box
	groups jail.SoloGroups
	limits limits
	meter  meter
	waker  waker
	files  *os.File // folder of the identity's files
	ready  time.Duration

	mu    sync.Mutex // calls of several connections follow each other
	disks disks      // as last looked for
	root  *root      // nil before Enter
	agent chan *guest.Agent
	spent bool // an Enter failed half-way
}

var _ vm.Handler = (*machine)(nil)

// serveMachine is the agent's program, as pid 1 of its namespaces.
func serveMachine(shell *jail.Shell) error {
	runtime.MemProfileRate = 0
	groups, err := jail.MakeSoloGroups(cgroupRoot)
	if err != nil {
		return err
	}
	m := &machine{shell: shell, groups: groups, agent: make(chan *guest.Agent, 1)}
	if m.box, err = shell.DressSolo(groups); err != nil {
		return err
	}
	if m.limits, err = newLimits(groups.Work()); err != nil {
		return err
	}
	m.limits.have(vm.Limits{})
	if m.meter, err = newMeter(groups.Work()); err != nil {
		return err
	}
	if m.waker, err = newWaker(); err != nil {
		return err
	}
	if m.files, err = os.Open(jail.SoloFiles); err != nil {
		return err
	}
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
	m.ready = sinceBoot()
	ended := make(chan error, 3)
	go func() { ended <- shell.WaitReaper() }()
	go func() { ended <- serveControl(vm.NewPort(control), m) }()
	go func() {
		agent := <-m.agent
		ended <- serveFrames(vm.NewPort(frames), agent)
	}()
	return <-ended
}

// serveControl answers the control port's connections.
func serveControl(p *vm.Port, h vm.Handler) error {
	return eachConn(p, func(c io.ReadWriteCloser) { vm.Serve(c, h) }) //nolint:errcheck // the host sees the same end
}

// serveFrames answers the wire port's connections.
func serveFrames(p *vm.Port, a *guest.Agent) error {
	return eachConn(p, func(c io.ReadWriteCloser) { wire.Serve(c, a) }) //nolint:errcheck // as above
}

func eachConn(p *vm.Port, serve func(io.ReadWriteCloser)) error {
	for {
		c, err := p.Accept()
		if err != nil {
			return err
		}
		go serve(c) // ends with the connection
	}
}

// sinceBoot is the time since the kernel started.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// Ping implements vm.Handler.
func (m *machine) Ping(context.Context) (vm.Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return vm.Info{Version: dsec.Version, Kernel: release(), Entered: m.root != nil, Boot: m.ready}, nil
}

func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Warm implements vm.Handler.
func (m *machine) Warm(ctx context.Context, s vm.Setup) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.root != nil || m.spent {
		return dsec.Errorf(dsec.Conflict, "the machine is a sandbox already")
	}
	s.Output = ""
	r, err := m.mount(&s)
	if err != nil {
		return err
	}
	defer r.undo.run()
	if _, err := os.ReadDir(jail.SoloRoot); err != nil {
		return err
	}
	a := guest.New(guest.Options{Box: box{m.box}, Passwd: os.DevNull, Group: os.DevNull})
	defer a.Close()
	// By frames, since that is how the first command comes.
	here, there := net.Pipe()
	go wire.Serve(there, a) //nolint:errcheck // ends with the client
	c := wire.NewClient(wire.Options{Dial: func(context.Context) (io.ReadWriteCloser, error) { return here, nil }})
	defer c.Close()
	x, err := c.Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{jail.NullProgram}}, nil)
	if err == nil && x.Code != 0 {
		err = fmt.Errorf("the null program ended with status %d: %s", x.Code, x.Detail)
	}
	return err
}

// mount mounts the root that s asks for. The machine's disks are looked for only
// where one is not known yet.
func (m *machine) mount(s *vm.Setup) (*root, error) {
	if !m.disks.hold(s) {
		var err error
		if m.disks, err = findDisks(); err != nil {
			return nil, err
		}
	}
	return mountRoot(m.disks, s)
}

// Enter implements vm.Handler.
func (m *machine) Enter(_ context.Context, s vm.Setup) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.root != nil || m.spent {
		return dsec.Errorf(dsec.Conflict, "the machine is a sandbox already")
	}
	if s.Cwd != "" && !filepath.IsAbs(s.Cwd) {
		return dsec.Errorf(dsec.Invalid, "the working folder %q is not absolute", s.Cwd)
	}
	if err := m.limits.set(s.Limits); err != nil {
		return err
	}
	r, err := m.mount(&s)
	if err != nil {
		return err
	}
	id := jail.Identity{Machine: s.Machine, Boot: newUUID()}
	if id.Machine == "" {
		id.Machine = strings.ReplaceAll(newUUID(), "-", "")
	}
	m.spent = true // from here on there is no way back
	if err := m.shell.EnterSolo(&jail.Setup{Hostname: s.Hostname, Hosts: s.Hosts, Resolv: s.Resolv}, id); err != nil {
		return err
	}
	m.meter.from(r.upper)
	m.root = r
	m.agent <- guest.New(guest.Options{Box: box{m.box}, Output: r.output, Env: s.Env, Cwd: s.Cwd, User: s.User})
	return nil
}

// newUUID makes a random UUID as text.
func newUUID() string {
	var b [16]byte
	unix.Getrandom(b[:], 0) //nolint:errcheck // never fails for so few bytes
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Restored implements vm.Handler.
func (m *machine) Restored(_ context.Context, r vm.Restored) (vm.Clock, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	clock, err := m.waker.wake(r)
	if err != nil {
		return clock, err
	}
	if r.Hostname != "" {
		if err := unix.Sethostname([]byte(r.Hostname)); err != nil {
			return clock, dsec.Errorf(dsec.Invalid, "set host name: %w", err)
		}
	}
	if m.root == nil {
		return clock, nil // Enter brings the rest
	}
	files := map[string]string{"hosts": r.Hosts, "machine-id": line(r.Machine), "hostname": line(r.Hostname)}
	if r.Machine != "" {
		files["boot_id"] = line(newUUID())
	}
	for name, text := range files {
		if text == "" {
			continue
		}
		if err := rewrite(m.files, name, text); err != nil {
			return clock, fmt.Errorf("write %s: %w", name, err)
		}
	}
	return clock, nil
}

func line(s string) string {
	if s == "" {
		return ""
	}
	return s + "\n"
}

// rewrite changes a file in place, since it is mounted elsewhere.
func rewrite(dir *os.File, name, text string) error {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_TRUNC|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

// Freeze implements vm.Handler.
func (m *machine) Freeze(context.Context) error { return m.onUpper(freeze) }

// Thaw implements vm.Handler.
func (m *machine) Thaw(context.Context) error { return m.onUpper(thaw) }

// Sync implements vm.Handler.
func (m *machine) Sync(context.Context) error {
	return m.onUpper(func(f *os.File) error { return unix.Syncfs(int(f.Fd())) })
}

func (m *machine) onUpper(do func(*os.File) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.root == nil {
		return nil
	}
	if m.root.output != nil {
		unix.Syncfs(int(m.root.output.Fd())) //nolint:errcheck // a full disk is told where it is written
	}
	return do(m.root.upper)
}

// PowerOff implements vm.Handler. The agent's end is the machine's.
func (m *machine) PowerOff(ctx context.Context) error {
	if err := m.Sync(ctx); err != nil {
		return err
	}
	// Time for the answer to leave.
	time.AfterFunc(100*time.Millisecond, func() { os.Exit(0) })
	return nil
}

// Again implements vm.Handler. The agent is pid 1 of all that it has started,
// and nothing that it has mounted is seen elsewhere.
func (m *machine) Again(context.Context) error {
	os.Exit(statusAgain)
	return nil
}

// Usage implements vm.Handler.
func (m *machine) Usage(context.Context) (dsec.Usage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.meter.read()
}

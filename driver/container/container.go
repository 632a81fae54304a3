// Package container runs sandboxes as containers: namespaces, cgroups, a
// seccomp filter and a root of shared layers, made by the kernel directly with
// no container runtime on the path.
//
// What it owns on the host is one folder for each slot, named by its number,
// below Config.Dir, and while a box is in it the control groups of that name:
//
//	state        who it is: sandbox, process, start time; see state.go
//	s            the guest's listening socket
//	upper work   the overlay's writable folders
//	out          where the guest makes unlinked files for long output
//
// A slot's number gives its range of ids. Boxes are made in two halves: a shell
// (folder, cgroups, namespaces, guest process: nothing that depends on a Spec),
// kept ready in a small pool, and then limits, root and guest settings.
//
// Invariants: those of package driver. Order of a box's end: the guest's pidfd
// is readable (the kernel has ended every process), cgroups are removed, the
// folder is emptied, the slot is free, Done is closed.
//
// Read next: package jail.
package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/jail/profile"
	"github.com/dsec-go/dsec/rootfs"
	"github.com/dsec-go/dsec/wire"
)

// Range of host ids that boxes use: slot n has the IDRange ids from FirstID +
// n × IDRange. It lies above what distributions and systemd give out.
const (
	FirstID  = 0x7000_0000
	MaxSlots = (1<<32 - FirstID) / jail.IDRange
)

// DefaultPool is how many shells are kept ready: enough to hide their making
// from single creates; a burst makes its own.
const DefaultPool = 8

// Config says where a driver lives.
type Config struct {
	Dir   string   // its own folder, on a file system that can hold overlay uppers; required
	Guest string   // path of the dsec-guest binary; required
	Name  string   // of its control groups, unique on the host; required
	Pool  int      // shells kept ready; 0 means DefaultPool, negative none
	First int      // number of its lowest slot, for two drivers of one host; default 0
	Log   *os.File // standard error of guests; default none
}

// Driver makes containers. It implements driver.Driver.
type Driver struct {
	config  Config
	cgroups *jail.Cgroups
	holder  *jail.Holder
	watch   *watch
	filter  []byte
	pool    *pool

	stop     chan struct{} // closed by Close
	sweeping sync.WaitGroup
	deleting sync.WaitGroup // of trash
	waking   sync.WaitGroup // prefaults

	mu       sync.Mutex
	slots    driver.Slots
	machines map[int]*machine // by slot
	closed   bool
	looked   bool                     // Adopt was called
	fault    func(stage string) error // nil but in tests
}

var _ driver.Driver = (*Driver)(nil)

// Open makes the driver's folders and control groups and finds or starts its
// holder. Adopt comes next.
func Open(c Config) (*Driver, error) {
	if c.Pool == 0 {
		c.Pool = DefaultPool
	}
	if err := os.MkdirAll(filepath.Join(c.Dir, trashDir), 0o700); err != nil {
		return nil, err
	}
	filter, err := profile.Default()
	if err != nil {
		return nil, err
	}
	cgroups, err := jail.OpenCgroups(c.Name)
	if err != nil {
		return nil, err
	}
	w, err := newWatch()
	if err != nil {
		return nil, err
	}
	d := &Driver{config: c, cgroups: cgroups, watch: w, filter: filter, stop: make(chan struct{}), machines: map[int]*machine{}}
	d.holder, err = jail.OpenHolder(jail.HolderConfig{
		Socket: filepath.Join(c.Dir, "hold.sock"), Guest: c.Guest, Log: c.Log, Join: cgroups.JoinGuests,
	})
	if err != nil {
		w.close()
		return nil, err
	}
	d.slots = driver.Slots{First: c.First, Limit: MaxSlots}
	d.pool = newPool(c.Pool, d.newShell)
	d.sweeping.Go(d.sweepStuck)
	return d, nil
}

// Kind is dsec.Container.
func (d *Driver) Kind() dsec.Kind { return dsec.Container }

// shell is a box without a root: the first half of its making.
type shell struct {
	slot  int
	dir   string
	pid   int
	start uint64 // of the process, see jail.StartTime
	pidfd *os.File
	group *jail.Group

	priority jail.Priority // it was made with
}

// base is the first id of a slot.
func base(slot int) uint32 { return FirstID + uint32(slot)*jail.IDRange }

func (s *shell) socket() string { return filepath.Join(s.dir, "s") }

// newShell makes the first half of a box.
func (d *Driver) newShell(p jail.Priority) (*shell, error) {
	d.mu.Lock()
	n, ok := d.slots.Take()
	d.mu.Unlock()
	if !ok {
		return nil, dsec.Errorf(dsec.Exhausted, "all %d id ranges of the node are in use", MaxSlots)
	}
	s := &shell{slot: n, dir: filepath.Join(d.config.Dir, strconv.Itoa(n)), priority: p}
	if err := d.makeShell(s, p); err != nil {
		if e := d.destroy(s); e != nil {
			err = fmt.Errorf("%w; and then %v", err, e)
		}
		return nil, err
	}
	return s, nil
}

func (d *Driver) makeShell(s *shell, p jail.Priority) error {
	id := int(base(s.slot))
	for _, f := range slotFolders {
		path := filepath.Join(s.dir, f.name)
		err := os.Mkdir(path, f.mode)
		if errors.Is(err, os.ErrExist) && f.stays {
			continue
		}
		if err == nil && f.owned {
			err = os.Chown(path, id, id)
		}
		if err != nil {
			return fmt.Errorf("make box folder: %w", err)
		}
	}
	l, err := jail.ListenPath(s.socket(), unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer l.Close()
	if s.group, err = d.cgroups.Make(strconv.Itoa(s.slot), base(s.slot)); err != nil {
		return err
	}
	cg, err := s.group.Guest()
	if err != nil {
		return err
	}
	if cg != nil {
		defer cg.Close()
	}
	if s.pid, s.pidfd, err = d.holder.Spawn(jail.SpawnConfig{Base: base(s.slot), Listener: l, Cgroup: cg, Priority: p}); err != nil {
		return err
	}
	s.start = jail.StartTime(s.pid)
	if err := writeState(s.dir, state{Pid: s.pid, Start: s.start}); err != nil {
		return err
	}
	out, err := rootfs.MountFolder(filepath.Join(s.dir, "out"), nil)
	if err != nil {
		return err
	}
	defer out.Close()
	join, err := s.group.Join()
	if err != nil {
		return err
	}
	defer join.Close()
	return jail.Dress(s.socket(), &jail.Outfit{Output: out, Cgroup: join, Filter: d.filter, Warm: p == jail.Spare})
}

// kill sends SIGKILL to the guest, pid 1 of the box's outer pid namespace, and
// returns once gone is closed, or given up. A v1 freezer holds back even
// SIGKILL, and the guest may die between freezing a command and thawing it, so
// what is frozen is thawed until the kernel is done, for the first time after
// patience.
func (s *shell) kill(patience time.Duration, gone, giveUp <-chan struct{}) error {
	if err := unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EBADF) {
		return fmt.Errorf("kill guest: %w", err)
	}
	for pause := patience; ; pause = min(2*pause+killPatience, 100*time.Millisecond) {
		select {
		case <-gone:
			return nil
		case <-giveUp:
			return nil
		case <-time.After(pause):
			s.group.Thaw() //nolint:errcheck // may be gone by now
		}
	}
}

// killPatience is how long a killed box may take before anybody asks whether
// something of it is frozen.
const killPatience = 5 * time.Millisecond

// destroy ends whatever there is of a box and frees its slot. Its order is the
// package's invariant.
func (d *Driver) destroy(s *shell) error {
	var errs []error
	if s.pidfd != nil {
		gone, giveUp := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(giveUp)
			if err := waitPidfd(s.pidfd, endTimeout); err == nil {
				close(gone)
			}
		}()
		errs = append(errs, s.kill(killPatience, gone, giveUp))
		<-giveUp
		s.pidfd.Close()
	}
	return errors.Join(append(errs, d.clean(s))...)
}

// clean removes what a box without processes has on the host.
func (d *Driver) clean(s *shell) error {
	var errs []error
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	errs = append(errs, d.emptySlot(s))
	if err := errors.Join(errs...); err != nil {
		return err // the slot stays taken: its ids may still own something
	}
	d.mu.Lock()
	d.slots.Free(s.slot)
	d.mu.Unlock()
	return nil
}

// slotFolders are the folders of a slot. Those that stay serve the slot's next
// box too: they hold nothing of the last one. The writable ones are made anew,
// since a workload may change even their own mode and attributes.
var slotFolders = []struct {
	name  string
	mode  os.FileMode
	owned bool // by the box's root
	stays bool
}{
	{name: "", mode: 0o700, stays: true},
	{name: "out", mode: 0o700, owned: true, stays: true},
	{name: "upper", mode: 0o755, owned: true},
	{name: "work", mode: 0o700},
}

const (
	endTimeout   = 30 * time.Second // for the kernel to end a killed tree
	trashDir     = "trash"
	trashPatient = 500 * time.Millisecond // how long an end waits for its files to be deleted
)

// emptySlot removes what a box left in its slot's folder. A writable layer is
// moved out of the way and deleted, in the background if that takes long: a
// workload may leave a million files. What a crash leaves is deleted by the
// next Adopt.
func (d *Driver) emptySlot(s *shell) error {
	var errs []error
	for _, f := range slotFolders {
		if !f.stays {
			errs = append(errs, d.discard(filepath.Join(s.dir, f.name)))
		}
	}
	errs = append(errs, emptyFolder(filepath.Join(s.dir, "out")))
	if err := os.Remove(s.socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	if err == nil && writeState(s.dir, state{}) != nil {
		err = os.Remove(filepath.Join(s.dir, stateFile)) // as good, and possible on a full disk
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil // the folder was never made
	}
	return err
}

// emptyFolder removes what is in a folder: a guest makes nameless files there,
// but it can make others.
func emptyFolder(dir string) error {
	es, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range es {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

func (d *Driver) discard(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	trash := filepath.Join(d.config.Dir, trashDir, filepath.Base(dir)+"-"+strconv.FormatInt(time.Now().UnixNano(), 36))
	if err := os.Rename(dir, trash); err != nil {
		return err
	}
	done := make(chan error, 1)
	d.deleting.Add(1)
	go func() {
		defer d.deleting.Done()
		done <- os.RemoveAll(trash)
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(trashPatient):
		return nil
	}
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	return d.start(ctx, c, driver.NewTimer(), nil)
}

// start makes a box, with the writable layer of a snapshot if there is one.
func (d *Driver) start(ctx context.Context, c driver.Config, t *driver.Timer, from *opened) (driver.Machine, error) {
	s, err := d.pool.get(ctx)
	if err != nil {
		return nil, err
	}
	t.Mark("shell")
	if s.priority == jail.Spare {
		if err := jail.Hasten(s.pid); err != nil {
			return nil, errors.Join(err, d.destroy(s))
		}
	}
	if from != nil {
		err = from.plant(ctx, s)
		t.Mark("files")
	}
	var m *machine
	if err == nil {
		m, err = d.enter(ctx, s, c, t)
	}
	if err != nil {
		if e := d.destroy(s); e != nil {
			err = fmt.Errorf("%w; and then %v", err, e)
		}
		return nil, err
	}
	return m, nil
}

func (d *Driver) enter(ctx context.Context, s *shell, c driver.Config, t *driver.Timer) (*machine, error) {
	if err := s.group.Limit(c.Resources); err != nil {
		return nil, err
	}
	if err := d.breakAt("limits"); err != nil {
		return nil, err
	}
	t.Mark("limits")
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.pid))
	if err != nil {
		return nil, err
	}
	root, err := mountRoot(s.dir, c.Root, userns)
	userns.Close()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	t.Mark("root")
	if err := errors.Join(ctx.Err(), d.breakAt("root")); err != nil {
		return nil, err
	}
	setup := &jail.Setup{
		Root: root, Hostname: c.Hostname, Hosts: hostsFile(c.Hostname), Resolv: resolvFile,
		Env: c.Guest.Env, Cwd: c.Guest.Cwd, User: c.Guest.User,
	}
	if c.Cells {
		if setup.Cells, err = cells(s, c.Root); err != nil {
			return nil, err
		}
		defer setup.Cells.Close()
	}
	if err := jail.Enter(s.socket(), setup); err != nil {
		return nil, err
	}
	t.Mark("guest")
	if err := d.breakAt("guest"); err != nil {
		return nil, err
	}
	m := d.newMachine(s, c.ID)
	m.stages = t.Stages()
	if err := writeState(s.dir, state{ID: c.ID, Pid: s.pid, Start: s.start}); err != nil {
		m.client.Close()
		return nil, err
	}
	return m, d.register(m)
}

// breakAt is where a test makes a start fail.
func (d *Driver) breakAt(stage string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault == nil {
		return nil
	}
	return d.fault(stage)
}

func mountRoot(dir string, r driver.Root, userns *os.File) (*os.File, error) {
	if r.Dir != "" {
		return rootfs.MountFolder(r.Dir, userns)
	}
	return rootfs.Overlay{
		Lowers: r.Layers, UserNS: userns,
		Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work"),
	}.Mount()
}

func hostsFile(hostname string) string {
	return "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n"
}

// resolvFile names no server: a box has no network. An empty file would make
// resolvers ask loopback and wait.
const resolvFile = "# this sandbox has no network\noptions timeout:1 attempts:1\n"

// dialGuest connects to a box's guest.
func dialGuest(s *shell) func(context.Context) (io.ReadWriteCloser, error) {
	return func(context.Context) (io.ReadWriteCloser, error) { return jail.DialPath(s.socket()) }
}

func (d *Driver) newMachine(s *shell, id dsec.SandboxID) *machine {
	return &machine{
		driver: d, id: id, shell: s, Ending: driver.NewEnding(),
		client: wire.NewClient(wire.Options{Dial: dialGuest(s), IdleAfter: idleConnection}),
	}
}

// register starts to watch m. From here on its end is noticed.
func (d *Driver) register(m *machine) error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		m.client.Close()
		return dsec.Errorf(dsec.Unavailable, "the node is closing")
	}
	d.machines[m.shell.slot] = m
	d.mu.Unlock()
	if err := d.watch.add(m.shell.pidfd, m.ended); err != nil {
		d.mu.Lock()
		delete(d.machines, m.shell.slot)
		d.mu.Unlock()
		m.client.Close()
		return err
	}
	return nil
}

// unseen counts the machines of an earlier process that Adopt did not look for.
func (d *Driver) unseen() int {
	entries, err := os.ReadDir(d.config.Dir)
	if err != nil {
		return 1 // who knows
	}
	n := 0
	for _, e := range entries {
		if st, err := readState(filepath.Join(d.config.Dir, e.Name())); err == nil && st.ID != "" {
			n++
		}
	}
	return n
}

// Adopt implements driver.Driver. Folders and groups of boxes whose guest is
// gone are removed, and so are shells that nobody came to use.
func (d *Driver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	d.mu.Lock()
	d.looked = true
	d.mu.Unlock()
	entries, err := os.ReadDir(d.config.Dir)
	if err != nil {
		return nil, err
	}
	var out []driver.Machine
	var adopted []*machine
	var errs []error
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n < 0 || n >= MaxSlots {
			continue
		}
		d.mu.Lock()
		d.slots.Mark(n)
		d.mu.Unlock()
		m, err := d.adopt(n)
		if err != nil {
			errs = append(errs, fmt.Errorf("adopt slot %d: %w", n, err))
		} else if m != nil {
			out, adopted = append(out, m), append(adopted, m)
		}
	}
	d.wakeAdopted(adopted)
	errs = append(errs, d.sweep())
	d.pool.start()
	return out, errors.Join(errs...)
}

func (d *Driver) adopt(n int) (*machine, error) {
	s := &shell{slot: n, dir: filepath.Join(d.config.Dir, strconv.Itoa(n)), group: d.cgroups.Group(strconv.Itoa(n))}
	st, err := readState(s.dir)
	if err == nil {
		s.pid = st.Pid
		s.pidfd = jail.OpenProcess(st.Pid, st.Start)
	}
	if s.pidfd == nil || st.ID == "" {
		return nil, d.destroy(s)
	}
	m := d.newMachine(s, st.ID)
	m.paused = s.group.Frozen()
	if err := d.register(m); err != nil {
		return nil, err
	}
	return m, nil
}

// sweep removes groups without a folder, guests that no folder knows, and
// files that an earlier process did not come to delete.
func (d *Driver) sweep() error {
	slots, err := d.cgroups.Slots()
	if err != nil {
		return err
	}
	d.mu.Lock()
	known := map[int]bool{}
	for n := range d.machines {
		known[n] = true
	}
	d.mu.Unlock()
	var errs []error
	for _, s := range slots {
		if n, err := strconv.Atoi(s); err != nil || !known[n] {
			g := d.cgroups.Group(s)
			errs = append(errs, g.KillAll(), g.Remove())
		}
	}
	errs = append(errs, d.killStrangers())
	trash := filepath.Join(d.config.Dir, trashDir)
	old, err := os.ReadDir(trash)
	errs = append(errs, err)
	for _, e := range old {
		errs = append(errs, os.RemoveAll(filepath.Join(trash, e.Name())))
	}
	return errors.Join(errs...)
}

// killStrangers ends guests that have no folder: an edge that died between the
// fork of a shell and its first record left them.
func (d *Driver) killStrangers() error {
	holder := d.holder.Pid()
	d.mu.Lock()
	guests := map[int]bool{}
	for _, m := range d.machines {
		guests[m.shell.pid] = true
	}
	d.mu.Unlock()
	return d.cgroups.KillGuests(func(pid int) bool {
		return pid == holder || guests[pid] || guests[jail.Parent(pid)] // the last is a guest's reaper
	})
}

// sweepEvery is how often guests are looked at that died without an end.
const sweepEvery = 10 * time.Second

// sweepStuck frees boxes whose guest died by itself while a command of theirs
// was frozen: the kernel cannot finish them, and their pidfd stays silent.
func (d *Driver) sweepStuck() {
	for {
		select {
		case <-d.stop:
			return
		case <-time.After(sweepEvery):
		}
		d.mu.Lock()
		ms := make([]*machine, 0, len(d.machines))
		for _, m := range d.machines {
			ms = append(ms, m)
		}
		d.mu.Unlock()
		for _, m := range ms {
			if jail.Zombie(m.shell.pid) {
				m.shell.group.Thaw() //nolint:errcheck // may be gone by now
			}
		}
	}
}

// Close implements driver.Driver: shells without a sandbox end; if no sandbox
// is left, the holder and the control groups go too.
func (d *Driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	left := len(d.machines)
	if !d.looked {
		left += d.unseen() // they need their holder
	}
	for _, m := range d.machines {
		m.detach()
	}
	d.mu.Unlock()
	close(d.stop)
	d.sweeping.Wait()
	var errs []error
	for _, s := range d.pool.close() {
		errs = append(errs, d.destroy(s))
	}
	d.watch.close()
	d.deleting.Wait()
	d.waking.Wait()
	for _, n := range d.slots.Freed() {
		if err := os.RemoveAll(filepath.Join(d.config.Dir, strconv.Itoa(n))); err != nil {
			errs = append(errs, err)
		}
	}
	if left == 0 {
		errs = append(errs, d.holder.Exit())
		if err := waitGone(d.holder.Pid()); err != nil {
			errs = append(errs, err)
		}
		errs = append(errs, d.cgroups.Remove(), os.Remove(filepath.Join(d.config.Dir, "hold.sock")))
	}
	return errors.Join(append(errs, d.holder.Close())...)
}

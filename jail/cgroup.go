package jail

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Cgroups is a node's place in the host's control groups: one folder named for
// the node in each hierarchy (v1) or in the one (v2). Below it, "guests" holds
// the holder and, on v1, all guests; every box has a group of its own.
//
// On v2 a box's group has two children, guest and work, because the fork into a
// command's group needs their common parent delegated to the box's root.
type Cgroups struct {
	v2    bool
	roots map[string]string // controller -> the node's folder; only "" on v2
}

// The controllers used on v1, in the order in which groups are made.
var controllers = []string{"memory", "cpu", "cpuacct", "pids", "freezer"}

const guestsGroup = "guests"

// OpenCgroups finds the host's hierarchies and makes the node's folders.
func OpenCgroups(node string) (*Cgroups, error) {
	c := &Cgroups{roots: map[string]string{}}
	mounts, err := cgroupMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	if root := mounts[""]; root != "" && hasControllers(root) {
		c.v2 = true
		c.roots[""] = filepath.Join(root, node)
	} else {
		for _, k := range controllers {
			root := mounts[k]
			if root == "" {
				return nil, dsec.Errorf(dsec.Unsupported, "the host has neither cgroup v2 with controllers nor the v1 controller %s", k)
			}
			c.roots[k] = filepath.Join(root, node)
		}
	}
	for k, root := range c.roots {
		if err := c.makeRoot(k, root); err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", root, err)
		}
	}
	return c, nil
}

func (c *Cgroups) makeRoot(controller, root string) error {
	if c.v2 {
		if err := enableControllers(filepath.Dir(root)); err != nil {
			return err
		}
	}
	dir := root
	if c.hasGuests(controller) {
		dir = filepath.Join(root, guestsGroup)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if c.v2 {
		return enableControllers(root)
	}
	return nil
}

// hasGuests reports whether guests have a group of their own in a hierarchy. In
// that of CPU time they have not: there a group would weigh as much as all the
// rest of the host, and the low priority of spare shells would count only among
// themselves.
func (c *Cgroups) hasGuests(controller string) bool { return controller != "cpu" }

func enableControllers(dir string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory +cpu +pids"), 0)
}

func hasControllers(root string) bool {
	b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	s := " " + strings.TrimSpace(string(b)) + " "
	return err == nil && strings.Contains(s, " memory ") && strings.Contains(s, " pids ") && strings.Contains(s, " cpu ")
}

// cgroupMounts gives controller -> mount point; "" is the v2 hierarchy. Of several mounts of one
// hierarchy it is the first, which is the host's: another is of whoever mounted it since, and may
// go with him.
func cgroupMounts(mountinfo string) (map[string]string, error) {
	b, err := os.ReadFile(mountinfo)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, line := range strings.Split(string(b), "\n") {
		head, tail, ok := strings.Cut(line, " - ")
		f, t := strings.Fields(head), strings.Fields(tail)
		if !ok || len(f) < 5 || len(t) < 3 || f[3] != "/" {
			continue
		}
		of := []string{""}
		switch t[0] {
		case "cgroup2":
		case "cgroup":
			of = strings.Split(t[2], ",")
		default:
			continue
		}
		for _, k := range of {
			if _, ok := out[k]; !ok {
				out[k] = f[4]
			}
		}
	}
	return out, nil
}

// V2 reports whether boxes live in the unified hierarchy.
func (c *Cgroups) V2() bool { return c.v2 }

// JoinGuests moves a process, the holder, into the guests' groups. What it
// forks is born there.
func (c *Cgroups) JoinGuests(pid int) error {
	for k, root := range c.roots {
		if !c.hasGuests(k) {
			continue
		}
		if err := writeFile(filepath.Join(root, guestsGroup, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("move holder to its cgroup: %w", err)
		}
	}
	return nil
}

// Slots lists the boxes that have groups, alive or left over.
func (c *Cgroups) Slots() ([]string, error) {
	seen := map[string]bool{}
	var out []string
	for _, root := range c.roots {
		es, err := os.ReadDir(root)
		if err != nil {
			return nil, err
		}
		for _, e := range es {
			if e.IsDir() && e.Name() != guestsGroup && !seen[e.Name()] {
				seen[e.Name()] = true
				out = append(out, e.Name())
			}
		}
	}
	return out, nil
}

// KillGuests ends the processes in the guests' group, but for those that keep
// says to.
func (c *Cgroups) KillGuests(keep func(pid int) bool) error {
	controller := "pids"
	if c.v2 {
		controller = ""
	}
	return killAll(filepath.Join(c.roots[controller], guestsGroup), keep)
}

// killAll ends every process of a group, but for keep, and waits until the
// kernel lists no other. The caller's own is listed for a moment after a thread
// of its has forked into the group.
func killAll(dir string, keep func(pid int) bool) error {
	deadline := time.Now().Add(killTimeout)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
		left := 0
		for _, f := range strings.Fields(string(b)) {
			if p, err := strconv.Atoi(f); err == nil && p > 0 && p != os.Getpid() && (keep == nil || !keep(p)) {
				unix.Kill(p, unix.SIGKILL) //nolint:errcheck // gone is as good
				left++
			}
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kill group %s: %d processes are left", dir, left)
		}
		time.Sleep(pause)
	}
}

// Remove deletes the node's folders; every box must be gone, and the holder.
func (c *Cgroups) Remove() error {
	var errs []error
	for _, root := range c.roots {
		errs = append(errs, removeTree(root))
	}
	return errors.Join(errs...)
}

// Group is one box's control groups.
type Group struct {
	c    *Cgroups
	slot string
}

// Make makes the groups of a box whose ids start at base.
func (c *Cgroups) Make(slot string, base uint32) (*Group, error) {
	g := &Group{c: c, slot: slot}
	if err := g.make(int(base)); err != nil {
		g.Remove() //nolint:errcheck // the first error says more
		return nil, fmt.Errorf("make cgroups of %s: %w", slot, err)
	}
	return g, nil
}

// Name is what /proc/PID/cgroup begins with for what is in a box, without the
// first slash: the node's folder and the slot.
func (g *Group) Name() string {
	for _, root := range g.c.roots {
		return filepath.Base(root) + "/" + g.slot
	}
	return ""
}

// Group gives the groups of an existing box.
func (c *Cgroups) Group(slot string) *Group { return &Group{c: c, slot: slot} }

func (g *Group) path(controller string, more ...string) string {
	if g.c.v2 {
		controller = ""
	}
	return filepath.Join(append([]string{g.c.roots[controller], g.slot}, more...)...)
}

func (g *Group) make(base int) error {
	if g.c.v2 {
		for _, d := range []string{"", "guest", "work"} {
			if err := os.Mkdir(g.path("", d), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
			if d == "" {
				if err := enableControllers(g.path("")); err != nil {
					return err
				}
			}
			for _, f := range []string{"", "cgroup.procs"} {
				if d == "guest" {
					continue
				}
				if err := os.Chown(g.path("", d, f), base, base); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for _, k := range controllers {
		if err := os.Mkdir(g.path(k), 0o755); err != nil {
			return err
		}
	}
	return os.Chown(g.path("freezer"), base, base)
}

// Guest opens the group a shell is born in; nil on v1, where it inherits the
// holder's.
func (g *Group) Guest() (*os.File, error) {
	if !g.c.v2 {
		return nil, nil
	}
	return os.Open(g.path("", "guest"))
}

const cpuPeriod = 100_000 // microseconds, the kernel's default

// Limit sets the limits of r, Disk apart, which is none of the kernel's groups'
// business.
func (g *Group) Limit(r dsec.Resources) error {
	quota := max(int64(math.Round(r.CPU*cpuPeriod)), 1000)
	var ws [][3]string
	if g.c.v2 {
		ws = [][3]string{
			{"", "memory.max", strconv.FormatInt(r.Memory, 10)},
			{"", "memory.swap.max", swapNever},
			{"", "memory.oom.group", "0"},
			{"", "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod)},
			{"", "pids.max", strconv.Itoa(r.Pids)},
		}
	} else {
		ws = [][3]string{
			{"memory", "memory.limit_in_bytes", strconv.FormatInt(r.Memory, 10)},
			{"memory", "memory.memsw.limit_in_bytes", strconv.FormatInt(r.Memory, 10)},
			{"memory", "memory.swappiness", swapNever},
			{"cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)},
			// The forge counts. The kernel takes no number above MaxPids.
			{"pids", "pids.max", strconv.Itoa(min(r.Pids+1, dsec.MaxPids))},
		}
	}
	for _, w := range ws {
		p := g.path(w[0], w[1])
		if g.c.v2 {
			p = g.path("", "work", w[1])
		}
		err := writeFile(p, w[2])
		if errors.Is(err, unix.ENOENT) && strings.Contains(w[1], "sw") {
			continue // a kernel without swap accounting
		}
		if err != nil {
			return fmt.Errorf("set %s to %s: %w", w[1], w[2], err)
		}
	}
	return nil
}

// writeFile writes an existing control file with no more calls than it takes.
func writeFile(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		// A limit is set in a loop that any signal ends, the Go runtime's own
		// included.
		if _, err = unix.Write(fd, []byte(text)); err != unix.EINTR {
			return err
		}
	}
}

// Join opens what a box needs to put its processes into the groups. The caller
// closes it.
func (g *Group) Join() (Join, error) {
	var j Join
	var err error
	open := func(path string, flags int) *os.File {
		if err != nil {
			return nil
		}
		var f *os.File
		f, err = os.OpenFile(path, flags, 0)
		return f
	}
	if g.c.v2 {
		j.Commands = open(g.path("", "work"), os.O_RDONLY)
		j.OOM = open(g.path("", "work", "memory.events"), os.O_RDONLY)
	} else {
		j.Commands = open(g.path("freezer"), os.O_RDONLY)
		j.OOM = open(g.path("memory", "memory.oom_control"), os.O_RDONLY)
		j.Leave = open(filepath.Join(g.c.roots["freezer"], guestsGroup, "tasks"), os.O_WRONLY)
		for _, k := range []string{"memory", "cpu", "cpuacct", "pids"} {
			j.Tasks = append(j.Tasks, open(g.path(k, "tasks"), os.O_WRONLY))
		}
	}
	if err != nil {
		j.Close()
		return Join{}, fmt.Errorf("open cgroups of %s: %w", g.slot, err)
	}
	return j, nil
}

// Close closes what is open.
func (j *Join) Close() {
	for _, f := range append([]*os.File{j.Leave, j.Commands, j.OOM}, j.Tasks...) {
		if f != nil {
			f.Close()
		}
	}
}

// Usage reads what the workload uses.
func (g *Group) Usage() (dsec.Usage, error) {
	var u dsec.Usage
	if g.c.v2 {
		events, err := os.ReadFile(g.path("", "work", "memory.events"))
		if err != nil {
			return u, err
		}
		stat, _ := os.ReadFile(g.path("", "work", "cpu.stat"))
		u.CPU = time.Duration(Count(string(stat), "usage_usec ")) * time.Microsecond
		u.Memory = readInt(g.path("", "work", "memory.current"))
		u.MemoryPeak = readInt(g.path("", "work", "memory.peak"))
		u.Pids = int(readInt(g.path("", "work", "pids.current")))
		u.OOMKills = int(Count(string(events), "oom_kill "))
		return u, nil
	}
	oom, err := os.ReadFile(g.path("memory", "memory.oom_control"))
	if err != nil {
		return u, err
	}
	u.OOMKills = int(Count(string(oom), "oom_kill "))
	u.CPU = time.Duration(readInt(g.path("cpuacct", "cpuacct.usage")))
	u.Memory = readInt(g.path("memory", "memory.usage_in_bytes"))
	u.MemoryPeak = readInt(g.path("memory", "memory.max_usage_in_bytes"))
	u.Pids = max(int(readInt(g.path("pids", "pids.current")))-1, 0)
	return u, nil
}

func readInt(path string) int64 {
	b, _ := os.ReadFile(path)
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// Freeze stops every process of the workload, and returns when all stand still
// or ctx ends. The guest goes on.
func (g *Group) Freeze(ctx context.Context) error {
	file, ask, check, want := g.path("freezer", "freezer.state"), "FROZEN", g.path("freezer", "freezer.state"), "FROZEN"
	if g.c.v2 {
		file, ask, check, want = g.path("", "work", "cgroup.freeze"), "1", g.path("", "work", "cgroup.events"), "frozen 1"
	}
	if err := writeFile(file, ask); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		b, err := os.ReadFile(check)
		if err != nil {
			return fmt.Errorf("freeze: %w", err)
		}
		if strings.Contains(string(b), want) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("freeze: %w", ctx.Err())
		case <-time.After(pause):
		}
		if !g.c.v2 { // v1 tries once for each write
			writeFile(file, ask) //nolint:errcheck // the state is read again
		}
	}
}

// Thaw lets the workload go on, also those of its commands that a guest froze
// to kill them and died.
func (g *Group) Thaw() error {
	dir, file, thawed := g.path("freezer"), "freezer.state", "THAWED"
	if g.c.v2 {
		dir, file, thawed = g.path("", "work"), "cgroup.freeze", "0"
	}
	if err := writeFile(filepath.Join(dir, file), thawed); err != nil {
		return fmt.Errorf("thaw: %w", err)
	}
	commands, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("thaw: %w", err)
	}
	for _, c := range commands {
		if c.IsDir() {
			err := writeFile(filepath.Join(dir, c.Name(), file), thawed)
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("thaw %s: %w", c.Name(), err)
			}
		}
	}
	return nil
}

// KillAll ends what is left of a workload whose guest is gone.
func (g *Group) KillAll() error {
	var errs []error
	g.Thaw() //nolint:errcheck // may never have been frozen, or be gone
	for k := range g.c.roots {
		dir := g.path(k)
		errs = append(errs, filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				return nil //nolint:nilerr // gone is as good
			}
			return killAll(p, nil)
		}))
	}
	return errors.Join(errs...)
}

// Remove deletes the groups. Processes that are just dying are waited for.
func (g *Group) Remove() error {
	var errs []error
	for k := range g.c.roots {
		errs = append(errs, removeTree(g.path(k)))
	}
	return errors.Join(errs...)
}

// removeTree deletes a cgroup and those below it. A group stays busy for a
// moment after its last process was reaped.
func removeTree(dir string) error {
	err := unix.Rmdir(dir)
	deadline := time.Now().Add(killTimeout)
	for pause := 200 * time.Microsecond; errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); pause = min(2*pause, 50*time.Millisecond) {
		es, _ := os.ReadDir(dir)
		for _, e := range es {
			if e.IsDir() {
				if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
					return err
				}
			}
		}
		if err = unix.Rmdir(dir); errors.Is(err, unix.EBUSY) {
			time.Sleep(pause)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

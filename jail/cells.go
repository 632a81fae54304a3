package jail

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Cells are what a box needs, as descriptors, to run each command in a cell of
// its own: a pristine root over the same layers, and fresh namespaces. See
// Box.OpenCell.
type Cells struct {
	Lowers []*os.File // detached mounts in the box's ids, lowest first
	Filter []byte     // seccomp program: the box's, and setns for the one that forks warm

	// V1: the box's folders in which cells get groups of their own, and its
	// tasks file in the hierarchy where they do not. V2: the folder for command
	// groups; the other files are missing.
	Memory, CPUAcct, Pids *os.File
	CPU                   *os.File
}

// MaxCells is how many cells a box has at once.
const MaxCells = 64

func (c *Cells) files() []*os.File {
	f := []*os.File{c.Memory}
	if c.CPUAcct != nil {
		f = append(f, c.CPUAcct, c.Pids, c.CPU)
	}
	return append(f, c.Lowers...)
}

// Close closes what is open.
func (c *Cells) Close() {
	for _, f := range append([]*os.File{c.Memory, c.CPUAcct, c.Pids, c.CPU}, c.Lowers...) {
		if f != nil {
			f.Close()
		}
	}
}

// cellsField is the field of an enter message that says that files of Cells
// follow, and of which version.
const (
	cellsV1 = "cells1"
	cellsV2 = "cells2"
)

// addTo puts c at the end of an enter message.
func (c *Cells) addTo(m *message) {
	version := cellsV2
	if c.CPUAcct != nil {
		version = cellsV1
	}
	m.fields = append(m.fields, string(c.Filter), version)
	m.files = append(m.files, c.files()...)
}

// takeCells takes the Cells from the end of an enter message, if it has them.
func takeCells(m *message) (*Cells, error) {
	if len(m.files) < 2 || len(m.fields) < 2 {
		return nil, nil
	}
	version := m.fields[len(m.fields)-1]
	c := &Cells{Filter: []byte(m.fields[len(m.fields)-2]), Memory: m.files[1]}
	rest := m.files[2:]
	switch {
	case version == cellsV1 && len(rest) >= 3:
		c.CPUAcct, c.Pids, c.CPU, rest = rest[0], rest[1], rest[2], rest[3:]
	case version != cellsV2:
		return nil, errMessage
	}
	if len(rest) == 0 {
		return nil, errMessage
	}
	c.Lowers = rest
	m.fields, m.files = m.fields[:len(m.fields)-2], m.files[:1]
	return c, nil
}

// Cells opens what a box needs to make cells, Lowers and Filter apart, and
// lets its root make groups in its own. base is the first id of the box.
func (g *Group) Cells(base uint32) (*Cells, error) {
	c := &Cells{}
	var err error
	open := func(path string, flags int) *os.File {
		if err != nil {
			return nil
		}
		var f *os.File
		f, err = os.OpenFile(path, flags, 0)
		return f
	}
	own := func(path string) *os.File {
		for _, f := range []string{path, path + "/tasks"} {
			if err == nil && (f == path || !g.c.v2) {
				err = os.Chown(f, int(base), int(base))
			}
		}
		return open(path, os.O_RDONLY)
	}
	if g.c.v2 {
		work := g.path("", "work")
		for _, f := range []string{"cgroup.subtree_control", "cgroup.threads"} {
			if err == nil {
				err = os.Chown(work+"/"+f, int(base), int(base))
			}
		}
		c.Memory = own(work)
		if err == nil {
			err = enableControllers(work)
		}
	} else {
		c.Memory, c.CPUAcct, c.Pids = own(g.path("memory")), own(g.path("cpuacct")), own(g.path("pids"))
		c.CPU = open(g.path("cpu", "tasks"), os.O_WRONLY)
		if err == nil {
			err = os.Chown(g.path("freezer", "tasks"), int(base), int(base))
		}
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("open cgroups for cells: %w", err)
	}
	return c, nil
}

// CellLimits bound one cell. Zero means what the box as a whole has.
type CellLimits struct {
	Memory int64 // bytes, files included, which are at most half of it
	Pids   int
}

// CellUsage is what a cell has used so far.
type CellUsage struct {
	CPU      time.Duration
	Peak     int64 // bytes
	OOMKills int64
}

// cellGroup is a cell's control groups: one on v2, three on v1.
type cellGroup struct {
	name string
	v2   bool
	dirs [3]int // memory, cpuacct, pids; on v2 the first alone
	of   [3]int // the folders they are in
}

func (c *Cells) newGroup(slot int, l CellLimits) (g cellGroup, err error) {
	g = cellGroup{name: "cell" + strconv.Itoa(slot), v2: c.CPUAcct == nil, dirs: [3]int{-1, -1, -1}}
	parents := []*os.File{c.Memory, c.CPUAcct, c.Pids}
	if g.v2 {
		parents = parents[:1]
	}
	defer func() {
		if err != nil {
			g.remove() //nolint:errcheck // the first error says more
		}
	}()
	for i, p := range parents {
		g.of[i] = int(p.Fd())
		if err := unix.Mkdirat(g.of[i], g.name, 0o755); err != nil {
			return g, fmt.Errorf("make cell group: %w", err)
		}
		if g.dirs[i], err = unix.Openat(g.of[i], g.name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return g, err
		}
	}
	memory := strconv.FormatInt(l.Memory, 10)
	switch {
	case g.v2 && l.Memory > 0:
		err = g.write(0, "memory.max", memory)
		g.write(0, "memory.swap.max", "0") //nolint:errcheck // absent without swap accounting
	case l.Memory > 0:
		err = g.write(0, "memory.limit_in_bytes", memory)
		g.write(0, "memory.memsw.limit_in_bytes", memory) //nolint:errcheck // as above
	}
	if err == nil && l.Pids > 0 {
		last := 2
		if g.v2 {
			last = 0
		}
		err = g.write(last, "pids.max", strconv.Itoa(l.Pids+1)) // the one that forks counts
	}
	if err != nil {
		return g, fmt.Errorf("set limits of cell: %w", err)
	}
	return g, nil
}

func (g *cellGroup) write(i int, file, text string) error {
	fd, err := unix.Openat(g.dirs[i], file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

func (g *cellGroup) read(i int, file string) string {
	fd, err := unix.Openat(g.dirs[i], file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	var buf [2048]byte
	n, _ := unix.Read(fd, buf[:])
	return string(buf[:max(n, 0)])
}

// joins opens the files through which a process puts itself into the groups by
// writing "0". The caller closes them.
func (g *cellGroup) joins() ([]int, error) {
	file, n := "tasks", 3
	if g.v2 {
		file, n = "cgroup.procs", 1
	}
	var out []int
	for i := range n {
		fd, err := unix.Openat(g.dirs[i], file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			closeAll(out)
			return nil, fmt.Errorf("open cell group: %w", err)
		}
		out = append(out, fd)
	}
	return out, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// usage reads what the cell has used.
func (g *cellGroup) usage() CellUsage {
	if g.v2 {
		return CellUsage{
			CPU:      time.Duration(Count(g.read(0, "cpu.stat"), "usage_usec ")) * time.Microsecond,
			Peak:     Count("n "+g.read(0, "memory.peak"), "n "),
			OOMKills: Count(g.read(0, "memory.events"), "oom_kill "),
		}
	}
	return CellUsage{
		CPU:      time.Duration(Count("n "+g.read(1, "cpuacct.usage"), "n ")),
		Peak:     Count("n "+g.read(0, "memory.max_usage_in_bytes"), "n "),
		OOMKills: Count(g.read(0, "memory.oom_control"), "oom_kill "),
	}
}

// remove deletes the groups, whose processes are gone. A group stays busy for
// a moment after that.
func (g *cellGroup) remove() error {
	var errs []error
	for i, d := range g.dirs {
		if d < 0 {
			continue
		}
		unix.Close(d)
		g.dirs[i] = -1
		deadline := time.Now().Add(killTimeout)
		for pause := 50 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
			err := unix.Unlinkat(g.of[i], g.name, unix.AT_REMOVEDIR)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				errs = append(errs, dsec.Errorf(dsec.Internal, "remove cell group: %w", err))
				break
			}
			time.Sleep(pause)
		}
	}
	return errors.Join(errs...)
}

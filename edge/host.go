package edge

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// HostSample is what a host has and what of it is free.
type HostSample struct {
	CPUs       int
	Load       float64 // one minute
	Memory     int64   // bytes
	Available  int64   // bytes that can be used without swapping
	Disk       int64   // bytes of the data folder's file system
	DiskFree   int64
	InodesFree int64 // -1 where the file system has no fixed number
	Tasks      int   // processes and threads
	MaxTasks   int
	Pressure   dsec.Pressure
}

// Host measures the computer that a node runs on.
type Host interface {
	Sample() (HostSample, error)
}

// ProcHost is the Host that reads proc.
type ProcHost struct {
	Data string // a folder on the file system whose room counts
	Proc string // default /proc
}

// Sample reads the figures; it takes some tens of microseconds.
func (p ProcHost) Sample() (HostSample, error) {
	proc := p.Proc
	if proc == "" {
		proc = "/proc"
	}
	s := HostSample{CPUs: runtime.NumCPU(), InodesFree: -1}
	mem, err := os.ReadFile(filepath.Join(proc, "meminfo"))
	if err != nil {
		return HostSample{}, fmt.Errorf("read memory: %w", err)
	}
	s.Memory, s.Available = parseMeminfo(mem)
	if s.Memory == 0 {
		return HostSample{}, fmt.Errorf("read memory: no MemTotal in %s/meminfo", proc)
	}
	load, err := os.ReadFile(filepath.Join(proc, "loadavg"))
	if err != nil {
		return HostSample{}, fmt.Errorf("read load: %w", err)
	}
	s.Load, s.Tasks = parseLoadavg(load)
	for _, name := range []string{"pid_max", "threads-max"} {
		b, err := os.ReadFile(filepath.Join(proc, "sys/kernel", name))
		if err != nil {
			return HostSample{}, fmt.Errorf("read %s: %w", name, err)
		}
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && (s.MaxTasks == 0 || n < s.MaxTasks) {
			s.MaxTasks = n
		}
	}
	// Pressure figures are absent on kernels built without them.
	s.Pressure.CPU = readPressure(proc, "cpu")
	s.Pressure.Memory = readPressure(proc, "memory")
	s.Pressure.IO = readPressure(proc, "io")

	var fs unix.Statfs_t
	if err := unix.Statfs(p.Data, &fs); err != nil {
		return HostSample{}, fmt.Errorf("measure disk of %s: %w", p.Data, err)
	}
	s.Disk, s.DiskFree = int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize
	if fs.Files > 0 {
		s.InodesFree = int64(fs.Ffree)
	}
	return s, nil
}

// parseMeminfo finds MemTotal and MemAvailable, in bytes.
func parseMeminfo(b []byte) (total, available int64) {
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch name {
		case "MemTotal":
			total = n << 10
		case "MemAvailable":
			available = n << 10
		}
	}
	return total, available
}

// parseLoadavg reads "0.20 0.18 0.12 1/80 11206": the first figure and the
// number after the slash.
func parseLoadavg(b []byte) (load float64, tasks int) {
	f := strings.Fields(string(b))
	if len(f) < 4 {
		return 0, 0
	}
	load, _ = strconv.ParseFloat(f[0], 64)
	_, n, _ := strings.Cut(f[3], "/")
	tasks, _ = strconv.Atoi(n)
	return load, tasks
}

func readPressure(proc, what string) float64 {
	b, err := os.ReadFile(filepath.Join(proc, "pressure", what))
	if err != nil {
		return 0
	}
	return parsePressure(b)
}

// parsePressure reads avg10 of the line "some avg10=1.23 avg60=...".
func parsePressure(b []byte) float64 {
	for _, line := range strings.Split(string(b), "\n") {
		rest, some := strings.CutPrefix(line, "some avg10=")
		if !some {
			continue
		}
		v, _, _ := strings.Cut(rest, " ")
		p, _ := strconv.ParseFloat(v, 64)
		return p
	}
	return 0
}

// hostAge is how old a sample may be when a create is admitted by it.
const hostAge = 100 * time.Millisecond

// gauge is a Host whose newest sample is shared by the calls of hostAge.
type gauge struct {
	host Host
	busy sync.Mutex // held by the one that measures
	last atomic.Pointer[timedSample]
}

type timedSample struct {
	HostSample
	err error
	at  time.Time
}

// sample gives figures at most hostAge old, or the last ones while somebody
// measures.
func (g *gauge) sample() (HostSample, error) {
	s := g.last.Load()
	if s != nil && time.Since(s.at) < hostAge {
		return s.HostSample, s.err
	}
	if s == nil {
		g.busy.Lock()
	} else if !g.busy.TryLock() {
		return s.HostSample, s.err
	}
	defer g.busy.Unlock()
	h, err := g.host.Sample()
	g.last.Store(&timedSample{h, err, time.Now()})
	return h, err
}

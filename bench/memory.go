package bench

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The parts of /proc/meminfo that a box holds, beside its processes' own pages.
var kernelParts = []string{"SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "SecPageTables", "Percpu", "Shmem"}

// memory is what the host's memory is used for at one moment.
type memory struct {
	available int64 // MemAvailable
	free      int64 // MemFree once clean caches are dropped
	parts     map[string]int64
	processes int64 // anonymous pages of the processes that count, each shared one by its share
}

// readMemory drops what the kernel can drop, which every reading of a run does
// alike, and then counts. The processes that count are those below pid, it
// included; all of the host when it is 0.
func readMemory(pid int) (memory, error) {
	if err := dropCaches(); err != nil {
		return memory{}, err
	}
	info, err := meminfo()
	if err != nil {
		return memory{}, err
	}
	m := memory{available: info["MemAvailable"], free: info["MemFree"], parts: map[string]int64{}}
	for _, k := range kernelParts {
		m.parts[k] = info[k]
	}
	m.processes, err = treePss(pid)
	return m, err
}

// dropCaches is a variable because tests leave the host its caches.
var dropCaches = func() error {
	unix.Sync()
	for range 2 { // what the first leaves behind holds other things
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
			return err
		}
	}
	return nil
}

// treePss sums the anonymous part of the proportional sets of a process and
// its descendants, of all processes for 0.
func treePss(pid int) (int64, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	children := map[int][]int{}
	parents := map[int]int{}
	for _, e := range entries {
		if p, err := strconv.Atoi(e.Name()); err == nil {
			stat, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
			parent := parseParent(string(stat))
			children[parent] = append(children[parent], p)
			parents[p] = parent
		}
	}
	var sum int64
	todo := []int{pid}
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = append(todo[:len(todo)-1], children[p]...)
		delete(children, p) // a number that was reused meanwhile makes no circle
		if p != 0 && !sharesMemory(p, parents[p]) {
			sum += processPss(strconv.Itoa(p))
		}
	}
	return sum, nil
}

// sharesMemory reports whether a process runs in its parent's memory, as the
// first process of a container does; the parent's count has it then.
func sharesMemory(pid, parent int) bool {
	const kcmpVM = 1
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(pid), uintptr(parent), kcmpVM, 0, 0, 0)
	return errno == 0 && r == 0
}

// parseParent reads the parent from a process's stat, whose second field may
// hold anything.
func parseParent(stat string) int {
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(f) < 2 {
		return -1
	}
	p, err := strconv.Atoi(f[1])
	if err != nil {
		return -1
	}
	return p
}

// processPss is 0 for a kernel thread and for a process that has just gone.
func processPss(pid string) int64 {
	b, err := os.ReadFile(filepath.Join("/proc", pid, "smaps_rollup"))
	if err != nil {
		return 0
	}
	return parsePss(string(b))
}

// parsePss reads the anonymous part of an smaps_rollup.
func parsePss(text string) int64 {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "Pss_Anon:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}

// usage is what n boxes hold, each, in MiB.
type usage struct {
	available, free, processes float64
	parts                      map[string]float64
}

// since gives what n boxes made after before hold each.
func (m memory) since(before memory, n int) usage {
	each := func(v int64) float64 { return float64(v) / float64(n) / (1 << 20) }
	u := usage{
		available: each(before.available - m.available),
		free:      each(before.free - m.free),
		processes: each(m.processes - before.processes),
		parts:     map[string]float64{},
	}
	for k, v := range m.parts {
		u.parts[k] = each(v - before.parts[k])
	}
	return u
}

// sum is the whole as its parts say.
func (u usage) sum() float64 {
	s := u.processes
	for _, v := range u.parts {
		s += v
	}
	return s
}

// worst is the greatest of the ways to count. MemAvailable alone would take a
// box's own kernel objects, which its mounts hold, for reclaimable; and
// whatever else gave memory back meanwhile must not pay for the boxes.
func (u usage) worst() float64 { return max(u.available, u.free, u.sum()) }

// figure shows the whole and its parts.
func (u usage) figure(name string) Figure {
	one := func(name string, v float64) Figure {
		return Figure{Name: name, Unit: "MiB", N: 1, P50: v, P99: v, Min: v, Max: v, Mean: v}
	}
	f := one(name, u.worst())
	f.Stages = []Figure{
		one("fall of MemAvailable", u.available),
		one("fall of MemFree, caches dropped", u.free),
		one("sum of the parts below", u.sum()),
		one("processes, node included", u.processes),
	}
	for _, k := range kernelParts {
		f.Stages = append(f.Stages, one(k, u.parts[k]))
	}
	return f
}

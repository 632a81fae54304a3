package container

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// state is what a slot's folder says about its box. It is one write of a fixed
// size, which the end of this process does not tear; a crash of the host ends
// every box, so it is never synced.
type state struct {
	ID    dsec.SandboxID `json:"id,omitempty"` // empty while it is a shell
	Pid   int            `json:"pid"`          // 0 while the slot is free
	Start uint64         `json:"start"`        // with Pid it names a process for the host's uptime
}

const (
	stateFile = "state"
	stateSize = 128
)

func writeState(dir string, s state) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, stateFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("record box: %w", err)
	}
	defer f.Close()
	if _, err := f.Write(append(b, bytes.Repeat([]byte(" "), stateSize-len(b))...)); err != nil {
		return fmt.Errorf("record box: %w", err)
	}
	return nil
}

func readState(dir string) (state, error) {
	var s state
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(b, &s)
}

// startTime is when a process began, in clock ticks since boot; 0 if it is gone.
func startTime(pid int) uint64 { return statField(pid, 22) }

// parent is a process's parent; 0 if it is gone.
func parent(pid int) int { return int(statField(pid, 4)) }

// zombie reports whether a process has ended without being collected.
func zombie(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	i := bytes.LastIndexByte(b, ')')
	return err == nil && i+2 < len(b) && b[i+2] == 'Z'
}

// statField reads one numeric field of /proc/PID/stat, as proc(5) numbers them.
func statField(pid, n int) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The second field, a name in parentheses, may contain anything.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < n-2 {
		return 0
	}
	v, _ := strconv.ParseUint(string(f[n-3]), 10, 64)
	return v
}

// openProcess gives a pidfd of the process, nil if it is gone or another
// process has its number now.
func openProcess(pid int, start uint64) *os.File {
	if pid <= 0 || start == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if startTime(pid) != start || waitPidfd(f, 0) == nil { // another, or a zombie
		f.Close()
		return nil
	}
	return f
}

// slots knows which numbers are taken. A freed one is given out again first: its
// folder is there already.
type slots struct {
	taken map[int]bool
	freed []int
	next  int // all numbers from here on were never used
}

func (s *slots) take() (int, bool) {
	var n int
	switch {
	case len(s.freed) > 0:
		n = s.freed[len(s.freed)-1]
		s.freed = s.freed[:len(s.freed)-1]
	case s.next < MaxSlots:
		n = s.next
		s.next++
	default:
		return 0, false
	}
	if s.taken == nil {
		s.taken = map[int]bool{}
	}
	s.taken[n] = true
	return n, true
}

// mark takes the number of a folder that an earlier process left; none below it
// is known to be free until its folder is seen.
func (s *slots) mark(n int) {
	if s.taken == nil {
		s.taken = map[int]bool{}
	}
	for ; s.next <= n; s.next++ {
		if s.next != n {
			s.freed = append(s.freed, s.next)
		}
	}
	s.freed = slices.DeleteFunc(s.freed, func(f int) bool { return f == n })
	s.taken[n] = true
}

func (s *slots) free(n int) {
	delete(s.taken, n)
	s.freed = append(s.freed, n)
}

// timer cuts a start into stages.
type timer struct {
	last   time.Time
	stages []driver.Stage
}

func newTimer() *timer { return &timer{last: time.Now()} }

func (t *timer) mark(name string) {
	now := time.Now()
	t.stages = append(t.stages, driver.Stage{Name: name, Took: now.Sub(t.last)})
	t.last = now
}

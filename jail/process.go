package jail

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// StartTime is when a process began, in clock ticks since boot; 0 if it is gone.
// With its number it names a process for as long as the host is up.
func StartTime(pid int) uint64 { return statField(pid, 22) }

// Parent is a process's parent; 0 if it is gone.
func Parent(pid int) int { return int(statField(pid, 4)) }

// Zombie reports whether a process has ended without being collected.
func Zombie(pid int) bool {
	f := stat(pid)
	return len(f) > 0 && string(f[0]) == "Z"
}

// OpenProcess gives a pidfd of the process that began at start, nil if it has
// ended or another has its number now.
func OpenProcess(pid int, start uint64) *os.File {
	if pid <= 0 || start == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	// The number is looked at after the pidfd holds it, so it cannot be given to
	// another in between.
	if StartTime(pid) != start || Zombie(pid) {
		unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// stat gives the fields of /proc/PID/stat from the third on, which is the
// state; none if the process is gone.
func stat(pid int) [][]byte {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil
	}
	// The second field, a name in parentheses, may contain anything.
	return bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
}

// statField reads one numeric field, as proc(5) numbers them.
func statField(pid, n int) uint64 {
	f := stat(pid)
	if len(f) < n-2 {
		return 0
	}
	v, _ := strconv.ParseUint(string(f[n-3]), 10, 64)
	return v
}

package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/vm"
)

// limits are the files of a workload's limits, which are open because finding
// them takes longer than writing them, and what is in them, if that is known.
type limits struct {
	files  [len(limitFiles)]*os.File
	values [len(limitFiles)]string
}

var limitFiles = [...]string{"memory.max", "pids.max", "cpu.max"}

// newLimits opens the files of a cgroup v2 folder.
func newLimits(group string) (l limits, err error) {
	for i, name := range limitFiles {
		f, e := os.OpenFile(filepath.Join(group, name), os.O_WRONLY, 0)
		l.files[i], err = f, errors.Join(err, e)
	}
	return l, err
}

// have notes that the limits are in force already.
func (l *limits) have(v vm.Limits) { l.values = limitValues(v) }

// set sets the workload's limits.
func (l *limits) set(v vm.Limits) error {
	for i, text := range limitValues(v) {
		if text == l.values[i] {
			continue
		}
		if _, err := unix.Pwrite(int(l.files[i].Fd()), []byte(text), 0); err != nil {
			return dsec.Errorf(dsec.Invalid, "set %s to %s: %w", limitFiles[i], text, err)
		}
		l.values[i] = text
	}
	return nil
}

// limitValues are the contents of the files.
func limitValues(v vm.Limits) [len(limitFiles)]string {
	value := func(n int64) string {
		if n <= 0 {
			return "max"
		}
		return strconv.FormatInt(n, 10)
	}
	const period = 100_000
	cpu := "max" // also where the machine has no more processors: counting costs
	if v.CPU > 0 && v.CPU < float64(runtime.NumCPU()) {
		cpu = strconv.FormatInt(max(int64(v.CPU*period), 1000), 10)
	}
	return [len(limitFiles)]string{value(v.Memory), value(int64(v.Pids)), cpu + " " + strconv.Itoa(period)}
}

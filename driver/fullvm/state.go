package fullvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/vm"
)

// Files of a slot's folder, beside those of package qemu.
const (
	stateFile  = "machine"
	diskFile   = "disk"
	varsFile   = "vars"
	memoryFile = "memory"
)

// state is what a slot's folder says about its machine. It appears whole or not
// at all; a crash of the host ends every machine, so it is never synced.
type state struct {
	ID        dsec.SandboxID     `json:"id"` // empty while nobody has it
	Image     image              `json:"image"`
	Resources dsec.Resources     `json:"resources"`
	Agent     Agent              `json:"agent,omitempty"`
	Guest     driver.GuestConfig `json:"guest"`
	Hostname  string             `json:"hostname,omitempty"`
	Paused    bool               `json:"paused,omitempty"`
}

// setup is what the agent is told of the sandbox. Its machine's identity it has
// by vm.Restored.
func (s state) setup() vm.Setup {
	return vm.Setup{
		Hostname: s.Hostname, Env: s.Guest.Env, Cwd: s.Guest.Cwd, User: s.Guest.User,
		Limits: vm.Limits{Memory: workMemory(s.Resources), Pids: s.Resources.Pids},
	}
}

// workMemory is what commands may use of a machine's memory, so that it is they
// who meet a limit, and not the system below them. Services of the guest's are
// not among them.
func workMemory(r dsec.Resources) int64 {
	m := ram(r)
	return max(m-(128<<20+m/8), m/2)
}

func writeState(dir string, s state) error { return writeJSON(filepath.Join(dir, stateFile), s) }

func readState(dir string) (state, error) {
	var s state
	err := readJSON(filepath.Join(dir, stateFile), &s)
	return s, err
}

// writeJSON writes a file that appears whole or not at all.
func writeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		os.Remove(tmp) //nolint:errcheck // the first error says more
		return noSpace(err)
	}
	return os.Rename(tmp, path)
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// noSpace makes a full disk Exhausted.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return dsec.Errorf(dsec.Exhausted, "the host's disk is full: %w", err)
	}
	return err
}

// overhead is what a process may use beside the memory of its machine.
const overhead = 512 << 20

// roomFor is Exhausted where the host has not so much memory now.
func roomFor(n int64) error {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		rest, ok := strings.CutPrefix(line, "MemAvailable:")
		f := strings.Fields(rest)
		if !ok || len(f) == 0 {
			continue
		}
		kib, err := strconv.ParseInt(f[0], 10, 64)
		if err == nil && n > kib<<10 {
			return dsec.Errorf(dsec.Exhausted, "a machine of %d MiB needs more memory than the %d MiB that the host has left", n>>20, kib>>10)
		}
	}
	return nil
}

// copySparse copies a file but for its holes to a new one.
func copySparse(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return noSpace(err)
	}
	defer dst.Close()
	if err := copyFile(dst, src); err != nil {
		return noSpace(fmt.Errorf("copy %s: %w", filepath.Base(from), err))
	}
	return dst.Close()
}

func copyFile(dst, src *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}
	for off := int64(0); off < st.Size(); {
		start, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(dst, start), io.NewSectionReader(src, start, end-start)); err != nil {
			return err
		}
		off = end
	}
	return nil
}

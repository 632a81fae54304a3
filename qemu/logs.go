package qemu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ConsoleSize is how much is kept of what a guest prints on its first serial
// port, and of what QEMU prints on its standard error: the beginning.
const ConsoleSize = 256 << 10

// logs are the texts of a process. They are memory files that are sealed
// against growth: a guest that prints without end fills them and no more, with
// nobody reading. They live as long as QEMU or somebody who has them open, so
// what a process said that ended while no node was running is lost.
type logs struct {
	console, stderr memory
}

type memory struct{ file *os.File }

const (
	consoleName = "dsec-console"
	stderrName  = "dsec-stderr"
)

func newLogs() (logs, error) {
	var l logs
	var err error
	if l.console, err = newMemory(consoleName); err == nil {
		l.stderr, err = newMemory(stderrName)
	}
	return l, err
}

func (l *logs) seal() error {
	return errors.Join(l.console.seal(), l.stderr.seal())
}

func (l *logs) close() {
	l.console.close()
	l.stderr.close()
}

func newMemory(name string) (memory, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return memory{}, fmt.Errorf("make memory file: %w", err)
	}
	return memory{os.NewFile(uintptr(fd), name)}, nil
}

// seal gives the file its size, for good. It comes after QEMU has opened it,
// which cuts it to nothing first.
func (m memory) seal() error {
	if err := m.file.Truncate(ConsoleSize); err != nil {
		return fmt.Errorf("size memory file: %w", err)
	}
	if _, err := unix.FcntlInt(m.file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("seal memory file: %w", err)
	}
	return nil
}

// writer opens it for writing, from the beginning.
func (m memory) writer() (*os.File, error) {
	return os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(m.file.Fd())), os.O_WRONLY, 0)
}

// text is what was written.
func (m memory) text() string {
	if m.file == nil {
		return ""
	}
	b := make([]byte, ConsoleSize)
	n, _ := m.file.ReadAt(b, 0)
	// What was not written yet is zeros; others are a guest's own.
	return strings.ReplaceAll(strings.TrimRight(string(b[:n]), "\x00"), "\x00", "")
}

func (m memory) close() {
	if m.file != nil {
		m.file.Close()
	}
}

// findLogs opens the memory files of a running process.
func findLogs(pid int) logs {
	var l logs
	dir := "/proc/" + strconv.Itoa(pid) + "/fd"
	es, _ := os.ReadDir(dir)
	for _, e := range es {
		to, _ := os.Readlink(filepath.Join(dir, e.Name()))
		for name, m := range map[string]*memory{consoleName: &l.console, stderrName: &l.stderr} {
			if m.file == nil && strings.HasPrefix(to, "/memfd:"+name) {
				m.file, _ = os.Open(filepath.Join(dir, e.Name()))
			}
		}
	}
	return l
}

// Console is the beginning of what the guest printed on the chardev "console",
// up to ConsoleSize. Args decide which device that is: "-serial chardev:console"
// or "-device isa-serial,chardev=console".
func (p *Process) Console() string { return p.log.console.text() }

// Stderr is what QEMU itself had to say.
func (p *Process) Stderr() string { return p.log.stderr.text() }

// lastLines gives the last n lines with something in them, as one line.
func lastLines(s string, n int) string {
	var out []string
	lines := strings.Split(s, "\n")
	for i := len(lines) - 1; i >= 0 && len(out) < n; i-- {
		if l := strings.TrimSpace(printable(lines[i])); l != "" {
			out = append([]string{l}, out...)
		}
	}
	return strings.Join(out, "; ")
}

// printable drops what would move a terminal's cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f || r == 0xfffd {
			return -1
		}
		return r
	}, s)
}

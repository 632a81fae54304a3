package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTurnLog writes through one descriptor into logs that are turned.
func TestTurnLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), upLog)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 100)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	w := os.NewFile(uintptr(fd), "log")
	defer w.Close()
	for _, line := range []string{"one", "two", "three"} {
		if err := turnLog(path, 1000, fd); err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteString(line + strings.Repeat(".", 1000) + "\n"); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{path: "three.", path + ".1": "two."} {
		b, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(b), want) || len(b) > 1010 {
			t.Errorf("%s has %d bytes, %.10q, %v", name, len(b), b, err)
		}
	}
	// Somebody else has moved it: nothing is lost, nothing is moved twice.
	if err := os.Rename(path, path+".kept"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Repeat("x", 2000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := turnLog(path, 1000, fd); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(path); err != nil || i.Size() != 2000 {
		t.Errorf("a log of somebody else was touched: %v", err)
	}
}

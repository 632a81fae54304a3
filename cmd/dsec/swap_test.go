package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec/swap"
)

func swapPaths(t *testing.T) []string {
	t.Helper()
	all, err := swap.Devices()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range all {
		out = append(out, d.Path)
	}
	return out
}

func TestDoctorFixesAndUnfixes(t *testing.T) {
	before := swapPaths(t)
	data := filepath.Join(t.TempDir(), "data")
	t.Cleanup(func() { swap.Remove(filepath.Join(data, swapDir)) })
	var out strings.Builder
	a := &app{Stdout: &out, Stderr: os.Stderr}
	for range 2 {
		if err := (&doctorCmd{Data: data, Fix: true, Swap: 32 << 20}).Run(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	if now := swapPaths(t); len(now) <= len(before) || !slices.Contains(now, filepath.Join(data, swapDir, "file")) {
		t.Errorf("swap is %v, was %v", now, before)
	}
	if !strings.Contains(out.String(), "swap ") {
		t.Errorf("it printed %q", out.String())
	}
	// A folder with nothing but swap may become a node's.
	if d, err := openData(data); err != nil {
		t.Error(err)
	} else {
		d.close()
	}
	for range 2 {
		if err := (&doctorCmd{Data: data, Unfix: true}).Run(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	if now := swapPaths(t); !slices.Equal(now, before) {
		t.Errorf("swap is %v, was %v", now, before)
	}
}

// TestUpWithSwap follows the swap of a node: it stays for as long as sandboxes
// may have memory in it.
func TestUpWithSwap(t *testing.T) {
	before := swapPaths(t)
	w := newWorld(t)
	t.Cleanup(func() { swap.Remove(filepath.Join(w.data, swapDir)) })
	file := filepath.Join(w.data, swapDir, "file")
	for range 2 {
		s := w.start("up", "--data", w.data, "--guest", w.guest, "--listen", "127.0.0.1:0", "--swap", "32M")
		s.out.await(t, "serves at")
		if now := swapPaths(t); !slices.Contains(now, file) {
			t.Errorf("swap is %v", now)
		}
		s.signals <- os.Interrupt
		if code := <-s.code; code != 0 {
			t.Errorf("up ended with %d: %s", code, s.err)
		}
		if now := swapPaths(t); !slices.Contains(now, file) {
			t.Errorf("after Ctrl-C swap is %v", now)
		}
	}
	w.run("down", "--data", w.data, "--guest", w.guest)
	if now := swapPaths(t); !slices.Equal(now, before) {
		t.Errorf("after down swap is %v, was %v", now, before)
	}
}

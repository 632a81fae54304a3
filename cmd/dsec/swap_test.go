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
		if err := (&doctorCmd{Data: data, Fix: true, Swap: 32 << 20}).Run(a); err != nil {
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
		if err := (&doctorCmd{Data: data, Unfix: true}).Run(a); err != nil {
			t.Fatal(err)
		}
	}
	if now := swapPaths(t); !slices.Equal(now, before) {
		t.Errorf("swap is %v, was %v", now, before)
	}
}

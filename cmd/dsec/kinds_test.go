package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

func TestWarmth(t *testing.T) {
	for _, c := range []struct {
		in   string
		want warmth
	}{
		{"", warmth{}}, {"microvm=2", warmth{dsec.MicroVM: 2}},
		{"container=0, microvm=4,fullvm=1", warmth{dsec.Container: 0, dsec.MicroVM: 4, dsec.FullVM: 1}},
	} {
		got, err := parseWarmth(c.in)
		if err != nil || len(got) != len(c.want) {
			t.Errorf("%q is %v, %v", c.in, got, err)
		}
		for k, n := range c.want {
			if got[k] != n {
				t.Errorf("%q keeps %d of %s, want %d", c.in, got[k], k, n)
			}
		}
	}
	for in, says := range map[string]string{
		"microvm": "number from 0 to", "microvm=": "number", "microvm=-1": "number", "microvm=two": "number", "microvm=100000": "256",
		"vm=2": "none of container, microvm, fullvm", "fncall=2": "function calls", "microvm=1,microvm=2": "twice", "microvm=1,": "none of", ",": "none of",
	} {
		if _, err := parseWarmth(in); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", in, err, says)
		}
	}
}

// TestPowersAreReal compares what a node says that its kinds can do with what
// the drivers' tests have found.
func TestPowersAreReal(t *testing.T) {
	for _, kind := range dsec.Kinds {
		b, err := os.ReadFile(filepath.Join("../../docs/backends", string(kind)+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var found []struct{ Behaviour, Lacks string }
		if err := json.Unmarshal(b, &found); err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			if !slices.Contains([]string{"files", "ports", "terminal", "pause", "snapshot", "fork", "screen"}, f.Behaviour) {
				continue
			}
			if says := slices.Contains(powers[kind], f.Behaviour); says != (f.Lacks == "") {
				t.Errorf("%s can %s: the node says %v, its test %q", kind, f.Behaviour, says, f.Lacks)
			}
		}
	}
}

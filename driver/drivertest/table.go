package drivertest

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// update makes the tests write docs/backends instead of comparing: first those of
// the drivers, then this package's own, which makes the table of their files.
var update = flag.Bool("update", false, "write the results of the list to docs/backends")

// Result is one behaviour of a driver: passed, passed with an exception, or
// lacking with the reason.
type Result struct {
	Behaviour string `json:"behaviour"`
	But       string `json:"but,omitempty"`
	Lacks     string `json:"lacks,omitempty"`
}

// keepResults compares what a run found with the file, or writes it.
func keepResults(t *testing.T, path string, rs []Result) {
	t.Helper()
	b, err := json.MarshalIndent(rs, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	b = append(b, '\n')
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if old, err := os.ReadFile(path); err != nil || !bytes.Equal(old, b) {
		t.Errorf("%s is not what this run found (%v): run the tests with -update", path, err)
	}
}

// Table makes the table of the results in the files of a folder, one for each
// kind, in Markdown. Lacks and
// exceptions are footnotes.
func Table(dir string, kinds []dsec.Kind) (string, error) {
	cells := map[string]map[dsec.Kind]string{}
	var notes []string
	for _, k := range kinds {
		b, err := os.ReadFile(filepath.Join(dir, string(k)+".json"))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return "", err
		}
		var rs []Result
		if err := json.Unmarshal(b, &rs); err != nil {
			return "", fmt.Errorf("read results of %s: %w", k, err)
		}
		for _, r := range rs {
			if cells[r.Behaviour] == nil {
				cells[r.Behaviour] = map[dsec.Kind]string{}
			}
			cell, note := "yes", r.But
			if r.Lacks != "" {
				cell, note = "", r.Lacks
			}
			if note != "" {
				i := slices.Index(notes, note)
				if i < 0 {
					i = len(notes)
					notes = append(notes, note)
				}
				cell = strings.TrimSpace(fmt.Sprintf("%s [%d]", cell, i+1))
			}
			cells[r.Behaviour][k] = cell
		}
	}
	var b strings.Builder
	b.WriteString("| behaviour |")
	for _, k := range kinds {
		fmt.Fprintf(&b, " %s |", k)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(kinds)) + "\n")
	for _, l := range behaviours {
		fmt.Fprintf(&b, "| %s |", l.name)
		for _, k := range kinds {
			cell := cells[l.name][k]
			if cell == "" {
				cell = "–"
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
	for i, n := range notes {
		fmt.Fprintf(&b, "%d. %s\n", i+1, n)
	}
	return b.String(), nil
}

// power is an optional interface of package driver.
type power string

const (
	upper       power = "Upper"
	pauser      power = "Pauser"
	reclaimer   power = "Reclaimer"
	snapshotter power = "Snapshotter"
	forker      power = "Forker"
	screen      power = "Screen"
)

// findPowers starts a machine to see what it can do.
func findPowers(t *testing.T, e Env) map[power]bool {
	t.Helper()
	has := map[power]bool{}
	d := e.Open(t)
	defer d.Close()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal("adopt:", err)
	}
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal("start:", err)
	}
	defer stop(t, m)
	_, has[upper] = m.(driver.Upper)
	_, has[pauser] = m.(driver.Pauser)
	_, has[reclaimer] = m.(driver.Reclaimer)
	_, has[forker] = m.(driver.Forker)
	_, has[screen] = m.(driver.Screen)
	_, has[snapshotter] = m.(driver.Snapshotter)
	if _, ok := d.(driver.Restorer); ok != has[snapshotter] {
		t.Errorf("machines that can be saved %v, a driver that can restore %v", has[snapshotter], ok)
	}
	return has
}

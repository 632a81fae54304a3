package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestBench runs a benchmark as small as it gets against the private server
// that it starts, and looks for what it left. Figures are not looked at.
func TestBench(t *testing.T) {
	w := newWorld(t)
	t.Setenv(asProgram, "1") // its server is this test binary
	t.Setenv("TMPDIR", searchable(t))
	out := w.run("bench", "create", "--guest", w.guest, "--rounds", "1", "-n", "1", "--rate-n", "2", "--json")
	var r struct {
		Bench   string
		Budgets []struct {
			Name, Unit   string
			Value, Limit float64
			OK           *bool
		}
		Figures []struct {
			Name     string
			N        int
			P50, P99 float64
		}
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if r.Bench != "create" || len(r.Budgets) < 3 || len(r.Figures) < 6 {
		t.Errorf("report is %s", out)
	}
	for _, b := range r.Budgets {
		if b.Name == "" || b.Unit == "" || b.Limit <= 0 || b.OK == nil {
			t.Errorf("budget is %+v", b)
		}
	}
	for _, f := range r.Figures {
		if f.N == 0 || f.P50 <= 0 || f.P99 < f.P50 {
			t.Errorf("figure is %+v", f)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "dsec-bench-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// searchable gives a folder that every account can search, as the temporary
// folder is and a test's own is not.
func searchable(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dsec-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

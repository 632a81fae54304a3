package bench_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/bench"
)

func build(t *testing.T) *bench.Floor {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("feature root: namespaces and mounts need it")
	}
	f, err := bench.BuildFloor(t.Context(), t.TempDir())
	if dsec.KindOf(err) == dsec.Unsupported {
		t.Skipf("feature C compiler: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob("/sys/fs/cgroup/*/dsec-floor-" + strconv.Itoa(os.Getpid())); len(left) > 0 {
			t.Errorf("control groups are left: %v", left)
		}
	})
	return f
}

func TestFloorMakesBoxes(t *testing.T) {
	f := build(t)
	base, err := bench.WriteBase(t.Context(), t.TempDir(), f.Program)
	if err != nil {
		t.Fatal(err)
	}
	f.Layers = []string{base}
	s, err := f.Boxes(t.Context(), 3, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if s.N() != 3 || s.Stage("exec").N() != 3 {
		t.Errorf("3 boxes gave %d times and %d of the exec step", s.N(), s.Stage("exec").N())
	}
	// The steps up to the command's answer make up the total.
	sum := -s.Stage("destroy").Mean()
	for _, k := range []string{"groups", "folders", "clone", "maps", "overlay", "enter", "mounts", "pivot", "join", "exec", "destroy"} {
		sum += s.Stage(k).Mean()
	}
	if d := sum - s.Mean(); d > 0.01 || d < -0.01 {
		t.Errorf("steps add up to %v ms, the total is %v", sum, s.Mean())
	}
	rate, err := f.Rate(t.Context(), 8, 4)
	if err != nil {
		t.Fatal(err)
	}
	if rate <= 0 {
		t.Errorf("rate is %v", rate)
	}
}

func TestFloorOnAFolder(t *testing.T) {
	f := build(t)
	dir := t.TempDir()
	for _, d := range []string{"bin", "proc", "dev"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(f.Program, filepath.Join(dir, "bin/true")); err != nil {
		t.Fatal(err)
	}
	f.Layers = []string{dir}
	if _, err := f.Boxes(t.Context(), 1, 0); err != nil {
		t.Fatal(err)
	}
}

func TestFloorSaysWhatIsWrong(t *testing.T) {
	f := build(t)
	f.Layers = []string{filepath.Join(t.TempDir(), "absent")}
	if _, err := f.Boxes(t.Context(), 1, 0); err == nil || !bytes.Contains([]byte(err.Error()), []byte("absent")) {
		t.Errorf("boxes of an absent layer: %v", err)
	}
}

func TestFloorSpawnAndPipe(t *testing.T) {
	f := build(t)
	dir := t.TempDir()
	for _, name := range []string{"true", "write"} {
		if err := os.Link(f.Program, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := f.Spawns(t.Context(), 3, 0, filepath.Join(dir, "true"))
	if err != nil {
		t.Fatal(err)
	}
	if s.N() != 3 {
		t.Errorf("3 spawns gave %d times", s.N())
	}
	if _, err := f.Pipe(t.Context(), 1<<20, filepath.Join(dir, "write")); err != nil {
		t.Error(err)
	}
}

func TestInterruptedFloorLeavesNothing(t *testing.T) {
	f := build(t) // its clean-up looks for control groups
	base, err := bench.WriteBase(t.Context(), t.TempDir(), f.Program)
	if err != nil {
		t.Fatal(err)
	}
	f.Layers = []string{base}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.Rate(ctx, 1_000_000, 4); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("interrupted: %v", err)
	}
}

func TestRunc(t *testing.T) {
	f := build(t)
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o711); err != nil { // a box's root comes by
		t.Fatal(err)
	}
	r, err := bench.NewRunc(t.Context(), filepath.Join(dir, "runc"), f.Program)
	if dsec.KindOf(err) == dsec.Unsupported {
		t.Skipf("feature runc: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob("/sys/fs/cgroup/*/dsec-runc-" + strconv.Itoa(os.Getpid())); len(left) > 0 {
			t.Errorf("control groups are left: %v", left)
		}
	}()
	if err := r.Prepare(t.Context(), 0, 2); err != nil {
		t.Fatal(err)
	}
	if err := r.Create(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := r.Exec(t.Context(), 0, &out, "/bin/write", "1000"); err != nil {
		t.Fatal(err)
	}
	if out.Len() != 1000 {
		t.Errorf("command wrote %d bytes, want 1000", out.Len())
	}
	if err := r.Exec(t.Context(), 0, nil, "/bin/absent"); err == nil {
		t.Error("an absent program ran")
	}
	if err := r.Destroy(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	// Box 1 is left for Close.
	if err := r.Create(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
}

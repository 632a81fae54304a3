package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

//go:embed floor.c
var floorSource []byte

// floorSteps are the names of a box's steps, in order.
var floorSteps = []string{"groups", "folders", "clone", "maps", "overlay", "enter", "mounts", "pivot", "join", "exec", "destroy"}

// Floor runs the C program.
type Floor struct {
	Program string   // the compiled binary, which is also what runs in sandboxes
	Layers  []string // folders or META,DATA of EROFS images, lowest first
	dir     string   // for writable layers
	group   string   // of its control groups
}

// BuildFloor compiles the floor into dir. Without a C compiler it is
// Unsupported.
func BuildFloor(ctx context.Context, dir string) (*Floor, error) {
	source, program := filepath.Join(dir, "floor.c"), filepath.Join(dir, "floor")
	if err := os.WriteFile(source, floorSource, 0o644); err != nil {
		return nil, err
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "the floor is a C program and this host has no compiler: install gcc and libc6-dev")
	}
	if out, err := exec.CommandContext(ctx, cc, "-O2", "-static", "-s", "-o", program, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the floor: %w: %s", err, bytes.TrimSpace(out))
	}
	f := &Floor{Program: program, dir: filepath.Join(dir, "boxes"), group: "dsec-floor-" + strconv.Itoa(os.Getpid())}
	return f, os.MkdirAll(f.dir, 0o700)
}

// Boxes makes n boxes one after another with a pause before each and returns
// the times up to the exit status of their command, with the steps.
func (f *Floor) Boxes(ctx context.Context, n int, gap time.Duration) (*Sample, error) {
	lines, err := f.run(ctx, f.box("box", strconv.Itoa(n), millis(gap))...)
	if err != nil {
		return nil, err
	}
	s := Millis()
	for _, l := range lines {
		s.Add(l["total"] / 1e3)
		for _, k := range floorSteps {
			s.Stage(k).Add(l[k] / 1e3)
		}
	}
	return s, nil
}

// Rate makes and destroys n boxes, c at a time, and returns how many it did a
// second.
func (f *Floor) Rate(ctx context.Context, n, c int) (float64, error) {
	lines, err := f.run(ctx, f.box("boxes", strconv.Itoa(n), strconv.Itoa(c))...)
	if err != nil {
		return 0, err
	}
	if len(lines) != 1 || lines[0]["seconds"] <= 0 {
		return 0, errFloorOutput
	}
	return lines[0]["n"] / lines[0]["seconds"], nil
}

// Spawns times n bare fork, exec and wait of "true" from a small process.
func (f *Floor) Spawns(ctx context.Context, n int, gap time.Duration, program string) (*Sample, error) {
	lines, err := f.run(ctx, "spawn", strconv.Itoa(n), millis(gap), program)
	if err != nil {
		return nil, err
	}
	return totals(lines), nil
}

// totals gives the times of what a floor did, in milliseconds.
func totals(lines []map[string]float64) *Sample {
	s := Millis()
	for _, l := range lines {
		s.Add(l["total"] / 1e3)
	}
	return s
}

// Pipe reads size bytes of a child's output and returns MB a second.
func (f *Floor) Pipe(ctx context.Context, size int64, program string) (float64, error) {
	lines, err := f.run(ctx, "pipe", strconv.FormatInt(size, 10), program)
	if err != nil {
		return 0, err
	}
	if len(lines) != 1 || int64(lines[0]["bytes"]) != size || lines[0]["seconds"] <= 0 {
		return 0, errFloorOutput
	}
	return lines[0]["bytes"] / lines[0]["seconds"] / 1e6, nil
}

// Reclaim takes back the memory of n processes that hold size bytes each, one
// thread doing only that, and returns bytes a second.
func (f *Floor) Reclaim(ctx context.Context, n int, size int64) (float64, error) {
	lines, err := f.run(ctx, "-g", f.group, "reclaim", strconv.Itoa(n), strconv.FormatInt(size, 10))
	if err != nil {
		return 0, err
	}
	if len(lines) != 1 || lines[0]["bytes"] <= 0 || lines[0]["seconds"] <= 0 {
		return 0, errFloorOutput
	}
	return lines[0]["bytes"] / lines[0]["seconds"], nil
}

var errFloorOutput = errors.New("the floor printed something else than was asked for")

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

func (f *Floor) box(mode ...string) []string {
	args := []string{"-d", f.dir, "-g", f.group, "-x", binTrue}
	for _, l := range f.Layers {
		args = append(args, "-l", l)
	}
	return append(args, mode...)
}

func (f *Floor) run(ctx context.Context, args ...string) ([]map[string]float64, error) {
	cmd := exec.CommandContext(ctx, f.Program, args...)
	endTogether(cmd)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("run the floor: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return parseLines(out)
}

// endTogether puts cmd and what it forks in a process group that ends as one
// when cmd's context does.
func endTogether(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}

// parseLines reads one JSON object of numbers from each line.
func parseLines(out []byte) ([]map[string]float64, error) {
	var lines []map[string]float64
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
		var m map[string]float64
		if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
			return nil, fmt.Errorf("%w: %v", errFloorOutput, err)
		}
		lines = append(lines, m)
	}
	return lines, nil
}

// Close removes what an interrupted run left.
func (f *Floor) Close() error {
	return errors.Join(removeGroups(f.group), os.RemoveAll(f.dir))
}

const cgroupRoot = "/sys/fs/cgroup"

// removeGroups ends and deletes every control group of a name, in all
// hierarchies.
func removeGroups(name string) error {
	if name == "" || strings.ContainsAny(name, "/*?[") {
		return fmt.Errorf("remove control groups %q: not a name", name)
	}
	roots, _ := filepath.Glob(filepath.Join(cgroupRoot, "*", name))
	roots = append(roots, filepath.Join(cgroupRoot, name))
	var errs []error
	for _, r := range roots {
		errs = append(errs, removeGroup(r))
	}
	return errors.Join(errs...)
}

package bench_test

import (
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/bench"
)

// server is a server that runs nothing and notes what it was asked for.
type server struct {
	mu     sync.Mutex
	specs  []dsec.Spec
	alive  map[dsec.SandboxID]bool
	images map[string]bool
	execs  int
}

func newServer() *server {
	return &server{alive: map[dsec.SandboxID]bool{}, images: map[string]bool{}}
}

func (s *server) services() dsec.Services {
	return dsec.Services{Sandboxes: sandboxes{server: s}, Commands: commands{server: s}, Images: images{server: s}}
}

type (
	sandboxes struct {
		*server
		dsec.Sandboxes
	}
	commands struct {
		*server
		dsec.Commands
	}
	images struct {
		*server
		dsec.Images
	}
)

func (s sandboxes) Create(_ context.Context, spec dsec.Spec, _ dsec.CreateOptions) (dsec.Sandbox, error) {
	if err := spec.Check(); err != nil {
		return dsec.Sandbox{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range spec.Environment.Parts() {
		if !s.images[p] {
			return dsec.Sandbox{}, dsec.Errorf(dsec.NotFound, "no image %s", p)
		}
	}
	s.specs = append(s.specs, spec)
	id := dsec.SandboxID("sb" + strconv.Itoa(len(s.specs)))
	s.alive[id] = true
	return dsec.Sandbox{ID: id, Stages: []dsec.Stage{{Name: "root", Took: time.Millisecond}}}, nil
}

func (s sandboxes) Stop(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.alive[id] {
		return dsec.Sandbox{}, dsec.Errorf(dsec.NotFound, "no sandbox %s", id)
	}
	delete(s.alive, id)
	return dsec.Sandbox{ID: id}, nil
}

func (s commands) run(on dsec.Call) (dsec.CommandStatus, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.alive[on.Sandbox] {
		return dsec.CommandStatus{}, dsec.Errorf(dsec.NotFound, "no sandbox %s", on.Sandbox)
	}
	s.execs++
	return dsec.CommandStatus{ID: "c1", Outcome: dsec.Exited}, nil
}

func (s commands) Run(_ context.Context, on dsec.Call, _ dsec.Command, _ []byte) (dsec.Result, error) {
	st, err := s.run(on)
	return dsec.Result{CommandStatus: st}, err
}

func (s commands) Start(_ context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	st, err := s.run(on)
	st.Command = c
	st.ID = dsec.CommandID(c.Argv[1])
	return st, err
}

// Attach yields as many bytes as the command was told to write, which is its
// name here.
func (s commands) Attach(_ context.Context, _ dsec.Call, id dsec.CommandID, _ int64) iter.Seq2[dsec.Output, error] {
	n, err := strconv.Atoi(string(id))
	return func(yield func(dsec.Output, error) bool) {
		if yield(dsec.Output{Data: make([]byte, n)}, err) {
			yield(dsec.Output{Status: &dsec.CommandStatus{Outcome: dsec.Exited}}, nil)
		}
	}
}

func (s images) Upload(_ context.Context, o dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	if err := dsec.CheckImageName(o.Name); err != nil {
		return dsec.Image{}, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return dsec.Image{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[o.Name] = true
	return dsec.Image{}, nil
}

func (s images) Remove(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.images[name] {
		return dsec.Errorf(dsec.NotFound, "no image %s", name)
	}
	delete(s.images, name)
	return nil
}

func (s images) Collect(context.Context, dsec.CollectOptions) (dsec.Collected, error) {
	return dsec.Collected{}, nil
}

// left says what a closed world left on the server.
func (s *server) left() string {
	if len(s.alive)+len(s.images) == 0 {
		return ""
	}
	return fmt.Sprintf("%d sandboxes and %d images", len(s.alive), len(s.images))
}

func open(t *testing.T, s *server) *bench.World {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("feature root: namespaces and mounts need it")
	}
	dir, err := os.MkdirTemp("", "bench-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	w, err := bench.Open(t.Context(), bench.Config{Dir: dir, Services: s.services()})
	if dsec.KindOf(err) == dsec.Unsupported {
		t.Skipf("feature C compiler: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		if l := s.left(); l != "" {
			t.Errorf("left behind: %s", l)
		}
	})
	return w
}

func TestCreateIsFair(t *testing.T) {
	s := newServer()
	w := open(t, s)
	r, err := w.Create(t.Context(), bench.CreateOptions{Rounds: 1, N: 2, Runc: 1, Many: 2, RateN: 4, RateTurn: 1})
	if err != nil {
		t.Fatal(err)
	}
	limits, workspaces := map[dsec.Resources]bool{}, map[string]bool{}
	for _, spec := range s.specs {
		if limits[spec.Resources] || workspaces[spec.Environment.Workspace] {
			t.Errorf("limits %+v or workspace %s were used before", spec.Resources, spec.Environment.Workspace)
		}
		limits[spec.Resources], workspaces[spec.Environment.Workspace] = true, true
	}
	// Twice two to warm up and two measured, then four and two for the rate.
	if len(s.specs) != 14 {
		t.Errorf("%d creates, want 14", len(s.specs))
	}
	if len(r.Budgets) < 3 {
		t.Errorf("budgets are %+v", r.Budgets)
	}
	for _, f := range r.Figures {
		if f.N == 0 {
			t.Errorf("figure %q has no measurement", f.Name)
		}
	}
}

func TestExecRuns(t *testing.T) {
	s := newServer()
	w := open(t, s)
	r, err := w.Exec(t.Context(), bench.ExecOptions{Rounds: 1, N: 2, Runc: 1, Bytes: 1 << 16})
	if err != nil {
		t.Fatal(err)
	}
	// One to begin with, twice two, three times output.
	if s.execs != 8 {
		t.Errorf("%d commands, want 8", s.execs)
	}
	if len(r.Budgets) != 2 || r.Budgets[0].Unit != "ms" {
		t.Errorf("budgets are %+v", r.Budgets)
	}
}

func TestDensityAsksAll(t *testing.T) {
	s := newServer()
	w := open(t, s)
	r, err := w.Density(t.Context(), bench.DensityOptions{N: 5, Workspaces: 2, Settle: time.Millisecond}, os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Agents(t.Context(), r, bench.AgentsOptions{Levels: []int{1}, Period: 20 * time.Millisecond, Pace: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	got := map[string]bench.Budget{}
	for _, b := range r.Budgets {
		got[b.Name] = b
	}
	if b := got["alive and answering"]; b.Value != 5 || b.Limit != 5 || !b.OK {
		t.Errorf("answering: %+v", b)
	}
	if b := got["agents at work, exec p99 at most twice quiet"]; b.Limit != 12 || b.OK {
		t.Errorf("agents: %+v", b)
	}
}

package bench_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dsec-go/dsec/bench"
)

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name   string
		more   bool
		values map[string]float64
		best   string
		lost   bool
	}{
		{"less wins", false, map[string]float64{"dsec": 3, "runc": 100, "podman": 300}, "dsec", false},
		{"less lost", false, map[string]float64{"dsec": 3, "runc": 2, "podman": 300}, "runc", true},
		{"more wins", true, map[string]float64{"dsec": 3, "runc": 2}, "dsec", false},
		{"more lost", true, map[string]float64{"dsec": 3, "runc": 4}, "runc", true},
		{"a draw is no loss", false, map[string]float64{"dsec": 3, "another": 3}, "another", false},
		{"alone", false, map[string]float64{"dsec": 3}, "dsec", false},
		{"not measured elsewhere", false, map[string]float64{"dsec": 3, "runc": math.NaN()}, "dsec", false},
		{"not measured here", false, map[string]float64{"dsec": math.NaN(), "runc": 5}, "runc", true},
	} {
		r := bench.Row{More: c.more, Values: c.values}
		bench.Judge(&r)
		if r.Best != c.best || r.Lost != c.lost {
			t.Errorf("%s: best %q, lost %v; want %q, %v", c.name, r.Best, r.Lost, c.best, c.lost)
		}
		for name, v := range r.Values {
			if math.IsNaN(v) {
				t.Errorf("%s: %s is kept without a value", c.name, name)
			}
		}
	}
}

func TestComparisonPrintsLosses(t *testing.T) {
	c := bench.Comparison{Report: *bench.NewReport("compare"), Names: []string{"dsec", "runc"}}
	for _, r := range []bench.Row{
		{Job: "create", Unit: "ms", Values: map[string]float64{"dsec": 5, "runc": 100}},
		{Job: "memory", Unit: "MiB", Values: map[string]float64{"dsec": 1.4, "runc": 0.9}},
		{Job: "output", Unit: "MB/s", More: true, Values: map[string]float64{"dsec": 800}},
	} {
		bench.Judge(&r)
		c.Rows = append(c.Rows, r)
	}
	var b strings.Builder
	if err := c.Print(&b); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "memory") != strings.Contains(line, "LOST") {
			t.Errorf("line %q", line)
		}
		if strings.HasPrefix(line, "output") && !strings.Contains(line, " -") {
			t.Errorf("line %q does not show that runc has no value", line)
		}
	}
	if want := "best of 2 of 3 jobs, and loses 1"; !strings.Contains(b.String(), want) {
		t.Errorf("%q is not in\n%s", want, b.String())
	}
}

func TestParallel(t *testing.T) {
	var mu sync.Mutex
	seen := map[int]int{}
	var now, most atomic.Int64
	err := bench.Parallel(t.Context(), 3, 10, 60, func(_ context.Context, i int) error {
		n := now.Add(1)
		defer now.Add(-1)
		mu.Lock()
		defer mu.Unlock()
		most.Store(max(most.Load(), n))
		seen[i]++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := 10; i < 60; i++ {
		if seen[i] != 1 {
			t.Errorf("number %d was called %d times", i, seen[i])
		}
	}
	if len(seen) != 50 || most.Load() > 3 {
		t.Errorf("%d numbers, %d at a time; want 50, at most 3", len(seen), most.Load())
	}
}

func TestParallelStopsAtAnError(t *testing.T) {
	bad := errors.New("bad")
	var calls atomic.Int64
	err := bench.Parallel(t.Context(), 1, 0, 100, func(_ context.Context, i int) error {
		calls.Add(1)
		if i == 4 {
			return bad
		}
		return nil
	})
	if !errors.Is(err, bad) || calls.Load() != 5 {
		t.Errorf("%d calls, then %v; want 5 and %v", calls.Load(), err, bad)
	}
	if err := bench.Parallel(t.Context(), 2, 3, 3, nil); err != nil {
		t.Errorf("no numbers: %v", err)
	}
}

package bench_test

import (
	"math"
	"testing"
	"time"

	"github.com/dsec-go/dsec/bench"
)

func sample(values ...float64) *bench.Sample {
	s := bench.Millis()
	for _, v := range values {
		s.Add(v)
	}
	return s
}

func TestQuantile(t *testing.T) {
	hundred := bench.Millis()
	for i := 100; i >= 1; i-- { // not in order
		hundred.Add(float64(i))
	}
	for _, c := range []struct {
		s    *bench.Sample
		q    float64
		want float64
	}{
		{sample(7), 0.5, 7},
		{sample(7), 0.99, 7},
		{sample(3, 1, 2), 0.5, 2},
		{sample(4, 1, 3, 2), 0.5, 2}, // the lower of the two in the middle
		{sample(1, 2), 0.99, 2},
		{hundred, 0.5, 50},
		{hundred, 0.99, 99},
		{hundred, 1, 100},
		{hundred, 0, 1},
	} {
		if got := c.s.Quantile(c.q); got != c.want {
			t.Errorf("Quantile(%v) of %d values = %v, want %v", c.q, c.s.N(), got, c.want)
		}
	}
	if got := sample().Quantile(0.5); !math.IsNaN(got) {
		t.Errorf("median of nothing = %v, want NaN", got)
	}
	if got := sample(1, 2, 6).Mean(); got != 3 {
		t.Errorf("mean = %v, want 3", got)
	}
}

func TestQuantileLeavesTheSampleAlone(t *testing.T) {
	s := sample(3, 1, 2)
	s.P50()
	s.Add(0)
	if got := s.Quantile(0); got != 0 {
		t.Errorf("minimum = %v, want 0", got)
	}
	if got := s.P50(); got != 1 {
		t.Errorf("median = %v, want 1", got)
	}
}

func TestTookIsMilliseconds(t *testing.T) {
	s := bench.Millis()
	s.Took(1500 * time.Microsecond)
	if got := s.P50(); got != 1.5 {
		t.Errorf("1500 µs = %v ms", got)
	}
}

func TestMergeTakesStages(t *testing.T) {
	a, b := sample(1), sample(2, 3)
	a.Stage("clone").Add(10)
	b.Stage("clone").Add(20)
	b.Stage("exec").Add(5)
	a.Merge(b)
	if a.N() != 3 || a.Stage("clone").N() != 2 || a.Stage("exec").N() != 1 {
		t.Errorf("merged: %d values, %d and %d of stages", a.N(), a.Stage("clone").N(), a.Stage("exec").N())
	}
}

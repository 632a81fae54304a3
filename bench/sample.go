package bench

import (
	"math"
	"slices"
	"time"
)

// Sample is a growing set of measurements of one quantity. The zero value with
// a Unit is ready; it is not safe for concurrent use.
type Sample struct {
	Unit   string
	values []float64
	names  []string // of stages, in the order of their first appearance
	stages map[string]*Sample
}

// Millis is a sample of durations.
func Millis() *Sample { return &Sample{Unit: "ms"} }

// Add takes one measurement.
func (s *Sample) Add(v float64) { s.values = append(s.values, v) }

// Took takes one duration, in milliseconds.
func (s *Sample) Took(d time.Duration) { s.Add(float64(d) / 1e6) }

// Stage gives the sample of one named step.
func (s *Sample) Stage(name string) *Sample {
	if st := s.stages[name]; st != nil {
		return st
	}
	if s.stages == nil {
		s.stages = map[string]*Sample{}
	}
	st := &Sample{Unit: s.Unit}
	s.stages[name] = st
	s.names = append(s.names, name)
	return st
}

// N is how many measurements there are.
func (s *Sample) N() int { return len(s.values) }

// Merge takes all measurements of o.
func (s *Sample) Merge(o *Sample) {
	s.values = append(s.values, o.values...)
	for _, n := range o.names {
		s.Stage(n).Merge(o.stages[n])
	}
}

// Quantile gives the smallest measurement that at least the share q of all
// does not exceed; NaN of none.
func (s *Sample) Quantile(q float64) float64 {
	if len(s.values) == 0 {
		return math.NaN()
	}
	v := slices.Sorted(slices.Values(s.values))
	i := int(math.Ceil(q*float64(len(v)))) - 1
	return v[min(max(i, 0), len(v)-1)]
}

// P50 is the median.
func (s *Sample) P50() float64 { return s.Quantile(0.5) }

// P99 is what all but a hundredth stay below or at.
func (s *Sample) P99() float64 { return s.Quantile(0.99) }

// Mean is the average; NaN of none.
func (s *Sample) Mean() float64 {
	var sum float64
	for _, v := range s.values {
		sum += v
	}
	return sum / float64(len(s.values))
}

func (s *Sample) figure(name string) Figure {
	f := Figure{Name: name, Unit: s.Unit, N: s.N()}
	if f.N > 0 { // JSON has no NaN
		f.P50, f.P99, f.Min, f.Max, f.Mean = s.P50(), s.P99(), s.Quantile(0), s.Quantile(1), s.Mean()
	}
	for _, n := range s.names {
		f.Stages = append(f.Stages, s.stages[n].figure(n))
	}
	return f
}

// ratio is a/b of two medians; NaN when either is unknown.
func ratio(a, b *Sample) float64 { return a.P50() / b.P50() }

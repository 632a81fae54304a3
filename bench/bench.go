// Package bench measures DSec against the least that its jobs cost on the same
// host: a C program of raw system calls (floor.c) and the usual container
// runtime, both in the same run.
//
// A benchmark alternates short blocks of the floor, of DSec and of the runtime,
// so that a noisy host disturbs all alike, and holds a budget against the ratio
// of their medians. It talks to a server through dsec.Services and knows none
// of its parts; package main starts that server and prints the report.
//
// Fair play, which every benchmark keeps:
//   - Each create has limits and a workspace that the node has not seen in the
//     run. Pools and the log are as the server has them by default.
//   - What runs in a sandbox is the very file that the floor executes.
//   - The runtime's root and configuration are made before its clock runs, and
//     its images are mounted already; the floor's layers too.
//   - Losses are figures like any other.
//
// What it does not do: it asserts nothing and is no test. A figure means
// something on a quiet host only.
//
// Invariants:
//   - Close leaves no process, mount, control group or file, whenever a run is
//     interrupted.
//
// Read next: floor.c, world.go, create.go.
package bench

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// Report is what one benchmark found.
type Report struct {
	Bench   string   `json:"bench"`
	Host    Host     `json:"host"`
	Budgets []Budget `json:"budgets"`
	Figures []Figure `json:"figures"`
	Notes   []string `json:"notes"` // how it was measured, as far as it matters
}

// Host is where a benchmark ran. Figures of different hosts are not compared.
type Host struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Memory int64  `json:"memory"` // bytes
}

// Sense says on which side of its limit a budget's value should be.
type Sense string

// The senses of a budget.
const (
	AtMost  Sense = "at most"
	AtLeast Sense = "at least"
)

// Budget is one promise and what became of it.
type Budget struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Limit float64 `json:"limit"`
	Unit  string  `json:"unit"`
	OK    bool    `json:"ok"`
	Sense Sense   `json:"sense"`
}

// Figure is a distribution of one measured quantity, or a single value, whose
// N is 1.
type Figure struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	N    int     `json:"n"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
	// Stages are the steps that it is made of, where they are known.
	Stages []Figure `json:"stages,omitempty"`
}

// NewReport begins the report of a benchmark on this host.
func NewReport(name string) *Report {
	r := &Report{Bench: name, Host: Host{CPUs: runtime.NumCPU()}, Budgets: []Budget{}, Figures: []Figure{}, Notes: []string{}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		r.Host.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) == nil {
		r.Host.Memory = int64(s.Totalram) * int64(s.Unit)
	}
	return r
}

// Hold adds a budget. A value that is not a number keeps nothing: it is shown
// as missed.
func (r *Report) Hold(name string, value float64, sense Sense, limit float64, unit string) {
	b := Budget{Name: name, Value: value, Limit: limit, Unit: unit, Sense: sense}
	b.OK = sense == AtMost && value <= limit || sense == AtLeast && value >= limit
	if value != value || value > 1e300 {
		b.Value = -1 // JSON has no word for it
	}
	r.Budgets = append(r.Budgets, b)
}

// Add adds the distribution of s, with those of its stages.
func (r *Report) Add(name string, s *Sample) { r.Figures = append(r.Figures, s.figure(name)) }

// Value adds a single figure.
func (r *Report) Value(name string, v float64, unit string) {
	r.Figures = append(r.Figures, Figure{Name: name, Unit: unit, N: 1, P50: v, P99: v, Min: v, Max: v, Mean: v})
}

// Note adds a sentence for people.
func (r *Report) Note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// Missed counts the budgets that were not kept.
func (r *Report) Missed() int {
	n := 0
	for _, b := range r.Budgets {
		if !b.OK {
			n++
		}
	}
	return n
}

// Print writes the report as tables.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s: %d CPUs, %.0f GiB, Linux %s\n\n", r.Bench, r.Host.CPUs, float64(r.Host.Memory)/(1<<30), r.Host.Kernel)
	if len(r.Budgets) > 0 {
		fmt.Fprintln(t, "BUDGET\tVALUE\tLIMIT\tUNIT\t")
		for _, b := range r.Budgets {
			verdict := "kept"
			if !b.OK {
				verdict = "MISSED"
			}
			fmt.Fprintf(t, "%s\t%s\t%s %s\t%s\t%s\n", b.Name, number(b.Value), b.Sense, number(b.Limit), b.Unit, verdict)
		}
		fmt.Fprintln(t)
	}
	if len(r.Figures) > 0 {
		fmt.Fprintln(t, "FIGURE\tP50\tP99\tMIN\tUNIT\tN")
		printFigures(t, r.Figures, "")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(r.Notes) > 0 {
		fmt.Fprintf(w, "\n%s\n", strings.Join(r.Notes, "\n"))
	}
	return nil
}

func printFigures(w io.Writer, list []Figure, indent string) {
	for _, f := range list {
		if f.N == 1 {
			fmt.Fprintf(w, "%s%s\t%s\t\t\t%s\t\n", indent, f.Name, number(f.P50), f.Unit)
		} else {
			fmt.Fprintf(w, "%s%s\t%s\t%s\t%s\t%s\t%d\n", indent, f.Name, number(f.P50), number(f.P99), number(f.Min), f.Unit, f.N)
		}
		printFigures(w, f.Stages, indent+"  ")
	}
}

// number prints three digits that mean something, and no exponent.
func number(v float64) string {
	switch a := max(v, -v); {
	case a >= 100 || a == float64(int64(a)):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

// CompareOptions size a run of Compare. Zero fields have defaults.
type CompareOptions struct {
	Rounds int   // of all contestants in turn; default 5
	N      int   // creates of each in a round; default 4
	Execs  int   // commands of each in a round; default 10
	Many   int   // boxes made at a time; default 8
	Rate   int   // boxes made and destroyed so; default 48
	Idle   int   // idle boxes whose memory is read; default 32
	Bytes  int64 // of output; default 64 MiB
}

func (o CompareOptions) withDefaults() CompareOptions {
	def(&o.Rounds, 5)
	def(&o.N, 4)
	def(&o.Execs, 10)
	def(&o.Many, 8)
	def(&o.Rate, 48)
	def(&o.Idle, 32)
	def(&o.Bytes, 64<<20)
	return o
}

// Row is one job and what each contestant made of it. The contestants are
// named as in Values.
type Row struct {
	Job    string             `json:"job"`
	Unit   string             `json:"unit"`
	More   bool               `json:"more"` // more is better
	Values map[string]float64 `json:"values"`
	Best   string             `json:"best"`
	Lost   bool               `json:"lost"` // another is better than dsec
}

// judge finds out who is best. Contestants that measured nothing are left out.
func (r *Row) judge() {
	for name, v := range r.Values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			delete(r.Values, name)
			continue
		}
		best, ok := r.Values[r.Best]
		if !ok || r.More && v > best || !r.More && v < best || v == best && name < r.Best {
			r.Best = name
		}
	}
	ours, ok := r.Values["dsec"]
	r.Lost = !ok || r.Best != "dsec" && r.Values[r.Best] != ours
}

// Comparison is a report of rows.
type Comparison struct {
	Report
	Names []string `json:"names"` // of the contestants, dsec first
	Rows  []Row    `json:"comparison"`
}

// Print writes the rows, those that DSec loses marked, and the notes.
func (c *Comparison) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s: %d CPUs, %.0f GiB, Linux %s\n\n", c.Bench, c.Host.CPUs, float64(c.Host.Memory)/(1<<30), c.Host.Kernel)
	fmt.Fprintf(t, "JOB\tUNIT\t%s\tBEST\n", strings.ToUpper(strings.Join(c.Names, "\t")))
	lost := 0
	for _, r := range c.Rows {
		fmt.Fprintf(t, "%s\t%s", r.Job, r.Unit)
		for _, n := range c.Names {
			if v, ok := r.Values[n]; ok {
				fmt.Fprintf(t, "\t%s", number(v))
			} else {
				fmt.Fprint(t, "\t-")
			}
		}
		fmt.Fprintf(t, "\t%s", r.Best)
		if r.Lost {
			lost++
			fmt.Fprint(t, "  LOST")
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nDSec is the best of %d of %d jobs, and loses %d.\n", len(c.Rows)-lost, len(c.Rows), lost)
	for _, n := range c.Notes {
		fmt.Fprintln(w, n)
	}
	return nil
}

// measured is what one contestant did.
type measured struct {
	creates, execs, destroys *Sample
	rate, output, idle       float64
}

// Compare runs the same jobs on DSec and on the runtimes that the host has.
func (w *World) Compare(ctx context.Context, o CompareOptions) (*Comparison, error) {
	o = o.withDefaults()
	list := []contestant{w.ours}
	for _, open := range []func(context.Context) (contestant, error){w.runc, w.podman} {
		c, err := open(ctx)
		if err != nil {
			return nil, err
		}
		if c != nil {
			list = append(list, c)
		}
	}
	got := map[string]*measured{}
	for _, c := range list {
		got[c.name()] = &measured{creates: Millis(), execs: Millis(), destroys: Millis(), rate: math.NaN(), output: math.NaN(), idle: math.NaN()}
	}
	for i := range o.Rounds {
		for _, c := range list {
			w.say("%s: round %d of %d", c.name(), i+1, o.Rounds)
			if err := w.compareOne(ctx, c, got[c.name()], o); err != nil {
				return nil, fmt.Errorf("%s: %w", c.name(), err)
			}
		}
	}
	for _, c := range list {
		if err := w.compareMany(ctx, c, got[c.name()], o); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name(), err)
		}
	}
	return w.comparison(list, got, o), nil
}

// compareOne does one round of what is done one at a time.
func (w *World) compareOne(ctx context.Context, c contestant, m *measured, o CompareOptions) error {
	s, err := creates(ctx, c, &w.num, o.N, 0)
	if err != nil {
		return err
	}
	m.creates.Merge(s)
	m.destroys.Merge(s.Stage(stageDestroy))
	box, err := w.boxOf(ctx, c)
	if err != nil {
		return err
	}
	if s, err = execs(ctx, c, box, o.Execs, 0); err != nil {
		return err
	}
	m.execs.Merge(s)
	if v, err := outputSpeed(ctx, c, box, o.Bytes); err != nil {
		return err
	} else if math.IsNaN(m.output) || v > m.output {
		m.output = v
	}
	return c.destroy(ctx, box)
}

// compareMany measures the rate of many at a time and the memory of idle boxes.
func (w *World) compareMany(ctx context.Context, c contestant, m *measured, o CompareOptions) error {
	w.say("%s: %d boxes, %d at a time", c.name(), o.Rate, o.Many)
	v, err := rate(ctx, c, &w.num, createExecDestroy, o.Rate, o.Many)
	if err != nil {
		return err
	}
	m.rate = v
	w.say("%s: %d idle boxes", c.name(), o.Idle)
	from, to := w.num.take(o.Idle)
	if err := c.prepare(ctx, from, to); err != nil {
		return err
	}
	before, err := readMemory(0)
	if err != nil {
		return err
	}
	err = parallel(ctx, o.Many, from, to, func(ctx context.Context, i int) error {
		_, err := c.create(ctx, i)
		return err
	})
	if err != nil {
		return err
	}
	after, err := readMemory(0)
	if err != nil {
		return err
	}
	m.idle = after.since(before, o.Idle).worst()
	return parallel(ctx, o.Many, from, to, c.destroy)
}

func (w *World) comparison(list []contestant, got map[string]*measured, o CompareOptions) *Comparison {
	c := &Comparison{Report: *w.report("compare")}
	for _, l := range list {
		c.Names = append(c.Names, l.name())
	}
	row := func(job, unit string, more bool, of func(*measured) float64) {
		r := Row{Job: job, Unit: unit, More: more, Values: map[string]float64{}}
		for name, m := range got {
			r.Values[name] = of(m)
		}
		r.judge()
		c.Rows = append(c.Rows, r)
	}
	row("create + first exec, p50", "ms", false, func(m *measured) float64 { return m.creates.P50() })
	row("create + first exec, p99", "ms", false, func(m *measured) float64 { return m.creates.P99() })
	row("exec true, p50", "ms", false, func(m *measured) float64 { return m.execs.P50() })
	row("exec true, p99", "ms", false, func(m *measured) float64 { return m.execs.P99() })
	row("destroy, p50", "ms", false, func(m *measured) float64 { return m.destroys.P50() })
	row("create + exec + destroy, "+strconv.Itoa(o.Many)+" at a time", "1/s", true, func(m *measured) float64 { return m.rate })
	row("memory of an idle box", "MiB", false, func(m *measured) float64 { return m.idle })
	row("output of a command", "MB/s", true, func(m *measured) float64 { return m.output })
	for _, l := range list {
		m := got[l.name()]
		c.Add(l.name()+" create + first exec", m.creates)
		c.Add(l.name()+" exec true", m.execs)
	}
	c.Note("dsec: through its API, recorded, every box with a workspace of its own. runc: with a user namespace, root and configuration made beforehand, no seccomp filter. podman: its defaults as root, no network. Output of the latter two goes through a pipe and is not kept.")
	return c
}

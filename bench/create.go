package bench

import (
	"context"
	"time"
)

// Quiet is the pause of the second half of create and exec: what a host does
// after some rest differs from what it does in a tight loop.
const Quiet = 50 * time.Millisecond

// The budgets of create and exec.
const (
	createOfFloor = 2.0
	createOfRunc  = 0.2
	rateOfFloor   = 0.5
	rateStretch   = 0.8
)

// CreateOptions size a run of Create. Zero fields have defaults.
type CreateOptions struct {
	Rounds   int // of floor, DSec, runc in turn; default 10
	N        int // creates of DSec and of the floor in a round; default 20
	Runc     int // creates of runc in a round; default 2
	Many     int // concurrent creates of the rate; default 16
	RateN    int // creates of a round of the rate; default 400
	RateTurn int // rounds of the rate; default 4
}

func (o CreateOptions) withDefaults() CreateOptions {
	def(&o.Rounds, 10)
	def(&o.N, 20)
	def(&o.Runc, 2)
	def(&o.Many, 16)
	def(&o.RateN, 400)
	def(&o.RateTurn, 4)
	return o
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// duel is the same job done by the floor, by DSec and by runc, in turn.
type duel struct {
	floor, ours, runc *Sample
	ratios            *Sample // of the medians, one a round
}

// Create measures creations: one at a time up to the answer of the first
// command, without and with quiet, and many at a time.
func (w *World) Create(ctx context.Context, o CreateOptions) (*Report, error) {
	o = o.withDefaults()
	runc, err := w.runc(ctx)
	if err != nil {
		return nil, err
	}
	r := w.report("create")
	for _, gap := range []time.Duration{0, Quiet} {
		d, err := w.createDuel(ctx, runc, o, gap)
		if err != nil {
			return nil, err
		}
		suffix := gapName(gap)
		r.Hold("create + first exec, of the floor"+suffix, ratio(d.ours, d.floor), AtMost, createOfFloor, "ratio")
		if runc != nil {
			r.Hold("create + first exec, of runc"+suffix, ratio(d.ours, d.runc), AtMost, createOfRunc, "ratio")
		}
		r.Add("dsec create + first exec"+suffix, d.ours)
		r.Add("floor create + exec"+suffix, d.floor)
		if runc != nil {
			r.Add("runc create + start + exec"+suffix, d.runc)
		}
		r.Add("dsec of the floor, by round"+suffix, d.ratios)
	}
	if err := w.createRate(ctx, r, o); err != nil {
		return nil, err
	}
	r.Note("Each create has limits and a workspace that the node has not seen. The floor's layers are mounted before its clock runs, runc's root and configuration are made before.")
	r.Note("The floor's figure and DSec's end with the answer of the first command; what is destroyed afterwards counts in the rate only.")
	return r, nil
}

func gapName(gap time.Duration) string {
	if gap == 0 {
		return ""
	}
	return ", " + gap.String() + " quiet"
}

func (w *World) createDuel(ctx context.Context, runc contestant, o CreateOptions, gap time.Duration) (*duel, error) {
	d := &duel{floor: Millis(), ours: Millis(), runc: Millis(), ratios: &Sample{Unit: "ratio"}}
	// The first of anything pays for caches.
	if _, err := creates(ctx, w.ours, &w.num, 2, 0); err != nil {
		return nil, err
	}
	if runc != nil {
		if _, err := creates(ctx, runc, &w.num, 1, 0); err != nil {
			return nil, err
		}
	}
	for i := range o.Rounds {
		w.say("create%s: round %d of %d", gapName(gap), i+1, o.Rounds)
		floor, err := w.floor.Boxes(ctx, o.N, gap)
		if err != nil {
			return nil, err
		}
		ours, err := creates(ctx, w.ours, &w.num, o.N, gap)
		if err != nil {
			return nil, err
		}
		d.floor.Merge(floor)
		d.ours.Merge(ours)
		d.ratios.Add(ratio(ours, floor))
		if runc == nil {
			continue
		}
		s, err := creates(ctx, runc, &w.num, o.Runc, gap)
		if err != nil {
			return nil, err
		}
		d.runc.Merge(s)
	}
	return d, nil
}

// createRate measures creates and destroys, many at a time.
func (w *World) createRate(ctx context.Context, r *Report, o CreateOptions) error {
	floor, ours, answered := &Sample{Unit: "1/s"}, &Sample{Unit: "1/s"}, &Sample{Unit: "1/s"}
	for i := range o.RateTurn {
		w.say("creates and destroys, %d at a time: round %d of %d", o.Many, i+1, o.RateTurn)
		f, err := w.floor.Rate(ctx, o.RateN, o.Many)
		if err != nil {
			return err
		}
		floor.Add(f)
		for _, j := range []struct {
			what job
			n    int
			to   *Sample
		}{{createDestroy, o.RateN, ours}, {createExecDestroy, max(o.RateN/2, 1), answered}} {
			v, err := rate(ctx, w.ours, &w.num, j.what, j.n, o.Many)
			if err != nil {
				return err
			}
			j.to.Add(v)
		}
	}
	r.Hold("creates and destroys at once, of the floor's rate", ratio(ours, floor), AtLeast, rateOfFloor, "ratio")
	r.Add("dsec creates and destroys, many at a time", ours)
	r.Add("dsec the same with a command in each", answered)
	r.Add("floor creates and destroys, many at a time", floor)
	r.Note("Many at a time is %d. The stretch goal of that rate is %v of the floor's; each of the floor's boxes executes a program.", o.Many, rateStretch)
	return nil
}

package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
)

// The budgets of recording: what it may add to an exec, and how fast a repeated
// step is answered.
const (
	recordOfBare   = 1.25 // of the p50 without a record
	recordRate     = 0.8  // of the rate without a record
	forwardLimit   = 1.0  // ms
	forwardPerSec  = 5000.0
	forwardSession = "bench"
)

// TrajectoryOptions size a run of Trajectory. Zero fields have defaults.
type TrajectoryOptions struct {
	Rounds int // of the two servers in turn; default 10
	N      int // commands of each in a round; default 50
	Many   int // commands at a time, for the rates; default 16
	Steps  int // that are recorded and repeated; default 2000
}

func (o TrajectoryOptions) withDefaults() TrajectoryOptions {
	def(&o.Rounds, 10)
	def(&o.N, 50)
	def(&o.Many, 16)
	def(&o.Steps, 2000)
	return o
}

// Trajectory measures what recording costs, against a server that records
// nothing, and how fast steps are answered from the record.
func (w *World) Trajectory(ctx context.Context, o TrajectoryOptions, bare dsec.Services) (*Report, error) {
	o = o.withDefaults()
	r := w.report("trajectory")
	off, err := newOurs(ctx, bare, w.base)
	if err != nil {
		return nil, err
	}
	off.label = "dsec without a record"
	w.others = append(w.others, off)
	onBox, err := w.boxOf(ctx, w.ours)
	if err != nil {
		return nil, err
	}
	offBox, err := w.boxOf(ctx, off)
	if err != nil {
		return nil, err
	}
	on, without, ratios := Millis(), Millis(), &Sample{Unit: "ratio"}
	onRate, offRate := &Sample{Unit: "1/s"}, &Sample{Unit: "1/s"}
	for i := range o.Rounds {
		w.say("exec with and without a record: round %d of %d", i+1, o.Rounds)
		a, err := execs(ctx, off, offBox, o.N, 0)
		if err != nil {
			return nil, err
		}
		b, err := execs(ctx, w.ours, onBox, o.N, 0)
		if err != nil {
			return nil, err
		}
		without.Merge(a)
		on.Merge(b)
		ratios.Add(ratio(b, a))
		for s, c := range map[*Sample]struct {
			*ours
			box int
		}{offRate: {off, offBox}, onRate: {w.ours, onBox}} {
			begin := time.Now()
			if err := parallel(ctx, o.Many, 0, 4*o.N, func(ctx context.Context, _ int) error {
				return c.exec(ctx, c.box, nil, binTrue)
			}); err != nil {
				return nil, err
			}
			s.Add(float64(4*o.N) / time.Since(begin).Seconds())
		}
	}
	r.Hold("exec true with the record", on.P50(), AtMost, recordOfBare*without.P50(), "ms")
	r.Hold("execs at a time with the record", onRate.P50(), AtLeast, recordRate*offRate.P50(), "1/s")

	w.say("recording %d steps", o.Steps)
	id := w.ours.id(onBox)
	step := func(ctx context.Context, n int) (dsec.Result, error) {
		on := dsec.Call{Sandbox: id, Step: dsec.Step{Session: forwardSession, Number: uint64(n + 1)}}
		return w.ours.services.Commands.Run(ctx, on, dsec.Command{Argv: []string{binTrue}}, nil)
	}
	if err := parallel(ctx, o.Many, 0, o.Steps, func(ctx context.Context, n int) error {
		_, err := step(ctx, n)
		return err
	}); err != nil {
		return nil, err
	}
	w.say("repeating them")
	forward := Millis()
	for n := range o.Steps {
		begin := time.Now()
		res, err := step(ctx, n)
		if err != nil {
			return nil, err
		}
		if !res.Replayed {
			return nil, fmt.Errorf("step %d ran again", n+1)
		}
		forward.Took(time.Since(begin))
	}
	var done atomic.Int64
	begin := time.Now()
	err = parallel(ctx, o.Many, 0, 4*o.Steps, func(ctx context.Context, n int) error {
		res, err := step(ctx, n%o.Steps)
		if err == nil && !res.Replayed {
			err = fmt.Errorf("step %d ran again", n%o.Steps+1)
		}
		done.Add(1)
		return err
	})
	if err != nil {
		return nil, err
	}
	rate := float64(done.Load()) / time.Since(begin).Seconds()
	r.Hold("step answered from the record, through the API", forward.P50(), AtMost, forwardLimit, "ms")
	r.Hold("steps answered from the record, through the API", rate, AtLeast, forwardPerSec, "1/s")
	r.Add("exec true, recorded", on)
	r.Add("exec true, not recorded", without)
	r.Add("recorded of not recorded, by round", ratios)
	r.Add(fmt.Sprintf("%d at a time, recorded", o.Many), onRate)
	r.Add(fmt.Sprintf("%d at a time, not recorded", o.Many), offRate)
	r.Add("step answered from the record", forward)
	r.Note("A recorded command is synced to the disk before its end is told. The budgets of answered steps are the edge's; these went through the API and its client in this process, on the same CPUs.")
	return r, nil
}

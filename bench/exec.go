package bench

import (
	"context"
	"io"
	"strconv"
	"time"
)

// The budget of exec: twice the bare cost and a millisecond.
const (
	execOfFloor = 2.0
	execPlus    = 1.0 // ms
)

// ExecOptions size a run of Exec. Zero fields have defaults.
type ExecOptions struct {
	Rounds int   // of floor, DSec, runc in turn; default 10
	N      int   // commands of DSec and of the floor in a round; default 50
	Runc   int   // commands of runc in a round; default 3
	Bytes  int64 // of output whose reading is timed; default 256 MiB
}

func (o ExecOptions) withDefaults() ExecOptions {
	def(&o.Rounds, 10)
	def(&o.N, 50)
	def(&o.Runc, 3)
	def(&o.Bytes, 256<<20)
	return o
}

// Exec measures commands in a sandbox that is there: true, without and with
// quiet, and the speed of output.
func (w *World) Exec(ctx context.Context, o ExecOptions) (*Report, error) {
	o = o.withDefaults()
	r := w.report("exec")
	runc, err := w.runc(ctx)
	if err != nil {
		return nil, err
	}
	box, err := w.boxOf(ctx, w.ours)
	if err != nil {
		return nil, err
	}
	var runcBox int
	if runc != nil {
		if runcBox, err = w.boxOf(ctx, runc); err != nil {
			return nil, err
		}
	}
	for _, gap := range []time.Duration{0, Quiet} {
		d, err := w.execDuel(ctx, runc, [2]int{box, runcBox}, o, gap)
		if err != nil {
			return nil, err
		}
		suffix := gapName(gap)
		r.Hold("exec true"+suffix, d.ours.P50(), AtMost, execOfFloor*d.floor.P50()+execPlus, "ms")
		r.Add("dsec exec true"+suffix, d.ours)
		r.Add("bare fork + exec + wait"+suffix, d.floor)
		if runc != nil {
			r.Add("runc exec true"+suffix, d.runc)
		}
		r.Add("dsec of the bare one, by round"+suffix, d.ratios)
	}
	r.Note("The limit of exec true is %v times the bare fork + exec + wait of the same run, plus %v ms.", execOfFloor, execPlus)
	return r, w.output(ctx, r, runc, [2]int{box, runcBox}, o.Bytes)
}

// boxOf makes a box that stays, and runs one command in it.
func (w *World) boxOf(ctx context.Context, c contestant) (int, error) {
	n, to := w.num.take(1)
	if err := c.prepare(ctx, n, to); err != nil {
		return 0, err
	}
	if _, err := c.create(ctx, n); err != nil {
		return 0, err
	}
	return n, c.exec(ctx, n, nil, binTrue)
}

func (w *World) execDuel(ctx context.Context, runc contestant, boxes [2]int, o ExecOptions, gap time.Duration) (*duel, error) {
	d := &duel{floor: Millis(), ours: Millis(), runc: Millis(), ratios: &Sample{Unit: "ratio"}}
	for i := range o.Rounds {
		w.say("exec%s: round %d of %d", gapName(gap), i+1, o.Rounds)
		floor, err := w.floor.Spawns(ctx, o.N, gap, w.program(binTrue))
		if err != nil {
			return nil, err
		}
		ours, err := execs(ctx, w.ours, boxes[0], o.N, gap)
		if err != nil {
			return nil, err
		}
		d.floor.Merge(floor)
		d.ours.Merge(ours)
		d.ratios.Add(ratio(ours, floor))
		if runc == nil {
			continue
		}
		s, err := execs(ctx, runc, boxes[1], o.Runc, gap)
		if err != nil {
			return nil, err
		}
		d.runc.Merge(s)
	}
	return d, nil
}

// outputTurns is how often the speed of output is measured.
const outputTurns = 3

// output measures how fast a command's output reaches the caller.
func (w *World) output(ctx context.Context, r *Report, runc contestant, boxes [2]int, size int64) error {
	w.say("output of %d MiB", size>>20)
	ours, theirs, floor := &Sample{Unit: "MB/s"}, &Sample{Unit: "MB/s"}, &Sample{Unit: "MB/s"}
	for range outputTurns {
		v, err := w.floor.Pipe(ctx, size, w.program(binWrite))
		if err != nil {
			return err
		}
		floor.Add(v)
		if v, err = outputSpeed(ctx, w.ours, boxes[0], size); err != nil {
			return err
		}
		ours.Add(v)
		if runc == nil {
			continue
		}
		if v, err = outputSpeed(ctx, runc, boxes[1], size); err != nil {
			return err
		}
		theirs.Add(v)
	}
	r.Add("dsec output, recorded and read through the API", ours)
	r.Add("bare pipe", floor)
	if runc != nil {
		r.Add("runc output through a pipe", theirs)
	}
	return nil
}

func outputSpeed(ctx context.Context, c contestant, box int, size int64) (float64, error) {
	n := counter(0)
	begin := time.Now()
	if err := c.exec(ctx, box, &n, binWrite, strconv.FormatInt(size, 10)); err != nil {
		return 0, err
	}
	took := time.Since(begin).Seconds()
	if int64(n) != size {
		return 0, io.ErrUnexpectedEOF
	}
	return float64(n) / took / 1e6, nil
}

// counter is a writer that counts.
type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}

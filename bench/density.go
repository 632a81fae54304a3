package bench

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

// The budget of an idle sandbox.
const (
	idleMiB  = 1.5
	idleGoal = 1.0
)

// DensityOptions size a run of Density. Zero fields have defaults.
type DensityOptions struct {
	N          int           // idle sandboxes; default 1000
	Workspaces int           // that they share; default 16
	Many       int           // made at a time; default 16
	Settle     time.Duration // before memory is read; default 35 s, after which the node has closed idle connections
}

func (o DensityOptions) withDefaults() DensityOptions {
	def(&o.N, 1000)
	def(&o.Workspaces, 16)
	def(&o.Many, 16)
	def(&o.Settle, 35*time.Second)
	return o
}

// Density measures what an idle sandbox holds of the host's memory, the node's
// own growth included, and whether all of them answer. pid is the node's
// process, 0 when it is not on this host or not known.
func (w *World) Density(ctx context.Context, o DensityOptions, pid int) (*Report, error) {
	o = o.withDefaults()
	r := w.report("density")
	from, to := w.num.take(o.N)
	if err := w.ours.prepare(ctx, from, min(to, from+o.Workspaces)); err != nil {
		return nil, err
	}
	// One of its life before: what the node needs for the first, it needs once.
	if err := w.ours.life(ctx, &w.num); err != nil {
		return nil, err
	}
	if err := rest(ctx, o.Settle); err != nil {
		return nil, err
	}
	before, err := readMemory(pid)
	if err != nil {
		return nil, err
	}
	node := nodePss(pid)

	begin := time.Now()
	var made atomic.Int64
	err = parallel(ctx, o.Many, from, to, func(ctx context.Context, i int) error {
		_, err := w.ours.createOn(ctx, i, from+(i-from)%o.Workspaces)
		if n := made.Add(1); n%500 == 0 {
			w.say("%d of %d sandboxes", n, o.N)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("after %d sandboxes: %w", made.Load(), err)
	}
	r.Value("creates, none destroyed", float64(o.N)/time.Since(begin).Seconds(), "1/s")
	if err := rest(ctx, o.Settle); err != nil {
		return nil, err
	}
	idle, err := readMemory(pid)
	if err != nil {
		return nil, err
	}
	growth := nodePss(pid) - node

	w.say("asking all %d", o.N)
	answering, first, err := w.answers(ctx, o, from, to)
	if err != nil {
		return nil, err
	}
	if err := rest(ctx, o.Settle); err != nil {
		return nil, err
	}
	used, err := readMemory(pid)
	if err != nil {
		return nil, err
	}
	begin = time.Now()
	if err := parallel(ctx, o.Many, from, to, w.ours.destroy); err != nil {
		return nil, err
	}
	r.Value("destroys, none created", float64(o.N)/time.Since(begin).Seconds(), "1/s")
	u := idle.since(before, o.N)
	r.Hold("idle sandbox, all memory", u.worst(), AtMost, idleMiB, "MiB")
	r.Hold("alive and answering", float64(answering), AtLeast, float64(o.N), "sandboxes")
	r.Figures = append(r.Figures, u.figure("idle sandbox"), used.since(before, o.N).figure("after its first command"))
	if pid != 0 {
		r.Value("of which the node process", float64(growth)/float64(o.N)/(1<<20), "MiB")
	}
	r.Add("first command in each, one at a time", first)
	r.Note("%d sandboxes on %d workspaces, each with other limits. The figure is the greatest of the fall of MemAvailable, that of MemFree with clean caches dropped, and the sum of its parts, divided by their number. The goal beyond the budget is %v MiB.", o.N, o.Workspaces, idleGoal)
	return r, nil
}

// life is one sandbox from its creation to its end.
func (o *ours) life(ctx context.Context, num *numbers) error {
	_, err := creates(ctx, o, num, 1, 0)
	return err
}

// answers runs a command in every box and counts those that answer.
func (w *World) answers(ctx context.Context, o DensityOptions, from, to int) (int, *Sample, error) {
	s := Millis()
	n := 0
	for i := from; i < to; i++ {
		begin := time.Now()
		err := w.ours.exec(ctx, i, nil, binTrue)
		if ctx.Err() != nil {
			return n, s, ctx.Err()
		}
		if err != nil {
			w.say("sandbox %d of %d: %v", i-from+1, o.N, err)
			continue
		}
		s.Took(time.Since(begin))
		n++
	}
	return n, s, nil
}

// nodePss is what the node's process holds, 0 when it is not known.
func nodePss(pid int) int64 {
	if pid == 0 {
		return 0
	}
	if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err != nil {
		return 0
	}
	return processPss(strconv.Itoa(pid))
}

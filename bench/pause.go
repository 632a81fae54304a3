package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// The budgets of a pause.
const (
	pauseAll     = 5.0 // s, until all stand and that is acknowledged
	reclaimRate  = 0.7 // of one thread that does nothing else
	reclaimShare = 90  // percent of what they had, net of what swap takes itself
	resumeLimit  = 100 // ms, with a command
)

// PauseOptions size a run of Pause. Zero fields have defaults.
type PauseOptions struct {
	N      int           // sandboxes; default 500
	Size   int64         // memory that each holds; default 20 MiB
	Making int           // made at a time; default 4, since each fills its memory
	Many   int           // paused at a time; default 16
	Resume int           // that are resumed one after another; default 100
	Wait   time.Duration // longest wait for the memory; default 5 min
}

func (o PauseOptions) withDefaults() PauseOptions {
	def(&o.N, 500)
	def(&o.Size, 20<<20)
	def(&o.Making, 4)
	def(&o.Many, 16)
	def(&o.Resume, 100)
	def(&o.Wait, 5*time.Minute)
	return o
}

// PauseSwap is how much swap a run of Pause needs.
func PauseSwap(o PauseOptions) int64 {
	o = o.withDefaults()
	return int64(o.N)*(o.Size+4<<20) + 256<<20
}

// reclaimPoll is the pause between two looks at what came back.
const reclaimPoll = 500 * time.Millisecond

// Pause measures a job whose trainer is gone: sandboxes that hold memory, half
// of it random, are paused, give it back and are resumed by a command. The
// host must have swap.
func (w *World) Pause(ctx context.Context, o PauseOptions) (*Report, error) {
	o = o.withDefaults()
	r := w.report("pause")
	w.say("the floor reclaims %d times %d MiB", o.N, o.Size>>20)
	floor, err := w.floor.Reclaim(ctx, o.N, o.Size)
	if err != nil {
		return nil, err
	}
	from, to := w.num.take(o.N)
	if err := w.ours.prepare(ctx, from, min(to, from+16)); err != nil {
		return nil, err
	}
	w.say("making %d sandboxes", o.N)
	if err := parallel(ctx, o.Making, from, to, func(ctx context.Context, i int) error {
		if err := w.patiently(ctx, i, from+(i-from)%16); err != nil {
			return err
		}
		return w.hold(ctx, i, o.Size)
	}); err != nil {
		return nil, err
	}
	held, err := w.charged(ctx)
	if err != nil {
		return nil, err
	}
	before, compressed, err := available()
	if err != nil {
		return nil, err
	}

	w.say("pausing them")
	one := Millis()
	begin := time.Now()
	if err := parallel(ctx, o.Many, from, to, func(ctx context.Context, i int) error {
		begin := time.Now()
		_, err := w.ours.services.Sandboxes.Pause(ctx, w.ours.id(i))
		one.Took(time.Since(begin))
		return err
	}); err != nil {
		return nil, err
	}
	stand := time.Since(begin)
	back, took, err := w.reclaimed(ctx, o, begin)
	if err != nil {
		return nil, err
	}
	after, taken, err := available()
	if err != nil {
		return nil, err
	}
	taken -= compressed
	w.say("resuming %d", o.Resume)
	resumed := Millis()
	for i := from; i < min(to, from+o.Resume); i++ {
		begin := time.Now()
		if err := w.ours.exec(ctx, i, nil, binTrue); err != nil {
			return nil, err
		}
		resumed.Took(time.Since(begin))
	}
	if err := parallel(ctx, o.Many, from, to, w.ours.destroy); err != nil {
		return nil, err
	}

	rate := float64(back) / took.Seconds()
	r.Hold("all frozen and acknowledged", stand.Seconds(), AtMost, pauseAll, "s")
	r.Hold("reclaim, of one thread doing only that", rate/floor, AtLeast, reclaimRate, "ratio")
	r.Hold("given back, net of swap's own use", 100*float64(back-taken)/float64(held), AtLeast, reclaimShare, "%")
	r.Hold("resume and command, p99", resumed.Quantile(0.99), AtMost, resumeLimit, "ms")
	r.Add("pause of one, several at a time", one)
	r.Add("resume and command", resumed)
	r.Value("held by all", float64(held)/(1<<20), "MiB")
	r.Value("given back, as the sandboxes count", float64(back)/(1<<20), "MiB")
	r.Value("taken by compressed swap", float64(taken)/(1<<20), "MiB")
	r.Value("rise of MemAvailable, whatever else the host did", float64(after-before)/(1<<20), "MiB")
	r.Value("reclaimed", rate/(1<<20), "MiB/s")
	r.Value("floor: one thread", floor/(1<<20), "MiB/s")
	r.Note("%d sandboxes with a process of %d MiB each, half of it random. The share is what they were charged with before, less what they are charged with after and what compressed swap devices take of the memory.", o.N, o.Size>>20)
	return r, nil
}

// available gives the host's MemAvailable, and what compressed swap takes.
func available() (free, compressed int64, err error) {
	info, err := meminfo()
	if err != nil {
		return 0, 0, err
	}
	stats, err := filepath.Glob("/sys/block/zram*/mm_stat")
	if err != nil {
		return 0, 0, err
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			return 0, 0, err
		}
		if f := strings.Fields(string(b)); len(f) > 2 {
			n, _ := strconv.ParseInt(f[2], 10, 64)
			compressed += n
		}
	}
	return info["MemAvailable"], compressed, nil
}

// patiently creates a box on a node that others keep busy filling memory: how
// long that takes is not what is measured.
func (w *World) patiently(ctx context.Context, i, workspace int) error {
	for try := 0; ; try++ {
		_, err := w.ours.createOn(ctx, i, workspace)
		var e *dsec.Error
		if !errors.As(err, &e) || !e.Retryable() || try == 20 {
			return err
		}
		if err := rest(ctx, time.Second); err != nil {
			return err
		}
	}
}

// hold starts a process with so much memory and waits until it has it.
func (w *World) hold(ctx context.Context, i int, size int64) error {
	on := dsec.Call{Sandbox: w.ours.id(i)}
	st, err := w.ours.services.Commands.Start(ctx, on, dsec.Command{Argv: []string{binHold, strconv.FormatInt(size, 10)}})
	if err != nil {
		return fmt.Errorf("start %s: %w", binHold, err)
	}
	for out, err := range w.ours.services.Commands.Attach(ctx, on, st.ID, 0) {
		switch {
		case err != nil:
			return fmt.Errorf("wait for %s: %w", binHold, err)
		case out.Status != nil:
			return fmt.Errorf("%s ended as %s", binHold, out.Status.Outcome)
		case strings.Contains(string(out.Data), "ready"):
			return nil
		}
	}
	return fmt.Errorf("%s said nothing", binHold)
}

// charged sums the memory of this run's sandboxes.
func (w *World) charged(ctx context.Context) (int64, error) {
	list, err := w.ours.services.Sandboxes.List(ctx, dsec.Filter{})
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, b := range list {
		sum += b.Usage.Memory
	}
	return sum, nil
}

// reclaimed waits until every paused sandbox has given memory back, and says
// how much and since when.
func (w *World) reclaimed(ctx context.Context, o PauseOptions, begin time.Time) (bytes int64, took time.Duration, err error) {
	for {
		list, err := w.ours.services.Sandboxes.List(ctx, dsec.Filter{State: dsec.Paused})
		if err != nil {
			return 0, 0, err
		}
		took, bytes = time.Since(begin), 0
		waiting := 0
		for _, b := range list {
			bytes += b.Reclaimed
			if b.Reclaimed == 0 {
				waiting++
			}
		}
		if waiting == 0 && len(list) >= o.N {
			return bytes, took, nil
		}
		if took > o.Wait {
			return 0, 0, fmt.Errorf("after %v %d of %d sandboxes have given nothing back", took.Round(time.Second), waiting, len(list))
		}
		if err := rest(ctx, reclaimPoll); err != nil {
			return 0, 0, err
		}
	}
}

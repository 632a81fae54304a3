package bench

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

//go:embed fn.py
var fnFloor string

// The budgets of function calls, on two processors.
const (
	fnLimit = 8.0   // ms, p50 of warm Python, two at a time
	fnRate  = 150.0 // calls a second, four at a time
)

// FnOptions size a run of Fn. Root is required; zero fields have defaults.
type FnOptions struct {
	Root   string // a root file system with python3, as a tar
	Rounds int    // of the floor and DSec in turn; default 5
	N      int    // calls in a round; default 100
}

func (o FnOptions) withDefaults() FnOptions {
	def(&o.Rounds, 5)
	def(&o.N, 100)
	return o
}

// Fn measures function calls of warm Python against a bare warm interpreter
// that forks itself into namespaces, and against starting python3.
func (w *World) Fn(ctx context.Context, o FnOptions) (*Report, error) {
	o = o.withDefaults()
	r := w.report("fn")
	if w.ours.services.Functions == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "the server calls no functions")
	}
	w.say("importing %s", o.Root)
	root, err := os.ReadFile(o.Root)
	if err != nil {
		return nil, fmt.Errorf("read root with python3: %w (make debian makes one)", err)
	}
	image := w.ours.prefix + "-fn@1"
	if err := w.ours.upload(ctx, image, dsec.Base, root); err != nil {
		return nil, err
	}
	call := func(runtime dsec.Runtime, source string) func(context.Context, int) error {
		f := dsec.Function{Environment: dsec.Environment{Base: image}, Runtime: runtime, Source: []byte(source)}
		return func(ctx context.Context, _ int) error {
			res, err := w.ours.services.Functions.Call(ctx, f)
			if err == nil && (res.Outcome != dsec.FunctionOK || string(res.Out) != "hi\n") {
				err = fmt.Errorf("the call ended as %s and printed %q, %q", res.Outcome, res.Out, res.Err)
			}
			return err
		}
	}
	python, shell := call(dsec.RuntimePython, "print('hi')"), call(dsec.RuntimeShell, "echo hi")
	if err := parallel(ctx, 4, 0, 16, python); err != nil { // four machines are warm
		return nil, err
	}
	floor, start := Millis(), Millis()
	alone, two, sh := Millis(), Millis(), Millis()
	rates, ratios := &Sample{Unit: "1/s"}, &Sample{Unit: "ratio"}
	for i := range o.Rounds {
		w.say("function calls: round %d of %d", i+1, o.Rounds)
		f, err := w.fnFloor(ctx, o.N)
		if err != nil {
			return nil, err
		}
		floor.Merge(f)
		for range 5 {
			begin := time.Now()
			if out, err := exec.CommandContext(ctx, "python3", "-c", "print('hi')").CombinedOutput(); err != nil {
				return nil, fmt.Errorf("start python3: %w: %s", err, out)
			}
			start.Took(time.Since(begin))
		}
		one, err := timed(ctx, 1, o.N, python)
		if err != nil {
			return nil, err
		}
		alone.Merge(one)
		ratios.Add(ratio(one, f))
		both, err := timed(ctx, 2, o.N, python)
		if err != nil {
			return nil, err
		}
		two.Merge(both)
		begin := time.Now()
		if _, err := timed(ctx, 4, 2*o.N, python); err != nil {
			return nil, err
		}
		rates.Add(float64(2*o.N) / time.Since(begin).Seconds())
		s, err := timed(ctx, 1, o.N/2, shell)
		if err != nil {
			return nil, err
		}
		sh.Merge(s)
	}
	r.Hold("call of warm Python, two at a time, p50", two.P50(), AtMost, fnLimit, "ms")
	r.Hold("calls of warm Python, four at a time", rates.P50(), AtLeast, fnRate, "1/s")
	r.Add("dsec call of warm Python, one at a time", alone)
	r.Add("dsec call of warm Python, two at a time", two)
	r.Add("dsec call of sh", sh)
	r.Add("dsec calls a second, four at a time, by round", rates)
	r.Add("bare fork of a warm Python into namespaces", floor)
	r.Add("python3 -c, bare", start)
	r.Add("dsec of the bare fork, by round", ratios)
	r.Note("Each call has a root, namespaces and control groups of its own; the bare fork has namespaces alone, and the host's python3.")
	return r, nil
}

// fnFloor times n calls of the floor.
func (w *World) fnFloor(ctx context.Context, n int) (*Sample, error) {
	cmd := exec.CommandContext(ctx, "python3", "-c", fnFloor, strconv.Itoa(n))
	endTogether(cmd)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run the floor of calls: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	lines, err := parseLines(out)
	if err != nil {
		return nil, err
	}
	return totals(lines), nil
}

// timed makes n calls, c at a time, and gives the time of each.
func timed(ctx context.Context, c, n int, call func(context.Context, int) error) (*Sample, error) {
	s := Millis()
	var mu sync.Mutex
	err := parallel(ctx, c, 0, n, func(ctx context.Context, i int) error {
		begin := time.Now()
		err := call(ctx, i)
		mu.Lock()
		defer mu.Unlock()
		s.Took(time.Since(begin))
		return err
	})
	return s, err
}

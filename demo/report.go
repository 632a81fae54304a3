package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dsec-go/dsec"
)

// report is what was measured beside the tasks.
type report struct {
	images     []dsec.Image
	creating   time.Duration // all creates, wall time
	working    time.Duration // all tasks, wall time
	charged    int64         // bytes charged to an idle sandbox
	hostMemory int64         // bytes of the host that an idle sandbox took
}

// print shows what a person wants to see.
func (r *report) print(w io.Writer, tasks []*task) {
	var creates, execs, runs, cpu []time.Duration
	for _, t := range tasks {
		creates = append(creates, t.create)
		execs = append(execs, t.execs...)
		runs = append(runs, t.runs...)
		cpu = append(cpu, t.cpu...)
	}
	var size int64
	for _, i := range r.images {
		size += i.Size
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tp50\tp99\tcount\t")
	row := func(name string, d []time.Duration) {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t\n", name, ms(quantile(d, 0.5)), ms(quantile(d, 0.99)), len(d))
	}
	row("create", creates)
	row("exec true", execs)
	row("task", runs)
	row("task, CPU", cpu)
	t.Flush()
	fmt.Fprintf(w, "\n%.1f creates per second, %d at once; all tasks in %.1f s\n",
		float64(len(tasks))/r.creating.Seconds(), createsAtOnce, r.working.Seconds())
	fmt.Fprintf(w, "memory per idle sandbox: %.2f MiB charged to it, %.2f MiB of the host\n", mib(r.charged), mib(r.hostMemory))
	fmt.Fprintf(w, "bytes shared: %.0f MiB of layers, once for %d sandboxes (%.1f GiB if each had its own)\n",
		mib(size), len(tasks), mib(size)*float64(len(tasks))/1024)
	for i, t := range tasks {
		if t.fault != "" {
			fmt.Fprintf(w, "sandbox %d %s: %s\n", i, t.sandbox.ID, t.fault)
		}
	}
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

func ms(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// quantile gives the smallest value that q of all values do not exceed.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

// availableMemory is what the host could still give out.
func availableMemory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), "MemAvailable:"); ok {
			var kib int64
			fmt.Sscan(v, &kib)
			return kib << 10
		}
	}
	return 0
}

// Command demo shows DSec at work: it starts a node of its own, imports a
// Debian base, a workspace and a toolkit as three layers, and lets 64 sandboxes
// run the test suite of a real project at once, patch it, and run it again. The
// results must be those that each patch is known for.
//
// It is a user of the client SDK like any other and sees no package of the
// node. What it keeps between runs is one folder of downloads, .cache/demo; the
// node's folder, the node and the sandboxes are gone when it ends, also after
// Ctrl-C, and what an earlier demo that was killed left is removed first.
//
// Read next: task.go for what a sandbox does, assets.go for the layers.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/term"
)

func main() {
	var d demo
	flag.StringVar(&d.dsec, "dsec", "bin/dsec", "the `program` to show")
	flag.StringVar(&d.cache, "cache", ".cache/demo", "`folder` of downloads, kept")
	flag.BoolVar(&d.prepare, "prepare", false, "only make the base image, which tests use too")
	flag.IntVar(&d.sandboxes, "sandboxes", 64, "`number` of sandboxes at once")
	flag.Parse()
	d.terminal = term.IsTerminal(int(os.Stderr.Fd()))

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	good, err := d.run(ctx)
	stop()
	switch {
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "demo: interrupted, nothing is left behind")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	if d.prepare {
		return
	}
	fmt.Printf("demo: %d of %d tasks as expected\n", good, d.sandboxes)
	if good != d.sandboxes {
		os.Exit(1)
	}
}

// demo is one run.
type demo struct {
	dsec      string
	cache     string
	sandboxes int
	prepare   bool
	terminal  bool
	open      bool // a progress line stands
}

// run does everything, and takes the node down again however it ends.
func (d *demo) run(ctx context.Context) (good int, err error) {
	if d.cache, err = filepath.Abs(d.cache); err != nil {
		return 0, err
	}
	if d.dsec, err = filepath.Abs(d.dsec); err != nil {
		return 0, err
	}
	if err := os.MkdirAll(d.cache, 0o755); err != nil {
		return 0, fmt.Errorf("make cache folder: %w", err)
	}
	if d.prepare {
		return 0, d.makeBase(ctx, filepath.Join(d.cache, baseFile))
	}
	layers, err := d.layers(ctx)
	if err != nil {
		return 0, err
	}
	d.say("starting dsec up")
	node, err := startNode(ctx, d.dsec, filepath.Join(d.cache, "node"))
	if err != nil {
		return 0, err
	}
	defer func() {
		d.say("taking the node down")
		err = errors.Join(err, node.end())
		d.done()
	}()
	var r report
	if r.images, err = d.importLayers(ctx, node.services, layers); err != nil {
		return 0, err
	}
	tasks, err := d.work(ctx, node.services, &r)
	if err != nil {
		return 0, err
	}
	d.done()
	r.print(os.Stdout, tasks)
	for _, t := range tasks {
		if t.fault == "" {
			good++
		}
	}
	return good, nil
}

// say shows what is being done: on a terminal in one line that replaces itself.
func (d *demo) say(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if d.terminal {
		fmt.Fprintf(os.Stderr, "\r\x1b[K%s", text)
		d.open = true
		return
	}
	fmt.Fprintln(os.Stderr, text)
}

// done ends the progress line.
func (d *demo) done() {
	if d.open {
		fmt.Fprint(os.Stderr, "\r\x1b[K")
		d.open = false
	}
}

// count shows progress of many things; without a terminal only at the end.
func (d *demo) count(what string, n, of int, begin time.Time) {
	if d.terminal || n == of {
		d.say("%s: %d of %d, %.1f s", what, n, of, time.Since(begin).Seconds())
	}
}

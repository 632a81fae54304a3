// Command vmimage makes what virtual machines boot from, out of Debian's
// packages: kernels with their modules, and disk images. It installs nothing on
// this machine, asks only apt, and keeps what it fetched in a cache folder.
//
//	vmimage [-cache DIR] [-out DIR] kernel VERSION...
//	vmimage [-cache DIR] [-out DIR] worker [-kernel VERSION] [-bin DIR] [-add PATH=SOURCE]... [-o FILE]
//	vmimage [-cache DIR] [-out DIR] debian [-bin DIR] [-o FILE]
//
// It knows nothing of sandboxes; whoever boots what it made finds it by the
// names that package vm/initramfs has.
//
// Read next: kernel.go, and package vm/initramfs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// tool is what every job gets.
type tool struct {
	cache string // kept
	out   string // the finished files
}

// jobs are what can be made, by name.
var jobs = map[string]func(tool, context.Context, []string) error{
	"kernel": tool.kernels,
	"worker": tool.worker,
	"debian": tool.debian,
}

func main() {
	var t tool
	flag.StringVar(&t.cache, "cache", ".cache/vm", "`folder` of downloads, kept")
	flag.StringVar(&t.out, "out", "bin/vm", "`folder` of what is made")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := t.run(ctx, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vmimage:", err)
		os.Exit(1)
	}
}

func (t tool) run(ctx context.Context, args []string) error {
	if len(args) == 0 || jobs[args[0]] == nil {
		return errors.New("say what to make: vmimage kernel VERSION..., vmimage worker, or vmimage debian")
	}
	for _, dir := range []*string{&t.cache, &t.out} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(abs, 0o755); err != nil {
			return err
		}
		*dir = abs
	}
	return jobs[args[0]](t, ctx, args[1:])
}

// command runs a program that a person need not see unless it fails, and gives
// what it prints.
func command(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	// Asked to end, it cleans up after itself.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		text := ""
		if errors.As(err, &exit) {
			text = "\n" + string(exit.Stderr[max(0, len(exit.Stderr)-4096):])
		}
		return nil, fmt.Errorf("%s: %w%s", name, err, text)
	}
	return out, nil
}

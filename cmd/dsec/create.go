package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-go/dsec"
)

// createCmd creates a sandbox.
type createCmd struct {
	From string `help:"Snapshot that it begins with; image and limits are the snapshot's then (default none)." placeholder:"ID"`
	specFlags
	userFlags
	outputFlags
}

// Run creates it and prints its ID alone.
func (c *createCmd) Run(ctx context.Context, a *app) error {
	spec, err := c.spec()
	if err != nil {
		return err
	}
	spec.User, spec.Cwd = c.User, c.Cwd
	if spec.Env, err = pairs("environment variable", c.Env, a.Getenv); err != nil {
		return err
	}
	if spec.From = c.From; c.From != "" {
		if err := spec.Check(); err != nil {
			return err
		}
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	sb, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: c.Key})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(sb)
	}
	_, err = fmt.Fprintln(a.Stdout, sb.ID)
	return err
}

// stopLimit bounds how long run waits for its sandbox to end.
const stopLimit = 15 * time.Second

// runCmd creates a sandbox, runs one command in it and stops it.
type runCmd struct {
	specFlags
	commandFlags
	Args []string `arg:"" optional:"" passthrough:"partial" name:"image-and-command" help:"[IMAGE] -- COMMAND ARG..."`
}

// Help explains the argument forms.
func (c *runCmd) Help() string {
	return `An image that the server does not know is fetched from a registry first.

  dsec run --image debian -- make check
  dsec run -it debian -- bash

The exit status is the command's own; 124 when it was killed at its timeout,
125 when dsec itself failed, 126 or 127 when the program cannot be executed.
Ctrl-C ends the command and the sandbox.`
}

// split separates the optional image from the command.
func (c *runCmd) split() (image string, argv []string, err error) {
	image, argv = c.Image, c.Args
	if i := indexOf(argv, "--"); i == 0 || i == 1 && image == "" {
		if i == 1 {
			image = argv[0]
		}
		argv = argv[i+1:]
	} else if image == "" && len(argv) > 0 {
		image, argv = argv[0], argv[1:]
	}
	switch {
	case image == "":
		return "", nil, dsec.Errorf(dsec.Invalid, "run needs an image: dsec run --image NAME -- COMMAND")
	case len(argv) == 0:
		return "", nil, dsec.Errorf(dsec.Invalid, "run needs a command: dsec run --image %s -- COMMAND", image)
	}
	return image, argv, nil
}

func indexOf(list []string, s string) int {
	for i, x := range list {
		if x == s {
			return i
		}
	}
	return -1
}

// Run does all of it. The sandbox is stopped however the command ends.
func (c *runCmd) Run(ctx context.Context, a *app) error {
	image, argv, err := c.split()
	if err != nil {
		return err
	}
	cmd, err := c.command(a, argv)
	if err != nil {
		return err
	}
	spec, err := c.spec()
	if err != nil {
		return err
	}
	s, err := a.services()
	if err != nil {
		return err
	}

	// From here on Ctrl-C must not leave a sandbox behind.
	ctx, done := a.untilInterrupt(ctx)
	defer done()

	if spec.Environment.Base, err = a.haveImage(ctx, s, image); err != nil {
		return orInterrupt(ctx, err)
	}
	sb, err := s.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: c.Key})
	if err != nil {
		return orInterrupt(ctx, err)
	}
	defer a.stopSoon(ctx, s, sb.ID)
	run := execution{a: a, s: s, on: dsec.Call{Sandbox: sb.ID}, interactive: c.Interactive, tty: c.TTY}
	return orInterrupt(ctx, run.do(ctx, cmd))
}

// stopSoon ends the sandbox of a run within stopLimit, whatever became of ctx.
// What remains after that ends with its time to live, and is named.
func (a *app) stopSoon(ctx context.Context, s dsec.Services, id dsec.SandboxID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	if _, err := s.Sandboxes.Stop(ctx, id); err != nil {
		fmt.Fprintf(a.Stderr, "dsec: sandbox %s may still run: %s\n", id, explain(err))
	}
}

// interrupted is the cause of a context that a signal ended.
type interrupted struct{ sig os.Signal }

func (i interrupted) Error() string { return i.sig.String() }

// untilInterrupt gives a context that ends with a signal to this program, whose
// own end would leave something behind. done gives the signals back.
func (a *app) untilInterrupt(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals, unnotify := a.Notify(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		select {
		case sig := <-signals:
			cancel(interrupted{sig})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		unnotify()
		cancel(nil)
	}
}

// orInterrupt turns the error of a call that a signal broke off into the exit
// status a shell gives for that signal.
func orInterrupt(ctx context.Context, err error) error {
	if i, ok := context.Cause(ctx).(interrupted); ok && err != nil {
		if n, ok := i.sig.(syscall.Signal); ok {
			return exitStatus(128 + int(n))
		}
	}
	return err
}

// haveImage returns the local name of image, fetching it if the server does
// not know it. image is a local name or a registry reference.
func (a *app) haveImage(ctx context.Context, s dsec.Services, image string) (string, error) {
	name, ref := image, image
	if isReference(image) || dsec.CheckImageName(image) != nil {
		ref = strings.TrimPrefix(image, registryScheme)
		name = localName(ref)
	}
	if s.Images == nil {
		return name, nil // create will say whether it is known
	}
	_, err := s.Images.Inspect(ctx, name)
	if err == nil || dsec.KindOf(err) != dsec.NotFound {
		return name, err
	}
	ref = strings.Replace(ref, "@", ":", btoi(!strings.Contains(ref, "@sha256:")))
	img, err := a.pull(ctx, s, ref, dsec.ImportOptions{Name: name})
	if err != nil {
		return "", fmt.Errorf("image %s is not known here, and fetching it: %w", name, err)
	}
	return img.Ref(), nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

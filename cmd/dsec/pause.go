package main

import (
	"context"

	"github.com/dsec-go/dsec"
)

// pauseCmd makes sandboxes stand still.
type pauseCmd struct {
	Sandboxes []string `arg:"" name:"sandbox" help:"Sandbox IDs."`
	outputFlags
}

// Help says what comes back, and what wakes.
func (c *pauseCmd) Help() string {
	return `Every process stands still where it is; memory goes back to the node behind that.
The next command, file operation or connection resumes the sandbox by itself.`
}

// Run pauses them in turn. One that fails does not keep the others.
func (c *pauseCmd) Run(ctx context.Context, a *app) error {
	return a.eachSandbox(c.Sandboxes, c.JSON, func(s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
		return s.Pause(ctx, id)
	})
}

// resumeCmd lets sandboxes go on.
type resumeCmd struct {
	Sandboxes []string `arg:"" name:"sandbox" help:"Sandbox IDs."`
	outputFlags
}

// Run resumes them in turn. One that fails does not keep the others.
func (c *resumeCmd) Run(ctx context.Context, a *app) error {
	return a.eachSandbox(c.Sandboxes, c.JSON, func(s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
		return s.Resume(ctx, id)
	})
}

// eachSandbox does something to sandboxes in turn, and prints their records if
// that is asked for and all went well.
func (a *app) eachSandbox(ids []string, json bool, do func(dsec.Sandboxes, dsec.SandboxID) (dsec.Sandbox, error)) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	var done []dsec.Sandbox
	var last error
	for _, id := range ids {
		sb, err := do(s.Sandboxes, dsec.SandboxID(id))
		if err != nil {
			if last != nil {
				a.warn(last)
			}
			last = err
			continue
		}
		done = append(done, sb)
	}
	if json && last == nil {
		return a.json(done)
	}
	return last
}

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// psCmd lists the commands of a sandbox.
type psCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	outputFlags
}

// Run prints those that run and those still remembered, oldest first.
func (c *psCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	list, err := s.Commands.List(ctx, dsec.Call{Sandbox: dsec.SandboxID(c.Sandbox)})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	now := time.Now()
	rows := [][]string{{"COMMAND", "OUTCOME", "CODE", "PID", "AGE", "TOOK", "OUTPUT", "WHAT"}}
	for _, st := range list {
		code, pid, end := strconv.Itoa(st.Code), strconv.Itoa(st.Pid), st.Ended
		if st.Outcome == dsec.StillRunning {
			code, end = "-", now
		}
		rows = append(rows, []string{
			string(st.ID), string(st.Outcome), code, pid, since(st.Started, now), took(end.Sub(st.Started)),
			size(st.Stdout.Total + st.Stderr.Total), words(st.Command),
		})
	}
	return a.table(rows...)
}

// words gives a command as one short line.
func words(c dsec.Command) string {
	line := c.Shell
	if line == "" {
		line = strings.Join(c.Argv, " ")
	}
	if r := []rune(line); len(r) > 60 {
		line = string(r[:59]) + "…"
	}
	return line
}

// waitCmd waits for an end.
type waitCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	Command string `arg:"" optional:"" help:"Command ID; without it the sandbox's own end is waited for."`
	outputFlags
}

// Help explains the exit status.
func (c *waitCmd) Help() string {
	return "With a command, the exit status is the command's, as with exec."
}

// Run waits and says how it ended.
func (c *waitCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	id := dsec.SandboxID(c.Sandbox)
	if c.Command == "" {
		sb, err := s.Sandboxes.Wait(ctx, id)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.json(sb)
		}
		_, err = fmt.Fprintln(a.Stdout, strings.TrimSpace(fmt.Sprintf("%s %s %s", sb.State, sb.Cause, printable(sb.Detail))))
		return err
	}
	st, err := s.Commands.Wait(ctx, dsec.Call{Sandbox: id}, dsec.CommandID(c.Command))
	if err != nil {
		return err
	}
	if c.JSON {
		err = a.json(st)
	} else {
		_, err = fmt.Fprintf(a.Stdout, "%s %d\n", st.Outcome, st.Code)
	}
	if err != nil {
		return err
	}
	return a.exit(st)
}

// warn prints an error that does not end the program.
func (a *app) warn(err error) { fmt.Fprintf(a.Stderr, "dsec: %s\n", explain(err)) }

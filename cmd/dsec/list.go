package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// lsCmd lists sandboxes.
type lsCmd struct {
	All   bool     `short:"a" help:"Ended ones too, kept for 24 hours."`
	Job   string   `help:"Of this job only (default all)." placeholder:"ID"`
	Label []string `help:"With this label only; may be repeated (default all)." placeholder:"K=V" sep:"none"`
	State string   `help:"In this state only (default every one that has not ended)." placeholder:"STATE"`
	Limit int      `help:"At most this many, the newest (default all)." placeholder:"N"`
	Quiet bool     `short:"q" help:"Print IDs alone." not:"json"`
	outputFlags
}

func checkState(s dsec.State) error {
	known := []dsec.State{"", dsec.Creating, dsec.Running, dsec.Paused, dsec.Stopped, dsec.Failed, dsec.LostGone}
	if !slices.Contains(known, s) {
		return dsec.Errorf(dsec.Invalid, "state %q is not one of creating, running, paused, stopped, failed, lost", string(s))
	}
	return nil
}

// Run prints them, newest first.
func (c *lsCmd) Run(ctx context.Context, a *app) error {
	labels, err := pairs("label", c.Label, nil)
	if err != nil {
		return err
	}
	if err := checkState(dsec.State(c.State)); err != nil {
		return err
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	list, err := s.Sandboxes.List(ctx, dsec.Filter{
		All: c.All, Job: dsec.JobID(c.Job), Labels: labels, State: dsec.State(c.State), Limit: c.Limit,
	})
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		return a.json(list)
	case c.Quiet:
		for _, sb := range list {
			if _, err := fmt.Fprintln(a.Stdout, sb.ID); err != nil {
				return err
			}
		}
		return nil
	}
	now := time.Now()
	rows := [][]string{{"SANDBOX", "STATE", "KIND", "IMAGE", "NODE", "AGE", "LEFT", "MEMORY", "CPU"}}
	for _, sb := range list {
		state, left := string(sb.State), until(sb.Expires, now)
		if sb.State.Ended() {
			state, left = fmt.Sprintf("%s (%s)", sb.State, sb.Cause), "-"
		}
		rows = append(rows, []string{
			string(sb.ID), state, string(sb.Spec.Kind), strings.Join(sb.Spec.Environment.Parts(), "+"), sb.Node,
			since(sb.Created, now), left, size(sb.Usage.Memory), took(sb.Usage.CPU),
		})
	}
	return a.table(rows...)
}

// inspectCmd shows one sandbox.
type inspectCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	outputFlags
}

// Run prints its record.
func (c *inspectCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	sb, err := s.Sandboxes.Get(ctx, dsec.SandboxID(c.Sandbox))
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(sb)
	}
	return a.table(describe(sb, time.Now())...)
}

// describe gives a sandbox's record as rows of name and value.
func describe(sb dsec.Sandbox, now time.Time) [][]string {
	rows := [][]string{
		{"sandbox", string(sb.ID)},
		{"state", string(sb.State)},
	}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, []string{name, value})
		}
	}
	spec, use := sb.Spec, sb.Usage
	if sb.State.Ended() {
		add("cause", string(sb.Cause))
		add("detail", sb.Detail)
		add("ended", sb.Ended.UTC().Format(time.RFC3339))
	}
	if !sb.Paused.IsZero() {
		add("paused", sb.Paused.UTC().Format(time.RFC3339)+" ("+since(sb.Paused, now)+" ago), "+size(sb.Reclaimed)+" given back")
	}
	add("node", sb.Node)
	add("kind", string(spec.Kind))
	add("base", spec.Environment.Base)
	add("workspace", spec.Environment.Workspace)
	add("toolkits", strings.Join(spec.Environment.Toolkits, " "))
	add("created", sb.Created.UTC().Format(time.RFC3339)+" ("+since(sb.Created, now)+" ago)")
	if !sb.State.Ended() {
		add("expires", sb.Expires.UTC().Format(time.RFC3339)+" ("+until(sb.Expires, now)+")")
	}
	add("took", took(sb.Took))
	for _, st := range sb.Stages {
		add("  "+st.Name, took(st.Took))
	}
	add("cpu", fmt.Sprintf("%s used, limit %g cores", took(use.CPU), spec.Resources.CPU))
	add("memory", fmt.Sprintf("%s, peak %s, limit %s", size(use.Memory), size(use.MemoryPeak), size(spec.Resources.Memory)))
	add("disk", fmt.Sprintf("%s, limit %s", size(use.Disk), size(spec.Resources.Disk)))
	add("pids", fmt.Sprintf("%d, limit %d", use.Pids, spec.Resources.Pids))
	add("commands", fmt.Sprintf("%d running", use.Commands))
	if use.OOMKills > 0 {
		add("oom kills", strconv.Itoa(use.OOMKills))
	}
	if use.Waited > 0 {
		add("fetched", fmt.Sprintf("%s of its images, waited %s for them", size(use.Fetched), took(use.Waited)))
	}
	add("user", spec.User)
	add("cwd", spec.Cwd)
	add("network", string(spec.Network))
	add("job", string(spec.Job))
	add("project", string(spec.Project))
	if d := spec.API; d != nil {
		add("api", fmt.Sprintf("port %d, %d sandboxes, rights %v", d.Port, d.Quota.Sandboxes, d.Rights))
	}
	add("key", sb.Key)
	add("from", sb.Spec.From)
	for _, k := range sortedKeys(spec.Labels) {
		add("label", k+"="+spec.Labels[k])
	}
	for _, k := range sortedKeys(spec.Env) {
		add("env", k+"="+spec.Env[k])
	}
	return rows
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// stopCmd ends sandboxes.
type stopCmd struct {
	Sandboxes []string `arg:"" name:"sandbox" help:"Sandbox IDs."`
	outputFlags
}

// Run ends them in turn. One that fails does not keep the others.
func (c *stopCmd) Run(ctx context.Context, a *app) error {
	return a.eachSandbox(c.Sandboxes, c.JSON, func(s dsec.Sandboxes, id dsec.SandboxID) (dsec.Sandbox, error) {
		return s.Stop(ctx, id)
	})
}

// commitCmd makes an image of what changed.
type commitCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	Name    string `arg:"" name:"name@version" help:"Name and version of the new workspace image."`
	outputFlags
}

// Run prints the image's name and version.
func (c *commitCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	img, err := s.Sandboxes.Commit(ctx, dsec.SandboxID(c.Sandbox), c.Name)
	if err != nil {
		return err
	}
	return a.printImage(img, c.JSON)
}

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// snapshotCmd groups the commands on snapshots; without one of their names it
// takes one.
type snapshotCmd struct {
	Take snapshotTakeCmd `cmd:"" default:"withargs" help:"Save a sandbox and print the snapshot's ID (the default: dsec snapshot SANDBOX)."`
	Ls   snapshotLsCmd   `cmd:"" help:"List snapshots."`
	Rm   snapshotRmCmd   `cmd:"" help:"Delete snapshots. Sandboxes that were made from them stay."`
}

// Help says what is in a snapshot.
func (c *snapshotCmd) Help() string {
	return `Of a container its files are saved, of a virtual machine memory and disk, so that
what runs in it goes on in every copy. The sandbox runs on. A snapshot stays when
its sandbox ends, until it is removed.

  dsec snapshot SANDBOX          # prints an ID
  dsec create --from ID          # a new sandbox that begins there`
}

type snapshotTakeCmd struct {
	Sandbox string `arg:"" help:"Sandbox ID."`
	Key     string `help:"Repeating it with the same key gives the same snapshot (default none)." placeholder:"KEY"`
	outputFlags
}

// Run takes it and prints its ID alone.
func (c *snapshotTakeCmd) Run(ctx context.Context, a *app) error {
	s, err := a.snapshots()
	if err != nil {
		return err
	}
	snap, err := s.Take(ctx, dsec.SandboxID(c.Sandbox), dsec.SnapshotOptions{Key: c.Key})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(snap)
	}
	_, err = fmt.Fprintln(a.Stdout, snap.ID)
	return err
}

// snapshots gives the service.
func (a *app) snapshots() (dsec.Snapshots, error) {
	s, err := a.services()
	if err != nil {
		return nil, err
	}
	if s.Snapshots == nil {
		return nil, lacking("snapshots")
	}
	return s.Snapshots, nil
}

type snapshotLsCmd struct {
	Quiet bool `short:"q" help:"Print IDs alone." not:"json"`
	outputFlags
}

// Run prints them, newest first.
func (c *snapshotLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.snapshots()
	if err != nil {
		return err
	}
	list, err := s.List(ctx)
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		return a.json(list)
	case c.Quiet:
		for _, x := range list {
			if _, err := fmt.Fprintln(a.Stdout, x.ID); err != nil {
				return err
			}
		}
		return nil
	}
	now := time.Now()
	rows := [][]string{{"SNAPSHOT", "SANDBOX", "KIND", "IMAGE", "HOLDS", "SIZE", "AGE"}}
	for _, x := range list {
		holds := "files"
		if x.Memory {
			holds = "memory and disk"
		}
		rows = append(rows, []string{
			string(x.ID), string(x.Sandbox), string(x.Spec.Kind), strings.Join(x.Spec.Environment.Parts(), "+"), holds,
			size(x.Size), since(x.Created, now),
		})
	}
	return a.table(rows...)
}

type snapshotRmCmd struct {
	Snapshots []string `arg:"" name:"snapshot" help:"Snapshot IDs."`
}

// Run removes them in turn. One that fails does not keep the others.
func (c *snapshotRmCmd) Run(ctx context.Context, a *app) error {
	s, err := a.snapshots()
	if err != nil {
		return err
	}
	var last error
	for _, id := range c.Snapshots {
		if err := s.Remove(ctx, dsec.SnapshotID(id)); err != nil {
			if last != nil {
				a.warn(last)
			}
			last = err
		}
	}
	return last
}

// forkCmd copies a sandbox.
type forkCmd struct {
	Sandbox string   `arg:"" help:"Sandbox ID."`
	Count   int      `short:"n" name:"count" help:"How many children." default:"1" placeholder:"N"`
	TTL     span     `name:"ttl" help:"Children are ended this long after the fork (default the parent's)." placeholder:"TIME" positive:""`
	Label   []string `help:"Label k=v, over those of the parent; may be repeated (default none)." placeholder:"K=V" sep:"none"`
	Key     string   `help:"Repeating a fork with the same key gives the same children (default none)." placeholder:"KEY"`
	outputFlags
}

// Help says what a child has.
func (c *forkCmd) Help() string {
	return `Each child begins as the sandbox is now, has a host name, a clock and random numbers
of its own, and is private from there on. The parent runs on. All children are
made, or none. Children of a container have its files, those of a virtual machine
what runs in it too.`
}

// Run forks it and prints the IDs of the children.
func (c *forkCmd) Run(ctx context.Context, a *app) error {
	labels, err := pairs("label", c.Label, nil)
	if err != nil {
		return err
	}
	s, err := a.snapshots()
	if err != nil {
		return err
	}
	kids, err := s.Fork(ctx, dsec.SandboxID(c.Sandbox), c.Count, dsec.ForkOptions{Key: c.Key, TTL: time.Duration(c.TTL), Labels: labels})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(kids)
	}
	for _, k := range kids {
		if _, err := fmt.Fprintln(a.Stdout, k.ID); err != nil {
			return err
		}
	}
	return nil
}

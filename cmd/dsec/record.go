package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/trajectory"
)

// openLog opens the trajectories of the node's sandboxes. Their segments lie in
// a store of their own: what images need says nothing of them.
func (n *node) openLog(ctx context.Context, j *journal.Journal) (*trajectory.Log, error) {
	store, err := blob.OpenFolder(n.data.at(logDir))
	if err != nil {
		return nil, fmt.Errorf("open log segments: %w", err)
	}
	l, err := trajectory.Open(ctx, j, trajectory.Config{
		Store: store, Archives: n.cluster.Archives(),
		Fault: func(err error) {
			n.telemetry.fault("trajectory", err)
			if n.edge != nil && errors.Is(err, journal.ErrFailed) {
				n.edge.Distrust() // health says so, and creates go elsewhere
			}
		},
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

// recorded lets the log hear of what happens on the node by itself, before
// events do what they did.
func (n *node) recorded(events edge.Events) edge.Events {
	ended, paused, resumed := events.Ended, events.Paused, events.Resumed
	events.Ending = func(e edge.EndingEvent) {
		if r := n.recorder.Load(); r != nil {
			r.Salvage(e.ID, e.Guest.Commands())
		}
	}
	events.Ended = func(e edge.EndedEvent) {
		n.trajectories.Ended(e.ID, e.State, e.Cause, e.Detail)
		if ended != nil {
			ended(e)
		}
	}
	events.Paused = func(e edge.PausedEvent) {
		if e.Detail != "" { // else it is recorded with who asked for it
			n.trajectories.Note(e.ID, dsec.RecordPause, e.Detail)
		}
		if paused != nil {
			paused(e)
		}
	}
	events.Resumed = func(e edge.ResumedEvent) {
		if e.Detail != "" {
			n.trajectories.Note(e.ID, dsec.RecordResume, e.Detail)
		}
		if r := n.recorder.Load(); r != nil { // there is none while the edge is opened; Recover comes after
			r.Awake(e.ID)
		}
		if resumed != nil {
			resumed(e)
		}
	}
	return events
}

// record puts the recorder before the node's services and takes up what the
// last process left open.
func (n *node) record(ctx context.Context) error {
	r := trajectory.NewRecorder(n.trajectories, n.edge.Services(), n.edge)
	n.recorder.Store(r)
	n.onClose("recorder", r.Close)
	if err := r.Recover(ctx); err != nil {
		return fmt.Errorf("recover trajectories: %w", err)
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	ran := make(chan error, 1)
	go func() { ran <- n.trajectories.Run(run) }()
	n.onClose("trajectories", func() error { stop(); return <-ran })
	return nil
}

// down ends every sandbox and puts their trajectories where they are read
// without this node, then closes the parts.
func (n *node) down(ctx context.Context) error {
	n.goingDown = true
	return errors.Join(n.edge.Down(ctx), n.trajectories.Tidy(ctx), n.close())
}

package main

import (
	"context"
	"fmt"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/job"
	"github.com/dsec-go/dsec/journal"
)

// openJobs opens the jobs of the node's sandboxes.
func (n *node) openJobs(j *journal.Journal) error {
	jobs, err := job.Open(job.Config{
		Journal: &job.Log{Journal: j},
		Label: func(ctx context.Context, id dsec.SandboxID, labels map[string]string) (dsec.Sandbox, error) {
			return n.recorder.Load().Label(ctx, id, labels, n.edge.Label)
		},
		Error: func(err error) { n.telemetry.fault("jobs", err) },
	})
	if err != nil {
		return fmt.Errorf("open jobs: %w", err)
	}
	n.jobs = jobs
	return nil
}

// told lets jobs hear of what happens to their sandboxes, before events do what
// they did.
func (n *node) told(events edge.Events) edge.Events {
	created, ended, paused, resumed := events.Created, events.Ended, events.Paused, events.Resumed
	events.Created = func(e edge.CreatedEvent) {
		if e.Job != "" {
			n.jobs.Note(job.Change{Sandbox: e.ID, Project: e.Project, Job: e.Job, Key: e.Key, State: dsec.Running})
		}
		if created != nil {
			created(e)
		}
	}
	events.Ended = func(e edge.EndedEvent) {
		if e.Job != "" {
			n.jobs.Note(job.Change{
				Sandbox: e.ID, Project: e.Project, Job: e.Job, Key: e.Key, State: e.State, Cause: e.Cause, Detail: e.Detail,
			})
		}
		if ended != nil {
			ended(e)
		}
	}
	events.Paused = func(e edge.PausedEvent) {
		n.jobs.Note(job.Change{Sandbox: e.ID, State: dsec.Paused, Detail: e.Detail})
		if paused != nil {
			paused(e)
		}
	}
	events.Resumed = func(e edge.ResumedEvent) {
		n.jobs.Note(job.Change{Sandbox: e.ID, State: dsec.Running, Detail: e.Detail})
		if resumed != nil {
			resumed(e)
		}
	}
	return events
}

// fence puts the jobs before the node's services. Closing them comes before
// closing what they call.
func (n *node) fence() {
	n.jobs.Bind(n.unfenced().Sandboxes)
	n.onClose("jobs", n.jobs.Close)
}

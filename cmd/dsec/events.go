package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
)

// eventsCmd prints what happened to jobs and their sandboxes.
type eventsCmd struct {
	Job    string `help:"Of this job only (default all jobs)." placeholder:"ID"`
	After  uint64 `help:"Events of the job behind this number (default all that are kept)." placeholder:"N" needs:"job"`
	Follow bool   `short:"f" help:"Wait for more, until the job is stopped." needs:"job"`
	outputFlags
}

// jobEvent is an event with its job, as it is printed.
type jobEvent struct {
	Job dsec.JobID
	dsec.JobEvent
}

// Run prints them, oldest first, one a line.
func (c *eventsCmd) Run(ctx context.Context, a *app) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	if c.Job != "" {
		for e, err := range jobs.Events(ctx, dsec.JobID(c.Job), dsec.JobEventOptions{After: c.After, Follow: c.Follow}) {
			if err == nil {
				err = c.print(a, jobEvent{dsec.JobID(c.Job), e})
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	list, err := jobs.List(ctx)
	if err != nil {
		return err
	}
	var all []jobEvent
	for _, j := range list {
		for e, err := range jobs.Events(ctx, j.ID, dsec.JobEventOptions{}) {
			if err != nil {
				return err
			}
			all = append(all, jobEvent{j.ID, e})
		}
	}
	slices.SortStableFunc(all, func(x, y jobEvent) int { return x.Time.Compare(y.Time) })
	for _, e := range all {
		if err := c.print(a, e); err != nil {
			return err
		}
	}
	return nil
}

func (c *eventsCmd) print(a *app, e jobEvent) error {
	if c.JSON {
		return a.jsonLine(e)
	}
	job, at := "", "-"
	if c.Job == "" {
		job = string(e.Job)
	}
	if !e.Time.IsZero() {
		at = e.Time.UTC().Format(time.RFC3339)
	}
	retry, detail := "", e.Detail
	switch {
	case e.Type == dsec.EventGap:
		detail = fmt.Sprintf("%d events are not kept any more", e.Missed)
	case e.Type == dsec.EventOwner && detail == "":
		detail = fmt.Sprintf("epoch %d", e.Epoch)
	}
	if e.Retry {
		retry = "(worth another try)"
	}
	_, err := fmt.Fprintln(a.Stdout, printable(phrase(
		fmt.Sprintf("%6d", e.Seq), at, job, fmt.Sprintf("%-13s", e.Type), string(e.Sandbox), e.Key, string(e.Cause), detail, retry)))
	return err
}

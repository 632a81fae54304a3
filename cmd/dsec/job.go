package main

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// jobCmd groups the commands on jobs.
type jobCmd struct {
	Create  jobCreateCmd  `cmd:"" help:"Make a job and print its ID."`
	Open    jobOpenCmd    `cmd:"" help:"Become a job's owner and print the epoch; the owner before is refused from then on."`
	Renew   jobRenewCmd   `cmd:"" help:"Begin the owner's lease anew."`
	Ls      jobLsCmd      `cmd:"" help:"List jobs."`
	Inspect jobInspectCmd `cmd:"" help:"Show everything about a job."`
	Pause   jobPauseCmd   `cmd:"" help:"Pause all sandboxes of a job."`
	Resume  jobResumeCmd  `cmd:"" help:"Let all sandboxes of a job go on."`
	Stop    jobStopCmd    `cmd:"" help:"End all sandboxes of a job, and the job."`
	Label   jobLabelCmd   `cmd:"" help:"Set labels of a job and of all its sandboxes."`
}

// jobs gives the service, or why there is none.
func (a *app) jobs() (dsec.Jobs, error) {
	s, err := a.services()
	if err == nil && s.Jobs == nil {
		err = lacking("jobs")
	}
	return s.Jobs, err
}

type jobCreateCmd struct {
	ID           string   `arg:"" optional:"" help:"ID of the job (default one is made)."`
	OnDisconnect string   `help:"What becomes of its sandboxes when the lease ends: pause, keep or stop." default:"pause" placeholder:"POLICY"`
	Lease        span     `help:"How long it is owned without a renewal, 1s to 24h; the first lease begins now." default:"30s" placeholder:"TIME"`
	Label        []string `help:"Label k=v; may be repeated (default none)." placeholder:"K=V" sep:"none"`
	Key          string   `help:"Repeating a create with the same key gives the same job (default none)." placeholder:"KEY"`
	outputFlags
}

// Run makes it and prints its ID alone.
func (c *jobCreateCmd) Run(ctx context.Context, a *app) error {
	labels, err := pairs("label", c.Label, nil)
	if err != nil {
		return err
	}
	s := dsec.JobSpec{ID: dsec.JobID(c.ID), OnDisconnect: dsec.OnDisconnect(c.OnDisconnect), Lease: time.Duration(c.Lease), Labels: labels}
	if err := s.Check(); err != nil {
		return err
	}
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	j, err := jobs.Create(ctx, s, dsec.CreateOptions{Key: c.Key})
	if err != nil {
		return err
	}
	return a.printJob(j, string(j.ID), c.JSON)
}

// printJob prints a job as JSON, or the one word of it that is wanted.
func (a *app) printJob(j dsec.Job, word string, asJSON bool) error {
	if asJSON {
		return a.json(j)
	}
	_, err := fmt.Fprintln(a.Stdout, word)
	return err
}

type jobOpenCmd struct {
	ID string `arg:"" help:"Job ID."`
	outputFlags
}

// Run opens it and prints the epoch.
func (c *jobOpenCmd) Run(ctx context.Context, a *app) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	j, err := jobs.Open(ctx, dsec.JobID(c.ID))
	if err != nil {
		return err
	}
	return a.printJob(j, strconv.FormatUint(j.Epoch, 10), c.JSON)
}

type jobRenewCmd struct {
	ID    string `arg:"" help:"Job ID."`
	Epoch uint64 `arg:"" help:"Epoch of the owner, as create and open gave it."`
	outputFlags
}

// Run renews it and prints when the lease ends.
func (c *jobRenewCmd) Run(ctx context.Context, a *app) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	j, err := jobs.Renew(ctx, dsec.JobID(c.ID), c.Epoch)
	if err != nil {
		return err
	}
	return a.printJob(j, j.LeaseEnds.UTC().Format(time.RFC3339), c.JSON)
}

type jobLsCmd struct{ outputFlags }

// Run prints them, newest first.
func (c *jobLsCmd) Run(ctx context.Context, a *app) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	list, err := jobs.List(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	now := time.Now()
	rows := [][]string{{"JOB", "STATE", "LEASE", "LEFT", "EPOCH", "RUNNING", "PAUSED", "ENDED", "AGE"}}
	for _, j := range list {
		lease, left := "-", "-"
		if j.Lease > 0 {
			lease = j.Lease.String() + ", " + string(j.OnDisconnect)
		}
		if !j.LeaseEnds.IsZero() {
			left = until(j.LeaseEnds, now)
		}
		n := j.Counts
		rows = append(rows, []string{
			string(j.ID), string(j.State), lease, left, strconv.FormatUint(j.Epoch, 10), strconv.Itoa(n[dsec.Running] + n[dsec.Creating]),
			strconv.Itoa(n[dsec.Paused]), strconv.Itoa(n[dsec.Stopped] + n[dsec.Failed] + n[dsec.LostGone]), since(j.Created, now),
		})
	}
	return a.table(rows...)
}

type jobInspectCmd struct {
	ID string `arg:"" help:"Job ID."`
	outputFlags
}

// Run prints its record.
func (c *jobInspectCmd) Run(ctx context.Context, a *app) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	j, err := jobs.Get(ctx, dsec.JobID(c.ID))
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(j)
	}
	now := time.Now()
	rows := [][]string{
		{"job", string(j.ID)}, {"project", or(string(j.Project))}, {"state", string(j.State)}, {"on disconnect", string(j.OnDisconnect)},
		{"created", j.Created.UTC().Format(time.RFC3339) + " (" + since(j.Created, now) + " ago)"},
	}
	if j.Lease > 0 {
		rows = append(rows, []string{"lease", j.Lease.String()})
	}
	if !j.LeaseEnds.IsZero() {
		rows = append(rows, []string{"ends", j.LeaseEnds.UTC().Format(time.RFC3339) + " (" + until(j.LeaseEnds, now) + ")"})
	}
	rows = append(rows, []string{"epoch", strconv.FormatUint(j.Epoch, 10)}, []string{"events", strconv.FormatUint(j.Events, 10)})
	states := make([]dsec.State, 0, len(j.Counts))
	for s := range j.Counts {
		states = append(states, s)
	}
	slices.Sort(states)
	for _, s := range states {
		rows = append(rows, []string{string(s), strconv.Itoa(j.Counts[s])})
	}
	for _, k := range sortedKeys(j.Labels) {
		rows = append(rows, []string{"label", k + "=" + j.Labels[k]})
	}
	return a.table(rows...)
}

// jobArg is a command on all sandboxes of a job.
type jobArg struct {
	ID string `arg:"" help:"Job ID."`
	outputFlags
}

// run prints what became of each sandbox with --json, else the faults alone.
// One that fails does not keep the others.
func (c *jobArg) run(ctx context.Context, a *app, call func(dsec.Jobs) iter.Seq2[dsec.JobResult, error]) error {
	jobs, err := a.jobs()
	if err != nil {
		return err
	}
	results := []jobResult{}
	failed := 0
	for r, err := range call(jobs) {
		if err != nil {
			return err
		}
		out := jobResult{Sandbox: r.Sandbox.ID, Key: r.Key, State: r.Sandbox.State}
		if r.Err != nil {
			failed++
			out.Error = &jobFault{Kind: dsec.KindOf(r.Err).String(), Message: r.Err.Error()}
			if !c.JSON {
				a.warn(r.Err)
			}
		}
		results = append(results, out)
	}
	if c.JSON {
		if err := a.json(results); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d sandboxes failed", failed, len(results))
	}
	return nil
}

// jobResult is what --json prints of one sandbox.
type jobResult struct {
	Sandbox dsec.SandboxID
	Key     string
	State   dsec.State
	Error   *jobFault
}

type jobFault struct{ Kind, Message string }

type jobPauseCmd struct{ jobArg }

// Run pauses all.
func (c *jobPauseCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(j dsec.Jobs) iter.Seq2[dsec.JobResult, error] { return j.Pause(ctx, dsec.JobID(c.ID)) })
}

type jobResumeCmd struct{ jobArg }

// Run resumes all.
func (c *jobResumeCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(j dsec.Jobs) iter.Seq2[dsec.JobResult, error] { return j.Resume(ctx, dsec.JobID(c.ID)) })
}

type jobStopCmd struct{ jobArg }

// Run ends all.
func (c *jobStopCmd) Run(ctx context.Context, a *app) error {
	return c.run(ctx, a, func(j dsec.Jobs) iter.Seq2[dsec.JobResult, error] { return j.Stop(ctx, dsec.JobID(c.ID)) })
}

type jobLabelCmd struct {
	jobArg
	Labels []string `arg:"" name:"k=v" help:"Labels; an empty value takes one away."`
}

// Run labels all.
func (c *jobLabelCmd) Run(ctx context.Context, a *app) error {
	labels, err := pairs("label", c.Labels, nil)
	if err != nil {
		return err
	}
	return c.run(ctx, a, func(j dsec.Jobs) iter.Seq2[dsec.JobResult, error] { return j.Label(ctx, dsec.JobID(c.ID), labels) })
}

// jsonLine prints v as one line, for streams.
func (a *app) jsonLine(v any) error {
	b, err := json.Marshal(plain(reflect.ValueOf(v)))
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_, err = a.Stdout.Write(append(b, '\n'))
	return err
}

// phrase joins what is not empty.
func phrase(list ...string) string {
	return strings.Join(slices.DeleteFunc(list, func(s string) bool { return s == "" }), " ")
}

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/trajectory"
)

// logCmd shows what was recorded of a sandbox.
type logCmd struct {
	Sandbox   string `arg:"" optional:"" help:"Sandbox ID; it may have ended."`
	Full      bool   `help:"All of every output and file, not their beginnings." not:"raw"`
	Follow    bool   `short:"f" help:"Go on until the sandbox ends." not:"verify,raw,cast,from"`
	Verify    bool   `help:"Check that no record was changed, dropped or moved; with --full the bodies beside them too." not:"raw,cast"`
	Head      string `help:"Hash that the last record must have, for --verify (default what its keeper says)." placeholder:"HASH" needs:"verify"`
	Cast      string `help:"Write the session as an asciicast that terminal players show; - for standard output (default none)." placeholder:"FILE" not:"raw,json"`
	IdleLimit span   `help:"Longest pause that a player makes, for --cast." default:"2s" placeholder:"TIME" needs:"cast"`
	Raw       string `help:"Write the records as files to a new folder, to be verified elsewhere (default none)." placeholder:"DIR"`
	From      string `help:"Read what --raw wrote instead of asking a server (default none)." placeholder:"DIR"`
	outputFlags
}

// Help shows the forms.
func (c *logCmd) Help() string {
	return `  dsec log sb...                      the session, to read
  dsec log sb... --json               the records, one JSON object a line
  dsec log sb... --verify             is it all there, and as it was written?
  dsec log sb... --raw DIR            and elsewhere: dsec log --verify --from DIR
  dsec log sb... --cast session.cast`
}

// followEvery is how often log --follow looks for more.
const followEvery = 250 * time.Millisecond

// Run does one of the things that a trajectory is for.
func (c *logCmd) Run(ctx context.Context, a *app) error {
	t, err := a.tape(c.Sandbox, c.From)
	if err != nil {
		return err
	}
	switch {
	case c.Verify:
		return c.verify(ctx, a, t)
	case c.Raw != "":
		h, err := t.export(ctx, a.local(c.Raw))
		if err != nil {
			return err
		}
		if c.JSON {
			return a.json(h)
		}
		_, err = fmt.Fprintf(a.Stdout, "%d records, head %s\n", h.Seq, h.Hash)
		return err
	case c.Cast != "":
		return a.writeCast(ctx, t, c.Cast, time.Duration(c.IdleLimit), c.Full)
	}
	var to logWriter = newSessionText(a, t, c.Full)
	if c.JSON {
		to = &recordLines{a: a, t: t, full: c.Full}
	}
	return c.show(ctx, a, t, to)
}

func (c *logCmd) verify(ctx context.Context, a *app, t tape) error {
	v, err := t.verify(ctx, c.Head, c.Full)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(v)
	}
	_, err = fmt.Fprintf(a.Stdout, "%d records, chain whole, head %s\n", v.Records, v.Head)
	return err
}

// logWriter takes the records of a trajectory in order.
type logWriter interface {
	record(ctx context.Context, r dsec.Record) error
	// pause says that no more is there at present.
	pause(ctx context.Context) error
}

// show writes the records to their present end, or to the last there will be.
// Whoever reads sees what is there, also where the chain is broken; that it is,
// where, and the exit status say that it cannot be relied upon.
func (c *logCmd) show(ctx context.Context, a *app, t tape, to logWriter) error {
	after, over, sound := uint64(0), false, true
	v := trajectory.NewVerifier(t.id)
	doubt := func(err error) {
		if sound && err != nil {
			sound = false
			a.warn(fmt.Errorf("the record does not verify: %w", err))
		}
	}
	for {
		for r, err := range t.records(ctx, after) {
			if err != nil {
				return err
			}
			if sound {
				doubt(v.Add(r.Raw))
			}
			if err := to.record(ctx, r); err != nil {
				return err
			}
			after, over = r.Seq, r.Op == dsec.RecordEnd
		}
		if err := to.pause(ctx); err != nil {
			return err
		}
		if !c.Follow || over {
			if sound && !t.living() {
				end, err := t.from.Head(ctx, t.id)
				if err != nil {
					return err
				}
				doubt(v.End(end))
			}
			if !sound {
				return exitStatus(statusFailed)
			}
			return nil
		}
		select {
		case <-time.After(followEvery):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

package main

import (
	"context"

	"github.com/dsec-go/dsec"
)

// doctorCmd shows what the host can do.
type doctorCmd struct{ outputFlags }

// Run probes this host; no server is needed. The exit status is 1 if sandboxes
// cannot run here at all.
func (c *doctorCmd) Run(ctx context.Context, a *app) error {
	list := features(ctx)
	if c.JSON {
		return a.json(list)
	}
	rows := [][]string{{"FEATURE", "OK", "DETAIL", "WITHOUT IT"}}
	for _, f := range list {
		ok, cost := "yes", ""
		if !f.OK {
			ok, cost = "no", f.Cost
		}
		rows = append(rows, []string{f.Name, ok, or(f.Detail), cost})
	}
	return a.table(rows...)
}

// features gathers what the mechanisms found out about this host.
func features(context.Context) []dsec.FeatureStatus {
	return nil
}

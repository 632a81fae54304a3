package main

import (
	"os"

	"github.com/dsec-go/dsec"
)

// doctorCmd shows what the host can do.
type doctorCmd struct {
	Data string `help:"Folder on the file system that a node would use; probes are written there and removed (default the temporary one)." placeholder:"DIR"`
	outputFlags
}

// Run probes this host; no server is needed.
func (c *doctorCmd) Run(a *app) error {
	dir := c.Data
	if dir == "" {
		dir = os.TempDir()
	}
	list := hostFeatures(dir)
	if c.JSON {
		return a.json(list)
	}
	return a.table(featureRows(list)...)
}

// featureRows gives one row a feature; what an absence costs is shown where it
// is absent.
func featureRows(list []dsec.FeatureStatus) [][]string {
	rows := [][]string{{"FEATURE", "OK", "DETAIL", "WITHOUT IT"}}
	for _, f := range list {
		ok, cost := "yes", ""
		if !f.OK {
			ok, cost = "no", f.Cost
		}
		rows = append(rows, []string{f.Name, ok, or(f.Detail), cost})
	}
	return rows
}

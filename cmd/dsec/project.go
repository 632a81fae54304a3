package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/dsec-go/dsec"
)

// projectCmd groups the commands on projects.
type projectCmd struct {
	Create projectCreateCmd `cmd:"" help:"Make a project; \"dsec token create --project\" lets people in."`
	Ls     projectLsCmd     `cmd:"" help:"List projects with what they use of their quotas."`
	Rm     projectRmCmd     `cmd:"" help:"Remove a project, its tokens and its image names."`
}

// quotaFlags say what a project may have at once.
type quotaFlags struct {
	Sandboxes int      `help:"Sandboxes that may live at once (default unbounded)." placeholder:"N"`
	CPU       float64  `help:"Cores, the limits of its sandboxes added up (default unbounded)." placeholder:"CORES"`
	Memory    byteSize `help:"Memory, likewise (default unbounded)." placeholder:"SIZE"`
	MaxTTL    span     `name:"max-ttl" help:"Longest time to live of a sandbox (default unbounded)." placeholder:"TIME"`
}

func (f quotaFlags) quota() dsec.Quota {
	return dsec.Quota{Sandboxes: f.Sandboxes, CPU: f.CPU, Memory: int64(f.Memory), TTL: time.Duration(f.MaxTTL)}
}

type projectCreateCmd struct {
	Name   string `arg:"" help:"Name, for tokens: a-z 0-9 . _ -; A/B is below A."`
	Parent string `help:"Project that it is below; the same as writing PARENT/NAME (default none)." placeholder:"ID"`
	quotaFlags
	outputFlags
}

// Help says what a quota is.
func (c *projectCreateCmd) Help() string {
	return `What lives in a project counts for it and for every project above it, and each of
their quotas must have room. A create beyond one is refused at once.`
}

// Run makes the project.
func (c *projectCreateCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Projects == nil {
		return lacking("projects")
	}
	name := dsec.ProjectID(c.Name)
	if c.Parent != "" {
		name = dsec.ProjectID(c.Parent + "/" + c.Name)
	}
	p, err := s.Projects.Create(ctx, dsec.Project{Name: name, Quota: c.quota()})
	if err != nil || !c.JSON {
		return err
	}
	return a.json(p)
}

type projectLsCmd struct{ outputFlags }

// Run prints all projects.
func (c *projectLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Projects == nil {
		return lacking("projects")
	}
	list, err := s.Projects.List(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	now := time.Now()
	rows := [][]string{{"PROJECT", "SANDBOXES", "CPU", "MEMORY", "MAX TTL", "AGE"}}
	for _, p := range list {
		old, ttl := "-", "-"
		if !p.Created.IsZero() {
			old = since(p.Created, now)
		}
		if p.Quota.TTL > 0 {
			ttl = p.Quota.TTL.String()
		}
		u, q := p.Used, p.Quota
		rows = append(rows, []string{
			string(p.Name),
			of(strconv.Itoa(u.Sandboxes), strconv.Itoa(q.Sandboxes), q.Sandboxes > 0),
			of(fmt.Sprintf("%g", u.CPU), fmt.Sprintf("%g", q.CPU), q.CPU > 0),
			of(size(u.Memory), size(q.Memory), q.Memory > 0), ttl, old,
		})
	}
	return a.table(rows...)
}

// of gives a figure beside its bound.
func of(used, quota string, bounded bool) string {
	if !bounded {
		return used
	}
	return used + "/" + quota
}

type projectRmCmd struct {
	Name string `arg:"" help:"Name of the project."`
}

// Help says when it is refused.
func (c *projectRmCmd) Help() string {
	return "A project that has living sandboxes, or projects below it, is not removed."
}

// Run removes it.
func (c *projectRmCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Projects == nil {
		return lacking("projects")
	}
	return s.Projects.Remove(ctx, dsec.ProjectID(c.Name))
}

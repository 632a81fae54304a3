package main

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

// projectCmd groups the commands on projects.
type projectCmd struct {
	Create projectCreateCmd `cmd:"" help:"Make a project; \"dsec token create --project\" lets people in."`
	Ls     projectLsCmd     `cmd:"" help:"List projects."`
}

type projectCreateCmd struct {
	Name string `arg:"" help:"Name, for tokens: a-z 0-9 . _ -"`
	outputFlags
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
	p, err := s.Projects.Create(ctx, dsec.ProjectID(c.Name))
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
	rows := [][]string{{"PROJECT", "AGE"}}
	for _, p := range list {
		old := "-"
		if !p.Created.IsZero() {
			old = since(p.Created, now)
		}
		rows = append(rows, []string{string(p.Name), old})
	}
	return a.table(rows...)
}

// projects makes the cluster's projects fit the contract.
type projects struct{ cluster.Projects }

// Create makes a project at the top.
func (p projects) Create(ctx context.Context, name dsec.ProjectID) (dsec.Project, error) {
	if err := p.Projects.Create(ctx, cluster.Project{Name: name}); err != nil {
		return dsec.Project{}, err
	}
	made, err := p.Get(name)
	return dsec.Project{Name: made.Name, Created: made.Created}, err
}

// List gives all projects.
func (p projects) List(context.Context) ([]dsec.Project, error) {
	var list []dsec.Project
	for _, pr := range p.Projects.List() {
		list = append(list, dsec.Project{Name: pr.Name, Created: pr.Created})
	}
	return list, nil
}

package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/dsec-go/dsec"
)

// projectCmd groups the commands on projects.
type projectCmd struct {
	Create projectCreateCmd `cmd:"" help:"Make a project; \"dsec token create --project\" lets people in."`
	Ls     projectLsCmd     `cmd:"" help:"List projects with what they use of their quotas."`
	Set    projectSetCmd    `cmd:"" help:"Change the quota of a project."`
	Rm     projectRmCmd     `cmd:"" help:"Remove a project, its tokens and its image names."`
}

// quotaFlags say what a project may have at once.
type quotaFlags struct {
	Sandboxes int      `help:"Sandboxes that may live at once (default unbounded)." placeholder:"N" positive:""`
	CPU       float64  `help:"Cores, the limits of its sandboxes added up (default unbounded)." placeholder:"CORES" positive:""`
	Memory    byteSize `help:"Memory, likewise (default unbounded)." placeholder:"SIZE" positive:""`
	Images    byteSize `help:"What its images take in the store, each blob once, without what everybody's images need too (default unbounded)." placeholder:"SIZE" positive:""`
	MaxTTL    span     `name:"max-ttl" help:"Longest time to live of a sandbox (default unbounded)." placeholder:"TIME" positive:""`
}

func (f quotaFlags) quota() dsec.Quota {
	return dsec.Quota{Sandboxes: f.Sandboxes, CPU: f.CPU, Memory: int64(f.Memory), Images: int64(f.Images), TTL: time.Duration(f.MaxTTL)}
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
their quotas must have room. A create beyond one is refused at once, and so is an
import or a commit that would take the images beyond one.`
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

// unbounded is how a flag takes a bound away.
const unbounded = "none"

type projectSetCmd struct {
	Name      string `arg:"" help:"Name of the project."`
	Sandboxes string `help:"Sandboxes that may live at once, or none for no bound (default: as it is)." placeholder:"N"`
	CPU       string `help:"Cores, likewise (default: as it is)." placeholder:"CORES"`
	Memory    string `help:"Memory, likewise (default: as it is)." placeholder:"SIZE"`
	Images    string `help:"What its images take in the store, likewise (default: as it is)." placeholder:"SIZE"`
	MaxTTL    string `name:"max-ttl" help:"Longest time to live of a sandbox, likewise (default: as it is)." placeholder:"TIME"`
}

// Help says what happens to what is there.
func (c *projectSetCmd) Help() string {
	return `Sandboxes and images that a smaller quota has no room for stay; creates and imports
are refused until there is room again. A quota lies within that of the project above and holds those
of the projects below.`
}

// Run changes what the flags name.
func (c *projectSetCmd) Run(ctx context.Context, a *app) error {
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
	i := slices.IndexFunc(list, func(p dsec.Project) bool { return string(p.Name) == c.Name })
	if i < 0 {
		return dsec.Errorf(dsec.NotFound, "no project is called %s", c.Name)
	}
	q := list[i].Quota
	var memory, images byteSize
	var ttl span
	for _, f := range []struct {
		name, text string
		clear      func()
		set        func(text []byte) error
	}{
		{"sandboxes", c.Sandboxes, func() { q.Sandboxes = 0 }, func(t []byte) (err error) { q.Sandboxes, err = strconv.Atoi(string(t)); return }},
		{"cpu", c.CPU, func() { q.CPU = 0 }, func(t []byte) (err error) { q.CPU, err = strconv.ParseFloat(string(t), 64); return }},
		{"memory", c.Memory, func() { q.Memory = 0 }, func(t []byte) error { err := memory.UnmarshalText(t); q.Memory = int64(memory); return err }},
		{"images", c.Images, func() { q.Images = 0 }, func(t []byte) error { err := images.UnmarshalText(t); q.Images = int64(images); return err }},
		{"max-ttl", c.MaxTTL, func() { q.TTL = 0 }, func(t []byte) error { err := ttl.UnmarshalText(t); q.TTL = time.Duration(ttl); return err }},
	} {
		switch f.text {
		case "":
		case unbounded:
			f.clear()
		case "0": // stands for no bound in a Quota, and for the opposite in what people say
			return dsec.Errorf(dsec.Invalid, "--%s 0: a quota of nothing cannot be given; %q takes the bound away", f.name, unbounded)
		default:
			if err := f.set([]byte(f.text)); err != nil {
				return dsec.Errorf(dsec.Invalid, "--%s %q is neither a figure of its kind nor %q", f.name, f.text, unbounded)
			}
		}
	}
	return s.Projects.SetQuota(ctx, list[i].Name, q)
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
	rows := [][]string{{"PROJECT", "SANDBOXES", "CPU", "MEMORY", "IMAGES", "MAX TTL", "AGE"}}
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
			of(size(u.Memory), size(q.Memory), q.Memory > 0), of(size(u.Images), size(q.Images), q.Images > 0), ttl, old,
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

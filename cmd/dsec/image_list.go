package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

type imageLsCmd struct {
	Prefix string `arg:"" optional:"" help:"Beginning of the names (default all)."`
	Quiet  bool   `short:"q" help:"Print names alone, without finding out what they take."`
	outputFlags
}

// Help says what the sizes are.
func (c *imageLsCmd) Help() string {
	return `SIZE is that of the files, STORED what the layer takes in the store, UNIQUE what of
that no other name needs, CACHED what of it lies on the node that answers. Where the
store does not answer, the last two are not known. With --json they are exact bytes.`
}

// Run prints all images, by name, then newest first.
func (c *imageLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	list := []dsec.Image{}
	for img, err := range dsec.AllImages(ctx, s.Images, dsec.ImageQuery{Prefix: c.Prefix, Usage: !c.Quiet}) {
		switch {
		case err != nil:
			return err
		case c.Quiet && !c.JSON:
			if _, err := fmt.Fprintln(a.Stdout, img.Ref()); err != nil {
				return err
			}
		default:
			list = append(list, img)
		}
	}
	switch {
	case c.JSON:
		return a.json(list)
	case c.Quiet:
		return nil
	}
	now := time.Now()
	rows := [][]string{{"IMAGE", "ROLE", "SIZE", "STORED", "UNIQUE", "CACHED", "TAGS", "AGE", "SOURCE"}}
	for _, i := range list {
		unique, cached := usage(i)
		rows = append(rows, []string{
			i.Ref(), string(i.Role), size(i.Size), size(i.Stored), unique, cached, or(strings.Join(i.Tags, ",")), since(i.Created, now), or(i.Source),
		})
	}
	return a.table(rows...)
}

// usage gives the figures that may be unknown.
func usage(i dsec.Image) (unique, cached string) {
	if i.Usage == nil {
		return "-", "-"
	}
	return size(i.Usage.Unique), size(i.Usage.Cached)
}

type imageInspectCmd struct {
	Name string `arg:"" help:"name, name@version or name@tag."`
	outputFlags
}

// Run prints the image's record.
func (c *imageInspectCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	i, err := s.Images.Inspect(ctx, c.Name)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(i)
	}
	unique, cached := usage(i)
	rows := [][]string{
		{"image", i.Ref()},
		{"tags", or(strings.Join(i.Tags, " "))},
		{"role", string(i.Role)},
		{"digest", i.Digest},
		{"size", size(i.Size)},
		{"stored", size(i.Stored)},
		{"unique", unique},
		{"cached", cached},
		{"entries", fmt.Sprint(i.Entries)},
		{"created", i.Created.UTC().Format(time.RFC3339)},
		{"source", or(i.Source)},
		{"user", or(i.Config.User)},
		{"cwd", or(i.Config.Cwd)},
	}
	for _, e := range i.Config.Env {
		rows = append(rows, []string{"env", e})
	}
	if len(i.Config.Shell) > 0 {
		rows = append(rows, []string{"entry point", strings.Join(i.Config.Shell, " ")})
	}
	if i.Usage != nil {
		for _, p := range i.Usage.Parts {
			rows = append(rows, []string{p.Kind, fmt.Sprintf("%s  %s  needed by %d names", p.Digest, size(p.Size), p.Names)})
		}
	}
	return a.table(rows...)
}

type imageTagCmd struct {
	Name string `arg:"" help:"What it shall stand for: name@version, or whatever stands for one."`
	Tag  string `arg:"" help:"The tag, alone or as name@tag."`
	outputFlags
}

// Help says what a tag is.
func (c *imageTagCmd) Help() string {
	return `A version never changes; a tag is moved to another version in one step, and new
sandboxes of name@tag get that. Those that run keep what they have.

  dsec image tag tools@v7 stable`
}

// Run sets or moves the tag and prints the version that it stands for.
func (c *imageTagCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	name, _ := dsec.SplitImageName(c.Name)
	tag := c.Tag
	if of, t, ok := strings.Cut(c.Tag, "@"); ok {
		if of != name {
			return dsec.Errorf(dsec.Invalid, "a tag of %s cannot stand for a version of %s", of, name)
		}
		tag = t
	}
	img, err := s.Images.Tag(ctx, c.Name, tag)
	if err != nil {
		return err
	}
	return a.printImage(img, c.JSON)
}

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// tokenCmd groups the commands on tokens.
type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Make a token and print its secret, the only time it is shown."`
	Ls     tokenLsCmd     `cmd:"" help:"List tokens."`
	Revoke tokenRevokeCmd `cmd:"" help:"End a token, and the calls that it has under way."`
}

type tokenCreateCmd struct {
	Name    string   `arg:"" help:"Name, for listing and revoking."`
	Project string   `help:"Project whose quota and rights it has." default:"default" placeholder:"ID"`
	Right   []string `help:"What it may do: sandboxes, images, delegate, admin; may be repeated (default sandboxes)." placeholder:"RIGHT"`
	Expires span     `help:"Valid this long (default for ever)." placeholder:"TIME" positive:""`
	outputFlags
}

// Run prints the secret alone, so that a script can take it.
func (c *tokenCreateCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Tokens == nil {
		return lacking("tokens")
	}
	t := dsec.Token{Name: c.Name, Project: dsec.ProjectID(c.Project)}
	for _, r := range c.Right {
		t.Rights = append(t.Rights, dsec.Right(r))
	}
	if len(t.Rights) == 0 {
		t.Rights = []dsec.Right{dsec.RightSandboxes}
	}
	if c.Expires > 0 {
		t.Expires = time.Now().Add(time.Duration(c.Expires)).UTC()
	}
	secret, err := s.Tokens.Issue(ctx, t)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(struct{ Name, Secret string }{c.Name, secret})
	}
	_, err = fmt.Fprintln(a.Stdout, secret)
	return err
}

type tokenLsCmd struct{ outputFlags }

// Run prints what is known of the tokens, never their secrets.
func (c *tokenLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Tokens == nil {
		return lacking("tokens")
	}
	list, err := s.Tokens.List(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	now := time.Now()
	rows := [][]string{{"TOKEN", "PROJECT", "RIGHTS", "AGE", "LEFT"}}
	for _, t := range list {
		left, rights := "-", make([]string, len(t.Rights))
		for i, r := range t.Rights {
			rights[i] = string(r)
		}
		if !t.Expires.IsZero() {
			left = until(t.Expires, now)
		}
		rows = append(rows, []string{t.Name, string(t.Project), strings.Join(rights, ","), since(t.Created, now), left})
	}
	return a.table(rows...)
}

type tokenRevokeCmd struct {
	Name string `arg:"" help:"Name of the token."`
}

// Help says what one cannot guess.
func (c *tokenRevokeCmd) Help() string {
	return "The last token with the right admin stays. " + rotation
}

const rotation = `To rotate it, make another first: "dsec token create NAME --right admin". The token "operator" is the ` +
	`one in the context file: once it is revoked, the next start of "dsec up" makes a new one.`

// Run ends the token.
func (c *tokenRevokeCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Tokens == nil {
		return lacking("tokens")
	}
	err = s.Tokens.Revoke(ctx, c.Name)
	if dsec.KindOf(err) == dsec.Conflict {
		return fmt.Errorf("%w. %s", err, rotation)
	}
	return err
}

// nodeCmd groups the commands on nodes.
type nodeCmd struct {
	Ls nodeLsCmd `cmd:"" help:"List nodes."`
}

type nodeLsCmd struct{ outputFlags }

// Run prints the machines of the cluster as seen now.
func (c *nodeLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Nodes == nil {
		return lacking("nodes")
	}
	list, err := s.Nodes.Nodes(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	rows := [][]string{{"NODE", "VERSION", "KINDS", "SANDBOXES", "CPUS", "LOAD", "MEMORY", "FREE", "DISK FREE", "PRESSURE", "STORE", "CACHED"}}
	for _, n := range list {
		kinds := make([]string, len(n.Kinds))
		for i, k := range n.Kinds {
			kinds[i] = string(k)
		}
		store, cached := "data folder", "-"
		if n.Store != "" {
			store, cached = n.Store, of(size(n.Cached), size(n.Cache), n.Cache > 0)
		}
		rows = append(rows, []string{
			n.Name, n.Version, strings.Join(kinds, ","), strconv.Itoa(n.Sandboxes), strconv.Itoa(n.CPUs),
			fmt.Sprintf("%.1f", n.Load), size(n.Memory), size(n.Available), size(n.DiskFree),
			fmt.Sprintf("cpu %.0f%% mem %.0f%% io %.0f%%", n.Pressure.CPU, n.Pressure.Memory, n.Pressure.IO), store, cached,
		})
	}
	return a.table(rows...)
}

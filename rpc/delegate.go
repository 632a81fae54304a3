package rpc

import (
	"context"
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
)

// delegable is Denied unless a caller may give these rights to another.
func delegable(c dsec.Caller, rights []dsec.Right) error {
	if !c.May(dsec.RightDelegate) {
		return dsec.Errorf(dsec.Denied, "token %q has not the right %s, which giving rights to others takes", c.Token, dsec.RightDelegate)
	}
	for _, r := range rights {
		if !c.May(r) {
			return dsec.Errorf(dsec.Denied, "token %q has not the right %q and cannot give it", c.Token, clip(string(r)))
		}
	}
	return nil
}

// delegator gives the caller of ctx if what it manages is bounded: it is no
// operator. A sandbox's token manages nothing: what it made would outlive it.
func delegator(ctx context.Context) (c dsec.Caller, bounded bool, err error) {
	c, ok := dsec.CallerFrom(ctx)
	if !ok || c.Admin {
		return c, false, nil
	}
	if c.Sandbox != "" {
		return c, true, dsec.Errorf(dsec.Denied, "the token of a sandbox makes no tokens and projects; it can make sandboxes with an API of their own")
	}
	return c, true, delegable(c, nil)
}

// below is Denied for a project that is not below the caller's own.
func below(c dsec.Caller, p dsec.ProjectID) error {
	if p == c.Project || !p.Within(c.Project) {
		return dsec.Errorf(dsec.Denied, "project %q is not below the token's own, %q", clip(string(p)), c.Project)
	}
	return nil
}

// bound makes t a token that the caller may issue: of a project below its own,
// with rights of its own, for no longer than itself, and with a name that begins
// with its project, so that tenants cannot take names from each other.
func bound(ctx context.Context, t *dsec.Token) error {
	c, bounded, err := delegator(ctx)
	if !bounded || err != nil {
		return err
	}
	if err := below(c, t.Project); err != nil {
		return err
	}
	if err := delegable(c, t.Rights); err != nil {
		return err
	}
	switch {
	case c.Expires.IsZero():
	case t.Expires.IsZero():
		t.Expires = c.Expires
	case t.Expires.After(c.Expires):
		return dsec.Errorf(dsec.Denied, "token %q itself expires before the one that it is to make", c.Token)
	}
	if prefix := string(t.Project) + "/"; !strings.HasPrefix(t.Name, prefix) {
		t.Name = prefix + t.Name
	}
	return nil
}

// ownTokens keeps the tokens that the caller manages.
func ownTokens(ctx context.Context, all []dsec.Token) ([]dsec.Token, error) {
	c, bounded, err := delegator(ctx)
	if !bounded || err != nil {
		return all, err
	}
	return slices.DeleteFunc(slices.Clone(all), func(t dsec.Token) bool { return below(c, t.Project) != nil }), nil
}

// ownProjects keeps the projects that the caller sees.
func ownProjects(ctx context.Context, all []dsec.Project) ([]dsec.Project, error) {
	c, ok := dsec.CallerFrom(ctx)
	if !ok || c.Admin {
		return all, nil
	}
	return slices.DeleteFunc(slices.Clone(all), func(p dsec.Project) bool { return !c.Sees(p.Name) }), nil
}

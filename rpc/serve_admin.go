package rpc

import (
	"context"
	"slices"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// tokens serves dsec.Tokens.
type tokens struct{ *handler }

func (s tokens) Issue(ctx context.Context, req *dsecv1.TokensIssueRequest) (*dsecv1.TokensIssueResponse, error) {
	t := TokenFromWire(req.GetToken())
	if err := bound(ctx, &t); err != nil {
		return nil, err
	}
	secret, err := s.services.Tokens.Issue(ctx, t)
	return &dsecv1.TokensIssueResponse{Secret: secret}, err
}

func (s tokens) List(ctx context.Context, _ *dsecv1.TokensListRequest) (*dsecv1.TokensListResponse, error) {
	all, err := s.services.Tokens.List(ctx)
	if err == nil {
		all, err = ownTokens(ctx, all)
	}
	return &dsecv1.TokensListResponse{Tokens: each(all, TokenToWire)}, err
}

// Revoke is NotFound for a token that the caller does not manage.
func (s tokens) Revoke(ctx context.Context, req *dsecv1.TokensRevokeRequest) (*dsecv1.TokensRevokeResponse, error) {
	if _, bounded, err := delegator(ctx); err != nil {
		return nil, err
	} else if bounded {
		all, err := s.services.Tokens.List(ctx)
		if err == nil {
			all, err = ownTokens(ctx, all)
		}
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(all, func(t dsec.Token) bool { return t.Name == req.GetName() }) {
			return nil, dsec.Errorf(dsec.NotFound, "no token is called %q", clip(req.GetName()))
		}
	}
	return &dsecv1.TokensRevokeResponse{}, s.services.Tokens.Revoke(ctx, req.GetName())
}

// projects serves dsec.Projects.
type projects struct{ *handler }

func (s projects) Create(ctx context.Context, req *dsecv1.ProjectsCreateRequest) (*dsecv1.Project, error) {
	p := dsec.Project{Name: dsec.ProjectID(req.GetName()), Quota: QuotaFromWire(req.GetQuota())}
	if err := manages(ctx, p.Name); err != nil {
		return nil, err
	}
	return wire(ProjectToWire)(s.services.Projects.Create(ctx, p))
}

func (s projects) List(ctx context.Context, _ *dsecv1.ProjectsListRequest) (*dsecv1.ProjectsListResponse, error) {
	all, err := s.services.Projects.List(ctx)
	if err == nil {
		all, err = ownProjects(ctx, all)
	}
	return &dsecv1.ProjectsListResponse{Projects: each(all, ProjectToWire)}, err
}

func (s projects) SetQuota(ctx context.Context, req *dsecv1.ProjectsSetQuotaRequest) (*dsecv1.ProjectsSetQuotaResponse, error) {
	name := dsec.ProjectID(req.GetName())
	if err := manages(ctx, name); err != nil {
		return nil, err
	}
	return &dsecv1.ProjectsSetQuotaResponse{}, s.services.Projects.SetQuota(ctx, name, QuotaFromWire(req.GetQuota()))
}

func (s projects) Remove(ctx context.Context, req *dsecv1.ProjectsRemoveRequest) (*dsecv1.ProjectsRemoveResponse, error) {
	name := dsec.ProjectID(req.GetName())
	if err := manages(ctx, name); err != nil {
		return nil, err
	}
	return &dsecv1.ProjectsRemoveResponse{}, s.services.Projects.Remove(ctx, name)
}

// manages is Denied unless the caller may make, change and remove a project.
func manages(ctx context.Context, p dsec.ProjectID) error {
	c, bounded, err := delegator(ctx)
	if !bounded || err != nil {
		return err
	}
	return below(c, p)
}

// nodes serves dsec.Nodes.
type nodes struct{ *handler }

func (s nodes) List(ctx context.Context, _ *dsecv1.NodesListRequest) (*dsecv1.NodesListResponse, error) {
	all, err := s.services.Nodes.Nodes(ctx)
	return &dsecv1.NodesListResponse{Nodes: each(all, NodeToWire)}, err
}

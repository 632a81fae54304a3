package rpc

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// tokens serves dsec.Tokens.
type tokens struct{ *handler }

func (s tokens) Issue(ctx context.Context, req *dsecv1.TokensIssueRequest) (*dsecv1.TokensIssueResponse, error) {
	secret, err := s.services.Tokens.Issue(ctx, TokenFromWire(req.GetToken()))
	return &dsecv1.TokensIssueResponse{Secret: secret}, err
}

func (s tokens) List(ctx context.Context, _ *dsecv1.TokensListRequest) (*dsecv1.TokensListResponse, error) {
	all, err := s.services.Tokens.List(ctx)
	return &dsecv1.TokensListResponse{Tokens: each(all, TokenToWire)}, err
}

func (s tokens) Revoke(ctx context.Context, req *dsecv1.TokensRevokeRequest) (*dsecv1.TokensRevokeResponse, error) {
	return &dsecv1.TokensRevokeResponse{}, s.services.Tokens.Revoke(ctx, req.GetName())
}

// projects serves dsec.Projects.
type projects struct{ *handler }

func (s projects) Create(ctx context.Context, req *dsecv1.ProjectsCreateRequest) (*dsecv1.Project, error) {
	return wire(ProjectToWire)(s.services.Projects.Create(ctx, dsec.ProjectID(req.GetName())))
}

func (s projects) List(ctx context.Context, _ *dsecv1.ProjectsListRequest) (*dsecv1.ProjectsListResponse, error) {
	all, err := s.services.Projects.List(ctx)
	return &dsecv1.ProjectsListResponse{Projects: each(all, ProjectToWire)}, err
}

// nodes serves dsec.Nodes.
type nodes struct{ *handler }

func (s nodes) List(ctx context.Context, _ *dsecv1.NodesListRequest) (*dsecv1.NodesListResponse, error) {
	all, err := s.services.Nodes.Nodes(ctx)
	return &dsecv1.NodesListResponse{Nodes: each(all, NodeToWire)}, err
}

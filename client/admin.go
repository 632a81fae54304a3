package client

import (
	"context"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

type tokens struct {
	*core
	rpc dsecv1.TokensClient
}

func (s *tokens) Issue(ctx context.Context, t dsec.Token) (string, error) {
	a, err := unary(ctx, s.core, to{op: "client.Issue"}, s.rpc.Issue, &dsecv1.TokensIssueRequest{Token: rpc.TokenToWire(t)})
	return a.GetSecret(), err
}

func (s *tokens) List(ctx context.Context) ([]dsec.Token, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, &dsecv1.TokensListRequest{})
	return each(a.GetTokens(), rpc.TokenFromWire), err
}

func (s *tokens) Revoke(ctx context.Context, name string) error {
	_, err := unary(ctx, s.core, to{op: "client.Revoke"}, s.rpc.Revoke, &dsecv1.TokensRevokeRequest{Name: name})
	return err
}

type projects struct {
	*core
	rpc dsecv1.ProjectsClient
}

func (s *projects) Create(ctx context.Context, p dsec.Project) (dsec.Project, error) {
	q := &dsecv1.ProjectsCreateRequest{Name: string(p.Name), Quota: rpc.QuotaToWire(p.Quota)}
	a, err := unary(ctx, s.core, to{op: "client.Create"}, s.rpc.Create, q)
	if err != nil {
		return dsec.Project{}, err
	}
	return rpc.ProjectFromWire(a), nil
}

func (s *projects) List(ctx context.Context) ([]dsec.Project, error) {
	a, err := unary(ctx, s.core, to{op: "client.List", again: true}, s.rpc.List, &dsecv1.ProjectsListRequest{})
	return each(a.GetProjects(), rpc.ProjectFromWire), err
}

func (s *projects) SetQuota(ctx context.Context, name dsec.ProjectID, q dsec.Quota) error {
	r := &dsecv1.ProjectsSetQuotaRequest{Name: string(name), Quota: rpc.QuotaToWire(q)}
	_, err := unary(ctx, s.core, to{op: "client.SetQuota", again: true}, s.rpc.SetQuota, r)
	return err
}

func (s *projects) Remove(ctx context.Context, name dsec.ProjectID) error {
	_, err := unary(ctx, s.core, to{op: "client.Remove"}, s.rpc.Remove, &dsecv1.ProjectsRemoveRequest{Name: string(name)})
	return err
}

type nodes struct {
	*core
	rpc dsecv1.NodesClient
}

func (s *nodes) Nodes(ctx context.Context) ([]dsec.Node, error) {
	a, err := unary(ctx, s.core, to{op: "client.Nodes", again: true}, s.rpc.List, &dsecv1.NodesListRequest{})
	return each(a.GetNodes(), rpc.NodeFromWire), err
}

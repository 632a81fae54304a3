package cluster

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// secretPrefix lets people and scanners recognise a token.
const secretPrefix = "dsec_"

var rights = []dsec.Right{dsec.RightSandboxes, dsec.RightImages, dsec.RightDelegate, dsec.RightAdmin}

// Tokens issues, checks and revokes tokens. Only the SHA-256 of a secret is stored: the secret
// is random enough that nothing slower is needed.
type Tokens struct{ c *Cluster }

var _ dsec.Tokens = Tokens{}

// Tokens returns the tokens of the cluster.
func (c *Cluster) Tokens() Tokens { return Tokens{c} }

// Issue implements dsec.Tokens. Created is set here. The project must exist.
func (t Tokens) Issue(ctx context.Context, tok dsec.Token) (secret string, err error) {
	return t.issue(ctx, "cluster.Issue", tok, absent(keyNames+tok.Name))
}

// Renew issues a token in the place of the one that is called so, if there is one; that ends
// with the same change. It is for whoever owns the name, and refuses no last token.
func (t Tokens) Renew(ctx context.Context, tok dsec.Token) (secret string, err error) {
	const op = "cluster.Renew"
	hash, revision, err := t.named(ctx, op, tok.Name)
	if err != nil && dsec.KindOf(err) == dsec.NotFound {
		return t.issue(ctx, op, tok, absent(keyNames+tok.Name))
	}
	if err != nil {
		return "", err
	}
	return t.issue(ctx, op, tok, unchanged(keyNames+tok.Name, revision), clientv3.OpDelete(keyTokens+hash))
}

// issue writes a token if name holds of the key of its name, with more in the same change.
func (t Tokens) issue(ctx context.Context, op string, tok dsec.Token, name clientv3.Cmp, more ...clientv3.Op) (secret string, err error) {
	if err := checkToken(op, tok.Name); err != nil {
		return "", err
	}
	if p := dsec.ProjectID(tok.Name).Parent(); p != "" && p != tok.Project {
		return "", failf(op, dsec.Invalid, "token %s has the name of one of project %s", tok.Name, p)
	}
	if len(tok.Rights) == 0 {
		return "", failf(op, dsec.Invalid, "token %s has no rights", tok.Name)
	}
	for _, r := range tok.Rights {
		if !slices.Contains(rights, r) {
			return "", failf(op, dsec.Invalid, "token %s: no right is called %.80q", tok.Name, string(r))
		}
	}
	now := time.Now().UTC()
	if !tok.Expires.IsZero() && !tok.Expires.After(now) {
		return "", failf(op, dsec.Invalid, "token %s expires in the past", tok.Name)
	}
	if _, err := t.c.Projects().Get(tok.Project); err != nil {
		return "", dsec.WithOp(op, "", err)
	}
	tok.Created = now
	secret = secretPrefix + strings.ToLower(rand.Text()+rand.Text())
	h := hashSecret(secret)
	ok, err := t.c.commit(ctx, op, []clientv3.Cmp{name, present(keyProjects + string(tok.Project))},
		append(more, clientv3.OpPut(keyNames+tok.Name, h), clientv3.OpPut(keyTokens+h, encode(tok)))...)
	if err != nil {
		return "", err
	}
	if !ok {
		return "", failf(op, dsec.Exists, "a token is called %s already, or its project has just gone", tok.Name)
	}
	return secret, nil
}

// List implements dsec.Tokens.
func (t Tokens) List(context.Context) ([]dsec.Token, error) {
	var list []dsec.Token
	t.c.mirror.read(func(s *state) {
		for _, tok := range s.tokens {
			tok.Rights = slices.Clone(tok.Rights)
			list = append(list, tok)
		}
	})
	slices.SortFunc(list, func(a, b dsec.Token) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Revoke implements dsec.Tokens. The name is free afterwards.
func (t Tokens) Revoke(ctx context.Context, name string) error {
	const op = "cluster.Revoke"
	hash, revision, err := t.named(ctx, op, name)
	if err != nil {
		return err
	}
	if err := t.c.catchUp(ctx, op); err != nil {
		return err
	}
	conds := []clientv3.Cmp{unchanged(keyNames+name, revision)}
	switch heir, needed := t.heir(hash); {
	case needed && heir == "":
		return failf(op, dsec.Conflict, "token %s is the last with the right %s; make another first, one that lasts as long", name, dsec.RightAdmin)
	case needed:
		conds = append(conds, present(keyTokens+heir)) // not revoked at the same time
	}
	ok, err := t.c.commit(ctx, op, conds, clientv3.OpDelete(keyNames+name), clientv3.OpDelete(keyTokens+hash))
	if err == nil && !ok {
		err = failf(op, dsec.Conflict, "tokens changed while %s was to be revoked", name)
	}
	return err
}

// heir finds a token with the right of an operator that outlasts the one with a hash. It is
// needed if that one has the right.
func (t Tokens) heir(hash string) (heir string, needed bool) {
	now := time.Now()
	admin := func(tok dsec.Token) bool {
		return slices.Contains(tok.Rights, dsec.RightAdmin) && (tok.Expires.IsZero() || now.Before(tok.Expires))
	}
	t.c.mirror.read(func(s *state) {
		tok := s.tokens[hash]
		if needed = admin(tok); !needed {
			return
		}
		for h, other := range s.tokens {
			lasts := other.Expires.IsZero() || !tok.Expires.IsZero() && !other.Expires.Before(tok.Expires)
			if h != hash && admin(other) && lasts {
				heir = h
			}
		}
	})
	return heir, needed
}

// named finds the hash of a token by its name, and the revision of the name.
func (t Tokens) named(ctx context.Context, op, name string) (hash string, revision int64, err error) {
	if err := checkToken(op, name); err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := t.c.client.Get(ctx, keyNames+name)
	if err != nil {
		return "", 0, fail(op, err)
	}
	if len(got.Kvs) == 0 {
		return "", 0, failf(op, dsec.NotFound, "no token is called %s", name)
	}
	return string(got.Kvs[0].Value), got.Kvs[0].ModRevision, nil
}

// Authenticate returns what the bearer of a secret may do. It asks no one: see mirror.
// The Rights are shared; they must not be changed.
func (t Tokens) Authenticate(secret string) (dsec.Token, error) {
	const op = "cluster.Authenticate"
	h := hashSecret(secret)
	var tok dsec.Token
	var ok bool
	t.c.mirror.read(func(s *state) {
		if tok, ok = s.tokens[h]; ok {
			_, ok = s.projects[tok.Project] // a token ends with its project
		}
	})
	// The message is the same for all secrets that are not known, and holds nothing of them.
	if !ok {
		return dsec.Token{}, failf(op, dsec.Unauthenticated, "the token is not known")
	}
	if !tok.Expires.IsZero() && !time.Now().Before(tok.Expires) {
		return dsec.Token{}, failf(op, dsec.Unauthenticated, "the token %s expired at %s", tok.Name, tok.Expires.Format(time.RFC3339))
	}
	return tok, nil
}

// checkToken tells whether a token may be called so: with a name of its own, or one that begins
// with a project.
func checkToken(op, name string) error {
	project, last := dsec.ProjectID(name).Parent(), name[strings.LastIndexByte(name, '/')+1:]
	if project != "" {
		if err := project.Check(); err != nil {
			return dsec.WithOp(op, "", err)
		}
	}
	return checkName(op, "token", last)
}

func hashSecret(secret string) string {
	h := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(h[:])
}

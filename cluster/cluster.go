// Package cluster keeps what is small and must be agreed on by all nodes, in etcd: nodes with
// their numbers and epochs, tokens, projects, image names, and the key of sandbox IDs.
//
// It does not know sandboxes: no call on the path of a create or an exec writes here, and
// most do not even ask. Whatever is read often (Authenticate, Resolve, the address of a node)
// is answered from a mirror of all keys in memory, which one watch keeps current; what one
// Cluster has written, it reads back at once, and others see it within milliseconds. While
// etcd is away, reads go on with what is known and writes are Unavailable.
//
// Keys, with values in JSON unless noted:
//
//	/dsec/format            "1", plain: the version of this layout
//	/dsec/idkey             32 bytes
//	/dsec/nodes/NAME        number and epoch; never removed by itself
//	/dsec/numbers/N         name, plain: who has the number
//	/dsec/live/NAME         address and instance; under the node's lease
//	/dsec/tokens/HASH       what a token may do; HASH is the SHA-256 of its secret
//	/dsec/tokennames/NAME   HASH, plain
//	/dsec/projects/NAME     quota; NAME says what it is below
//	/dsec/images/NAME@VER   what an image name stands for, for everybody
//	/dsec/projectimages/PROJECT/NAME@VER  and for one project, whose slashes are colons here
//	/dsec/imagetags/NAME@TAG        which version a tag stands for now
//	/dsec/projectimagetags/PROJECT/NAME@TAG
//
// Beside these, and not in the mirror, are the list of snapshots and the profiles of layers:
//
//	/dsec-snapshots/ID      what it is a state of
//	/dsec-profiles/DIGEST   the blob that says what of a layer is wanted first, plain
//
// What projects use of their quotas is counted in memory alone, by Ledger.
//
// Errors are dsec.Error. Locks: Ledger.mu, then mirror.mu; none is held over a call. Whoever opens a
// Cluster closes it; Close ends its goroutines and waits for them. Read mirror.go next.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/dsec-go/dsec"
)

const (
	root        = "/dsec/"
	keyFormat   = root + "format"
	keyID       = root + "idkey"
	keyNodes    = root + "nodes/"
	keyNumbers  = root + "numbers/"
	keyLive     = root + "live/"
	keyTokens   = root + "tokens/"
	keyNames    = root + "tokennames/"
	keyProjects = root + "projects/"
	keyImages   = root + "images/"
	keyOwn      = root + "projectimages/"
	keyTags     = root + "imagetags/"
	keyOwnTags  = root + "projectimagetags/"

	format = "1"

	// callLimit bounds a call whose context has no earlier end: etcd's client waits for ever
	// for a server that is away.
	callLimit = 10 * time.Second
)

// Options of Open.
type Options struct {
	Endpoints []string // of the etcd cluster, as etcd's own client takes them
}

// Cluster is a connection to the shared state. It is safe for concurrent use.
type Cluster struct {
	client   *clientv3.Client
	embedded *Embedded // nil unless this Cluster owns the server
	mirror   *mirror
	ledger   *Ledger
}

// Open connects to an etcd cluster, and returns when all of its state is here.
func Open(ctx context.Context, o Options) (*Cluster, error) {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            o.Endpoints,
		DialTimeout:          callLimit,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		Logger:               zap.NewNop(), // its errors reach us as errors
	})
	if err != nil {
		return nil, fail("cluster.Open", err)
	}
	c := &Cluster{client: client}
	if err := c.init(ctx); err != nil {
		client.Close()
		return nil, err
	}
	if c.mirror, err = openMirror(ctx, client); err != nil {
		client.Close()
		return nil, fail("cluster.Open", err)
	}
	c.ledger = newLedger(c.mirror)
	return c, nil
}

// OpenEmbedded starts an etcd of its own in dir and connects to it. Close ends both. Warnings
// of etcd go to log; nil drops them.
func OpenEmbedded(ctx context.Context, dir string, log *slog.Logger) (*Cluster, error) {
	e, err := StartEmbedded(ctx, EmbeddedOptions{Dir: dir, Log: log})
	if err != nil {
		return nil, err
	}
	c, err := Open(ctx, Options{Endpoints: e.Endpoints()})
	if err != nil {
		e.Close()
		return nil, err
	}
	c.embedded = e
	return c, nil
}

// Close ends the connection, and the server if OpenEmbedded started it. Registrations are
// closed first, by their owners.
func (c *Cluster) Close() error {
	c.mirror.close()
	err := c.client.Close()
	if c.embedded != nil {
		c.embedded.Close()
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		return fail("cluster.Close", err)
	}
	return nil
}

// init writes what every cluster has, once.
func (c *Cluster) init(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := c.client.Txn(ctx).
		If(absent(keyFormat)).
		Then(clientv3.OpPut(keyFormat, format)).
		Commit()
	if err != nil {
		return fail("cluster.Open", err)
	}
	got, err := c.client.Get(ctx, keyFormat)
	if err != nil {
		return fail("cluster.Open", err)
	}
	if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != format {
		return &dsec.Error{Op: "cluster.Open", Kind: dsec.Unsupported, Err: errors.New("the cluster's state is of another version")}
	}
	var key dsec.IDKey
	rand.Read(key[:]) //nolint:errcheck // never fails
	_, err = c.client.Txn(ctx).
		If(absent(keyID)).
		Then(clientv3.OpPut(keyID, string(key[:])), clientv3.OpPut(keyProjects+string(DefaultProject), encode(project{}))).
		Commit()
	return fail("cluster.Open", err)
}

// IDKey returns the secret that tags sandbox IDs. It is made with the cluster and never changes.
func (c *Cluster) IDKey(ctx context.Context) (dsec.IDKey, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	got, err := c.client.Get(ctx, keyID)
	if err != nil {
		return dsec.IDKey{}, fail("cluster.IDKey", err)
	}
	var key dsec.IDKey
	if len(got.Kvs) != 1 || len(got.Kvs[0].Value) != len(key) {
		return dsec.IDKey{}, &dsec.Error{Op: "cluster.IDKey", Kind: dsec.Internal, Err: errors.New("the cluster has no key")}
	}
	copy(key[:], got.Kvs[0].Value)
	return key, nil
}

// commit runs a transaction. If its conditions hold, commit returns true once the mirror has
// what it wrote.
func (c *Cluster) commit(ctx context.Context, op string, conds []clientv3.Cmp, ops ...clientv3.Op) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	resp, err := c.client.Txn(ctx).If(conds...).Then(ops...).Commit()
	if err != nil {
		return false, fail(op, err)
	}
	if !resp.Succeeded {
		return false, nil
	}
	// What deleted nothing is no change: the revision is of another, which may be none that the
	// mirror will ever see.
	if !slices.ContainsFunc(resp.Responses, changed) {
		return true, nil
	}
	return true, fail(op, c.mirror.wait(ctx, resp.Header.Revision))
}

// changed reports whether an operation of a transaction has changed anything.
func changed(r *etcdserverpb.ResponseOp) bool {
	d := r.GetResponseDeleteRange()
	return r.GetResponsePut() != nil || d != nil && d.Deleted > 0
}

func absent(key string) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
}

func present(key string) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), ">", 0)
}

func unchanged(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
}

// fail gives an error of etcd its kind; nil stays nil.
func fail(op string, err error) error {
	if err == nil {
		return nil
	}
	kind := dsec.KindOf(err)
	if kind == dsec.Internal {
		kind = dsec.Unavailable
	}
	return &dsec.Error{Op: op, Kind: kind, Err: fmt.Errorf("ask etcd: %w", err)}
}

// failf is dsec.Errorf with an operation.
func failf(op string, kind dsec.ErrorKind, format string, args ...any) error {
	e := dsec.Errorf(kind, format, args...)
	e.Op = op
	return e
}

var plainName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// checkName tells whether a node, token or project may be called so.
func checkName(op, what, name string) error {
	if !plainName.MatchString(name) {
		return failf(op, dsec.Invalid, "%s name %.80q: use at most 63 of a-z 0-9 . _ -, beginning with a letter or digit", what, name)
	}
	return nil
}

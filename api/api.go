// Package api is the front door: it checks who calls, finds the node that a
// sandbox lives on, and relays. It keeps nothing, so any number of replicas
// serve one cluster.
//
// What it does not do: it decodes no body of a call that is for a sandbox, it
// places nothing by itself (Placement does), and it knows no telemetry (Events
// tells who wants to know).
//
// The way of a call: request id, overload gate, token, right. Then by what it
// is for:
//
//	a sandbox        its ID is decoded; the node's handler serves it, in this
//	                 process or behind a streaming proxy
//	Create, List     Placement names the nodes; a full one is passed over
//	the rest         served here
//
// Invariants:
//   - No call but /healthz and the metrics passes without a token.
//   - Who calls travels in the context as a dsec.Caller, and to a node of
//     another process in headers that count only beside the cluster's secret.
//     Whoever sends such headers from outside is not believed.
//   - An ID with a wrong tag is NotFound without asking anybody.
//   - A call ends soon after its token: it is looked up again every Recheck.
//   - Beyond MaxInFlight calls the answer is Exhausted at once.
//
// Read next: package rpc, then router.go.
package api

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
)

// Authenticator knows the tokens.
type Authenticator interface {
	// Authenticate gives the token of a secret; Unauthenticated for one that is
	// unknown, revoked or expired.
	Authenticate(ctx context.Context, secret string) (dsec.Token, error)
}

// Config says what a front door stands before. Auth, Key and Nodes are required.
type Config struct {
	Auth  Authenticator
	Key   *dsec.IDKey
	Nodes Placement

	// Services that are served here; its Sandboxes, Commands, Files, Ports,
	// Trajectories and Screens are not looked at. What is nil answers Unsupported.
	Local dsec.Services

	RPC         rpc.Options
	Metrics     http.Handler  // at /metrics, without a token; none when nil
	MaxInFlight int           // calls at a time; default DefaultInFlight
	Recheck     time.Duration // how often a call under way has its token looked up again; default DefaultRecheck
	Events      Events
}

// DefaultInFlight is how many calls are served at a time by default. Most of
// them wait: a replica for 5,000 busy sandboxes has that many attached.
const DefaultInFlight = 32768

// DefaultRecheck is how long a call outlives its token by default.
const DefaultRecheck = 2 * time.Second

// Events tells of what happens. A nil callback is not called; each must be
// quick and safe for concurrent use.
type Events struct {
	Access func(Access) // after each call
}

// Access is one call as it went.
type Access struct {
	Request   string
	Procedure string // "/dsec.v1.Commands/Run", or another path
	Sandbox   dsec.SandboxID
	Token     string
	Project   dsec.ProjectID
	Status    int // of HTTP; a stream that failed on the way has 200
	Failed    bool
	Kind      dsec.ErrorKind // of the failure, however late it came
	Sent      int64
	Took      time.Duration
}

// Handler is the front door.
type Handler struct {
	cfg      Config
	local    http.Handler
	inFlight atomic.Int64
}

// New gives the front door of c.
func New(c Config) *Handler {
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultInFlight
	}
	if c.Recheck == 0 {
		c.Recheck = DefaultRecheck
	}
	local := c.Local
	local.Sandboxes = router{c.Key, c.Nodes}
	local.Commands, local.Files, local.Ports, local.Trajectories, local.Screens = nil, nil, nil, nil, nil
	local.Functions = functions{c.Nodes}
	return &Handler{cfg: c, local: rpc.Handler(local, c.RPC)}
}

// InFlight is how many calls are being served.
func (h *Handler) InFlight() int { return int(h.inFlight.Load()) }

// ServeHTTP serves one call.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/healthz":
		healthz(w)
		return
	case r.URL.Path == "/metrics" && h.cfg.Metrics != nil:
		h.cfg.Metrics.ServeHTTP(w, r)
		return
	}
	a := Access{Request: rpc.RequestIDOr(r.Header.Get(rpc.HeaderRequest)), Procedure: r.URL.Path}
	begin := time.Now()
	rec, ctx := rpc.Follow(w), r.Context()
	if h.cfg.Events.Access != nil {
		defer func() {
			kind, ok := rec.Failure(ctx)
			a.Status, a.Sent, a.Failed, a.Kind, a.Took = rec.Status(), rec.Sent(), !ok, kind, time.Since(begin)
			h.cfg.Events.Access(a)
		}()
	}
	defer h.inFlight.Add(-1)
	if h.inFlight.Add(1) > int64(h.cfg.MaxInFlight) {
		rpc.WriteError(rec, r, a.Request, dsec.Errorf(dsec.Exhausted, "the server has %d calls in hand", h.cfg.MaxInFlight))
		return
	}
	secret := secretOf(r)
	next, r, err := h.admit(r, secret, &a)
	if err != nil {
		rpc.WriteError(rec, r, a.Request, err)
		return
	}
	g := h.guard(r.Context(), rec, secret)
	defer g.leave()
	ctx = g.ctx
	next.ServeHTTP(rec, r.WithContext(ctx))
	rec.Served()
}

// secretOf gives the secret that a request carries, "" if it has none.
func secretOf(r *http.Request) string {
	secret, ok := strings.CutPrefix(r.Header.Get(rpc.HeaderAuth), "Bearer ")
	if !ok {
		return ""
	}
	return secret
}

// admit checks who calls and finds who serves. The request that it gives
// carries the caller and no secret.
func (h *Handler) admit(r *http.Request, secret string, a *Access) (http.Handler, *http.Request, error) {
	if secret == "" {
		return nil, r, dsec.Errorf(dsec.Unauthenticated, "no token: header %s is not \"Bearer TOKEN\"", rpc.HeaderAuth)
	}
	token, err := h.cfg.Auth.Authenticate(r.Context(), secret)
	if err != nil {
		return nil, r, err
	}
	a.Token, a.Project = token.Name, token.Project
	known := rpc.Known(r.URL.Path)
	if err := allowed(token, r.URL.Path); err != nil && known {
		return nil, r, err
	}
	from, _ := Inside(r.Context())
	ctx := dsec.WithCaller(r.Context(), dsec.Caller{
		Project: token.Project, Token: token.Name, Admin: has(token, dsec.RightAdmin), Rights: token.Rights, Expires: token.Expires, Sandbox: from,
	})
	r2 := r.WithContext(ctx)
	r2.Header = r.Header.Clone()
	for _, name := range []string{rpc.HeaderAuth, headerPeer, headerProject, headerToken, headerAdmin} {
		r2.Header.Del(name)
	}
	r2.Header.Set(rpc.HeaderRequest, a.Request)
	if !known || !forSandbox(r.URL.Path) { // of what is not known, the local handler says so
		return h.local, r2, nil
	}
	a.Sandbox = dsec.SandboxID(r.Header.Get(rpc.HeaderSandbox))
	if a.Sandbox == "" {
		return nil, r, dsec.Errorf(dsec.Invalid, "no sandbox is named: header %s is missing", rpc.HeaderSandbox)
	}
	node, err := h.cfg.find(a.Sandbox)
	if err != nil {
		return nil, r, err
	}
	return node.Handler, r2, nil
}

func (c *Config) find(id dsec.SandboxID) (Node, error) { return router{c.Key, c.Nodes}.node(id) }

func healthz(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(`{"status":"ok","version":"` + dsec.Version + `"}` + "\n"))
}

// AuthFunc is a function as an Authenticator.
type AuthFunc func(ctx context.Context, secret string) (dsec.Token, error)

// Authenticate calls f.
func (f AuthFunc) Authenticate(ctx context.Context, secret string) (dsec.Token, error) {
	return f(ctx, secret)
}

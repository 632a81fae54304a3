package main

import (
	"context"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/rpc"
)

// door is the node's front: the api before this one node, with health and
// metrics, which need no token, beside it.
func (n *node) door() http.Handler {
	front := n.front(tokens{n.cluster.Tokens()})
	n.telemetry.watchDoor(front)
	mux := http.NewServeMux()
	mux.Handle("/", front)
	mux.Handle("GET /metrics", promhttp.HandlerFor(n.telemetry.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", n.health)
	return mux
}

// front is the api before this one node, for the tokens that auth knows.
func (n *node) front(auth api.Authenticator) *api.Handler {
	options := rpc.Options{Log: n.log}
	services := n.services()
	return api.New(api.Config{
		Auth: auth,
		Key:  n.key,
		Nodes: api.Single{Node: api.Node{
			Name: n.name, Number: n.place.Node, Handler: rpc.Handler(services, options), Services: services,
		}},
		Local:  dsec.Services{Images: services.Images, Jobs: services.Jobs, Tokens: services.Tokens, Projects: services.Projects, Nodes: services.Nodes, Snapshots: services.Snapshots},
		RPC:    options,
		Events: api.Events{Access: n.telemetry.access},
	})
}

// health says that the node serves, and whether it can take new sandboxes.
func (n *node) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	counts, status, word := n.edge.Counts(), http.StatusOK, "ok"
	if counts.Broken {
		status, word = http.StatusServiceUnavailable, "the journal cannot be written"
	}
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"status":%q,"version":%q,"node":%q,"sandboxes":%d}`+"\n", word, dsec.Version, n.name, counts.Alive)
}

// tokens makes the cluster's tokens fit the api.
type tokens struct{ cluster.Tokens }

// Authenticate gives the token of a secret.
func (t tokens) Authenticate(_ context.Context, secret string) (dsec.Token, error) {
	return t.Tokens.Authenticate(secret)
}

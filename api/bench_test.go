package api_test

import (
	"context"
	"net/http/httptest"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// nothing ends every command at once: what is left is the way there and back.
type nothing struct{ dsec.Commands }

func (nothing) Run(_ context.Context, _ dsec.Call, c dsec.Command, _ []byte) (dsec.Result, error) {
	return dsec.Result{CommandStatus: dsec.CommandStatus{ID: "c1", Command: c, Outcome: dsec.Exited}}, nil
}

// BenchmarkRun is what client, api and rpc add to a command on a local node.
func BenchmarkRun(b *testing.B) {
	f := rpctest.New()
	s := f.Services()
	s.Commands = nothing{}
	node := api.Node{Number: 1, Handler: rpc.Handler(s, rpc.Options{}), Services: s}
	srv := httptest.NewServer(api.New(api.Config{Auth: auth, Key: &f.Key, Nodes: api.Single{Node: node}}))
	defer srv.Close()
	tr := client.NewTransport()
	defer tr.CloseIdleConnections()
	c, err := client.Open(client.Config{URL: srv.URL, Token: "a", Transport: tr})
	if err != nil {
		b.Fatal(err)
	}
	box, err := c.Sandboxes.Create(b.Context(), spec, dsec.CreateOptions{})
	if err != nil {
		b.Fatal(err)
	}
	on, cmd := dsec.Call{Sandbox: box.ID}, dsec.Command{Argv: []string{"true"}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Commands.Run(b.Context(), on, cmd, nil); err != nil {
			b.Fatal(err)
		}
	}
}

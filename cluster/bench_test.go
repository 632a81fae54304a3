package cluster_test

import (
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/cluster"
)

func BenchmarkAuthenticate(b *testing.B) {
	c := open(b)
	secret, err := c.Tokens().Issue(b.Context(), dsec.Token{Name: "bench", Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightAdmin}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Tokens().Revoke(b.Context(), "bench") //nolint:errcheck // the server goes too
	for b.Loop() {
		if _, err := c.Tokens().Authenticate(secret); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	c := open(b)
	if err := c.Names().Put(b.Context(), entry("bench", "1", "sha256:1")); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := c.Names().Resolve("bench"); err != nil {
			b.Fatal(err)
		}
	}
}

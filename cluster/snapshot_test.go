package cluster_test

import (
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

func TestSnapshots(t *testing.T) {
	s := open(t).Snapshots()
	a := dsec.Snapshot{
		ID: dsec.SnapshotIDOf([32]byte{1}), Project: "p", Sandbox: "sb", Layers: []string{"sha256:x"}, Created: time.Unix(1000, 0).UTC(), Size: 7, Memory: true, Key: "k",
		Spec: dsec.Spec{Kind: dsec.MicroVM, Env: map[string]string{"large": "left out"}},
	}
	b := a
	b.ID = dsec.SnapshotIDOf([32]byte{2})
	for _, x := range []dsec.Snapshot{a, b, a} {
		if err := s.AddSnapshot(t.Context(), x); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := s.DropSnapshot(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	all, err := open(t).Snapshots().Snapshots(t.Context())
	if err != nil || len(all) != 1 {
		t.Fatalf("%v, %v", all, err)
	}
	got := all[0]
	if got.ID != a.ID || got.Key != "k" || !got.Created.Equal(a.Created) || !got.Memory || got.Spec.Kind != dsec.MicroVM || got.Spec.Env != nil || got.Layers[0] != "sha256:x" {
		t.Errorf("listed %+v", got)
	}
}

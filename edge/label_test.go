package edge_test

import (
	"fmt"
	"maps"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/synthetic"
)

// Labels can be changed while a sandbox lives, outlast the edge, and do not make
// its Spec another one.
func TestLabel(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.open()
	ctx := t.Context()
	s := spec()
	s.Labels = map[string]string{"a": "1", "b": "2"}
	sb := r.create(s, "k")
	want := map[string]string{"a": "9", "c": "3"}
	check := func(when string) {
		t.Helper()
		if got := r.get(sb.ID).Spec.Labels; !maps.Equal(got, want) {
			t.Errorf("%s: labels %v, want %v", when, got, want)
		}
		for k, v := range map[string]string{"a": "9", "c": "3"} {
			if list, err := r.node.List(ctx, dsec.Filter{Labels: map[string]string{k: v}}); err != nil || len(list) != 1 {
				t.Errorf("%s: %d have %s=%s, %v", when, len(list), k, v, err)
			}
		}
		for k, v := range map[string]string{"a": "1", "b": "2"} {
			if list, err := r.node.List(ctx, dsec.Filter{Labels: map[string]string{k: v}}); err != nil || len(list) != 0 {
				t.Errorf("%s: %d have %s=%s, %v", when, len(list), k, v, err)
			}
		}
		if again := r.create(s, "k"); again.ID != sb.ID {
			t.Errorf("%s: the key gives %s, want %s", when, again.ID, sb.ID)
		}
	}
	if _, err := r.node.Label(ctx, sb.ID, map[string]string{"a": "8", "b": ""}); err != nil {
		t.Fatal(err)
	}
	if got, err := r.node.Label(ctx, sb.ID, map[string]string{"a": "9", "c": "3"}); err != nil || !maps.Equal(got.Spec.Labels, want) {
		t.Fatalf("label gives %v, %v", got.Spec.Labels, err)
	}
	check("at first")
	r.kill()
	r.open()
	check("after a kill")
	r.close() // makes a checkpoint
	r.open()
	check("after a checkpoint")
	many := map[string]string{}
	for i := range dsec.MaxLabels {
		many[fmt.Sprint("x", i)] = "y"
	}
	_, err := r.node.Label(ctx, sb.ID, many)
	wantKind(t, "too many labels", err, dsec.Invalid)
	if _, err := r.node.Stop(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	_, err = r.node.Label(ctx, sb.ID, map[string]string{"a": "b"})
	wantKind(t, "an ended sandbox", err, dsec.Conflict)
	if got := r.get(sb.ID).Spec.Labels; !maps.Equal(got, want) {
		t.Errorf("ended: labels %v, want %v", got, want)
	}
	r.close()
}

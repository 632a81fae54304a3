package edge

import (
	"context"
	"maps"

	"github.com/dsec-go/dsec"
)

// Label sets labels of a sandbox that has not ended; an empty value takes one
// away. The Spec that a keyed create is compared with stays what it was.
// Labeling is no use of the sandbox.
func (n *Node) Label(ctx context.Context, id dsec.SandboxID, labels map[string]string) (dsec.Sandbox, error) {
	const op = "edge.Label"
	e, err := n.get(id)
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	// One at a time: each record holds all that was set so far.
	n.labeling.Lock()
	defer n.labeling.Unlock()
	e.mu.Lock()
	set, all := overlay(e.rec.labels, labels), e.rec.effectiveLabels(labels)
	err = e.usable()
	e.mu.Unlock()
	if err == nil && len(all) > dsec.MaxLabels {
		err = dsec.Errorf(dsec.Invalid, "the sandbox would have %d labels, more than %d", len(all), dsec.MaxLabels)
	}
	if err == nil {
		err = n.append(change{Op: opLabeled, ID: id, Labels: set}, func() {
			e.change(func(r *record) *record { return r.labeled(set) })
		})
	}
	if err != nil {
		return dsec.Sandbox{}, dsec.WithOp(op, id, err)
	}
	return n.view(ctx, e), nil
}

// overlay gives old with what set says; an empty value is one taken away.
func overlay(old, set map[string]string) map[string]string {
	m := maps.Clone(old)
	if m == nil {
		m = make(map[string]string, len(set))
	}
	maps.Copy(m, set)
	return m
}

// labeled gives r with labels set over those of its Spec.
func (r *record) labeled(set map[string]string) *record {
	c := *r
	c.labels = set
	return &c
}

// effectiveLabels gives the labels of r as they are now, and as more would make
// them. The map is the caller's.
func (r *record) effectiveLabels(more map[string]string) map[string]string {
	m := maps.Clone(r.spec.spec.Labels)
	for _, set := range []map[string]string{r.labels, more} {
		for k, v := range set {
			if v == "" {
				delete(m, k)
				continue
			}
			if m == nil {
				m = map[string]string{}
			}
			m[k] = v
		}
	}
	return m
}

// label gives one label of r as it is now.
func (r *record) label(k string) (string, bool) {
	if v, set := r.labels[k]; set {
		return v, v != ""
	}
	v, ok := r.spec.spec.Labels[k]
	return v, ok
}

package cluster

import "testing"

// RevokeLease takes the present lease away behind the registration's back.
func (r *Registration) RevokeLease(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	lease := r.lease
	r.mu.Unlock()
	r.c.client.Revoke(t.Context(), lease) //nolint:errcheck // it may be gone already
	got, err := r.c.client.Get(t.Context(), keyLive+r.o.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.c.mirror.wait(t.Context(), got.Header.Revision); err != nil && r.c.mirror.at() < got.Header.Revision {
		t.Fatal(err)
	}
}

package api_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// TestTrajectoryThroughTheDoor reads what was recorded of a sandbox that its
// node has forgotten: the project it was of may, no other, and an operator.
func TestTrajectoryThroughTheDoor(t *testing.T) {
	ctx := t.Context()
	d := build(t, nil)
	for where, fake := range map[string]*rpctest.Fake{"fake": d.local, "fake2": d.remote} {
		id := fake.Key.New(fake.Place) // no sandbox has it any more
		fake.SetTrajectory(id, rpctest.Trajectory{
			Records: []dsec.Record{
				{Seq: 1, Op: dsec.RecordCreate, Who: dsec.Who{Project: "pa"}, Hash: "x"},
				{Seq: 2, Op: dsec.RecordEnd, Who: dsec.Who{Project: "pa"}, Hash: "y"},
			},
			Bodies: map[uint64][]byte{1: []byte("secret")}, Over: true,
		})
		read := func(token string, id dsec.SandboxID) (errs [3]error) {
			s := open(t, d.url, token, false).Trajectories
			_, errs[0] = s.Head(ctx, id)
			n := 0
			for _, err := range s.Records(ctx, id, 0) {
				errs[1] = errors.Join(errs[1], err)
				n++
			}
			if errs[1] == nil && n != 2 {
				t.Errorf("%s: %d records as %s", where, n, token)
			}
			b, err := s.Body(ctx, id, 1)
			if errs[2] = err; err == nil {
				b.Close()
			}
			return errs
		}
		for range 2 { // the second time it is remembered whose it is
			for _, token := range []string{"a", "admin"} {
				if errs := read(token, id); errs != [3]error{} {
					t.Errorf("%s: as %s: %v", where, token, errs)
				}
			}
			for _, err := range read("b", id) {
				if err == nil || dsec.KindOf(err) != dsec.NotFound {
					t.Errorf("%s: another project's trajectory: %v, want NotFound", where, err)
				}
			}
		}
		// What another project's trajectory says is what none at all says.
		none := fake.Key.New(fake.Place)
		words := func(e error, id dsec.SandboxID) string {
			text, _, _ := strings.Cut(strings.ReplaceAll(e.Error(), string(id), "ID"), " (request")
			return text
		}
		foreign, missing := read("b", id), read("b", none)
		for i := range foreign {
			if words(foreign[i], id) != words(missing[i], none) {
				t.Errorf("%s: %q for another's, %q for none", where, foreign[i], missing[i])
			}
		}
		for _, err := range read("img", id) {
			if err == nil || dsec.KindOf(err) != dsec.Denied {
				t.Errorf("%s: without the right: %v, want Denied", where, err)
			}
		}
	}
}

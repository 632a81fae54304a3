package edge_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// TestClockIsSet sets the host's clock by hours, forwards and backwards, under
// sandboxes with a time to live and an idle time: they end when so much time has
// passed, and their records are in order.
func TestClockIsSet(t *testing.T) {
	for _, by := range []time.Duration{7 * time.Hour, -7 * time.Hour} {
		t.Run(by.String(), func(t *testing.T) {
			move := edge.MovableClock(t)
			inFakeTime(t, synthetic.Options{}, nil, func(t *testing.T, r *rig) {
				defer r.close()
				ttl, idle := spec(), spec()
				ttl.TTL = time.Hour
				idle.TTL, idle.Idle = 20*time.Hour, 30*time.Minute
				a, b, c := r.create(ttl, ""), r.create(idle, ""), r.create(ttl, "")
				r.pause(c.ID)
				sleep(10 * time.Minute)
				move(by)
				r.exec(b.ID, "true")
				d := r.create(ttl, "")
				if got := r.get(d.ID); !got.Created.After(r.get(a.ID).Created) || got.Expires.Sub(got.Created) != time.Hour {
					t.Errorf("made behind the jump: %+v", got)
				}
				sleep(30*time.Minute - time.Second)
				for _, sb := range []dsec.Sandbox{a, b, d} {
					if got := r.get(sb.ID); got.State != dsec.Running {
						t.Errorf("%s is %s before its time", sb.ID, got.State)
					}
				}
				sleep(time.Second)
				if got := r.wantEnd(b.ID, dsec.Stopped, dsec.CauseIdle); got.Ended.Sub(got.Created) != 40*time.Minute {
					t.Errorf("it lived %v", got.Ended.Sub(got.Created))
				}
				sleep(20*time.Minute - time.Second)
				if got := r.get(a.ID); got.State != dsec.Running {
					t.Errorf("it is %s before its time", got.State)
				}
				sleep(time.Second)
				r.wantEnd(a.ID, dsec.Stopped, dsec.CauseTTL)
				r.wantEnd(c.ID, dsec.Stopped, dsec.CauseTTL)
				if _, err := r.node.Extend(t.Context(), d.ID, time.Minute); err != nil {
					t.Fatal(err)
				}
				sleep(time.Minute)
				r.wantEnd(d.ID, dsec.Stopped, dsec.CauseTTL)
				// What has ended is listed for its day.
				sleep(22 * time.Hour)
				r.get(a.ID)
				// The next process takes the clock as it is.
				e := r.create(ttl, "")
				r.close()
				r.open()
				synctest.Wait()
				want := dsec.Running
				if by > 0 { // it is later by hours than it was for the last process
					want = dsec.Stopped
				}
				if got := r.get(e.ID); got.State != want {
					t.Errorf("behind a restart it is %s", got.State)
				}
			})
		})
	}
}

package trajectory_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

// TestPowerCuts cuts the power again and again, with checkpoints, segments and
// archives in between. What was answered is answered the same ever after, and
// what the record holds is a whole chain.
func TestPowerCuts(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 3))
			r := newRig(t)
			r.tune = func(c *trajectory.Config) { c.SealBytes = 2 << 10 }
			r.open()
			type box struct {
				id    dsec.SandboxID
				steps uint64 // answered
				ended bool
			}
			var boxes []*box
			for range 3 {
				boxes = append(boxes, &box{id: r.create()})
			}
			for range 60 {
				b := boxes[rnd.IntN(len(boxes))]
				switch rnd.IntN(12) {
				case 0:
					r.kill(func(d *journaltest.CrashFS) *journaltest.CrashFS { return d.PowerCut(rnd) })
					r.open()
				case 1:
					r.kill(process)
					r.open()
				case 2:
					if err := r.log.Tidy(t.Context()); err != nil {
						t.Fatal(err)
					}
				case 3:
					r.node.Close() // a checkpoint
					r.kill(process)
					r.open()
				case 4:
					// A create is not synced: give it an answered step first, as a
					// sandbox that the power took has no trajectory to speak of.
					if rnd.IntN(4) == 0 && b.steps > 0 {
						r.Sandboxes.Stop(t.Context(), b.id)
						b.ended = true
					}
				default:
					if b.ended {
						continue
					}
					on := step(b.id, "s", b.steps+1)
					res, err := r.Commands.Run(t.Context(), on, sh(fmt.Sprintf("echo %d", b.steps+1)), nil)
					if k := dsec.KindOf(err); err != nil && (k == dsec.Lost || k == dsec.Conflict) {
						b.ended = true // the power took it while it was young
						continue
					}
					if err != nil || string(res.Out) != fmt.Sprintf("%d\n", b.steps+1) {
						t.Fatalf("step %d: %+v %v", b.steps+1, res, err)
					}
					b.steps++
				}
				for _, b := range boxes {
					for n := range b.steps {
						res, err := r.Commands.Run(t.Context(), step(b.id, "s", n+1), sh(fmt.Sprintf("echo %d", n+1)), nil)
						if err != nil || !res.Replayed || string(res.Out) != fmt.Sprintf("%d\n", n+1) {
							t.Fatalf("answered step %d: %+v %v", n+1, res, err)
						}
					}
					if b.steps > 0 {
						r.records(b.id)
					}
				}
			}
			r.close()
		})
	}
}

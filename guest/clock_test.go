package guest_test

import (
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestClocks lets commands stand for longer than their times, begun before
// and meanwhile.
func TestClocks(t *testing.T) {
	b := newBox(t)
	const limit = 400 * time.Millisecond
	var all []dsec.CommandStatus
	start := func() {
		for _, c := range []dsec.Command{{Shell: "sleep 60", Timeout: limit}, {Shell: "sleep 60", Idle: limit}} {
			st, err := b.Commands().Start(b.Context(), nobody, c)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, st)
		}
	}
	start()
	for range 2 {
		if err := b.StopClocks(b.Context()); err != nil {
			t.Fatal(err)
		}
	}
	start()
	<-time.After(2 * limit)
	list, err := b.Commands().List(b.Context(), nobody)
	if err != nil || len(list) != 4 {
		t.Fatalf("%d commands, %v", len(list), err)
	}
	for _, st := range list {
		if st.Outcome != dsec.StillRunning {
			t.Errorf("while its clock stands a command ends: %+v", st)
		}
	}
	for range 2 {
		if err := b.StartClocks(b.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for i, st := range all {
		want := []dsec.Outcome{dsec.TimedOut, dsec.Inactive}[i%2]
		if st := b.wait(st.ID); st.Outcome != want {
			t.Errorf("command %d ends with %s, want %s", i, st.Outcome, want)
		}
	}
}

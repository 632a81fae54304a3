package guest_test

import (
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestClocks lets commands stand for longer than their times, and asks for more
// meanwhile, which begin afterwards.
func TestClocks(t *testing.T) {
	b := newBox(t)
	const limit = 400 * time.Millisecond
	bounded := []dsec.Command{{Shell: "sleep 60", Timeout: limit}, {Shell: "sleep 60", Idle: limit}}
	want := []dsec.Outcome{dsec.TimedOut, dsec.Inactive}
	var all []dsec.CommandStatus
	for _, c := range bounded {
		all = append(all, b.start(c))
	}
	for range 2 {
		if err := b.StopClocks(b.Context()); err != nil {
			t.Fatal(err)
		}
	}
	later := make(chan dsec.CommandStatus, len(bounded))
	for _, c := range bounded {
		go func() {
			st, err := b.Commands().Start(b.Context(), nobody, c)
			if err != nil {
				t.Error(err)
			}
			later <- st
		}()
	}
	<-time.After(2 * limit)
	list, err := b.Commands().List(b.Context(), nobody)
	if err != nil || len(list) != len(bounded) {
		t.Fatalf("%d commands, %v: the others were to wait", len(list), err)
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
		if st := b.wait(st.ID); st.Outcome != want[i] {
			t.Errorf("command %d ends with %s, want %s", i, st.Outcome, want[i])
		}
	}
	for range bounded {
		if st := b.wait((<-later).ID); st.Outcome != dsec.TimedOut && st.Outcome != dsec.Inactive {
			t.Errorf("a command that waited ends with %s", st.Outcome)
		}
	}
}

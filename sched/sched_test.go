package sched_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/sched"
)

func TestReclaim(t *testing.T) {
	all := []sched.Candidate{
		{ID: "busy", Idle: 9 * time.Hour, Memory: 100, Busy: true},
		{ID: "young", Idle: time.Minute, Memory: 50},
		{ID: "old", Idle: 2 * time.Hour, Memory: 10},
		{ID: "empty", Idle: 8 * time.Hour},
		{ID: "twin-b", Idle: time.Hour, Memory: 20},
		{ID: "twin-a", Idle: time.Hour, Memory: 20},
		{ID: "big", Idle: time.Hour, Memory: 30},
	}
	for _, c := range []struct {
		need int64
		want []dsec.SandboxID
	}{
		{-1, nil},
		{0, nil},
		{1, []dsec.SandboxID{"old"}},
		{10, []dsec.SandboxID{"old"}},
		{11, []dsec.SandboxID{"old", "big"}},
		{41, []dsec.SandboxID{"old", "big", "twin-a"}},
		{1 << 40, []dsec.SandboxID{"old", "big", "twin-a", "twin-b", "young"}},
	} {
		before := slices.Clone(all)
		if got := sched.Reclaim(all, c.need); !slices.Equal(got, c.want) {
			t.Errorf("for %d bytes: %v, want %v", c.need, got, c.want)
		}
		if !slices.Equal(all, before) {
			t.Fatal("the caller's list was changed")
		}
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
}

func TestLevels(t *testing.T) {
	l := sched.Levels{Low: 5, High: 10}
	on := false
	for i, c := range []struct {
		figure float64
		want   bool
	}{{0, false}, {9.9, false}, {10, true}, {9, true}, {5.1, true}, {5, false}, {9, false}, {50, true}, {0, false}} {
		if on = l.Next(on, c.figure); on != c.want {
			t.Errorf("step %d: at %v it is %v", i, c.figure, on)
		}
	}
}

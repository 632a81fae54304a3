package driver_test

import (
	"slices"
	"testing"

	"github.com/dsec-go/dsec/driver"
)

// TestSlots has numbers that are used anew before others, none twice, and those
// of folders that an earlier process left.
func TestSlots(t *testing.T) {
	s := driver.Slots{First: 5, Limit: 9}
	take := func(want int) {
		t.Helper()
		if n, ok := s.Take(); !ok || n != want {
			t.Errorf("got %d, %v, want %d", n, ok, want)
		}
	}
	take(5)
	s.Mark(7)
	if got := s.Freed(); !slices.Equal(got, []int{6}) {
		t.Errorf("passed over: %v, want 6", got)
	}
	take(6)
	take(8)
	if n, ok := s.Take(); ok {
		t.Errorf("beyond the limit: %d", n)
	}
	s.Free(6)
	s.Free(6)
	take(6)
	if n, ok := s.Take(); ok {
		t.Errorf("freed twice, given twice: %d", n)
	}
	s.Free(7)
	s.Mark(7)
	if n, ok := s.Take(); ok {
		t.Errorf("marked and given: %d", n)
	}
}

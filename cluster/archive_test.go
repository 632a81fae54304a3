package cluster_test

import (
	"slices"
	"testing"
	"time"
)

func TestArchives(t *testing.T) {
	a := open(t).Archives()
	day := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for i, s := range []string{"first", "second", "third"} {
		for range 2 {
			if err := a.AddArchive(t.Context(), s, day.Add(time.Duration(i)*time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := a.DropArchive(t.Context(), "second", day.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := a.AddArchive(t.Context(), "", day); err == nil {
		t.Error("a segment without a name was added")
	}
	all, err := open(t).Archives().Archives(t.Context())
	if want := []string{"third", "first"}; err != nil || !slices.Equal(all, want) {
		t.Errorf("%q %v, want %q", all, err, want)
	}
}

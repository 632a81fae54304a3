package depot_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec/depot"
)

// TestLedger: what one process notes another reads, by the slot; a slot begins anew.
func TestLedger(t *testing.T) {
	dir := t.TempDir()
	open := func() *depot.Ledger {
		l, err := depot.OpenLedger(dir)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	writer, reader := open(), open()
	want := func(l *depot.Ledger, group string, fetched int64, waited time.Duration) {
		t.Helper()
		if f, w := l.Get(group); f != fetched || w != waited {
			t.Errorf("%s has %d bytes and %v, want %d and %v", group, f, w, fetched, waited)
		}
	}
	writer.Add("/dsec-a/1/work/c1", 10, time.Second)
	writer.Add("/dsec-a/1", 5, time.Second)
	writer.Add("/dsec-a/12", 7, time.Millisecond)
	writer.Add("/", 3, 0)
	writer.Add("", 1, 0)
	want(reader, "dsec-a/1", 15, 2*time.Second)
	want(reader, "dsec-a/12", 7, time.Millisecond)
	want(reader, "dsec-b/1", 0, 0)
	if f, w := reader.Take("dsec-a/1"); f != 15 || w != 2*time.Second {
		t.Errorf("took %d, %v", f, w)
	}
	want(writer, "dsec-a/1", 0, 0)
	writer.Add("/dsec-a/1", 4, 0)
	reader.Keep([]string{"dsec-a/1"})
	want(open(), "dsec-a/1", 4, 0)
	want(reader, "dsec-a/12", 0, 0)

	// As many groups as a node has slots, from many threads.
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			for i := range 30_000 {
				writer.Add(fmt.Sprintf("/dsec-many/%d", i), int64(1+k), 1)
			}
		})
	}
	wg.Wait()
	for i := range 30_000 {
		want(reader, fmt.Sprintf("dsec-many/%d", i), 10, 4)
	}
}

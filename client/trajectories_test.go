package client_test

import (
	"bytes"
	"io"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// recorded gives a trajectory of n records.
func recorded(n int) rpctest.Trajectory {
	t := rpctest.Trajectory{Bodies: map[uint64][]byte{2: bytes.Repeat([]byte("body "), 200_000)}, Over: true}
	for i := range n {
		t.Records = append(t.Records, dsec.Record{
			Seq: uint64(i + 1), Time: time.Unix(1700000000, int64(i)).UTC(), Op: dsec.RecordMkdir,
			Hash: strconv.Itoa(i), Raw: []byte(strings.Repeat("r", 1+i%2000)),
		})
	}
	return t
}

// TestRecordsSurviveCuts reads a trajectory over connections that break: every
// record comes once, in order.
func TestRecordsSurviveCuts(t *testing.T) {
	n := start(t, "h1")
	id := n.create(t).Sandbox
	want := recorded(3000)
	n.SetTrajectory(id, want)
	proxy, s := n.through(t, 600_000)
	var got []dsec.Record
	for r, err := range s.Trajectories.Records(t.Context(), id, 10) {
		if err != nil {
			t.Fatalf("after %d records: %v", len(got), err)
		}
		got = append(got, r)
	}
	if !reflect.DeepEqual(got, want.Records[10:]) {
		t.Errorf("%d records, want the %d behind the tenth", len(got), len(want.Records)-10)
	}
	proxy.mu.Lock()
	if proxy.cuts == 0 {
		t.Error("the proxy cut nothing")
	}
	proxy.mu.Unlock()
}

func TestTrajectories(t *testing.T) {
	for _, proto := range protos {
		n := start(t, proto)
		id := n.create(t).Sandbox
		want := recorded(3)
		n.SetTrajectory(id, want)
		h, err := n.Trajectories.Head(t.Context(), id)
		if err != nil || h != (dsec.Head{Seq: 3, Hash: "2", Over: true}) {
			t.Errorf("%s: head %+v, %v", proto, h, err)
		}
		b, err := n.Trajectories.Body(t.Context(), id, 2)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, want.Bodies[2]) {
			t.Errorf("%s: body of %d bytes, %v", proto, len(got), err)
		}
		b.Close()
		if _, err := n.Trajectories.Body(t.Context(), id, 1); dsec.KindOf(err) != dsec.NotFound || err == nil {
			t.Errorf("%s: body of a record without one: %v", proto, err)
		}
		if _, err := n.Trajectories.Head(t.Context(), "sbnone"); dsec.KindOf(err) != dsec.NotFound || err == nil {
			t.Errorf("%s: head of nothing: %v", proto, err)
		}
		for _, err := range n.Trajectories.Records(t.Context(), "sbnone", 0) {
			if dsec.KindOf(err) != dsec.NotFound || err == nil {
				t.Errorf("%s: records of nothing: %v", proto, err)
			}
		}
		for range n.Trajectories.Records(t.Context(), id, 0) {
			break // it can be left
		}
	}
}

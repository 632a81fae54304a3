package rpc_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
	"github.com/dsec-go/dsec/rpc/dsecv1"
	"github.com/dsec-go/dsec/rpc/rpctest"
)

// fullRecord has something in every field.
func fullRecord() dsec.Record {
	return dsec.Record{
		Seq: 1 << 60, Time: time.Unix(1700000000, 123456789).UTC(), Mono: 5 * time.Second, Op: dsec.RecordCommand, Of: 7, Alone: true,
		Who: dsec.Who{Project: "p", Token: "t", Job: "j"}, Step: dsec.Step{Session: "s:1", Number: 1 << 63},
		Request: json.RawMessage(`{"argv":["a"]}`), Answer: json.RawMessage(`{"code":0}`),
		Error: &dsec.RecordError{Kind: "not_found", Text: "no such file"},
		Body:  dsec.BodyOutput, Size: 1 << 40, Blob: "sha256:1", Prev: "aa", Hash: "bb", Raw: []byte{0, 255, 1},
	}
}

func TestRecordKeepsAllFields(t *testing.T) {
	r := fullRecord()
	v := reflect.ValueOf(r)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			t.Errorf("the test has nothing in %s", v.Type().Field(i).Name)
		}
	}
	if got := rpc.RecordFromWire(trip(t, rpc.RecordToWire(r))); !reflect.DeepEqual(got, r) {
		t.Errorf("%+v\nwant %+v", got, r)
	}
	h := dsec.Head{Seq: 3, Hash: "cc", Over: true}
	if got := rpc.HeadFromWire(trip(t, rpc.HeadToWire(h))); got != h {
		t.Errorf("%+v, want %+v", got, h)
	}
}

func FuzzRecord(f *testing.F) {
	b, err := proto.Marshal(rpc.RecordToWire(fullRecord()))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var w dsecv1.Record
		if proto.Unmarshal(b, &w) != nil {
			return
		}
		first := rpc.RecordFromWire(&w)
		if again := rpc.RecordFromWire(trip(t, rpc.RecordToWire(first))); !same(first, again) {
			t.Errorf("record %+v came back as %+v", first, again)
		}
	})
}

// TestReplayedTravels asks for the same step twice.
func TestReplayedTravels(t *testing.T) {
	r := start(t)
	for i, want := range []bool{false, true} {
		_, b := r.post(t, "Commands/Run", "application/json", []byte(`{"command":{"argv":["echo","hi"]}}`), "Dsec-Step", "s:1")
		var res struct {
			Status struct{ Replayed bool }
			Stdout []byte
		}
		if err := json.Unmarshal(b, &res); err != nil || res.Status.Replayed != want || string(res.Stdout) != "hi\n" {
			t.Errorf("run %d: %s, %v, want replayed %v", i, b, err, want)
		}
	}
}

func TestTrajectoryByHand(t *testing.T) {
	r := start(t)
	r.SetTrajectory(r.id, rpctest.Trajectory{Records: []dsec.Record{{Seq: 1, Op: dsec.RecordCreate, Request: json.RawMessage(`{"Spec":{}}`), Hash: "ab"}}})
	if _, b := r.post(t, "Trajectories/Head", "application/json", []byte(`{}`)); !bytes.Contains(b, []byte(`"seq":"1"`)) {
		t.Errorf("head: %s", b)
	}
	if _, b := r.post(t, "Trajectories/Records", "application/connect+json", frame(`{}`)); !bytes.Contains(b, []byte(`"op":"create"`)) {
		t.Errorf("records: %s", b)
	}
	if _, b := r.post(t, "Trajectories/Body", "application/connect+json", frame(`{"seq":"1"}`)); !bytes.Contains(b, []byte(`"not_found"`)) {
		t.Errorf("body: %s", b)
	}
}

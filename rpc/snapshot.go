package rpc

import (
	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// SnapshotToWire gives s for the wire.
func SnapshotToWire(s dsec.Snapshot) *dsecv1.Snapshot {
	return &dsecv1.Snapshot{
		Id: string(s.ID), Project: string(s.Project), Sandbox: string(s.Sandbox), Spec: SpecToWire(s.Spec), Layers: s.Layers,
		Created: stamp(s.Created), Size: s.Size, Memory: s.Memory, Sequence: s.Sequence, Key: s.Key,
	}
}

// SnapshotFromWire is the inverse of SnapshotToWire.
func SnapshotFromWire(w *dsecv1.Snapshot) dsec.Snapshot {
	return dsec.Snapshot{
		ID: dsec.SnapshotID(w.GetId()), Project: dsec.ProjectID(w.GetProject()), Sandbox: dsec.SandboxID(w.GetSandbox()),
		Spec: SpecFromWire(w.GetSpec()), Layers: w.GetLayers(), Created: unstamp(w.GetCreated()), Size: w.GetSize(),
		Memory: w.GetMemory(), Sequence: w.GetSequence(), Key: w.GetKey(),
	}
}

// InputToWire gives events for the wire. Of one that is none, nothing is set.
func InputToWire(events []dsec.InputEvent) []*dsecv1.InputEvent {
	out := make([]*dsecv1.InputEvent, len(events))
	for i, e := range events {
		w := &dsecv1.InputEvent{}
		switch {
		case e.Key != "":
			w.What = &dsecv1.InputEvent_Key{Key: e.Key}
		case e.Text != "":
			w.What = &dsecv1.InputEvent_Text{Text: e.Text}
		case e.Move != nil:
			w.What = &dsecv1.InputEvent_Move{Move: &dsecv1.Point{X: count(e.Move.X), Y: count(e.Move.Y)}}
		case e.Button != "":
			w.What = &dsecv1.InputEvent_Button{Button: e.Button}
		}
		out[i] = w
	}
	return out
}

// InputFromWire is the inverse of InputToWire. It does not check.
func InputFromWire(ws []*dsecv1.InputEvent) []dsec.InputEvent {
	out := make([]dsec.InputEvent, len(ws))
	for i, w := range ws {
		switch x := w.GetWhat().(type) {
		case *dsecv1.InputEvent_Key:
			out[i].Key = x.Key
		case *dsecv1.InputEvent_Text:
			out[i].Text = x.Text
		case *dsecv1.InputEvent_Move:
			out[i].Move = &dsec.Point{X: int(x.Move.GetX()), Y: int(x.Move.GetY())}
		case *dsecv1.InputEvent_Button:
			out[i].Button = x.Button
		}
	}
	return out
}

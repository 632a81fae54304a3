package rpc

import (
	"encoding/json"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// RecordToWire gives r for the wire. What is in Raw is not copied.
func RecordToWire(r dsec.Record) *dsecv1.Record {
	w := &dsecv1.Record{
		Seq: r.Seq, Time: stamp(r.Time), Mono: span(r.Mono), Op: string(r.Op), Of: r.Of, Alone: r.Alone,
		Project: string(r.Who.Project), Token: r.Who.Token, Job: string(r.Who.Job),
		Session: r.Step.Session, Step: r.Step.Number,
		Request: string(r.Request), Answer: string(r.Answer),
		Body: r.Body, Size: r.Size, Blob: r.Blob, Prev: r.Prev, Hash: r.Hash, Raw: r.Raw,
	}
	if r.Error != nil {
		w.Error = &dsecv1.RecordError{Kind: r.Error.Kind, Text: r.Error.Text}
	}
	return w
}

// RecordFromWire is the inverse of RecordToWire.
func RecordFromWire(w *dsecv1.Record) dsec.Record {
	r := dsec.Record{
		Seq: w.GetSeq(), Time: unstamp(w.GetTime()), Mono: unspan(w.GetMono()), Op: dsec.RecordOp(w.GetOp()), Of: w.GetOf(), Alone: w.GetAlone(),
		Who:     dsec.Who{Project: dsec.ProjectID(w.GetProject()), Token: w.GetToken(), Job: dsec.JobID(w.GetJob())},
		Step:    dsec.Step{Session: w.GetSession(), Number: w.GetStep()},
		Request: parameters(w.GetRequest()), Answer: parameters(w.GetAnswer()),
		Body: w.GetBody(), Size: w.GetSize(), Blob: w.GetBlob(), Prev: w.GetPrev(), Hash: w.GetHash(), Raw: w.GetRaw(),
	}
	if e := w.GetError(); e != nil {
		r.Error = &dsec.RecordError{Kind: e.GetKind(), Text: e.GetText()}
	}
	return r
}

func parameters(text string) json.RawMessage {
	if text == "" {
		return nil
	}
	return json.RawMessage(text)
}

// HeadToWire gives h for the wire.
func HeadToWire(h dsec.Head) *dsecv1.TrajectoriesHeadResponse {
	return &dsecv1.TrajectoriesHeadResponse{Seq: h.Seq, Hash: h.Hash, Over: h.Over}
}

// HeadFromWire is the inverse of HeadToWire.
func HeadFromWire(w *dsecv1.TrajectoriesHeadResponse) dsec.Head {
	return dsec.Head{Seq: w.GetSeq(), Hash: w.GetHash(), Over: w.GetOver()}
}

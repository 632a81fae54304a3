package rpc

import (
	"errors"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// JobToWire gives j for the wire.
func JobToWire(j dsec.Job) *dsecv1.Job {
	w := &dsecv1.Job{
		Id: string(j.ID), Project: string(j.Project), OnDisconnect: string(j.OnDisconnect), Lease: span(j.Lease), Epoch: j.Epoch,
		State: string(j.State), LeaseEnds: stamp(j.LeaseEnds), Created: stamp(j.Created), Labels: j.Labels, Events: j.Events,
	}
	if len(j.Counts) > 0 {
		w.Counts = make(map[string]int32, len(j.Counts))
		for s, n := range j.Counts {
			w.Counts[string(s)] = count(n)
		}
	}
	return w
}

// JobFromWire is the inverse of JobToWire.
func JobFromWire(w *dsecv1.Job) dsec.Job {
	j := dsec.Job{
		ID: dsec.JobID(w.GetId()), Project: dsec.ProjectID(w.GetProject()), OnDisconnect: dsec.OnDisconnect(w.GetOnDisconnect()),
		Lease: unspan(w.GetLease()), Epoch: w.GetEpoch(), State: dsec.JobState(w.GetState()), LeaseEnds: unstamp(w.GetLeaseEnds()),
		Created: unstamp(w.GetCreated()), Labels: w.GetLabels(), Events: w.GetEvents(),
	}
	if len(w.GetCounts()) > 0 {
		j.Counts = make(map[dsec.State]int, len(w.GetCounts()))
		for s, n := range w.GetCounts() {
			j.Counts[dsec.State(s)] = int(n)
		}
	}
	return j
}

// JobSpecToWire gives s for the wire.
func JobSpecToWire(s dsec.JobSpec) *dsecv1.JobsCreateRequest {
	return &dsecv1.JobsCreateRequest{
		Job: string(s.ID), Project: string(s.Project), OnDisconnect: string(s.OnDisconnect), Lease: span(s.Lease), Labels: s.Labels,
	}
}

// JobSpecFromWire is the inverse of JobSpecToWire. It does not check.
func JobSpecFromWire(w *dsecv1.JobsCreateRequest) dsec.JobSpec {
	return dsec.JobSpec{
		ID: dsec.JobID(w.GetJob()), Project: dsec.ProjectID(w.GetProject()), OnDisconnect: dsec.OnDisconnect(w.GetOnDisconnect()),
		Lease: unspan(w.GetLease()), Labels: w.GetLabels(),
	}
}

// JobResultToWire gives r for the wire. The text of an Internal stays here.
func JobResultToWire(r dsec.JobResult) *dsecv1.JobResult {
	w := &dsecv1.JobResult{Index: count(r.Index), Key: r.Key, Sandbox: SandboxToWire(r.Sandbox)}
	if r.Err != nil {
		kind, text := dsec.KindOf(r.Err), r.Err.Error()
		if kind == dsec.Internal {
			text = internalText
		}
		w.Error = &dsecv1.JobError{Kind: kind.String(), Message: strings.ToValidUTF8(text, "\uFFFD")}
	}
	return w
}

// JobResultFromWire is the inverse of JobResultToWire.
func JobResultFromWire(w *dsecv1.JobResult) dsec.JobResult {
	r := dsec.JobResult{Index: int(w.GetIndex()), Key: w.GetKey(), Sandbox: SandboxFromWire(w.GetSandbox())}
	if e := w.GetError(); e != nil {
		r.Err = &dsec.Error{Kind: dsec.ParseErrorKind(e.GetKind()), Err: errors.New(e.GetMessage())}
	}
	return r
}

// JobEventToWire gives e for the wire.
func JobEventToWire(e dsec.JobEvent) *dsecv1.JobEvent {
	return &dsecv1.JobEvent{
		Seq: e.Seq, Time: stamp(e.Time), Type: string(e.Type), Sandbox: string(e.Sandbox), Key: e.Key, Cause: string(e.Cause),
		Detail: strings.ToValidUTF8(e.Detail, "\uFFFD"), Retry: e.Retry, Epoch: e.Epoch, Missed: e.Missed,
	}
}

// JobEventFromWire is the inverse of JobEventToWire.
func JobEventFromWire(w *dsecv1.JobEvent) dsec.JobEvent {
	return dsec.JobEvent{
		Seq: w.GetSeq(), Time: unstamp(w.GetTime()), Type: dsec.JobEventType(w.GetType()), Sandbox: dsec.SandboxID(w.GetSandbox()),
		Key: w.GetKey(), Cause: dsec.Cause(w.GetCause()), Detail: w.GetDetail(), Retry: w.GetRetry(), Epoch: w.GetEpoch(), Missed: w.GetMissed(),
	}
}

// JobItemsToWire gives the request of a bulk create. Equal specs travel once.
func JobItemsToWire(id dsec.JobID, epoch uint64, items []dsec.JobItem) *dsecv1.JobsCreateManyRequest {
	w := &dsecv1.JobsCreateManyRequest{Job: string(id), Epoch: epoch, Items: make([]*dsecv1.JobItem, len(items))}
	at := map[string]int{}
	for i, it := range items {
		spec := SpecToWire(it.Spec)
		b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(spec) // one that cannot be sent fails there
		n, ok := at[string(b)]
		if !ok {
			n = len(w.Specs)
			at[string(b)] = n
			w.Specs = append(w.Specs, spec)
		}
		w.Items[i] = &dsecv1.JobItem{Key: it.Key, Spec: count(n)}
	}
	return w
}

// JobItemsFromWire is the inverse of JobItemsToWire. Invalid for an item of a
// spec that is not there.
func JobItemsFromWire(w *dsecv1.JobsCreateManyRequest) ([]dsec.JobItem, error) {
	specs := make([]dsec.Spec, len(w.GetSpecs()))
	for i, spec := range w.GetSpecs() {
		specs[i] = SpecFromWire(spec)
	}
	items := make([]dsec.JobItem, len(w.GetItems()))
	for i, it := range w.GetItems() {
		n := int(it.GetSpec())
		if n < 0 || n >= len(specs) {
			return nil, dsec.Errorf(dsec.Invalid, "item %d is of spec %d, but there are %d", i, n, len(specs))
		}
		items[i] = dsec.JobItem{Key: it.GetKey(), Spec: specs[n]}
	}
	return items, nil
}

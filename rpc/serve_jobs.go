package rpc

import (
	"context"
	"iter"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// jobs serves dsec.Jobs. Whose a job is the service itself knows, by the caller
// in the context.
type jobs struct{ *handler }

func (s jobs) Create(ctx context.Context, req *dsecv1.JobsCreateRequest) (*dsecv1.Job, error) {
	spec := JobSpecFromWire(req)
	of := dsec.Spec{Project: spec.Project}
	if err := s.claim(ctx, &of); err != nil {
		return nil, err
	}
	spec.Project = of.Project
	key, err := ParseKey(ctx.Value(callKey{}).(*call).header.Get(HeaderKey))
	if err != nil {
		return nil, err
	}
	return wire(JobToWire)(s.services.Jobs.Create(ctx, spec, dsec.CreateOptions{Key: key}))
}

func (s jobs) Open(ctx context.Context, req *dsecv1.JobsOpenRequest) (*dsecv1.Job, error) {
	return wire(JobToWire)(s.services.Jobs.Open(ctx, dsec.JobID(req.GetJob())))
}

func (s jobs) Renew(ctx context.Context, req *dsecv1.JobsRenewRequest) (*dsecv1.Job, error) {
	return wire(JobToWire)(s.services.Jobs.Renew(ctx, dsec.JobID(req.GetJob()), req.GetEpoch()))
}

func (s jobs) Get(ctx context.Context, req *dsecv1.JobsGetRequest) (*dsecv1.Job, error) {
	return wire(JobToWire)(s.services.Jobs.Get(ctx, dsec.JobID(req.GetJob())))
}

func (s jobs) List(ctx context.Context, _ *dsecv1.JobsListRequest) (*dsecv1.JobsListResponse, error) {
	all, err := s.services.Jobs.List(ctx)
	return &dsecv1.JobsListResponse{Jobs: each(all, JobToWire)}, err
}

func (s jobs) Pause(ctx context.Context, req *dsecv1.JobsPauseRequest, stream dsecv1.JobsPauseServerStream) error {
	return sendAll(ctx, s.services.Jobs.Pause(ctx, dsec.JobID(req.GetJob())), JobResultToWire, stream.Send)
}

func (s jobs) Resume(ctx context.Context, req *dsecv1.JobsResumeRequest, stream dsecv1.JobsResumeServerStream) error {
	return sendAll(ctx, s.services.Jobs.Resume(ctx, dsec.JobID(req.GetJob())), JobResultToWire, stream.Send)
}

func (s jobs) Stop(ctx context.Context, req *dsecv1.JobsStopRequest, stream dsecv1.JobsStopServerStream) error {
	return sendAll(ctx, s.services.Jobs.Stop(ctx, dsec.JobID(req.GetJob())), JobResultToWire, stream.Send)
}

func (s jobs) Label(ctx context.Context, req *dsecv1.JobsLabelRequest, stream dsecv1.JobsLabelServerStream) error {
	return sendAll(ctx, s.services.Jobs.Label(ctx, dsec.JobID(req.GetJob()), req.GetLabels()), JobResultToWire, stream.Send)
}

func (s jobs) CreateMany(ctx context.Context, req *dsecv1.JobsCreateManyRequest, stream dsecv1.JobsCreateManyServerStream) error {
	items, err := JobItemsFromWire(req)
	if err != nil {
		return err
	}
	return sendAll(ctx, s.services.Jobs.CreateMany(ctx, dsec.JobID(req.GetJob()), req.GetEpoch(), items), JobResultToWire, stream.Send)
}

func (s jobs) Events(ctx context.Context, req *dsecv1.JobsEventsRequest, stream dsecv1.JobsEventsServerStream) error {
	opt := dsec.JobEventOptions{After: req.GetAfter(), Follow: req.GetFollow()}
	return sendAll(ctx, s.services.Jobs.Events(ctx, dsec.JobID(req.GetJob()), opt), JobEventToWire, stream.Send)
}

// sendAll sends a sequence, one message for each.
func sendAll[A, W any](ctx context.Context, all iter.Seq2[A, error], to func(A) *W, send func(*W) error) error {
	for a, err := range all {
		if err != nil {
			return err
		}
		if err := send(to(a)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

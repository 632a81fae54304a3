package main

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/lmittmann/tint"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/api"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/rpc"
)

// Names of attributes in the log.
const (
	logSandbox = "sandbox"
	logRequest = "request"
	logOp      = "op"
	logTook    = "dur"
	logErr     = "err"
	logKind    = "kind"
	logCause   = "cause"
)

// newLog gives a log for w: coloured lines on a terminal, JSON elsewhere.
func newLog(w io.Writer, level slog.Level) *slog.Logger {
	if _, ok := terminalOf(w); ok {
		return slog.New(tint.NewTextHandler(w, &tint.Options{Level: level, TimeFormat: time.TimeOnly}))
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level}))
}

// etcdLog passes on the faults of the embedded etcd. Its warnings are about how
// a cluster should be run, and it calls the end of its listener an error.
func etcdLog(log *slog.Logger) *slog.Logger { return slog.New(etcdHandler{log.Handler()}) }

type etcdHandler struct{ slog.Handler }

func (h etcdHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelError && h.Handler.Enabled(ctx, level)
}

func (h etcdHandler) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "serving from embedded etcd") {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// telemetry turns the events of the inner packages into log lines and
// metrics. It is the only place that knows both.
type telemetry struct {
	log      *slog.Logger
	registry *prometheus.Registry

	created *prometheus.HistogramVec
	stages  *prometheus.HistogramVec
	refused *prometheus.CounterVec
	ended   *prometheus.CounterVec
	stops   prometheus.Histogram
	faults  *prometheus.CounterVec
	calls   *prometheus.HistogramVec
	pauses  *prometheus.CounterVec
	resumes prometheus.Histogram
	freed   prometheus.Counter
}

// createBuckets suit what takes milliseconds when all is well.
var createBuckets = []float64{.001, .002, .004, .008, .016, .032, .064, .128, .256, .512, 1, 2, 5, 10, 30}

// newTelemetry makes the metrics in a registry of their own.
func newTelemetry(log *slog.Logger) *telemetry {
	t := &telemetry{
		log:      log,
		registry: prometheus.NewRegistry(),
		created: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dsec_sandbox_create_seconds", Help: "Time from a create to a running sandbox.", Buckets: createBuckets,
		}, []string{"kind"}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dsec_sandbox_create_stage_seconds", Help: "Time of each step of a create.", Buckets: createBuckets,
		}, []string{"kind", "stage"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_sandbox_refused_total", Help: "Creates that led to no sandbox, by kind of error.",
		}, []string{"kind", "error"}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_sandbox_ended_total", Help: "Sandboxes that ended, by cause.",
		}, []string{"kind", "cause"}),
		stops: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dsec_sandbox_stop_seconds", Help: "Time from the decision to end a sandbox until nothing of it is left.", Buckets: createBuckets,
		}),
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_faults_total", Help: "What should not happen, by where.",
		}, []string{"where"}),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dsec_call_seconds", Help: "Calls of the api; a stream counts from its first byte to its last.", Buckets: createBuckets,
		}, []string{"procedure", "code"}),
		pauses: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_sandbox_paused_total", Help: "Pauses, by why: empty when they were asked for.",
		}, []string{"why"}),
		resumes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dsec_sandbox_resume_seconds", Help: "Time until a paused sandbox goes on.", Buckets: createBuckets,
		}),
		freed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dsec_reclaimed_bytes_total", Help: "Memory that paused sandboxes gave back.",
		}),
	}
	t.registry.MustRegister(t.created, t.stages, t.refused, t.ended, t.stops, t.faults, t.calls,
		t.pauses, t.resumes, t.freed,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return t
}

// edgeEvents are the callbacks of the edge.
func (t *telemetry) edgeEvents() edge.Events {
	return edge.Events{
		Created: func(e edge.CreatedEvent) {
			t.created.WithLabelValues(string(e.Kind)).Observe(e.Took.Seconds())
			for _, s := range e.Stages {
				t.stages.WithLabelValues(string(e.Kind), s.Name).Observe(s.Took.Seconds())
			}
			t.log.Debug("sandbox runs", logSandbox, e.ID, logKind, e.Kind, logTook, e.Took)
		},
		Refused: func(e edge.RefusedEvent) {
			kind := dsec.KindOf(e.Error)
			t.refused.WithLabelValues(string(e.Kind), kind.String()).Inc()
			level := slog.LevelDebug // the caller's business
			if kind == dsec.Internal {
				level = slog.LevelError
			}
			t.log.Log(context.Background(), level, "create failed", logKind, e.Kind, logErr, e.Error, logTook, e.Took)
		},
		Ended: func(e edge.EndedEvent) {
			t.ended.WithLabelValues(string(e.Kind), string(e.Cause)).Inc()
			if e.Took > 0 {
				t.stops.Observe(e.Took.Seconds())
			}
			level := slog.LevelDebug
			if e.State == dsec.Failed {
				level = slog.LevelWarn
			}
			t.log.Log(context.Background(), level, "sandbox ended", logSandbox, e.ID, logCause, e.Cause, "detail", e.Detail, "lived", e.Lived)
		},
		Adopted: func(e edge.AdoptedEvent) {
			t.log.Info("sandboxes of the last run", "adopted", e.Adopted, "gone", e.Gone, "orphans", e.Orphans, "ending", e.Ending, "rebooted", e.Rebooted, logTook, e.Took)
		},
		StopFailed: func(id dsec.SandboxID, err error) {
			t.fault("stop", err, logSandbox, id)
		},
		JournalError: func(err error) { t.fault("journal", err) },
		JournalHeal:  func() { t.log.Info("the journal can be written again") },
		Checkpoint: func(e edge.CheckpointEvent) {
			t.log.Debug("journal compacted", "records", e.Records, logTook, e.Took)
		},
		Paused: func(e edge.PausedEvent) {
			t.pauses.WithLabelValues(e.Detail).Inc()
			t.log.Debug("sandbox paused", logSandbox, e.ID, "why", e.Detail, logTook, e.Took)
		},
		Resumed: func(e edge.ResumedEvent) {
			t.resumes.Observe(e.Took.Seconds())
			t.log.Debug("sandbox resumed", logSandbox, e.ID, "why", e.Detail, "reclaimed", e.Reclaimed, logTook, e.Took)
		},
		Reclaimed: func(e edge.ReclaimedEvent) {
			t.freed.Add(float64(e.Bytes))
			if e.Error != nil {
				t.fault("reclaim", e.Error, logSandbox, e.ID)
			}
			t.log.Debug("memory reclaimed", logSandbox, e.ID, "bytes", e.Bytes, logTook, e.Took)
		},
		Pressure: func(e edge.PressureEvent) {
			if e.On {
				t.log.Warn("memory is short: idle sandboxes are paused", "pressure", e.Pressure, "available", e.Available)
			} else {
				t.log.Info("memory is no longer short", "pressure", e.Pressure, "available", e.Available)
			}
		},
		DiskFull: func(id dsec.SandboxID, used, limit int64) {
			t.log.Warn("sandbox is over its disk limit", logSandbox, id, "used", used, "limit", limit)
		},
	}
}

func (t *telemetry) fault(where string, err error, attrs ...any) {
	t.faults.WithLabelValues(where).Inc()
	t.log.Error("fault", append([]any{logOp, where, logErr, err}, attrs...)...)
}

// access records one call of the api. Paths that callers make up are counted
// as one, since each label is memory.
func (t *telemetry) access(a api.Access) {
	procedure, code := a.Procedure, "ok"
	switch {
	case a.Token == "":
		procedure = "without token"
	case !rpc.Known(a.Procedure):
		procedure = "unknown"
	}
	if a.Failed {
		code = a.Kind.String() // a stream that failed on the way has the status 200
	}
	t.calls.WithLabelValues(procedure, code).Observe(a.Took.Seconds())
	t.log.Debug("call", logRequest, a.Request, logOp, a.Procedure, logSandbox, a.Sandbox, "token", a.Token, "status", a.Status, "code", code, logTook, a.Took)
}

// watchDoor adds what the api counts to the metrics.
func (t *telemetry) watchDoor(h *api.Handler) {
	t.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "dsec_calls_in_flight", Help: "Calls being served.",
	}, func() float64 { return float64(h.InFlight()) }))
}

// watchNode adds what a node counts to the metrics.
func (t *telemetry) watchNode(n *edge.Node) {
	gauge := func(name, help string, value func(edge.Counts) int) {
		t.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
			func() float64 { return float64(value(n.Counts())) }))
	}
	gauge("dsec_sandboxes_alive", "Sandboxes that are being created or run.", func(c edge.Counts) int { return c.Alive })
	gauge("dsec_sandboxes_ended", "Records of ended sandboxes.", func(c edge.Counts) int { return c.Ended })
	gauge("dsec_creates_starting", "Creates under way.", func(c edge.Counts) int { return c.Starting })
	gauge("dsec_creates_queued", "Creates that wait for a start.", func(c edge.Counts) int { return c.Queued })
	gauge("dsec_commands_running", "Commands that run.", func(c edge.Counts) int { return c.Commands })
	gauge("dsec_journal_broken", "1 while the journal cannot be written.", func(c edge.Counts) int { return btoi(c.Broken) })
}

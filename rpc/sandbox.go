package rpc

import (
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// SpecToWire gives s for the wire.
func SpecToWire(s dsec.Spec) *dsecv1.Spec {
	w := &dsecv1.Spec{
		Kind: string(s.Kind),
		Environment: &dsecv1.Environment{
			Base: s.Environment.Base, Workspace: s.Environment.Workspace, Toolkits: s.Environment.Toolkits,
		},
		Ttl:      span(s.TTL),
		Idle:     span(s.Idle),
		User:     s.User,
		Hostname: s.Hostname,
		Labels:   s.Labels,
		Job:      string(s.Job),
		Project:  string(s.Project),
		Network:  string(s.Network),
		Api:      DelegationToWire(s.API),
		From:     s.From,
	}
	if r := s.Resources; r != (dsec.Resources{}) {
		w.Resources = &dsecv1.Resources{Cpu: r.CPU, Memory: r.Memory, Disk: r.Disk, Pids: count(r.Pids)}
	}
	w.Cwd, w.CwdBytes = name(s.Cwd)
	w.Env, w.EnvBytes = env(s.Env)
	return w
}

// SpecFromWire is the inverse of SpecToWire. It does not check.
func SpecFromWire(w *dsecv1.Spec) dsec.Spec {
	e, r := w.GetEnvironment(), w.GetResources()
	return dsec.Spec{
		Kind:        dsec.Kind(w.GetKind()),
		Environment: dsec.Environment{Base: e.GetBase(), Workspace: e.GetWorkspace(), Toolkits: e.GetToolkits()},
		Resources:   dsec.Resources{CPU: r.GetCpu(), Memory: r.GetMemory(), Disk: r.GetDisk(), Pids: int(r.GetPids())},
		TTL:         unspan(w.GetTtl()),
		Idle:        unspan(w.GetIdle()),
		User:        w.GetUser(),
		Cwd:         unname(w.GetCwd(), w.GetCwdBytes()),
		Env:         unenv(w.GetEnv(), w.GetEnvBytes()),
		Hostname:    w.GetHostname(),
		Labels:      w.GetLabels(),
		Job:         dsec.JobID(w.GetJob()),
		Project:     dsec.ProjectID(w.GetProject()),
		Network:     dsec.Network(w.GetNetwork()),
		API:         DelegationFromWire(w.GetApi()),
		From:        w.GetFrom(),
	}
}

// SandboxToWire gives s for the wire.
func SandboxToWire(s dsec.Sandbox) *dsecv1.Sandbox {
	w := &dsecv1.Sandbox{
		Id:       string(s.ID),
		Spec:     SpecToWire(s.Spec),
		State:    string(s.State),
		Cause:    string(s.Cause),
		Detail:   s.Detail,
		Node:     s.Node,
		Created:  stamp(s.Created),
		Expires:  stamp(s.Expires),
		Ended:    stamp(s.Ended),
		LastUsed: stamp(s.LastUsed),
		Layers:   s.Layers,
		Key:      s.Key,
		Took:     span(s.Took),

		Paused:    stamp(s.Paused),
		Reclaimed: s.Reclaimed,
	}
	if len(s.Stages) > 0 {
		w.Stages = make([]*dsecv1.Stage, len(s.Stages))
		for i, t := range s.Stages {
			w.Stages[i] = &dsecv1.Stage{Name: t.Name, Took: span(t.Took)}
		}
	}
	if u := s.Usage; u != (dsec.Usage{}) {
		w.Usage = &dsecv1.Usage{
			Cpu: span(u.CPU), Memory: u.Memory, MemoryPeak: u.MemoryPeak, Disk: u.Disk,
			Pids: count(u.Pids), Commands: count(u.Commands), OomKills: count(u.OOMKills),
			Fetched: u.Fetched, Waited: span(u.Waited),
		}
	}
	return w
}

// SandboxFromWire is the inverse of SandboxToWire.
func SandboxFromWire(w *dsecv1.Sandbox) dsec.Sandbox {
	u := w.GetUsage()
	s := dsec.Sandbox{
		ID:       dsec.SandboxID(w.GetId()),
		Spec:     SpecFromWire(w.GetSpec()),
		State:    dsec.State(w.GetState()),
		Cause:    dsec.Cause(w.GetCause()),
		Detail:   w.GetDetail(),
		Node:     w.GetNode(),
		Created:  unstamp(w.GetCreated()),
		Expires:  unstamp(w.GetExpires()),
		Ended:    unstamp(w.GetEnded()),
		LastUsed: unstamp(w.GetLastUsed()),
		Usage: dsec.Usage{
			CPU: unspan(u.GetCpu()), Memory: u.GetMemory(), MemoryPeak: u.GetMemoryPeak(), Disk: u.GetDisk(),
			Pids: int(u.GetPids()), Commands: int(u.GetCommands()), OOMKills: int(u.GetOomKills()),
			Fetched: u.GetFetched(), Waited: unspan(u.GetWaited()),
		},
		Layers: w.GetLayers(),
		Key:    w.GetKey(),
		Took:   unspan(w.GetTook()),

		Paused:    unstamp(w.GetPaused()),
		Reclaimed: w.GetReclaimed(),
	}
	for _, t := range w.GetStages() {
		s.Stages = append(s.Stages, dsec.Stage{Name: t.GetName(), Took: unspan(t.GetTook())})
	}
	return s
}

// FilterToWire gives f for the wire.
func FilterToWire(f dsec.Filter) *dsecv1.SandboxesListRequest {
	return &dsecv1.SandboxesListRequest{
		All: f.All, Job: string(f.Job), Labels: f.Labels, State: string(f.State), Limit: count(f.Limit), After: string(f.After),
	}
}

// FilterFromWire is the inverse of FilterToWire.
func FilterFromWire(w *dsecv1.SandboxesListRequest) dsec.Filter {
	return dsec.Filter{
		All: w.GetAll(), Job: dsec.JobID(w.GetJob()), Labels: w.GetLabels(), State: dsec.State(w.GetState()),
		Limit: int(w.GetLimit()), After: dsec.SandboxID(w.GetAfter()),
	}
}

// waitMax bounds a wait that a caller asked for.
func waitMax(d time.Duration) time.Duration {
	if d <= 0 || d > dsec.DefaultWaitMax {
		return dsec.DefaultWaitMax
	}
	return d
}

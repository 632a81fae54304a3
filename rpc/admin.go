package rpc

import (
	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// TokenToWire gives t for the wire.
func TokenToWire(t dsec.Token) *dsecv1.Token {
	w := &dsecv1.Token{Name: t.Name, Project: string(t.Project), Created: stamp(t.Created), Expires: stamp(t.Expires)}
	for _, r := range t.Rights {
		w.Rights = append(w.Rights, string(r))
	}
	return w
}

// TokenFromWire is the inverse of TokenToWire.
func TokenFromWire(w *dsecv1.Token) dsec.Token {
	t := dsec.Token{
		Name: w.GetName(), Project: dsec.ProjectID(w.GetProject()), Created: unstamp(w.GetCreated()), Expires: unstamp(w.GetExpires()),
	}
	for _, r := range w.GetRights() {
		t.Rights = append(t.Rights, dsec.Right(r))
	}
	return t
}

// ProjectToWire gives p for the wire.
func ProjectToWire(p dsec.Project) *dsecv1.Project {
	w := &dsecv1.Project{Name: string(p.Name), Created: stamp(p.Created), Quota: QuotaToWire(p.Quota)}
	if u := p.Used; u != (dsec.Share{}) {
		w.Used = &dsecv1.Share{Sandboxes: count(u.Sandboxes), Cpu: u.CPU, Memory: u.Memory, Images: u.Images}
	}
	return w
}

// ProjectFromWire is the inverse of ProjectToWire.
func ProjectFromWire(w *dsecv1.Project) dsec.Project {
	u := w.GetUsed()
	return dsec.Project{
		Name: dsec.ProjectID(w.GetName()), Created: unstamp(w.GetCreated()), Quota: QuotaFromWire(w.GetQuota()),
		Used: dsec.Share{Sandboxes: int(u.GetSandboxes()), CPU: u.GetCpu(), Memory: u.GetMemory(), Images: u.GetImages()},
	}
}

// QuotaToWire gives q for the wire.
func QuotaToWire(q dsec.Quota) *dsecv1.Quota {
	if q == (dsec.Quota{}) {
		return nil
	}
	return &dsecv1.Quota{Sandboxes: count(q.Sandboxes), Cpu: q.CPU, Memory: q.Memory, Ttl: span(q.TTL), Images: q.Images}
}

// QuotaFromWire is the inverse of QuotaToWire.
func QuotaFromWire(w *dsecv1.Quota) dsec.Quota {
	return dsec.Quota{Sandboxes: int(w.GetSandboxes()), CPU: w.GetCpu(), Memory: w.GetMemory(), TTL: unspan(w.GetTtl()), Images: w.GetImages()}
}

// DelegationToWire gives d for the wire.
func DelegationToWire(d *dsec.Delegation) *dsecv1.Delegation {
	if d == nil {
		return nil
	}
	w := &dsecv1.Delegation{Quota: QuotaToWire(d.Quota), Port: count(d.Port)}
	for _, r := range d.Rights {
		w.Rights = append(w.Rights, string(r))
	}
	return w
}

// DelegationFromWire is the inverse of DelegationToWire.
func DelegationFromWire(w *dsecv1.Delegation) *dsec.Delegation {
	if w == nil {
		return nil
	}
	d := &dsec.Delegation{Quota: QuotaFromWire(w.GetQuota()), Port: int(w.GetPort())}
	for _, r := range w.GetRights() {
		d.Rights = append(d.Rights, dsec.Right(r))
	}
	return d
}

// NodeToWire gives n for the wire.
func NodeToWire(n dsec.Node) *dsecv1.Node {
	w := &dsecv1.Node{
		Name: n.Name, Number: uint32(n.Place.Node), Epoch: n.Place.Epoch, Version: n.Version,
		Sandboxes: count(n.Sandboxes), Cpus: count(n.CPUs), Load: n.Load, Memory: n.Memory, Available: n.Available,
		Disk: n.Disk, DiskFree: n.DiskFree, Store: n.Store, Cache: n.Cache, Cached: n.Cached, Fetched: n.Fetched,
		Pressure: &dsecv1.Pressure{Cpu: n.Pressure.CPU, Memory: n.Pressure.Memory, Io: n.Pressure.IO},
	}
	for _, k := range n.Kinds {
		w.Kinds = append(w.Kinds, string(k))
	}
	for _, f := range n.Features {
		w.Features = append(w.Features, &dsecv1.FeatureStatus{Name: f.Name, Ok: f.OK, Detail: f.Detail, Cost: f.Cost})
	}
	return w
}

// NodeFromWire is the inverse of NodeToWire.
func NodeFromWire(w *dsecv1.Node) dsec.Node {
	p := w.GetPressure()
	n := dsec.Node{
		Name: w.GetName(), Place: dsec.Place{Node: uint16(w.GetNumber()), Epoch: w.GetEpoch()}, Version: w.GetVersion(),
		Sandboxes: int(w.GetSandboxes()), CPUs: int(w.GetCpus()), Load: w.GetLoad(), Memory: w.GetMemory(),
		Available: w.GetAvailable(), Disk: w.GetDisk(), DiskFree: w.GetDiskFree(),
		Store: w.GetStore(), Cache: w.GetCache(), Cached: w.GetCached(), Fetched: w.GetFetched(),
		Pressure: dsec.Pressure{CPU: p.GetCpu(), Memory: p.GetMemory(), IO: p.GetIo()},
	}
	for _, k := range w.GetKinds() {
		n.Kinds = append(n.Kinds, dsec.Kind(k))
	}
	for _, f := range w.GetFeatures() {
		n.Features = append(n.Features, dsec.FeatureStatus{Name: f.GetName(), OK: f.GetOk(), Detail: f.GetDetail(), Cost: f.GetCost()})
	}
	return n
}

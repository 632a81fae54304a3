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
	return &dsecv1.Project{Name: string(p.Name), Created: stamp(p.Created)}
}

// ProjectFromWire is the inverse of ProjectToWire.
func ProjectFromWire(w *dsecv1.Project) dsec.Project {
	return dsec.Project{Name: dsec.ProjectID(w.GetName()), Created: unstamp(w.GetCreated())}
}

// NodeToWire gives n for the wire.
func NodeToWire(n dsec.Node) *dsecv1.Node {
	w := &dsecv1.Node{
		Name: n.Name, Number: uint32(n.Place.Node), Epoch: n.Place.Epoch, Version: n.Version,
		Sandboxes: count(n.Sandboxes), Cpus: count(n.CPUs), Load: n.Load, Memory: n.Memory, Available: n.Available,
		Disk: n.Disk, DiskFree: n.DiskFree,
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

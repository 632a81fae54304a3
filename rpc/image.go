package rpc

import (
	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// ImageToWire gives i for the wire.
func ImageToWire(i dsec.Image) *dsecv1.Image {
	w := &dsecv1.Image{
		Name: i.Name, Version: i.Version, Role: string(i.Role), Digest: i.Digest, Size: i.Size, Stored: i.Stored,
		Entries: i.Entries, Created: stamp(i.Created), Source: i.Source, Project: string(i.Project), Tags: i.Tags,
	}
	if u := i.Usage; u != nil {
		w.Usage = &dsecv1.ImageUsage{Unique: u.Unique, Cached: u.Cached}
		for _, p := range u.Parts {
			w.Usage.Parts = append(w.Usage.Parts, &dsecv1.ImagePart{Kind: p.Kind, Digest: p.Digest, Size: p.Size, Names: count(p.Names)})
		}
	}
	if c := i.Config; len(c.Env) > 0 || len(c.Shell) > 0 || c.Cwd != "" || c.User != "" {
		w.Config = &dsecv1.ImageConfig{Env: c.Env, Cwd: c.Cwd, User: c.User, Shell: c.Shell}
	}
	return w
}

// ImageFromWire is the inverse of ImageToWire.
func ImageFromWire(w *dsecv1.Image) dsec.Image {
	c := w.GetConfig()
	i := dsec.Image{
		Name: w.GetName(), Version: w.GetVersion(), Role: dsec.Role(w.GetRole()), Digest: w.GetDigest(), Size: w.GetSize(),
		Stored: w.GetStored(), Entries: w.GetEntries(), Created: unstamp(w.GetCreated()), Source: w.GetSource(),
		Config:  dsec.ImageConfig{Env: c.GetEnv(), Cwd: c.GetCwd(), User: c.GetUser(), Shell: c.GetShell()},
		Project: dsec.ProjectID(w.GetProject()), Tags: w.GetTags(),
	}
	if u := w.GetUsage(); u != nil {
		i.Usage = &dsec.ImageUsage{Unique: u.GetUnique(), Cached: u.GetCached()}
		for _, p := range u.GetParts() {
			i.Usage.Parts = append(i.Usage.Parts, dsec.ImagePart{Kind: p.GetKind(), Digest: p.GetDigest(), Size: p.GetSize(), Names: int(p.GetNames())})
		}
	}
	return i
}

// ImageQueryToWire gives q for the wire.
func ImageQueryToWire(q dsec.ImageQuery) *dsecv1.ImagesListRequest {
	return &dsecv1.ImagesListRequest{Prefix: q.Prefix, Digest: q.Digest, Limit: count(q.Limit), After: q.After, Usage: q.Usage}
}

// ImageQueryFromWire is the inverse of ImageQueryToWire.
func ImageQueryFromWire(w *dsecv1.ImagesListRequest) dsec.ImageQuery {
	return dsec.ImageQuery{Prefix: w.GetPrefix(), Digest: w.GetDigest(), Limit: int(w.GetLimit()), After: w.GetAfter(), Usage: w.GetUsage()}
}

// ProgressToWire gives p for the wire.
func ProgressToWire(p dsec.Progress) *dsecv1.Progress {
	w := &dsecv1.Progress{Stage: p.Stage, Done: p.Done, Total: p.Total}
	if p.Image != nil {
		w.Image = ImageToWire(*p.Image)
	}
	return w
}

// ProgressFromWire is the inverse of ProgressToWire.
func ProgressFromWire(w *dsecv1.Progress) dsec.Progress {
	p := dsec.Progress{Stage: w.GetStage(), Done: w.GetDone(), Total: w.GetTotal()}
	if w.GetImage() != nil {
		i := ImageFromWire(w.GetImage())
		p.Image = &i
	}
	return p
}

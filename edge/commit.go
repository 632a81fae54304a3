package edge

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Commit writes the sandbox's changes as a workspace image, with the workload
// frozen while its files are read, no longer than Limits.CommitFreeze: beyond
// that it goes on and the commit is Timeout. A second commit of the same sandbox
// meanwhile is Conflict; the end of the sandbox ends its commit.
func (n *Node) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	img, err := n.commit(ctx, id, name)
	return img, dsec.WithOp("edge.Commit", id, err)
}

func (n *Node) commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	e, m, err := n.touch(id)
	if err != nil {
		return dsec.Image{}, err
	}
	defer e.finish()
	rec := e.record()
	upper, ok := m.(driver.Upper)
	switch {
	case !ok:
		return dsec.Image{}, unable(rec.spec.spec.Kind, "be committed")
	case n.cfg.Committer == nil:
		return dsec.Image{}, dsec.Errorf(dsec.Unsupported, "this node makes no images")
	}
	if err := dsec.CheckNewImageName(name); err != nil {
		return dsec.Image{}, err
	}
	src := CommitSource{}
	if src.Name, src.Version = dsec.SplitImageName(name); src.Version == "" {
		return dsec.Image{}, dsec.Errorf(dsec.Invalid, "image name %q has no version: a commit makes name@version", name)
	}
	if err := e.beginCommit(); err != nil {
		return dsec.Image{}, err
	}
	defer e.endCommit()

	// Before anything is frozen or written. Register decides in the end.
	owner := ownerOf(ctx, rec.spec.spec.Project)
	switch _, err := n.cfg.Names.Resolve(ctx, owner, name); {
	case err == nil:
		return dsec.Image{}, dsec.Errorf(dsec.Exists, "image %s exists", name)
	case dsec.KindOf(err) != dsec.NotFound:
		return dsec.Image{}, err
	}
	env, err := n.resolved(ctx, rec)
	if err != nil {
		return dsec.Image{}, err
	}
	src.Dir, src.IDBase = upper.Upper()
	src.Layers, src.Base = *rec.layers, env
	img, err := n.writeLayer(ctx, upper, m, src)
	if err != nil {
		return dsec.Image{}, err
	}
	img.Name, img.Version, img.Role = src.Name, src.Version, dsec.Workspace
	img.Project = owner
	img.Source = "sandbox " + string(id)
	if img.Created.IsZero() {
		img.Created = time.Now().UTC()
	}
	if env != nil {
		img.Config = env.Config
	}
	if err := n.cfg.Names.Register(ctx, img); err != nil {
		return dsec.Image{}, err
	}
	// The image is there and named: a record that cannot be written takes
	// nothing from it.
	_ = n.append(change{Op: opCommitted, ID: id, At: img.Created.UnixNano(), Image: img.Ref(), Digest: img.Digest}, func() {})
	return img, nil
}

// ownerOf says whose a new image is: the project's that its sandbox is of, so
// that no other sees what was in it, except that what an operator makes of his
// own is everybody's.
func ownerOf(ctx context.Context, project dsec.ProjectID) dsec.ProjectID {
	if c, ok := dsec.CallerFrom(ctx); !ok || c.Admin && c.Project == project {
		return ""
	}
	return project
}

// resolved gives the workspace image that the sandbox was made with, nil if
// there is none. Its name may point elsewhere by now, so the digest decides;
// of one whose name is gone only the digest is known.
func (n *Node) resolved(ctx context.Context, rec *record) (*dsec.Image, error) {
	name := rec.spec.spec.Environment.Workspace
	if name == "" {
		return nil, nil
	}
	digest := (*rec.layers)[1]
	img, err := n.cfg.Names.Resolve(ctx, rec.spec.spec.Project, name)
	if err != nil && dsec.KindOf(err) != dsec.NotFound {
		return nil, err
	}
	if err != nil || img.Digest != digest {
		return &dsec.Image{Role: dsec.Workspace, Digest: digest}, nil
	}
	return &img, nil
}

// writeLayer freezes the workload until its files are read, has the layer
// written, and lets the workload go on whatever came of it.
func (n *Node) writeLayer(ctx context.Context, u driver.Upper, m driver.Machine, src CommitSource) (img dsec.Image, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	finished := make(chan struct{})
	defer close(finished)
	if !n.spawn(func() {
		select {
		case <-m.Done():
			cancel(dsec.Errorf(dsec.Conflict, "the sandbox ended while it was being committed"))
		case <-n.life.Done():
			cancel(errClosing)
		case <-finished:
		}
	}) {
		return dsec.Image{}, errClosing
	}
	if p, ok := n.cfg.Committer.(Preparer); ok {
		p.Prepare(ctx, src)
	}
	thaw, err := u.Freeze(ctx)
	if err != nil {
		return dsec.Image{}, causeOf(ctx, fmt.Errorf("freeze: %w", err))
	}
	limit := n.limits.CommitFreeze
	timer := time.AfterFunc(limit, func() {
		cancel(dsec.Errorf(dsec.Timeout, "the changes could not be read while the workload stood still for %v; it goes on", limit))
	})
	goOn := sync.OnceValue(func() error {
		timer.Stop()
		err := thaw()
		select {
		case <-m.Done(): // nothing is left to thaw
			return nil
		default:
			return err
		}
	})
	src.Read = func() { _ = goOn() } // its error comes below
	img, err = n.cfg.Committer.Commit(ctx, src)
	if err != nil {
		err = causeOf(ctx, fmt.Errorf("write layer: %w", err))
	}
	if terr := goOn(); terr != nil {
		err = errors.Join(err, fmt.Errorf("thaw: %w", terr))
	}
	if err == nil && ctx.Err() != nil {
		// What was read while the sandbox went is not what it was.
		err = context.Cause(ctx)
	}
	return img, err
}

func (e *entry) beginCommit() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.commit {
		return dsec.Errorf(dsec.Conflict, "another commit, snapshot or fork of the sandbox is under way")
	}
	e.commit = true
	return nil
}

func (e *entry) endCommit() {
	e.mu.Lock()
	e.commit = false
	e.mu.Unlock()
}

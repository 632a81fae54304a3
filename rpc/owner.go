package rpc

import (
	"context"
	"slices"
	"sync"

	"github.com/dsec-go/dsec"
)

// maxOwners bounds what is remembered of projects; beyond it all is forgotten
// and asked again.
const maxOwners = 1 << 16

// owners remembers which project a sandbox is of. That never changes, so an
// entry is right for ever.
type owners struct {
	mu      sync.RWMutex
	project map[dsec.SandboxID]dsec.ProjectID
}

// check is NotFound, as for a sandbox that does not exist, when ctx carries a
// caller of a project that the sandbox's is not within.
func (o *owners) check(ctx context.Context, s dsec.Sandboxes, id dsec.SandboxID) error {
	caller, ok := dsec.CallerFrom(ctx)
	if !ok || caller.Admin {
		return nil
	}
	if s == nil {
		return dsec.Errorf(dsec.Denied, "this server cannot tell whose sandbox it is")
	}
	return o.checkBy(ctx, id, func() (dsec.ProjectID, error) {
		b, err := s.Get(ctx, id)
		return b.Spec.Project, err
	})
}

// checkBy is check where another than dsec.Sandboxes knows the project.
func (o *owners) checkBy(ctx context.Context, id dsec.SandboxID, find func() (dsec.ProjectID, error)) error {
	caller, ok := dsec.CallerFrom(ctx)
	if !ok || caller.Admin {
		return nil
	}
	o.mu.RLock()
	project, ok := o.project[id]
	o.mu.RUnlock()
	if !ok {
		var err error
		if project, err = find(); err != nil {
			return err
		}
		o.mu.Lock()
		if o.project == nil || len(o.project) >= maxOwners {
			o.project = map[dsec.SandboxID]dsec.ProjectID{}
		}
		o.project[id] = project
		o.mu.Unlock()
	}
	if !caller.Sees(project) {
		return noSandbox(id)
	}
	return nil
}

func noSandbox(id dsec.SandboxID) error {
	return dsec.Errorf(dsec.NotFound, "no sandbox has the id %q", clip(string(id)))
}

// claim sets the project of a new sandbox to the caller's, or checks the one
// that is named: it must exist, where that is known, and be within the caller's.
// An API of its own can have no right that the caller has not.
func (h *handler) claim(ctx context.Context, spec *dsec.Spec) error {
	caller, ok := dsec.CallerFrom(ctx)
	if !ok {
		return nil
	}
	if spec.API != nil {
		if err := delegable(caller, spec.WithDefaults().API.Rights); err != nil {
			return err
		}
	}
	switch {
	case spec.Project == "":
		spec.Project = caller.Project
	case !caller.Sees(spec.Project):
		return dsec.Errorf(dsec.Denied, "the token is of project %q, not %q", caller.Project, clip(string(spec.Project)))
	case spec.Project != caller.Project && h.services.Projects != nil:
		all, err := h.services.Projects.List(ctx)
		if err == nil && !slices.ContainsFunc(all, func(p dsec.Project) bool { return p.Name == spec.Project }) {
			err = dsec.Errorf(dsec.NotFound, "no project is called %q", clip(string(spec.Project)))
		}
		return err
	}
	return nil
}

// listOwn lists the sandboxes of the caller's project and those below. A filter has no project,
// so pages are read until the limit is reached.
func listOwn(ctx context.Context, s dsec.Sandboxes, f dsec.Filter) ([]dsec.Sandbox, error) {
	caller, ok := dsec.CallerFrom(ctx)
	if !ok || caller.Admin {
		return s.List(ctx, f)
	}
	var own []dsec.Sandbox
	limit := f.Limit
	for {
		page, err := s.List(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, b := range page {
			if caller.Sees(b.Spec.Project) {
				own = append(own, b)
			}
			if limit > 0 && len(own) == limit {
				return own, nil
			}
		}
		if limit <= 0 || len(page) < f.Limit {
			return own, nil
		}
		f.After = page[len(page)-1].ID
	}
}

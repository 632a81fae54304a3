package edge

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// environment is what a Spec's references came to.
type environment struct {
	images []dsec.Image // lowest first
	layers []string     // instead of images, of a copy
	guest  driver.GuestConfig
}

// digests lists the layers, lowest first.
func (e environment) digests() []string {
	if e.layers != nil {
		return e.layers
	}
	d := make([]string, len(e.images))
	for i, img := range e.images {
		d[i] = img.Digest
	}
	return d
}

// resolve looks up every image of s. A name that is not there is NotFound, one
// of another role or named twice Invalid.
func (n *Node) resolve(ctx context.Context, s dsec.Spec) (environment, error) {
	var env environment
	seen := map[string]string{}
	base := dsec.Base
	if s.Kind == dsec.FullVM {
		base = dsec.Disk
		if len(s.Environment.Parts()) > 1 {
			return env, dsec.Errorf(dsec.Invalid, "a sandbox of kind %s has a disk image and nothing over it", s.Kind)
		}
	}
	for i, name := range s.Environment.Parts() {
		role := dsec.Toolkit
		switch {
		case i == 0:
			role = base
		case i == 1 && s.Environment.Workspace != "":
			role = dsec.Workspace
		}
		img, err := n.cfg.Names.Resolve(ctx, s.Project, name)
		if err != nil {
			return environment{}, err
		}
		if img.Role != role {
			return environment{}, dsec.Errorf(dsec.Invalid, "image %s is a %s and cannot be the %s of a sandbox of kind %s", img.Ref(), img.Role, role, s.Kind)
		}
		if other, twice := seen[img.Digest]; twice {
			return environment{}, dsec.Errorf(dsec.Invalid, "images %s and %s are the same layer", other, img.Ref())
		}
		seen[img.Digest] = img.Ref()
		env.images = append(env.images, img)
	}
	env.guest = guestConfig(env.images, s)
	return env, nil
}

// guestConfig composes the defaults of commands. Of variables the higher image
// wins and the Spec over all; PATH is composed: what a higher image adds comes
// first. Folder and user are those of the workspace, else of the base: a
// toolkit only adds tools.
func guestConfig(images []dsec.Image, s dsec.Spec) driver.GuestConfig {
	var g driver.GuestConfig
	vars := map[string]string{}
	for _, img := range images {
		for _, kv := range img.Config.Env {
			k, v, ok := strings.Cut(kv, "=")
			if !ok || k == "" {
				continue
			}
			if k == "PATH" {
				v = joinPath(v, vars[k])
			}
			vars[k] = v
		}
		if img.Role == dsec.Toolkit {
			continue
		}
		if img.Config.Cwd != "" {
			g.Cwd = img.Config.Cwd
		}
		if img.Config.User != "" {
			g.User = img.Config.User
		}
	}
	maps.Copy(vars, s.Env)
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		g.Env = append(g.Env, k+"="+vars[k])
	}
	if s.Cwd != "" {
		g.Cwd = s.Cwd
	}
	if s.User != "" {
		g.User = s.User
	}
	return g
}

// joinPath puts the folders of upper that lower does not have before lower.
func joinPath(upper, lower string) string {
	if lower == "" {
		return upper
	}
	have := strings.Split(lower, ":")
	var dirs []string
	for _, d := range strings.Split(upper, ":") {
		if !slices.Contains(have, d) && !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	return strings.Join(append(dirs, have...), ":")
}

package api

import (
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// rights is what a service asks for by default.
var rights = map[string][]dsec.Right{
	dsecv1.SandboxesName:    {dsec.RightSandboxes},
	dsecv1.CommandsName:     {dsec.RightSandboxes},
	dsecv1.FilesName:        {dsec.RightSandboxes},
	dsecv1.PortsName:        {dsec.RightSandboxes},
	dsecv1.ImagesName:       {dsec.RightImages},
	dsecv1.JobsName:         {dsec.RightSandboxes},
	dsecv1.FunctionsName:    {dsec.RightSandboxes},
	dsecv1.TokensName:       {dsec.RightDelegate}, // of what is below its own project, see package rpc
	dsecv1.TrajectoriesName: {dsec.RightSandboxes},
	dsecv1.SnapshotsName:    {dsec.RightSandboxes},
	dsecv1.ScreensName:      {dsec.RightSandboxes},
	dsecv1.ProjectsName:     {dsec.RightDelegate},
	dsecv1.NodesName:        {dsec.RightAdmin},
}

// special are the calls that ask for something else. One of the rights is
// enough; a commit, which works on a sandbox and makes an image, asks for both.
var special = map[string]struct {
	any []dsec.Right
	all []dsec.Right
}{
	dsecv1.SandboxesCommitProcedure: {all: []dsec.Right{dsec.RightSandboxes, dsec.RightImages}},
	dsecv1.ImagesListProcedure:      {any: []dsec.Right{dsec.RightImages, dsec.RightSandboxes}},
	dsecv1.ImagesInspectProcedure:   {any: []dsec.Right{dsec.RightImages, dsec.RightSandboxes}},
	dsecv1.ImagesAdoptProcedure:     {any: []dsec.Right{dsec.RightAdmin}},
}

// allowed is Denied when the token has not the rights that the call asks for.
func allowed(t dsec.Token, path string) error {
	any, all := rights[service(path)], []dsec.Right(nil)
	if s, ok := special[path]; ok {
		any, all = s.any, s.all
	}
	if has(t, dsec.RightAdmin) {
		return nil
	}
	ok := len(any) == 0 || slices.ContainsFunc(any, func(r dsec.Right) bool { return has(t, r) })
	for _, r := range all {
		ok = ok && has(t, r)
	}
	if !ok {
		return dsec.Errorf(dsec.Denied, "token %q has not the right to call %s", t.Name, strings.TrimPrefix(path, "/"))
	}
	return nil
}

func has(t dsec.Token, r dsec.Right) bool { return slices.Contains(t.Rights, r) }

// service gives "dsec.v1.Commands" of "/dsec.v1.Commands/Run".
func service(path string) string {
	s, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return s
}

// forSandbox reports whether a call is for one sandbox, and so for its node.
func forSandbox(path string) bool {
	switch service(path) {
	case dsecv1.CommandsName, dsecv1.FilesName, dsecv1.PortsName, dsecv1.TrajectoriesName, dsecv1.ScreensName:
		return true
	case dsecv1.SnapshotsName:
		return path == dsecv1.SnapshotsTakeProcedure || path == dsecv1.SnapshotsForkProcedure
	case dsecv1.SandboxesName:
		return path != dsecv1.SandboxesCreateProcedure && path != dsecv1.SandboxesListProcedure
	}
	return false
}

package rpc

import (
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// Known reports whether a path is that of a call of the schema. What callers
// make up is not: it has no rights, no sandbox and no metric of its own.
func Known(path string) bool { return procedures()[path] }

var procedures = sync.OnceValue(func() map[string]bool {
	all := map[string]bool{}
	for _, f := range []protoreflect.FileDescriptor{
		dsecv1.File_dsec_v1_sandboxes_proto, dsecv1.File_dsec_v1_commands_proto, dsecv1.File_dsec_v1_files_proto,
		dsecv1.File_dsec_v1_ports_proto, dsecv1.File_dsec_v1_images_proto, dsecv1.File_dsec_v1_jobs_proto, dsecv1.File_dsec_v1_admin_proto,
		dsecv1.File_dsec_v1_trajectories_proto, dsecv1.File_dsec_v1_snapshots_proto, dsecv1.File_dsec_v1_screens_proto,
		dsecv1.File_dsec_v1_functions_proto,
	} {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				all["/"+string(s.FullName())+"/"+string(s.Methods().Get(j).Name())] = true
			}
		}
	}
	return all
})

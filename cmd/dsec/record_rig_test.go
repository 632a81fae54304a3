package main

import (
	"context"
	"os"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/edge"
)

// anyName resolves every image name.
type anyName struct{}

func (anyName) Resolve(_ context.Context, _ dsec.ProjectID, name string) (dsec.Image, error) {
	base, _ := dsec.SplitImageName(name)
	return dsec.Image{Name: base, Version: "1", Role: dsec.Base, Digest: "sha256:" + base}, nil
}
func (anyName) Register(context.Context, dsec.Image) error { return nil }

// oneImage lists the image that the tests use.
type oneImage struct{ dsec.Images }

func (oneImage) List(ctx context.Context, _ dsec.ImageQuery) (dsec.ImagePage, error) {
	img, err := anyName{}.Resolve(ctx, "", "debian")
	return dsec.ImagePage{Images: []dsec.Image{img}}, err
}

type noRoots struct{}

func (noRoots) Acquire(_ context.Context, d []string) ([]*os.File, func(), error) {
	return make([]*os.File, len(d)), func() {}, nil
}

type roomyHost struct{}

func (roomyHost) Sample() (edge.HostSample, error) {
	return edge.HostSample{CPUs: 2, Memory: 16 << 30, Available: 12 << 30, Disk: 1 << 40, DiskFree: 1 << 39, InodesFree: -1, Tasks: 200, MaxTasks: 32768}, nil
}

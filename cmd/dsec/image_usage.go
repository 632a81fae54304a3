package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/erofs"
)

// usageLimit bounds how long a list of images waits for figures. What was found
// out until then is there at the next.
const usageLimit = 10 * time.Second

// fillUsage finds out what images take. Where the store does not answer they
// stay without: the list is of names and those are known.
func (s *images) fillUsage(ctx context.Context, list []dsec.Image) {
	ctx, cancel := context.WithTimeout(ctx, usageLimit)
	defer cancel()
	digests := make([]string, len(list))
	for i, img := range list {
		digests[i] = img.Digest
	}
	all, err := s.stock.Usage(ctx, digests)
	if err != nil {
		return
	}
	var cached map[string]int64
	if s.cached != nil {
		cached = s.cached(ctx, digests)
	}
	for i, img := range list {
		u := all[img.Digest]
		if u == nil {
			continue
		}
		own := *u // two names of one layer share it
		if own.Cached = img.Stored; s.cached != nil {
			own.Cached = cached[img.Digest]
		}
		list[i].Usage = &own
	}
}

// beyond says of an import that ended at its bound whose bound that is.
func beyond(err error, most int64, p dsec.ProjectID) error {
	if most > 0 && errors.Is(err, erofs.ErrTooBig) {
		return &dsec.Error{Kind: dsec.Exhausted, Err: fmt.Errorf("more than the %s of images that project %s may have of its quota: %w", size(most), p, err)}
	}
	return err
}

// parts tells what a layer has in the store: it is the stock's PartsFunc.
func (s *images) parts(ctx context.Context, digest string) ([]dsec.ImagePart, error) {
	d, err := blob.Parse(digest)
	if err != nil {
		return nil, dsec.Errorf(dsec.NotFound, "layer %q: %w", digest, err)
	}
	l, err := s.library.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	m := l.Manifest
	kinds := map[blob.Digest]string{m.Meta.Digest: "metadata"}
	for _, data := range m.Data {
		kinds[data.Chunks.Digest], kinds[data.Digest] = "chunks", "data"
		if data.Packed != nil {
			kinds[data.Packed.Digest] = "packed"
		}
		if data.Pieces != nil {
			kinds[data.Pieces.Digest] = "pieces"
		}
	}
	var parts []dsec.ImagePart
	for _, p := range m.Parts() {
		kind, ok := kinds[p.Digest]
		if !ok {
			kind = "other"
		}
		parts = append(parts, dsec.ImagePart{Kind: kind, Digest: string(p.Digest), Size: p.Size})
	}
	return parts, nil
}

// stocked is dsec.Projects that also tells what projects have of images.
type stocked struct {
	cluster.Projects
	stock *cluster.Stock
}

// List adds what the images of each project take, where the store answers.
func (s stocked) List(ctx context.Context) ([]dsec.Project, error) {
	list, err := s.Projects.List(ctx)
	if err != nil {
		return nil, err
	}
	uctx, cancel := context.WithTimeout(ctx, usageLimit)
	defer cancel()
	if used, err := s.stock.Used(uctx); err == nil {
		for i := range list {
			list[i].Used.Images = used[list[i].Name]
		}
	}
	return list, nil
}

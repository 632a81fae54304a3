package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/depot"
)

// profiles keeps which bytes of a layer are wanted first: what one node saw in the
// first seconds of an environment, others fetch ahead. A profile is a hint; that
// there is none, or that it cannot be had, is nobody's error.
type profiles struct {
	names cluster.Profiles
	store blob.Store
}

// What the cluster has of a layer's profile: its blob, and that of the pages that it
// names, which stays with it.
func profileName(profile, pack blob.Digest) string { return string(profile) + " " + string(pack) }

func profileBlobs(name string) (profile, pack blob.Digest, err error) {
	first, second, _ := strings.Cut(name, " ")
	if profile, err = blob.Parse(first); err == nil {
		pack, err = blob.Parse(second)
	}
	return profile, pack, err
}

// get gives the profile of a layer; nil if there is none. One whose blob is gone or
// not what it should be is taken away, so that another can be recorded.
func (p profiles) get(ctx context.Context, layer string) ([]byte, error) {
	name, err := p.names.Get(ctx, layer)
	if dsec.KindOf(err) == dsec.NotFound && err != nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	b, err := p.read(ctx, name)
	if err == nil {
		_, err = depot.PackOf(b)
	}
	if err != nil && !errors.Is(err, blob.ErrUnavailable) {
		return nil, p.names.Remove(ctx, layer, name)
	}
	return b, err
}

func (p profiles) read(ctx context.Context, name string) ([]byte, error) {
	d, pack, err := profileBlobs(name)
	if err != nil {
		return nil, err
	}
	if _, err := p.store.Stat(ctx, pack); err != nil {
		return nil, err
	}
	info, err := p.store.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	if info.Size > depot.MaxProfile {
		return nil, fmt.Errorf("profile of %d bytes", info.Size)
	}
	return blob.ReadAll(ctx, p.store, d)
}

// add keeps a profile of a layer that has none yet.
func (p profiles) add(ctx context.Context, layer string, b []byte) error {
	if len(b) == 0 || len(b) > depot.MaxProfile {
		return nil
	}
	pack, err := depot.PackOf(b)
	if err != nil {
		return err
	}
	switch _, err := p.names.Get(ctx, layer); {
	case err == nil:
		return nil
	case dsec.KindOf(err) != dsec.NotFound:
		return err
	}
	d, err := blob.PutBytes(ctx, p.store, b)
	if err != nil {
		return fmt.Errorf("store profile: %w", err)
	}
	_, err = p.names.Add(ctx, layer, profileName(d, pack))
	return err
}

// forget takes away the profile that a layer has.
func (p profiles) forget(ctx context.Context, layer string) error {
	name, err := p.names.Get(ctx, layer)
	if err != nil {
		return err
	}
	return p.names.Remove(ctx, layer, name)
}

// keep gives the blobs of the profiles of layers that stay, and takes those of others
// away.
func (p profiles) keep(ctx context.Context, layers map[string]int) ([]blob.Digest, error) {
	all, err := p.names.All(ctx)
	if err != nil {
		return nil, err
	}
	var blobs []blob.Digest
	for _, layer := range slices.Sorted(maps.Keys(all)) {
		d, pack, err := profileBlobs(all[layer])
		if err == nil && layers[layer] > 0 {
			blobs = append(blobs, d, pack)
			continue
		}
		if err := p.names.Remove(ctx, layer, all[layer]); err != nil {
			return nil, err
		}
	}
	return blobs, nil
}

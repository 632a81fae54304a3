package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// Bounds of how long a store may take to answer a probe, and to answer at all.
const (
	probeLimit    = 20 * time.Second
	probePatience = 2 * time.Second
)

// storeFeature tries a store. A URL that cannot be one is an error; what the
// store says is a status.
func storeFeature(ctx context.Context, url string) (dsec.FeatureStatus, error) {
	f := dsec.FeatureStatus{Name: "store", Cost: "a node with it cannot import, commit or start what it has not kept"}
	dir, err := os.MkdirTemp("", "dsec-store-*")
	if err != nil {
		return f, err
	}
	defer os.RemoveAll(dir)
	where, err := openStore(Up{Data: dir, Store: url})
	if err != nil {
		return f, err
	}
	where.Retry = blob.Retry{For: probePatience} // who asks wants to know now
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	begin := time.Now()
	err = probe(ctx, where)
	if f.OK = err == nil; f.OK {
		f.Detail = fmt.Sprintf("%s: written, read and deleted in %s", where.URL, took(time.Since(begin)))
	} else {
		f.Detail = fmt.Sprintf("%s: %v", where.URL, err)
	}
	return f, nil
}

// probe writes a small blob that nobody has, reads it back and deletes it.
func probe(ctx context.Context, where storeConfig) error {
	// A node would make it; who asks beforehand wants to hear of a mount that is missing.
	if folder, ok := strings.CutPrefix(where.URL, "file://"); ok {
		if _, err := os.Stat(folder); err != nil {
			return fmt.Errorf("%w: there is no such folder", blob.ErrUnavailable)
		}
	}
	s, err := where.far(ctx)
	if err != nil {
		return err
	}
	b := make([]byte, 4<<10)
	rand.Read(b) //nolint:errcheck // never fails
	d, err := blob.PutBytes(ctx, s, b)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	got, err := blob.ReadAll(ctx, s, d)
	if err == nil && !bytes.Equal(got, b) {
		err = errors.New("what was written reads differently")
	}
	if err != nil {
		err = fmt.Errorf("read: %w", err)
	}
	if derr := s.Delete(ctx, d); derr != nil {
		err = errors.Join(err, fmt.Errorf("delete: %w", derr))
	}
	return err
}

// nodesWithStore is dsec.Nodes that also tells where the node's layers lie.
type nodesWithStore struct {
	nodes dsec.Nodes
	where storeConfig
	lazy  *lazyData // nil where nothing is kept
}

// Nodes adds the store.
func (s nodesWithStore) Nodes(ctx context.Context) ([]dsec.Node, error) {
	list, err := s.nodes.Nodes(ctx)
	for i := range list {
		list[i].Store = s.where.URL
		if s.where.way != wayLazy {
			continue
		}
		if list[i].Cache, err = s.where.cacheBytes(); err != nil {
			list[i].Cache, err = 0, nil // the folder may not be there yet
		}
		if s.lazy == nil {
			continue
		}
		if st, serr := s.lazy.Stats(ctx); serr == nil { // else it is just being started again
			list[i].Cached, list[i].Fetched = st.Cached, st.Fetched
		}
	}
	return list, err
}

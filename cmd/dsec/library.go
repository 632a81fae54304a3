package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// openLibrary gives what makes and opens the layers of a store. In the background
// it learns what layers with a name hold that other nodes made.
func (n *node) openLibrary(where storeConfig, s blob.Store) (*image.Library, error) {
	opts := image.LibraryOptions{
		Verified: n.data.at(verifiedDir), Temp: n.data.at(tempDir), Index: n.data.at(indexDir),
	}
	if where.compress == "zstd" {
		opts.Pack = image.Zstd
	}
	if where.way != wayOwn {
		// What is opened whole, such as a disk image, may be packed, also where this
		// node does not pack.
		plain, err := blob.OpenFolder(filepath.Join(n.data.at(cacheDir), "plain"))
		if err != nil {
			return nil, fmt.Errorf("open plain copies: %w", err)
		}
		opts.Plain = plain
	}
	library := image.New(s, opts)
	ctx, cancel := context.WithCancel(context.Background())
	learned := make(chan struct{})
	go func() {
		defer close(learned)
		var layers []blob.Digest
		for digest := range n.cluster.Names().Layers() {
			if d, err := blob.Parse(digest); err == nil {
				layers = append(layers, d)
			}
		}
		slices.Sort(layers)
		library.Learn(ctx, layers) //nolint:errcheck // what is not known is stored again
	}()
	n.onClose("file index", func() error {
		cancel()
		<-learned
		library.Close()
		return nil
	})
	return library, nil
}

// Package store opens a blob store by its URL, with the decorators that its kind needs in a
// node. It knows no flags and no defaults of a program, and offers nothing that the kinds do
// not: read blob for what a store is, docs/stores.md for how to choose one.
//
// It is a package of its own so that who only uses blobs does not link an S3 client.
package store

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/s3"
)

// Store is what every store opened here can do.
type Store interface {
	blob.Store
	blob.Stager
	blob.LocalPather
	blob.Holder
}

// Config says where blobs are kept.
type Config struct {
	// URL is a folder's path or file:// URL, or s3://bucket/prefix?endpoint=..., see
	// s3.ParseURL.
	URL string

	// Cache is a local folder for whole blobs of a store that has no local files, and
	// CacheBytes its bound, 0 for none. A folder needs no cache and gets none.
	Cache      string
	CacheBytes int64

	// Known, if set, is a file that notes that a folder had a store. A folder that has none any
	// more, since nothing is mounted there, is not made a new one.
	Known string

	// Retry is how patient to be with a store that does not answer.
	Retry blob.Retry
}

// Check returns nil if c can be opened as far as its text tells.
func (c Config) Check() error {
	folder, bucket, err := c.parse()
	if err != nil {
		return err
	}
	if bucket != nil && c.Cache == "" {
		return errors.New("a store without local files needs a cache folder")
	}
	if folder != "" && !filepath.IsAbs(folder) {
		return fmt.Errorf("store folder %q is not an absolute path", folder)
	}
	return nil
}

// parse returns either a folder or a bucket.
func (c Config) parse() (folder string, bucket *s3.Config, err error) {
	switch scheme, _, ok := strings.Cut(c.URL, ":"); {
	case strings.HasPrefix(c.URL, "/"):
		return c.URL, nil, nil
	case ok && scheme == "s3":
		conf, err := s3.ParseURL(c.URL)
		if err != nil {
			return "", nil, err
		}
		return "", &conf, nil
	case ok && scheme == "file":
		u, err := url.Parse(c.URL)
		if err != nil || u.Host != "" || u.RawQuery != "" || u.Fragment != "" || u.Path == "" {
			return "", nil, errors.New("store URL is not file:///folder")
		}
		return u.Path, nil, nil
	}
	return "", nil, errors.New("store URL is neither a folder's path nor file:// nor s3://")
}

// Open opens a store, and creates it where there is none. A store in a bucket that does not
// answer now is opened all the same, so that a node comes up and waits for it; wrong
// credentials or a wrong place are errors at once. What is opened holds nothing to close.
func Open(ctx context.Context, c Config) (Store, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	folder, bucket, err := c.parse()
	if err != nil {
		return nil, err
	}
	if bucket == nil {
		if err := c.known(folder); err != nil {
			return nil, err
		}
		f, err := blob.OpenFolder(folder)
		if err != nil {
			return nil, err
		}
		if c.Known != "" {
			if err := os.WriteFile(c.Known, []byte(folder+"\n"), 0o600); err != nil {
				return nil, fmt.Errorf("note the store: %w", err)
			}
		}
		return files{blob.NewRetrying(f, c.Retry)}, nil
	}
	far, err := openBucket(ctx, *bucket, c.Retry)
	if err != nil {
		return nil, err
	}
	near, err := blob.OpenFolder(c.Cache)
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	return blob.NewCached(near, far, blob.CacheOptions{Bytes: c.CacheBytes}), nil
}

// known refuses a folder that had a store and has none.
func (c Config) known(folder string) error {
	b, err := os.ReadFile(c.Known)
	if err != nil || strings.TrimSuffix(string(b), "\n") != folder || blob.IsFolder(folder) {
		return nil //nolint:nilerr // nothing is known
	}
	return fmt.Errorf("%w: %s had a store and has none now; is it mounted? To begin with an empty one, remove %s", blob.ErrUnavailable, folder, c.Known)
}

// OpenFar is Open without the cache of whole blobs, for who fetches ranges and keeps them.
func OpenFar(ctx context.Context, c Config) (blob.Store, error) {
	folder, bucket, err := c.parse()
	if err != nil {
		return nil, err
	}
	if bucket != nil {
		return openBucket(ctx, *bucket, c.Retry)
	}
	c.Cache = folder // not used, and Open then checks the rest
	return Open(ctx, c)
}

// checkLimit is how long opening a store waits for its answer.
const checkLimit = 3 * time.Second

func openBucket(ctx context.Context, conf s3.Config, retry blob.Retry) (*blob.Retrying, error) {
	conf.Retry = retry
	far, err := s3.New(conf)
	if err != nil {
		return nil, err
	}
	// A node that comes up asks whether what it was told is right. It does not wait for a store
	// that is away: whoever reads from it does.
	quick, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	if err := far.Check(quick); err != nil && !errors.Is(err, blob.ErrUnavailable) && quick.Err() == nil || ctx.Err() != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	return blob.NewRetrying(far, retry), nil
}

// files is a store that drops nothing by itself.
type files struct{ *blob.Retrying }

// Hold implements blob.Holder.
func (files) Hold(blob.Digest) (release func()) { return func() {} }

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/store"
)

// A storeWay is how the data of layers reach their mounts.
type storeWay string

// The ways.
const (
	wayOwn     storeWay = "own"      // files of the node's own folder, hashed whole once
	wayLazy    storeWay = "lazy"     // fetched in verified chunks when they are read
	wayInPlace storeWay = "in-place" // files of a mount, where they lie, unverified
)

// What a store URL may say beside what package blob/store reads. S3 is packed
// unless told otherwise, folders are not.
const (
	optCompress = "compress" // zstd or none: how imports of this node are stored
	optInPlace  = "in-place" // true: wayInPlace
	optTimeout  = "timeout"  // how long a read waits for the store before it is EIO
	optLatency  = "latency"  // added to every call, for benches
	optRate     = "rate"     // bytes a second, for benches
)

// defaultReadLimit is how long a read of lazy data waits for the store.
const defaultReadLimit = 30 * time.Second

// storeConfig says where the blobs of a node are and how its layers read them.
// It holds no secret, so it can be printed.
type storeConfig struct {
	store.Config          // without the options above; Cache is for whole blobs
	way          storeWay //
	compress     string   // "zstd" or "none"
	limits       blob.Limits
	readLimit    time.Duration
	lazy         string // folder of the chunk cache
	lazyBytes    int64  // its bound; 0 means a quarter of its file system
}

// openStore reads what Up says of the store. It only looks at the text: a bad
// URL is Invalid before anything is made.
func openStore(u Up) (storeConfig, error) {
	data, err := filepath.Abs(u.Data)
	if err != nil {
		return storeConfig{}, err
	}
	cache := filepath.Join(data, cacheDir)
	c := storeConfig{
		Config: store.Config{URL: filepath.Join(data, blobDir), Cache: filepath.Join(cache, "whole"), CacheBytes: wholeBytes},
		way:    wayOwn, compress: "none", readLimit: defaultReadLimit,
		lazy: filepath.Join(cache, "chunks"), lazyBytes: u.Cache,
	}
	if u.Cache < 0 {
		return storeConfig{}, dsec.Errorf(dsec.Invalid, "a cache of %d bytes", u.Cache)
	}
	if u.Cache > 0 {
		c.CacheBytes = min(wholeBytes, max(u.Cache, leastWhole))
	}
	if u.Store == "" {
		return c, nil
	}
	c.way = wayLazy
	c.Known = filepath.Join(data, knownStore)
	if strings.HasPrefix(u.Store, "s3:") {
		c.compress = "zstd"
	}
	if c.URL, err = c.options(u.Store); err == nil {
		err = c.Check()
	}
	if err != nil {
		return storeConfig{}, dsec.Errorf(dsec.Invalid, "store: %w", err)
	}
	return c, nil
}

// options takes this program's options out of a store URL and returns the rest.
func (c *storeConfig) options(raw string) (rest string, err error) {
	base, query, ok := strings.Cut(raw, "?")
	if !ok || strings.HasPrefix(raw, "/") { // a path may hold any character
		return raw, nil
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return "", errors.New("store URL has a malformed query") // the error repeats its input
	}
	for name, list := range values {
		value := list[0]
		switch name {
		case optCompress:
			if value != "zstd" && value != "none" {
				err = errors.New("is zstd or none")
			}
			c.compress = value
		case optInPlace:
			switch {
			case !strings.HasPrefix(raw, "file:"):
				err = errors.New("is for folders")
			case value == "true":
				c.way = wayInPlace
			case value != "false":
				err = errors.New("is true or false")
			}
		case optTimeout:
			if c.readLimit, err = time.ParseDuration(value); err == nil && c.readLimit <= 0 {
				err = errors.New("must be more than nothing")
			}
		case optLatency:
			c.limits.Latency, err = time.ParseDuration(value)
			c.limits.Exact = true
		case optRate:
			c.limits.BytesPerSecond, err = parseBytes(value)
		default:
			continue
		}
		if len(list) > 1 {
			err = errors.New("is given twice")
		}
		if err != nil {
			return "", fmt.Errorf("option %s: %w", name, err)
		}
		values.Del(name)
	}
	if c.way == wayInPlace && c.compress != "none" {
		return "", errors.New("packed data cannot be read in place")
	}
	if len(values) > 0 {
		base += "?" + values.Encode()
	}
	return base, nil
}

// placeFile says in a data folder where the node's layers are.
const placeFile = "store-place"

// place names the store: without options, which say how it is used.
func (c storeConfig) place() string {
	if c.way == wayOwn {
		return "its own folder"
	}
	path, ok := strings.CutPrefix(c.URL, "file://")
	if ok {
		path, _, _ = strings.Cut(path, "?")
		if plain, err := url.PathUnescape(path); err == nil {
			path = plain
		}
	}
	if strings.HasPrefix(path, "/") {
		return filepath.Clean(path)
	}
	return path // of a bucket, with the server that has it
}

// note writes down where the layers are, once the store could be opened.
func (c storeConfig) note(file string) error {
	if b, err := os.ReadFile(file); err == nil && len(b) > 0 {
		return nil
	}
	err := os.WriteFile(file+".new", []byte(c.place()+"\n"), 0o600)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		return fmt.Errorf("note where the layers are: %w", err)
	}
	return nil
}

// same is Conflict where a node had another store: the layers of its images and of its
// sandboxes are there.
func (c storeConfig) same(file string) error {
	b, err := os.ReadFile(file)
	switch had := strings.TrimSpace(string(b)); {
	case errors.Is(err, fs.ErrNotExist), err == nil && had == "":
		return nil
	case err != nil:
		return fmt.Errorf("read where the layers are: %w", err)
	case had != c.place():
		return dsec.Errorf(dsec.Conflict, "the layers of this node's images are in %s, and --store says %s; if they were moved there, remove %s", had, c.place(), file)
	}
	return nil
}

// wholeBytes bounds the local copies of what a node reads whole of a store
// without files: manifests and metadata that an import or a commit looks at. A
// smaller cache of chunks bounds them too, down to leastWhole.
const (
	wholeBytes = 2 << 30
	leastWhole = 64 << 20
)

// open opens the store itself, for imports, commits and names.
func (c storeConfig) open(ctx context.Context) (blob.Store, error) {
	if c.way == wayOwn {
		return blob.OpenFolder(c.URL)
	}
	s, err := store.Open(ctx, c.Config)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// far opens the store for the process that fetches lazy data: as it is, without
// a cache of whole blobs, and slowed down where a bench wants it so.
func (c storeConfig) far(ctx context.Context) (blob.Store, error) {
	s, err := store.OpenFar(ctx, c.Config)
	if err != nil {
		return nil, err
	}
	if c.limits != (blob.Limits{}) {
		return blob.NewLimited(s, c.limits), nil
	}
	return s, nil
}

// cacheBytes is the bound of the chunk cache.
func (c storeConfig) cacheBytes() (int64, error) {
	if c.lazyBytes > 0 {
		return c.lazyBytes, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.lazy, &st); err != nil {
		return 0, fmt.Errorf("look at cache folder: %w", err)
	}
	return int64(st.Blocks) * st.Bsize / 4, nil
}

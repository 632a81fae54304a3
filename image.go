package dsec

import (
	"context"
	"io"
	"iter"
	"time"
)

// Role says where in an Environment an image goes.
type Role string

// The roles of an image.
const (
	Base      Role = "base"
	Workspace Role = "workspace"
	Toolkit   Role = "toolkit"
)

// Check reports whether r is one of the three roles.
func (r Role) Check() error {
	if r == Base || r == Workspace || r == Toolkit {
		return nil
	}
	return Errorf(Invalid, "role %q is not base, workspace or toolkit", clip(string(r)))
}

// Image is a named, immutable version of a layer.
type Image struct {
	Name    string // without version
	Version string
	Role    Role
	Digest  string // of the layer's manifest
	Size    int64  // bytes of its files
	Stored  int64  // bytes of its metadata image and blobs in the store
	Entries int64  // files, folders and links
	Created time.Time
	Source  string // what it was made from, for people
	Config  ImageConfig
	Project ProjectID // whose it is alone; empty for everybody's
}

// Ref gives "name@version".
func (i Image) Ref() string { return i.Name + "@" + i.Version }

// ImageConfig is what an image says about how to run things in it.
type ImageConfig struct {
	Env   []string // NAME=value
	Cwd   string
	User  string
	Shell []string // its entry point and command; not run by DSec, kept for people
}

// ImportOptions name what an import makes.
type ImportOptions struct {
	Name string // name, or name@version; a missing version is the first 12 digits of the digest
	Role Role   // default Base
}

// Progress is one report of a long operation.
type Progress struct {
	Stage string // "fetch", "convert", "store"
	Done  int64  // bytes
	Total int64  // bytes, 0 when not known
	Image *Image // set in the last report
}

// Images keeps what environments are made of. All methods are safe for
// concurrent use.
type Images interface {
	// Pull imports from an OCI registry, reporting progress; the last report
	// carries the image.
	Pull(ctx context.Context, ref string, opt ImportOptions) iter.Seq2[Progress, error]

	// Upload imports a tar stream: of a root file system, of "docker save", or
	// of an OCI layout, plain or compressed with gzip or zstd.
	Upload(ctx context.Context, opt ImportOptions, r io.Reader) (Image, error)

	// List returns all images, by name, then newest version first.
	List(ctx context.Context) ([]Image, error)

	// Inspect resolves "name" or "name@version".
	Inspect(ctx context.Context, name string) (Image, error)

	// Remove forgets a name. Sandboxes that use the layer go on; its bytes go
	// with the next Collect.
	Remove(ctx context.Context, name string) error

	// Collect deletes blobs that no name and no sandbox needs.
	Collect(ctx context.Context) (Collected, error)
}

// Collected is what a collection freed.
type Collected struct {
	Blobs int
	Bytes int64
}

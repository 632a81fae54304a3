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
	Disk      Role = "disk" // a whole disk image, for kind fullvm, with nothing over it
)

// Check reports whether r is one of the roles.
func (r Role) Check() error {
	if r == Base || r == Workspace || r == Toolkit || r == Disk {
		return nil
	}
	return Errorf(Invalid, "role %q is not base, workspace, toolkit or disk", clip(string(r)))
}

// Image is a named, immutable version of a layer.
type Image struct {
	Name    string // without version
	Version string
	Role    Role
	Digest  string // of the layer's manifest
	Size    int64  // bytes of its files
	Stored  int64  // bytes of its metadata image and blobs in the store, those that it shares included
	Entries int64  // files, folders and links
	Created time.Time
	Source  string // what it was made from, for people
	Config  ImageConfig
	Project ProjectID   // whose it is alone; empty for everybody's
	Tags    []string    // what else stands for this version now, by name
	Usage   *ImageUsage // where it was asked for and could be found out
}

// ImageUsage is what an image takes.
type ImageUsage struct {
	Unique int64 // bytes in the store that no other name needs
	Cached int64 // bytes of it on the node that answers
	Parts  []ImagePart
}

// ImagePart is one blob of a layer.
type ImagePart struct {
	Kind   string // "metadata", "data", "packed", "chunks", "pieces", or what later versions add
	Digest string
	Size   int64
	Names  int // how many names need it, this one included
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

	// Adopt names a layer that the store has already: one that another node made,
	// or that has lost its name. opt.Role must be the layer's, or empty. It is for
	// operators: who knows a digest only is not known to own what it stands for.
	Adopt(ctx context.Context, digest string, opt ImportOptions) (Image, error)

	// List returns the images that q selects, by name, then newest version first.
	List(ctx context.Context, q ImageQuery) (ImagePage, error)

	// Inspect resolves "name" or "name@version", where a tag is as good as a
	// version, and finds out its Usage.
	Inspect(ctx context.Context, name string) (Image, error)

	// Tag lets "name@tag" stand for the version that name resolves to, from one
	// moment to the next if it stood for another. It is Exists when the tag is a
	// version.
	Tag(ctx context.Context, name, tag string) (Image, error)

	// Remove forgets a name: a tag, which leaves its version, or a version, which
	// is Conflict while it has tags. Sandboxes that use the layer go on; its bytes
	// go with the next Collect.
	Remove(ctx context.Context, name string) error

	// Export gives an environment as an OCI image: a tar of its layout. The reader
	// must be closed.
	Export(ctx context.Context, e Environment) (io.ReadCloser, error)

	// Collect deletes blobs that no name and no sandbox needs. It is Conflict where
	// others may need them of whom nothing is known here, unless opt.Alone says that
	// there are none.
	Collect(ctx context.Context, opt CollectOptions) (Collected, error)
}

// ImageQuery selects images. Empty fields select all.
type ImageQuery struct {
	Prefix string // of the name
	Digest string // of the layer
	Limit  int    // at most this many; default and most MaxImagePage
	After  string // Next of the page before
	Usage  bool   // find out what each takes
}

// MaxImagePage is how many images a page has at most.
const MaxImagePage = 1000

// ImagePage is a part of a list of images.
type ImagePage struct {
	Images []Image
	Next   string // empty at the end of the list
}

// AllImages yields all images that q selects, page after page.
func AllImages(ctx context.Context, s Images, q ImageQuery) iter.Seq2[Image, error] {
	return func(yield func(Image, error) bool) {
		for {
			page, err := s.List(ctx, q)
			if err != nil {
				yield(Image{}, err)
				return
			}
			for _, img := range page.Images {
				if !yield(img, nil) {
					return
				}
			}
			if q.After = page.Next; q.After == "" {
				return
			}
		}
	}
}

// CollectOptions say what may be deleted.
type CollectOptions struct {
	Alone bool // the store is used by nobody but this cluster
}

// Collected is what a collection freed.
type Collected struct {
	Blobs int
	Bytes int64
}

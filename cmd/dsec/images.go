package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/rootfs"
)

// images is dsec.Images: the layers of a library under the names of a cluster.
// Neither of the two knows the other.
type images struct {
	library *image.Library
	names   cluster.Names
	stock   *cluster.Stock

	// profiles of layers; the zero value keeps none.
	profiles profiles

	// lazy, if set, has the files of layers; learned are those whose profiles were
	// looked for.
	lazy    *lazyData
	learned sync.Map

	// shared says that others may use the store, whose names are not known here.
	shared bool

	// cached gives how many bytes of layers this node has; nil where all are.
	cached func(ctx context.Context, digests []string) map[string]int64

	// pinned are the layers that were just found by name, until which time.
	pinMu  sync.Mutex
	pinned map[string]time.Time

	// collecting keeps the naming of layers that are in the store, perhaps since
	// long, apart from collections: they must not go between the look and the name.
	collecting sync.RWMutex

	// inUse gives the layers that sandboxes use, which a collection keeps. It
	// lets go of mounts that nobody uses first.
	inUse func(context.Context) (map[string]int, error)
}

var _ dsec.Images = (*images)(nil)

func newImages(l *image.Library, c *cluster.Cluster) *images {
	s := &images{library: l, names: c.Names(), pinned: map[string]time.Time{}}
	s.stock = c.Stock(s.parts)
	return s
}

// Pull imports from a registry. The fetch ends with the loop over it.
func (s *images) Pull(ctx context.Context, ref string, opt dsec.ImportOptions) iter.Seq2[dsec.Progress, error] {
	return func(yield func(dsec.Progress, error) bool) {
		if err := check(opt); err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		most, err := s.stock.Room(ctx, ownerFrom(ctx))
		if err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		var work sync.WaitGroup
		defer work.Wait()
		defer cancel()
		reports := make(chan dsec.Progress, 1)
		var img dsec.Image
		work.Go(func() {
			defer close(reports)
			var l image.Layer
			l, err = s.library.Pull(ctx, ref, image.Options{Role: opt.Role, MaxBytes: most, Progress: func(p dsec.Progress) {
				select {
				case reports <- p:
				default: // a slow reader misses reports, the fetch goes on
				}
			}})
			if err = beyond(err, most, ownerFrom(ctx)); err == nil {
				img, err = s.name(ctx, l, opt, ref)
			}
		})
		for p := range reports {
			if !yield(p, nil) {
				return
			}
		}
		if err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		yield(dsec.Progress{Stage: "store", Done: img.Size, Total: img.Size, Image: &img}, nil)
	}
}

// Upload imports a tar stream.
func (s *images) Upload(ctx context.Context, opt dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	if err := check(opt); err != nil {
		return dsec.Image{}, err
	}
	most, err := s.stock.Room(ctx, ownerFrom(ctx))
	if err != nil {
		return dsec.Image{}, err
	}
	l, err := s.library.Upload(ctx, r, image.Options{Role: opt.Role, MaxBytes: most})
	if err = beyond(err, most, ownerFrom(ctx)); err != nil {
		return dsec.Image{}, err
	}
	if opt.Role == dsec.Disk {
		if err := s.checkDisk(ctx, l); err != nil {
			return dsec.Image{}, err // nothing has its name, and a collection takes it
		}
	}
	return s.name(ctx, l, opt, "upload")
}

// check refuses bad options before any work is done.
func check(opt dsec.ImportOptions) error {
	if opt.Role != "" {
		if err := opt.Role.Check(); err != nil {
			return err
		}
	}
	return dsec.CheckNewImageName(opt.Name)
}

// name makes an image of a layer.
func (s *images) name(ctx context.Context, l image.Layer, opt dsec.ImportOptions, source string) (dsec.Image, error) {
	img := l.Image()
	img.Name, img.Version = dsec.SplitImageName(opt.Name)
	if img.Version == "" {
		img.Version = l.Digest.Hex()[:12]
	}
	img.Created, img.Source = time.Now().UTC(), source
	img.Project = ownerFrom(ctx)
	if err := (names{s}).Register(ctx, img); err != nil {
		return dsec.Image{}, err
	}
	// Who gives the same content the same name again gets the first record.
	e, err := s.view(ctx).Resolve(img.Ref())
	return e.Image, err
}

// ownerFrom says whose an image that is made is: an operator's is everybody's.
func ownerFrom(ctx context.Context) dsec.ProjectID {
	if c, ok := dsec.CallerFrom(ctx); ok && !c.Admin {
		return c.Project
	}
	return ""
}

// view gives the names that the caller sees: a project's token its own and
// everybody's, an operator's all.
func (s *images) view(ctx context.Context) cluster.Names {
	if c, ok := dsec.CallerFrom(ctx); ok && !c.Admin {
		return s.names.Of(c.Project)
	}
	return s.names
}

// Remove forgets a name.
func (s *images) Remove(ctx context.Context, name string) error {
	return s.view(ctx).Delete(ctx, name)
}

// Collect deletes what no name and no sandbox needs. The names are read after
// the sandboxes: a create pins its layers while they have their names, and is
// among the sandboxes before the pin ends.
func (s *images) Collect(ctx context.Context, opt dsec.CollectOptions) (dsec.Collected, error) {
	if c, ok := dsec.CallerFrom(ctx); opt.Alone && ok && !c.Admin {
		return dsec.Collected{}, dsec.Errorf(dsec.Denied, "that nobody else uses the store is an operator's word")
	}
	if s.shared && !opt.Alone {
		return dsec.Collected{}, dsec.Errorf(dsec.Conflict, "other clusters may use the store, whose names are not known here and whose layers would go; an operator who knows that there is none says so with --alone")
	}
	s.collecting.Lock()
	defer s.collecting.Unlock()
	keep := map[string]int{}
	if s.inUse != nil {
		var err error
		if keep, err = s.inUse(ctx); err != nil {
			return dsec.Collected{}, err
		}
	}
	s.named(keep)
	roots := make([]blob.Digest, 0, len(keep))
	for digest := range keep {
		d, err := blob.Parse(digest)
		if err != nil {
			return dsec.Collected{}, fmt.Errorf("read digest %s: %w", digest, err)
		}
		roots = append(roots, d)
	}
	opts := image.CollectOptions{}
	if s.profiles.store != nil {
		var err error
		if opts.Keep, err = s.profiles.keep(ctx, keep); err != nil {
			return dsec.Collected{}, err
		}
	}
	return s.library.Collect(ctx, roots, opts)
}

// Layer gives the verified files of a layer: images is the rootfs.Source.
func (s *images) Layer(ctx context.Context, digest string) (rootfs.Layer, error) {
	return s.files(ctx, digest, depot.Mount)
}

// files gives the files of a layer for a use.
func (s *images) files(ctx context.Context, digest string, form depot.Form) (rootfs.Layer, error) {
	if s.lazy != nil {
		l, err := s.lazy.Layer(ctx, digest, form)
		if err != nil {
			return rootfs.Layer{}, err
		}
		if l.Lazy {
			s.learn(digest)
		}
		return rootfs.Layer{Digest: digest, Meta: l.Meta, Data: l.Data, Lazy: l.Lazy}, nil
	}
	d, err := blob.Parse(digest)
	if err != nil {
		return rootfs.Layer{}, dsec.Errorf(dsec.NotFound, "layer %q: %w", digest, err)
	}
	f, err := s.library.Open(ctx, d)
	if err != nil {
		return rootfs.Layer{}, err
	}
	return rootfs.Layer{Digest: digest, Meta: f.Meta, Data: f.Data}, nil
}

// Commit writes a layer of a sandbox's changes: images is the edge.Committer.
// The new layer stands in for the workspace that lay below it.
func (s *images) Commit(ctx context.Context, src edge.CommitSource) (dsec.Image, error) {
	upper, err := os.Open(src.Dir)
	if err != nil {
		return dsec.Image{}, fmt.Errorf("open writable layer: %w", err)
	}
	defer upper.Close()
	from := image.CommitSource{Upper: upper, Read: src.Read, IDs: erofs.IDRange{Base: src.IDBase, Count: jail.IDRange}}
	if src.Base != nil {
		if from.Over, err = blob.Parse(src.Base.Digest); err != nil {
			return dsec.Image{}, fmt.Errorf("read digest of workspace: %w", err)
		}
		c := src.Base.Config
		from.Config = image.Config{Env: c.Env, Cwd: c.Cwd, User: c.User, Cmd: c.Shell}
	}
	for _, digest := range src.Layers {
		d, err := blob.Parse(digest)
		if err != nil {
			return dsec.Image{}, fmt.Errorf("read digest of layer: %w", err)
		}
		if d != from.Over {
			from.Below = append(from.Below, d)
		}
	}
	l, err := s.library.Commit(ctx, from)
	if err != nil {
		return dsec.Image{}, err
	}
	return l.Image(), nil
}

// prepareBytes bounds how much a commit reads ahead: what is more would push out
// what was read first.
const prepareBytes = 1 << 30

// Prepare has the kernel read a sandbox's changes ahead, so that its workload
// stands still for as long as memory takes, not the disk. What cannot be read,
// or goes meanwhile, is the commit's to find. The workload runs and may swap
// folders for links: nothing outside of Dir is opened.
func (s *images) Prepare(ctx context.Context, src edge.CommitSource) {
	root, err := os.OpenRoot(src.Dir)
	if err != nil {
		return
	}
	defer root.Close()
	left := int64(prepareBytes)
	_ = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // see above
		}
		f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOATIME, 0)
		if err != nil {
			return nil //nolint:nilerr // see above
		}
		defer f.Close()
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_WILLNEED)
			left -= info.Size()
		}
		if left <= 0 || ctx.Err() != nil {
			return fs.SkipAll
		}
		return nil
	})
}

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/dsec-go/dsec"
)

// imageCmd groups the commands on images.
type imageCmd struct {
	Import  imageImportCmd  `cmd:"" help:"Make an image of a registry reference, a folder, a tar or an OCI layout."`
	Ls      imageLsCmd      `cmd:"" help:"List images with what they take."`
	Inspect imageInspectCmd `cmd:"" help:"Show everything about an image."`
	Tag     imageTagCmd     `cmd:"" help:"Let a tag stand for a version."`
	Rm      imageRmCmd      `cmd:"" help:"Forget images, or tags, by name."`
	Export  imageExportCmd  `cmd:"" help:"Write an environment as an OCI image."`
	Gc      imageGcCmd      `cmd:"" help:"Delete stored bytes that no image and no sandbox needs."`
}

// Schemes of sources.
const (
	registryScheme = "docker://" // a registry reference beyond doubt
	layerScheme    = "layer:"    // a layer that the store has already
)

type imageImportCmd struct {
	Src  string `arg:"" help:"Folder, tar (plain, gzip, zstd; also of docker save), OCI layout, - for standard input, registry reference, or layer:DIGEST."`
	Name string `help:"Name, or name@version; a missing version is taken from the content (default that of a reference; else needed)." placeholder:"NAME"`
	As   string `help:"Where in an environment it goes: base, workspace or toolkit; or disk, a whole disk image for kind fullvm." enum:"base,workspace,toolkit,disk" default:"base"`
	outputFlags
}

// Help shows the forms of a source.
func (c *imageImportCmd) Help() string {
	return `Folders and files are read here and streamed to the server, which never reads
paths of its own host; a registry reference is fetched by the server. A layer that
the store has already, of another node or of a name that was removed, only gets a name.

  dsec image import ./rootfs --name debian
  dsec image import ./repo --name repo@v1 --as workspace
  docker save app | dsec image import - --name app
  dsec image import debian.qcow2 --name debian-vm --as disk
  dsec image import docker://registry.example/team/app:1.2
  dsec image import layer:sha256:0123... --name task@v2`
}

// Run imports the source and prints the image's name and version.
func (c *imageImportCmd) Run(ctx context.Context, a *app) error {
	if digest, ok := strings.CutPrefix(c.Src, layerScheme); ok {
		return c.adopt(ctx, a, digest)
	}
	src, err := c.source(a)
	if err == nil && c.As == string(dsec.Disk) {
		src, err = packDisk(src)
	}
	if err != nil {
		return err
	}
	if src != nil {
		defer src.Close()
	}
	opt := dsec.ImportOptions{Name: c.Name, Role: dsec.Role(c.As)}
	if opt.Name == "" {
		if src != nil {
			return dsec.Errorf(dsec.Invalid, "give the image a name: --name NAME")
		}
		opt.Name = localName(strings.TrimPrefix(c.Src, registryScheme))
	}
	if err := dsec.CheckImageName(opt.Name); err != nil {
		return err
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	var img dsec.Image
	if src == nil {
		img, err = a.pull(ctx, s, strings.TrimPrefix(c.Src, registryScheme), opt)
	} else {
		m := a.meter("upload", sizeOf(src))
		img, err = s.Images.Upload(ctx, opt, &countingReader{r: src, m: m, then: "the server stores it"})
		m.clear()
	}
	if err != nil {
		return err
	}
	return a.printImage(img, c.JSON)
}

// adopt names a layer. Its role is its own, whatever --as says by default.
func (c *imageImportCmd) adopt(ctx context.Context, a *app, digest string) error {
	if c.Name == "" {
		return dsec.Errorf(dsec.Invalid, "give the image a name: --name NAME")
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	opt := dsec.ImportOptions{Name: c.Name}
	if c.As != string(dsec.Base) {
		opt.Role = dsec.Role(c.As)
	}
	img, err := s.Images.Adopt(ctx, digest, opt)
	if err != nil {
		return err
	}
	return a.printImage(img, c.JSON)
}

// source opens what is to be uploaded; nil means a registry reference.
func (c *imageImportCmd) source(a *app) (io.ReadCloser, error) {
	switch {
	case c.Src == "-":
		return io.NopCloser(a.Stdin), nil
	case strings.HasPrefix(c.Src, registryScheme):
		return nil, nil
	}
	info, err := os.Stat(a.local(c.Src))
	switch {
	case errors.Is(err, fs.ErrNotExist) && isReference(c.Src):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("open source: %w", err)
	case info.IsDir():
		return packFolder(a.local(c.Src), packOptions{}), nil
	}
	f, err := os.Open(a.local(c.Src))
	if err != nil {
		return nil, fmt.Errorf("open source: %w", err)
	}
	return f, nil
}

// isReference reports whether s looks like "host/name:tag" rather than a path
// or the name of an image here.
func isReference(s string) bool {
	if strings.HasPrefix(s, registryScheme) {
		return true
	}
	if s == "" || strings.HasPrefix(s, "/") || strings.HasPrefix(s, ".") {
		return false
	}
	host, _, slash := strings.Cut(s, "/")
	return strings.Contains(s, ":") || slash && strings.Contains(host, ".")
}

var (
	notName  = regexp.MustCompile(`[^a-z0-9._/-]+`)
	twoMarks = regexp.MustCompile(`[._-]{2,}`)
	atSlash  = regexp.MustCompile(`[._-]*/[._/-]*`)
)

// localName gives the image name under which a registry reference is kept:
// "registry.example/app:1.2" is registry.example/app@1.2. A reference without
// a tag gets no version, which means the newest.
func localName(ref string) string {
	name, digest, _ := strings.Cut(ref, "@")
	version := strings.Replace(digest, ":", "-", 1)
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		if version == "" {
			version = name[i+1:]
		}
		name = name[:i]
	}
	name = notName.ReplaceAllString(strings.ToLower(name), "-")
	name = twoMarks.ReplaceAllString(atSlash.ReplaceAllString(name, "/"), "-")
	name = strings.Trim(name, "-._/")
	if version != "" {
		name += "@" + version
	}
	return name
}

// pull lets the server fetch ref, showing how far it is.
func (a *app) pull(ctx context.Context, s dsec.Services, ref string, opt dsec.ImportOptions) (dsec.Image, error) {
	m := a.meter(ref, 0)
	defer m.clear()
	var img *dsec.Image
	for r, err := range s.Images.Pull(ctx, ref, opt) {
		if err != nil {
			return dsec.Image{}, err
		}
		if r.Image != nil {
			img = r.Image
		}
		m.report(r.Stage, r.Done, r.Total)
	}
	if img == nil {
		return dsec.Image{}, dsec.Errorf(dsec.Internal, "the server reported no image for %s", ref)
	}
	return *img, nil
}

func (a *app) printImage(img dsec.Image, asJSON bool) error {
	if asJSON {
		return a.json(img)
	}
	_, err := fmt.Fprintln(a.Stdout, img.Ref())
	return err
}

type imageRmCmd struct {
	Names []string `arg:"" name:"image" help:"Names, each name, name@version or name@tag."`
}

// Help says what goes with a name.
func (c *imageRmCmd) Help() string {
	return `A tag goes alone. A version goes when no tag stands for it; its bytes go with the
next "dsec image gc". Sandboxes that use it go on.`
}

// Run forgets the names. Sandboxes that use them go on.
func (c *imageRmCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	var last error
	for _, n := range c.Names {
		if err := s.Images.Remove(ctx, n); err != nil {
			if last != nil {
				a.warn(last)
			}
			last = err
		}
	}
	return last
}

type imageGcCmd struct {
	Alone bool `help:"The store of \"dsec up --store\" is used by no other cluster; needed there, since the names of others are not known here."`
	outputFlags
}

// Help says what a collection leaves that one may expect gone.
func (c *imageGcCmd) Help() string {
	return `Bytes that were written or used within the last hour stay: they may be of an
image that is just being made.`
}

// Run collects garbage and says what it freed.
func (c *imageGcCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	got, err := s.Images.Collect(ctx, dsec.CollectOptions{Alone: c.Alone})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(got)
	}
	_, err = fmt.Fprintf(a.Stdout, "%d blobs, %s\n", got.Blobs, size(got.Bytes))
	return err
}

// packOptions say how a folder becomes a tar.
type packOptions struct {
	// Anonymous leaves owners and extended attributes out: what cp sends
	// belongs to whoever unpacks it.
	Anonymous bool

	// Skip is called with the name of what is left out; nil means nobody cares.
	Skip func(name string)
}

// packFolder streams dir as a tar. Close ends it early.
func packFolder(dir string, opt packOptions) io.ReadCloser {
	r, w := io.Pipe()
	go func() {
		b := bufio.NewWriterSize(w, 256<<10)
		err := pack(b, filepath.Clean(dir), opt)
		if err == nil {
			err = b.Flush()
		}
		w.CloseWithError(err)
	}()
	return r
}

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
	"time"

	"github.com/dsec-go/dsec"
)

// imageCmd groups the commands on images.
type imageCmd struct {
	Import  imageImportCmd  `cmd:"" help:"Make an image of a registry reference, a folder, a tar or an OCI layout."`
	Ls      imageLsCmd      `cmd:"" help:"List images."`
	Inspect imageInspectCmd `cmd:"" help:"Show everything about an image."`
	Rm      imageRmCmd      `cmd:"" help:"Forget images by name."`
	Gc      imageGcCmd      `cmd:"" help:"Delete stored bytes that no image and no sandbox needs."`
}

// registryScheme marks a source as a registry reference beyond doubt.
const registryScheme = "docker://"

type imageImportCmd struct {
	Src  string `arg:"" help:"Folder, tar (plain, gzip, zstd; also of docker save), OCI layout, - for standard input, or registry reference."`
	Name string `help:"Name, or name@version; a missing version is taken from the content (default that of a reference; else needed)." placeholder:"NAME"`
	As   string `help:"Where in an environment it goes: base, workspace or toolkit." enum:"base,workspace,toolkit" default:"base"`
	outputFlags
}

// Help shows the forms of a source.
func (c *imageImportCmd) Help() string {
	return `Folders and files are read here and streamed to the server, which never reads
paths of its own host; a registry reference is fetched by the server.

  dsec image import ./rootfs --name debian
  dsec image import ./repo --name repo@v1 --as workspace
  docker save app | dsec image import - --name app
  dsec image import docker://registry.example/team/app:1.2`
}

// Run imports the source and prints the image's name and version.
func (c *imageImportCmd) Run(ctx context.Context, a *app) error {
	src, err := c.source(a)
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
		p := a.progress()
		img, err = s.Images.Upload(ctx, opt, &countingReader{r: src, p: p})
		p.clear()
	}
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
	p := a.progress()
	defer p.clear()
	var img *dsec.Image
	for r, err := range s.Images.Pull(ctx, ref, opt) {
		if err != nil {
			return dsec.Image{}, err
		}
		if r.Image != nil {
			img = r.Image
		}
		if r.Total > 0 {
			p.show("%s %s: %s of %s", r.Stage, ref, size(r.Done), size(r.Total))
		} else {
			p.show("%s %s: %s", r.Stage, ref, size(r.Done))
		}
	}
	if img == nil {
		return dsec.Image{}, dsec.Errorf(dsec.Internal, "the server reported no image for %s", ref)
	}
	return *img, nil
}

// countingReader shows on p what was read of r.
type countingReader struct {
	r io.Reader
	p *progress
	n int64
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	c.p.show("upload: %s", size(c.n))
	return n, err
}

func (a *app) printImage(img dsec.Image, asJSON bool) error {
	if asJSON {
		return a.json(img)
	}
	_, err := fmt.Fprintln(a.Stdout, img.Ref())
	return err
}

type imageLsCmd struct{ outputFlags }

// Run prints all images, by name, then newest first.
func (c *imageLsCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	list, err := s.Images.List(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(list)
	}
	now := time.Now()
	rows := [][]string{{"IMAGE", "ROLE", "SIZE", "STORED", "ENTRIES", "AGE", "SOURCE"}}
	for _, i := range list {
		rows = append(rows, []string{
			i.Ref(), string(i.Role), size(i.Size), size(i.Stored), fmt.Sprint(i.Entries), since(i.Created, now), or(i.Source),
		})
	}
	return a.table(rows...)
}

type imageInspectCmd struct {
	Name string `arg:"" help:"name or name@version."`
	outputFlags
}

// Run prints the image's record.
func (c *imageInspectCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	i, err := s.Images.Inspect(ctx, c.Name)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(i)
	}
	rows := [][]string{
		{"image", i.Ref()},
		{"role", string(i.Role)},
		{"digest", i.Digest},
		{"size", size(i.Size)},
		{"stored", size(i.Stored)},
		{"entries", fmt.Sprint(i.Entries)},
		{"created", i.Created.UTC().Format(time.RFC3339)},
		{"source", or(i.Source)},
		{"user", or(i.Config.User)},
		{"cwd", or(i.Config.Cwd)},
	}
	for _, e := range i.Config.Env {
		rows = append(rows, []string{"env", e})
	}
	if len(i.Config.Shell) > 0 {
		rows = append(rows, []string{"entry point", strings.Join(i.Config.Shell, " ")})
	}
	return a.table(rows...)
}

type imageRmCmd struct {
	Names []string `arg:"" name:"image" help:"Names, each name or name@version."`
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

type imageGcCmd struct{ outputFlags }

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
	got, err := s.Images.Collect(ctx)
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

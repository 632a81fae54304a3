package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/dsec-go/dsec"
)

type imageExportCmd struct {
	Names  []string `arg:"" name:"image" help:"Base, then what lies over it: workspace, toolkits; each name or name@version, separated by commas or spaces."`
	Output string   `short:"o" required:"" help:"File to write, - for standard output (no default)." placeholder:"FILE"`
}

// Help says what comes out.
func (c *imageExportCmd) Help() string {
	return `The file is a tar of an OCI image layout, which other tools take as oci-archive. It
is whole or not there at all.

  dsec image export debian,repo@v2 -o task.tar
  dsec image export debian -o - | ssh host podman load`
}

// Run writes the image.
func (c *imageExportCmd) Run(ctx context.Context, a *app) error {
	s, err := a.services()
	if err != nil {
		return err
	}
	if s.Images == nil {
		return lacking("images")
	}
	env, err := environmentOf(ctx, s.Images, strings.Split(strings.Join(c.Names, ","), ","))
	if err != nil {
		return err
	}
	if _, ok := terminalOf(a.Stdout); ok && c.Output == "-" {
		return dsec.Errorf(dsec.Invalid, "an image is not for a terminal: -o FILE")
	}
	r, err := s.Images.Export(ctx, env)
	if err != nil {
		return err
	}
	defer r.Close()
	m := a.meter("export", 0)
	defer m.clear()
	in := &countingReader{r: r, m: m}
	if c.Output == "-" {
		_, err := io.Copy(a.Stdout, in)
		return err
	}
	return writeWhole(a.local(c.Output), in)
}

// environmentOf gives what the images are by their roles.
func environmentOf(ctx context.Context, s dsec.Images, names []string) (env dsec.Environment, err error) {
	for i, name := range names {
		img, err := s.Inspect(ctx, name)
		switch {
		case err != nil:
			return env, err
		case i == 0 && img.Role == dsec.Base:
			env.Base = name
		case i == 1 && img.Role == dsec.Workspace:
			env.Workspace = name
		case i > 0 && img.Role == dsec.Toolkit:
			env.Toolkits = append(env.Toolkits, name)
		default:
			return env, dsec.Errorf(dsec.Invalid, "image %s is a %s: an environment is a base, at most one workspace, then toolkits", img.Ref(), img.Role)
		}
	}
	return env, nil
}

// writeWhole writes r to a file that appears when it is complete. What is no
// file, a pipe perhaps, is written to as it is.
func writeWhole(path string, r io.Reader) (err error) {
	if info, serr := os.Stat(path); serr == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("open output: %w", err)
		}
		_, err = io.Copy(f, r)
		return errors.Join(err, f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("create output: %w", err)
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name()) //nolint:errcheck // the first error counts
		}
	}()
	_, err = io.Copy(f, r)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

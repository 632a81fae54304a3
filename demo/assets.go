package main

import (
	"archive/tar"
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

//go:embed toolkit patches
var assets embed.FS

const (
	project  = "python3-simplejson" // the Debian package whose files are the workspace
	packages = "python3,git,make,gcc,libc6-dev"
	toolDir  = "opt/toolkit"
	workDir  = "work"
)

// baseFile is the Debian root in the cache.
const baseFile = "base.tar"

// layer is one image to import.
type layer struct {
	name string
	role dsec.Role
	open func() (io.ReadCloser, error)
}

// layers gives the three layers, making and fetching what the cache lacks.
func (d *demo) layers(ctx context.Context) ([]layer, error) {
	base := filepath.Join(d.cache, baseFile)
	if err := d.makeBase(ctx, base); err != nil {
		return nil, fmt.Errorf("make base: %w", err)
	}
	work, err := d.fetchProject(ctx)
	if err != nil {
		return nil, fmt.Errorf("fetch workspace: %w", err)
	}
	tools, err := fs.Sub(assets, "toolkit")
	if err != nil {
		return nil, err
	}
	return []layer{
		{"debian", dsec.Base, func() (io.ReadCloser, error) { return os.Open(base) }},
		{"simplejson", dsec.Workspace, func() (io.ReadCloser, error) { return tarOf(os.DirFS(work), workDir) }},
		{"testkit", dsec.Toolkit, func() (io.ReadCloser, error) { return tarOf(tools, toolDir) }},
	}, nil
}

// makeBase makes a Debian root file system, once.
func (d *demo) makeBase(ctx context.Context, file string) error {
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	d.say("making a Debian base image, once; this takes a minute or two")
	release, err := osRelease("VERSION_CODENAME")
	if err != nil {
		return err
	}
	part := file + ".part"
	defer os.RemoveAll(part)
	args := []string{"--quiet", "--variant=minbase", "--format=tar", "--include=" + packages, release, part}
	if own := sources(ctx, release); own != "" {
		args = append(args, own)
	}
	if err := command(ctx, d.cache, "mmdebstrap", args...); err != nil {
		return err
	}
	return os.Rename(part, file)
}

// sources gives this machine's own apt sources of a Debian release, so that a
// mirror set up here is used; empty when there are none, which leaves the
// choice to mmdebstrap.
func sources(ctx context.Context, release string) string {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(ORIGIN) $(CODENAME) deb $(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages").Output()
	if err != nil {
		return ""
	}
	var lines []string
	main := false
	for line := range strings.Lines(string(out)) {
		origin, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		codename, source, _ := strings.Cut(rest, " ")
		if origin != "Debian" || !strings.HasPrefix(codename, release) {
			continue
		}
		main = main || codename == release
		lines = append(lines, source)
	}
	if !main {
		return ""
	}
	return strings.Join(lines, "\n")
}

// fetchProject gives the folder that is the workspace: the files of a Debian
// package with its own test suite, fetched and unpacked once.
func (d *demo) fetchProject(ctx context.Context) (string, error) {
	dir := filepath.Join(d.cache, "workspace")
	if _, err := os.Stat(filepath.Join(dir, "simplejson", "tests")); err == nil {
		return dir, nil
	}
	d.say("fetching the workspace")
	part := filepath.Join(d.cache, "workspace.part")
	if err := errors.Join(os.RemoveAll(part), os.RemoveAll(dir), os.Mkdir(part, 0o755)); err != nil {
		return "", err
	}
	defer os.RemoveAll(part)
	if err := command(ctx, part, "apt-get", "download", "-qq", project); err != nil {
		// A machine that never fetched its package lists has none.
		if err := command(ctx, part, "apt-get", "update", "-qq"); err != nil {
			return "", err
		}
		if err := command(ctx, part, "apt-get", "download", "-qq", project); err != nil {
			return "", err
		}
	}
	debs, err := filepath.Glob(filepath.Join(part, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get left %d packages, %v", len(debs), err)
	}
	if err := command(ctx, part, "dpkg-deb", "-x", debs[0], "root"); err != nil {
		return "", err
	}
	tree := filepath.Join(part, "root/usr/lib/python3/dist-packages")
	// As an environment's builder would: compiled once instead of in every
	// sandbox. By hash, so that a patched file is seen whatever its time.
	if err := command(ctx, tree, "python3", "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."); err != nil {
		return "", err
	}
	return dir, os.Rename(tree, dir)
}

// command runs a program that a person need not see unless it fails.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// Asked to end, it cleans up after itself.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, tail(out.Bytes()))
	}
	return nil
}

func tail(b []byte) []byte {
	return b[max(0, len(b)-4096):]
}

func osRelease(key string) (string, error) {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), key+"="); ok {
			return strings.Trim(v, `"`), nil
		}
	}
	return "", fmt.Errorf("/etc/os-release has no %s", key)
}

// tarOf gives the files of a tree below prefix, all of them root's.
func tarOf(tree fs.FS, prefix string) (io.ReadCloser, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := fs.WalkDir(tree, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		h := &tar.Header{Name: path.Join(prefix, name), ModTime: info.ModTime(), Mode: 0o644, Typeflag: tar.TypeReg, Size: info.Size()}
		switch {
		case e.IsDir():
			h.Name, h.Mode, h.Typeflag, h.Size = h.Name+"/", 0o755, tar.TypeDir, 0
			return w.WriteHeader(h)
		case !info.Mode().IsRegular():
			return nil
		}
		data, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	})
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, fmt.Errorf("pack %s: %w", prefix, err)
	}
	return io.NopCloser(&b), nil
}

// importLayers makes an image of each layer.
func (d *demo) importLayers(ctx context.Context, s dsec.Services, layers []layer) ([]dsec.Image, error) {
	var images []dsec.Image
	for _, l := range layers {
		d.say("importing %s as %s", l.name, l.role)
		r, err := l.open()
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", l.name, err)
		}
		img, err := s.Images.Upload(ctx, dsec.ImportOptions{Name: l.name, Role: l.role}, r)
		if err = errors.Join(err, r.Close()); err != nil {
			return nil, fmt.Errorf("import %s: %w", l.name, err)
		}
		images = append(images, img)
	}
	return images, nil
}

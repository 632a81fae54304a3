package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dsec-go/dsec/vm/initramfs"
)

// kernels leaves Debian's cloud kernels of the given versions, such as 6.12,
// where initramfs.Find looks for them.
func (t tool) kernels(ctx context.Context, versions []string) error {
	if len(versions) == 0 {
		versions = []string{initramfs.DefaultVersion}
	}
	for _, v := range versions {
		if err := t.kernel(ctx, v); err != nil {
			return fmt.Errorf("kernel %s: %w", v, err)
		}
	}
	return nil
}

func (t tool) kernel(ctx context.Context, version string) error {
	k := initramfs.At(t.out, version)
	tree := t.tree(version)
	if _, err := os.Stat(tree); err != nil {
		if err := t.fetchKernel(ctx, version, tree); err != nil {
			return err
		}
	} else if _, err := k.Index(); err == nil && isWanted(k.Modules) {
		return nil
	}
	image, release, err := inTree(tree)
	if err != nil {
		return err
	}
	// The modules come last: their index says that all is there.
	if err := errors.Join(os.RemoveAll(k.Modules), os.RemoveAll(k.Image)); err != nil {
		return err
	}
	if err := os.Link(image, k.Image); err != nil {
		b, err := os.ReadFile(image)
		if err != nil {
			return err
		}
		if err := os.WriteFile(k.Image, b, 0o644); err != nil {
			return err
		}
	}
	if err := writeModules(ctx, filepath.Join(tree, "lib/modules", release), k.Modules, wanted()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(k.Modules, wantedFile), []byte(strings.Join(wanted(), "\n")), 0o644)
}

// wantedFile says which modules a folder was made for.
const wantedFile = "wanted"

// isWanted reports whether a folder has the modules that are wanted now.
func isWanted(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, wantedFile))
	return err == nil && string(b) == strings.Join(wanted(), "\n")
}

// tree is the folder in the cache where a kernel's package is unpacked, for who
// wants all of it.
func (t tool) tree(version string) string { return filepath.Join(t.cache, "linux-"+version) }

// inTree finds the kernel in its unpacked package.
func inTree(tree string) (image, release string, err error) {
	found, err := filepath.Glob(filepath.Join(tree, "boot/vmlinuz-*"))
	if err != nil || len(found) != 1 {
		return "", "", fmt.Errorf("the package has %d kernels, %v", len(found), err)
	}
	_, release, _ = strings.Cut(filepath.Base(found[0]), "-")
	return found[0], release, nil
}

// fetchKernel unpacks the newest package of a kernel version into tree.
func (t tool) fetchKernel(ctx context.Context, version, tree string) error {
	name, err := kernelPackage(ctx, version)
	if err != nil {
		// A machine that never fetched its package lists has none.
		if _, err := command(ctx, t.cache, "apt-get", "update", "-qq"); err != nil {
			return err
		}
		if name, err = kernelPackage(ctx, version); err != nil {
			return err
		}
	}
	fmt.Fprintln(os.Stderr, "fetching", name)
	part, err := os.MkdirTemp(t.cache, "kernel-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(part)
	if _, err := command(ctx, part, "apt-get", "download", "-qq", name); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(part, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get left %d packages, %v", len(debs), err)
	}
	if _, err := command(ctx, part, "dpkg-deb", "-x", debs[0], "root"); err != nil {
		return err
	}
	return os.Rename(filepath.Join(part, "root"), tree)
}

// kernelPackage gives the package that holds the cloud kernel of a version. The
// release's own has no version in its name.
func kernelPackage(ctx context.Context, version string) (string, error) {
	var errs []error
	for _, meta := range []string{"linux-image-" + version + "-cloud-amd64", "linux-image-cloud-amd64"} {
		out, err := command(ctx, ".", "apt-cache", "depends", meta)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for line := range strings.Lines(string(out)) {
			name, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: ")
			if rest, ours := strings.CutPrefix(name, "linux-image-"+version); ok && ours && strings.IndexAny(rest, ".-") == 0 {
				return name, nil
			}
		}
		errs = append(errs, fmt.Errorf("%s needs no linux-image-%s", meta, version))
	}
	return "", errors.Join(errs...)
}

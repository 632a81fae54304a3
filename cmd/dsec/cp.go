package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/dsec-go/dsec"
)

// cpCmd copies files into and out of a sandbox.
type cpCmd struct {
	Src  string `arg:"" help:"What to copy."`
	Dst  string `arg:"" help:"Where to."`
	User string `short:"u" help:"User whose rights apply in the sandbox, and who owns what is made (default the sandbox's)." placeholder:"USER"`
}

// Help shows the forms.
func (c *cpCmd) Help() string {
	return `One of the two is SANDBOX:PATH. An existing folder as destination takes the
source into it, as with cp; otherwise the copy gets the destination's name. A
source folder that ends in /. stands for what is in it. Only files, folders and
links are copied; what else was there is told. - is standard input or
output: the bytes of a file, or a tar where the path is a folder or ends in /.

  dsec cp ./repo sb...:/work
  dsec cp sb...:/work/report.txt .
  dsec cp sb...:/work/ - | tar t`
}

// place is one end of a copy.
type place struct {
	sandbox dsec.SandboxID // empty for this machine
	path    string
	stdio   bool
}

// parsePlace reads "SANDBOX:PATH", "-" or a local path. Only what has the form
// of a sandbox ID before the colon is one.
func parsePlace(s string) place {
	if s == "-" {
		return place{stdio: true}
	}
	if id, p, ok := strings.Cut(s, ":"); ok && dsec.SandboxID(id).Check() == nil {
		return place{sandbox: dsec.SandboxID(id), path: p}
	}
	return place{path: s}
}

// copying is one copy between this machine and a sandbox.
type copying struct {
	a     *app
	files dsec.Files
	on    dsec.Call
	user  string
}

func (c copying) op(p string) dsec.FileOp { return dsec.FileOp{Path: p, User: c.user} }

// Run copies.
func (c *cpCmd) Run(ctx context.Context, a *app) error {
	src, dst := parsePlace(c.Src), parsePlace(c.Dst)
	if (src.sandbox == "") == (dst.sandbox == "") {
		return dsec.Errorf(dsec.Invalid, "exactly one of %s and %s must be SANDBOX:PATH", c.Src, c.Dst)
	}
	for _, p := range []place{src, dst} {
		if !p.stdio && p.path == "" {
			return dsec.Errorf(dsec.Invalid, "path is empty")
		}
	}
	s, err := a.services()
	if err != nil {
		return err
	}
	x := copying{a: a, files: s.Files, user: c.User}
	switch {
	case src.stdio:
		x.on.Sandbox = dst.sandbox
		return x.fromStdin(ctx, dst.path)
	case dst.stdio:
		x.on.Sandbox = src.sandbox
		return x.toStdout(ctx, src.path)
	case dst.sandbox != "":
		x.on.Sandbox = dst.sandbox
		return x.into(ctx, a.local(src.path), dst.path)
	}
	x.on.Sandbox = src.sandbox

	// Ctrl-C must not leave the half of a file here, under its temporary name.
	ctx, done := a.untilInterrupt(ctx)
	defer done()
	return orInterrupt(ctx, x.outOf(ctx, src.path, a.local(dst.path)))
}

// folder reports whether p is a folder in the sandbox. What ends in a slash is
// meant to be one.
func (c copying) folder(ctx context.Context, p string) (is, exists bool, err error) {
	// The trailing "/." makes a link to a folder count as one.
	info, err := c.files.Stat(ctx, c.on, c.op(strings.TrimRight(p, "/")+"/."))
	switch {
	case err == nil:
		return info.Type == dsec.TypeDir, true, nil
	case dsec.KindOf(err) == dsec.NotFound || dsec.KindOf(err) == dsec.Invalid: // nothing there, or no folder
		return strings.HasSuffix(p, "/"), false, nil
	}
	// A folder that may not be entered is still one, and a fault names the path
	// that was given.
	if info, err = c.files.Stat(ctx, c.on, c.op(p)); err != nil {
		return false, false, err
	}
	return info.Type == dsec.TypeDir, true, nil
}

// about names the path that was given in an error that speaks of something in
// it alone.
func about(p string, err error) error {
	if err == nil || strings.Contains(err.Error(), p) {
		return err
	}
	return fmt.Errorf("%s: %w", p, err)
}

func (c copying) fromStdin(ctx context.Context, dst string) error {
	is, _, err := c.folder(ctx, dst)
	if err != nil {
		return err
	}
	if is {
		return about(dst, c.files.Unpack(ctx, c.on, c.op(dst), c.a.Stdin))
	}
	_, err = c.files.Write(ctx, c.on, c.op(dst), dsec.WriteOptions{Parents: true}, c.a.Stdin)
	return err
}

func (c copying) toStdout(ctx context.Context, src string) error {
	is, exists, err := c.folder(ctx, src)
	if err != nil {
		return err
	}
	var r io.ReadCloser
	if is && exists {
		r, err = c.files.Pack(ctx, c.on, c.op(src))
	} else {
		r, err = c.files.Read(ctx, c.on, c.op(src), dsec.ReadRange{})
	}
	if err != nil {
		return about(src, err)
	}
	_, err = io.Copy(c.a.Stdout, r)
	return about(src, errors.Join(err, r.Close()))
}

// into copies a local file or folder into the sandbox.
func (c copying) into(ctx context.Context, src, dst string) error {
	info, err := os.Stat(src)
	if err != nil {
		return fmt.Errorf("read source: %w", err)
	}
	is, exists, err := c.folder(ctx, dst)
	if err != nil {
		return err
	}
	contents := strings.HasSuffix(src, "/.") || src == "."
	if is && !(info.IsDir() && (contents || !exists)) {
		dst = path.Join(dst, filepath.Base(filepath.Clean(src)))
	}
	if info.IsDir() {
		var skipped leftOut
		r := packFolder(src, packOptions{Anonymous: true, Skip: skipped.add})
		err := about(dst, c.files.Unpack(ctx, c.on, c.op(dst), r))
		if err = errors.Join(err, r.Close()); err == nil {
			skipped.tell(c.a)
		}
		return err
	}
	f, err := os.Open(src)
	if err != nil {
		return fmt.Errorf("read source: %w", err)
	}
	defer f.Close()
	_, err = c.files.Write(ctx, c.on, c.op(dst), dsec.WriteOptions{Mode: uint32(info.Mode().Perm()), Parents: true}, f)
	return err
}

// outOf copies a file or folder of the sandbox to this machine.
func (c copying) outOf(ctx context.Context, src, dst string) error {
	is, exists, err := c.folder(ctx, src)
	if err != nil {
		return err
	}
	contents := strings.HasSuffix(src, "/.")
	into := strings.HasSuffix(dst, "/")
	if info, err := os.Stat(dst); err == nil {
		into = info.IsDir()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write destination: %w", err)
	} else if is && exists {
		into = false // the folder is made under the destination's name
	}
	if into && !(is && contents) {
		base := path.Base(path.Clean(src))
		if base == "/" || base == "." {
			base = string(c.on.Sandbox)
		}
		dst = filepath.Join(dst, base)
	}
	if is && exists {
		return c.folderOut(ctx, src, dst)
	}
	return c.fileOut(ctx, src, dst)
}

func (c copying) folderOut(ctx context.Context, src, dst string) error {
	r, err := c.files.Pack(ctx, c.on, c.op(src))
	if err != nil {
		return about(src, err)
	}
	defer r.Close()
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return fmt.Errorf("write destination: %w", err)
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return fmt.Errorf("write destination: %w", err)
	}
	defer root.Close()
	var skipped leftOut
	if err := unpack(root, r, skipped.add); err != nil {
		return fmt.Errorf("write %s: %w", dst, err)
	}
	skipped.tell(c.a)
	return nil
}

// leftOut is what a copy of a folder does not take along.
type leftOut struct{ names []string }

func (l *leftOut) add(name string) { l.names = append(l.names, name) }

// tell says how many there were and names the first.
func (l *leftOut) tell(a *app) {
	if len(l.names) == 0 {
		return
	}
	first, more := l.names[:min(5, len(l.names))], ""
	if len(first) < len(l.names) {
		more = ", ..."
	}
	fmt.Fprintf(a.Stderr, "dsec: %d left out, neither file nor folder nor link: %s%s\n", len(l.names), printable(strings.Join(first, ", ")), more)
}

// fileOut replaces dst once all bytes are there. A dst that is a device or a
// pipe is written to.
func (c copying) fileOut(ctx context.Context, src, dst string) error {
	info, err := c.files.Stat(ctx, c.on, c.op(src))
	if err != nil {
		return err
	}
	r, err := c.files.Read(ctx, c.on, c.op(src), dsec.ReadRange{})
	if err != nil {
		return err
	}
	defer r.Close()
	if st, err := os.Stat(dst); err == nil && !st.Mode().IsRegular() {
		return writeThrough(dst, r)
	}
	f, err := os.CreateTemp(filepath.Dir(dst), ".dsec-cp-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", dst, reason(err))
	}
	defer os.Remove(f.Name())
	mode := fs.FileMode(info.Mode).Perm()
	if info.Type == dsec.TypeSymlink {
		mode = 0o644 // those of the link say nothing
	}
	err = copySparse(f, r)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", dst, reason(err))
	}
	if err := os.Rename(f.Name(), dst); err != nil {
		return fmt.Errorf("write %s: %w", dst, reason(err))
	}
	return nil
}

func writeThrough(dst string, r io.Reader) error {
	f, err := os.OpenFile(dst, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write destination: %w", err)
	}
	_, err = io.Copy(f, r)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", dst, reason(err))
	}
	return nil
}

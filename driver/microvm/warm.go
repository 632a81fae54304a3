package microvm

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/wire"
)

// A machine that has never run anything is slow in all that it does first: the
// kernel allocates and sets up what it needs, and an emulator translates every
// piece of code when it is first run, kernel and agent alike, which takes
// longer than to carry it out hundreds of times. So a guest practises: it is
// woken, made a sandbox of an environment that means nothing, and runs a
// program, by the very calls that a start makes. Then its agent ends, with all
// of that, and another takes its place, from the same pages of memory.
//
// The saved guest has practised too. What the kernel has set up stays so in its
// copies; what was translated does not, so that members of the pool do it again.

// Files that practice needs, in the driver's folder.
const (
	warmMeta = "warm.meta"
	warmData = "warm.data"
	warmDisk = 64 << 20
)

// warm lets a running guest practise.
func (d *Driver) warm(ctx context.Context, g *slot) error {
	layer, err := d.warmLayer()
	if err != nil {
		return err
	}
	on := disks{layers: []driver.LayerFiles{layer, layer}, upper: g.path(upperFile), output: g.path(outputFile)}
	for path, size := range map[string]int64{on.upper: warmDisk, on.output: outputSize} {
		if err := d.blanks.make(path, size); err != nil {
			return err
		}
		defer os.Remove(path) //nolint:errcheck // a start says what is wrong with the folder
	}
	if err := g.bind(ctx, on); err != nil {
		return err
	}
	at, err := extents(on.layers, nil)
	if err != nil {
		return err
	}
	ctx, cancel := g.alive(ctx)
	defer cancel()
	id := identity(&driver.Config{Hostname: "practice"})
	s := vm.Setup{
		Layers: at, Upper: upperDisk, Output: outputDisk, Hostname: "practice", Hosts: id.Hosts, Resolv: resolvFile, Machine: id.Machine,
		Limits: vm.Limits{Memory: g.shape.workMemory(dsec.Resources{Memory: g.shape.RAM}), Pids: 64},
	}
	if _, err := g.ctl.Restored(ctx, identity(nil)); err != nil {
		return fmt.Errorf("wake the guest: %w", err)
	}
	if err := g.ctl.Enter(ctx, s); err != nil {
		return fmt.Errorf("enter the environment: %w", err)
	}
	if err := g.practise(ctx); err != nil {
		return err
	}
	if err := g.ctl.Again(ctx); err != nil {
		return fmt.Errorf("start the agent again: %w", err)
	}
	if _, err := g.ping(ctx); err != nil {
		return err
	}
	// The new agent has code that is warm, and nothing that it has used before.
	return g.ctl.Warm(ctx, s)
}

// practise runs the program of the warm layer, as often as it takes to pass the
// ways that a second command goes otherwise than a first.
func (g *slot) practise(ctx context.Context) error {
	c := wire.NewClient(wire.Options{Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
		raw, err := g.frames.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return vm.Dial(ctx, raw)
	}})
	defer c.Close()
	for range 2 {
		r, err := c.Commands().Run(ctx, dsec.Call{}, dsec.Command{Argv: []string{practice}}, nil)
		if err == nil && (r.Code != 0 || string(r.Out) != practiceSays) {
			err = dsec.Errorf(dsec.Internal, "the program ended with status %d: %s", r.Code, r.Detail)
		}
		if err != nil {
			return fmt.Errorf("practise: %w", err)
		}
	}
	return nil
}

// warmLayer gives the layer that is mounted for practice.
func (d *Driver) warmLayer() (driver.LayerFiles, error) {
	l := driver.LayerFiles{Digest: "warm", Meta: filepath.Join(d.config.Dir, warmMeta), Data: []string{filepath.Join(d.config.Dir, warmData)}}
	d.warmer.Lock()
	defer d.warmer.Unlock()
	if d.warmer.ready {
		return l, nil
	}
	var content, data bytes.Buffer
	if err := practiceTar(&content); err != nil {
		return l, err
	}
	blob := erofs.NewBlob(&data, erofs.BlobOptions{})
	tree, err := erofs.FromTar(d.life, &content, blob, erofs.TarOptions{})
	if err != nil {
		return l, err
	}
	if _, _, err := blob.Finish(); err != nil {
		return l, err
	}
	blob.SetTag("warm")
	image, err := tree.Encode()
	if err == nil {
		err = errors.Join(writeWhole(l.Meta, image.Meta), writeWhole(l.Data[0], data.Bytes()))
	}
	if err != nil {
		return l, err
	}
	d.warmer.ready = true
	return l, nil
}

// practiceTar writes a root in which some of what a start looks for is there.
func practiceTar(to io.Writer) error {
	w := tar.NewWriter(to)
	for _, dir := range []string{"dev", "proc", "etc"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}); err != nil {
			return err
		}
	}
	// Long enough to lie in the layer's data, and to be read ahead.
	program := make([]byte, 64<<10)
	copy(program, practiceELF)
	for name, b := range map[string][]byte{practice[1:]: program, "etc/hosts": nil, "etc/passwd": []byte("root:x:0:0:root:/root:/bin/sh\n")} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(b))}); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return w.Close()
}

// practice is a program that writes a word, uses memory that is not in its file,
// and ends.
const (
	practice     = "/practice"
	practiceSays = "ELF"

	practiceELF = "\x7fELF\x02\x01\x01\x00" + zeros8 + // 64 bits, little-endian
		"\x02\x00\x3e\x00\x01\x00\x00\x00" + "\xb0\x00\x40\x00\x00\x00\x00\x00" + // executable, x86-64; entry
		"\x40\x00\x00\x00\x00\x00\x00\x00" + zeros8 + // program headers at 64, no sections
		"\x00\x00\x00\x00\x40\x00\x38\x00" + "\x02\x00\x00\x00\x00\x00\x00\x00" + // sizes; two program headers:
		"\x01\x00\x00\x00\x05\x00\x00\x00" + zeros8 + // load, to read and execute, from 0
		"\x00\x00\x40\x00\x00\x00\x00\x00" + "\x00\x00\x40\x00\x00\x00\x00\x00" + // at 0x400000
		"\x00\x00\x01\x00\x00\x00\x00\x00" + "\x00\x00\x01\x00\x00\x00\x00\x00" + // 64 KiB
		"\x00\x10\x00\x00\x00\x00\x00\x00" + // alignment
		"\x01\x00\x00\x00\x06\x00\x00\x00" + "\x00\xf0\x00\x00\x00\x00\x00\x00" + // load, to read and write, from 60 KiB
		"\x00\xf0\x60\x00\x00\x00\x00\x00" + "\x00\xf0\x60\x00\x00\x00\x00\x00" + // at 0x60f000
		"\x00\x10\x00\x00\x00\x00\x00\x00" + "\x00\x30\x00\x00\x00\x00\x00\x00" + // 4 KiB of 12
		"\x00\x10\x00\x00\x00\x00\x00\x00" + // alignment
		"\xb8\x01\x00\x00\x00" + "\xbf\x01\x00\x00\x00" + // eax = write, edi = 1
		"\xbe\x01\x00\x40\x00" + "\xba\x03\x00\x00\x00" + "\x0f\x05" + // the word is in the header
		"\x89\x04\x25\x00\xf0\x60\x00" + "\x89\x04\x25\x00\x08\x61\x00" + // two pages are written to
		"\x31\xff\xb8\x3c\x00\x00\x00\x0f\x05" // exit(0)

	zeros8 = "\x00\x00\x00\x00\x00\x00\x00\x00"
)

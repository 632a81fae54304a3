package microvm

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Variant DAX maps a layer's bytes into the guest, which keeps no copy of them:
// the host's page cache serves all machines. For that a layer must be one file
// of the device's size, which is made once for each layer, and kept up to a
// bound.
const (
	flatDir   = "flat"
	emptyFlat = "empty"
	maxFlats  = 32
)

// flats are the layers in that form.
type flats struct {
	dir string

	mu    sync.Mutex
	order []string // names, the latest used last
}

// flat is one of them.
type flat struct{ name, path string }

func paths(fs []flat) []string {
	var out []string
	for _, f := range fs {
		out = append(out, f.path)
	}
	return out
}

// pmemName is the name of a layer's flat file.
func pmemName(l driver.LayerFiles) string {
	sum := sha256.Sum256([]byte(l.Digest + "\x00" + l.Meta))
	return hex.EncodeToString(sum[:16])
}

// choose says which layers of an environment reach a machine that way: the
// lowest that fit, as many as it has devices.
func (f *flats) choose(layers []driver.LayerFiles, s shape) ([]flat, error) {
	var out []flat
	for _, l := range layers {
		if len(out) == s.pmems() {
			break
		}
		size, err := layerSize(l)
		if err != nil {
			return nil, err
		}
		if size > PmemSlot {
			continue
		}
		one, err := f.get(l)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// get gives a layer's flat file, making it if there is none.
func (f *flats) get(l driver.LayerFiles) (flat, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	one := flat{name: pmemName(l)}
	one.path = filepath.Join(f.dir, one.name)
	if !exists(one.path) {
		if err := makeFlat(one.path, l); err != nil {
			return flat{}, err
		}
	}
	f.order = slices.DeleteFunc(f.order, func(n string) bool { return n == one.name })
	f.order = append(f.order, one.name)
	if len(f.order) > maxFlats {
		os.Remove(filepath.Join(f.dir, f.order[0])) //nolint:errcheck // those who map it keep it
		f.order = f.order[1:]
	}
	return one, nil
}

// makeFlat copies a layer's files end to end.
func makeFlat(path string, l driver.LayerFiles) error {
	tmp := path + ".new"
	out, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
	if err != nil {
		return noSpace(err)
	}
	defer os.Remove(tmp) //nolint:errcheck // renamed when all went well
	defer out.Close()
	var at int64
	for _, p := range append([]string{l.Meta}, l.Data...) {
		in, err := os.Open(p)
		if err != nil {
			return err
		}
		n, err := io.Copy(io.NewOffsetWriter(out, at), in)
		in.Close()
		if err != nil {
			return noSpace(fmt.Errorf("flatten layer %s: %w", l.Digest, err))
		}
		at += whole(n)
	}
	if err := out.Truncate(PmemSlot); err != nil {
		return noSpace(err)
	}
	return os.Rename(tmp, path)
}

// sweep finds what an earlier process left.
func (f *flats) sweep() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	es, err := os.ReadDir(f.dir)
	if err != nil {
		return err
	}
	var errs []error
	f.order = nil
	for _, e := range es {
		if filepath.Ext(e.Name()) == ".new" || len(f.order) >= maxFlats {
			errs = append(errs, os.Remove(filepath.Join(f.dir, e.Name())))
		} else if e.Name() != emptyFlat {
			f.order = append(f.order, e.Name())
		}
	}
	return errors.Join(errs...)
}

// emptyPmem gives what a machine's persistent memory is before it is told what
// it is.
func (d *Driver) emptyPmem(s shape) ([]string, error) {
	if s.pmems() == 0 {
		return nil, nil
	}
	path := filepath.Join(d.flat.dir, emptyFlat)
	d.flat.mu.Lock()
	defer d.flat.mu.Unlock()
	if !exists(path) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, noSpace(err)
		}
		defer f.Close()
		if err := f.Truncate(PmemSlot); err != nil {
			return nil, noSpace(err)
		}
	}
	return slices.Repeat([]string{path}, s.pmems()), nil
}

// keepPmem links a machine's flat layers into its slot, where they are safe from
// the bound.
func (g *slot) keepPmem(fs []flat) error {
	for _, f := range fs {
		if err := os.Link(f.path, g.path(f.name)); err != nil && !errors.Is(err, os.ErrExist) {
			return noSpace(err)
		}
	}
	return nil
}

// pmemPaths gives the files of a machine's persistent memory; nil if it is none.
func (g *slot) pmemPaths(names []string) []string {
	var out []string
	for _, n := range names {
		out = append(out, g.path(n))
	}
	return out
}

// roomFor is Exhausted where the host does not have so much memory at all.
func roomFor(n int64) error {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return err
	}
	if total := int64(si.Totalram) * int64(si.Unit); n > total {
		return dsec.Errorf(dsec.Exhausted, "the machine would take %d MiB of memory, and the host has %d", n>>20, total>>20)
	}
	return nil
}

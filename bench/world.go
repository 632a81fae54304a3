package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/dsec-go/dsec"
)

// World is what the benchmarks of one run share: a folder, the floor, the
// server and whatever it is compared with.
type World struct {
	dir      string
	log      io.Writer
	floor    *Floor
	base     []byte // the base image as a tar
	ours     *ours
	others   []contestant
	num      numbers
	notes    []string
	programs string // a folder with the base image's programs
}

// Config says where a World is.
type Config struct {
	Dir      string        // an existing folder that every account can search, on a file system that can hold overlay uppers
	Services dsec.Services // of the server to measure
	Log      io.Writer     // progress, a line each; default none
}

// Open builds the floor and uploads the base image.
func Open(ctx context.Context, c Config) (*World, error) {
	w := &World{dir: c.Dir, log: c.Log}
	if w.log == nil {
		w.log = io.Discard
	}
	if err := w.open(ctx, c); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

func (w *World) open(ctx context.Context, c Config) error {
	var err error
	if l, n := load(), runtime.NumCPU(); l > quietLoad*float64(n) {
		w.note("The host was busy before the run began: %.1f processes wanted to run on its %d CPUs. Even ratios mean little on such a host.", l, n)
	}
	w.say("building the floor")
	if w.floor, err = BuildFloor(ctx, w.dir); err != nil {
		return err
	}
	if w.base, err = baseTar(w.floor.Program); err != nil {
		return err
	}
	w.programs = filepath.Join(w.dir, "programs")
	if err := unpack(w.base, w.programs, 0); err != nil {
		return err
	}
	if err := w.layers(ctx); err != nil {
		return err
	}
	w.say("importing the base image")
	if w.ours, err = newOurs(ctx, c.Services, w.base); err != nil {
		return err
	}
	return nil
}

// layers gives the floor what the sandboxes have: a base and a workspace, as
// EROFS where the kernel mounts such files, else as folders.
func (w *World) layers(ctx context.Context) error {
	base, err := writeLayer(ctx, w.dir, "base", w.base)
	if err != nil {
		return err
	}
	workspace, err := writeLayer(ctx, w.dir, "workspace", workspaceTar(-1))
	if err != nil {
		return err
	}
	w.floor.Layers = []string{base, workspace}
	if _, err = w.floor.Boxes(ctx, 1, 0); err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	w.note("the floor's layers are folders: %v", err)
	if err := errors.Join(w.floor.Close(), os.MkdirAll(w.floor.dir, 0o700)); err != nil {
		return err
	}
	folder := filepath.Join(w.dir, "workspace")
	if err := unpack(workspaceTar(-1), folder, 0); err != nil {
		return err
	}
	w.floor.Layers = []string{w.programs, folder}
	_, err = w.floor.Boxes(ctx, 1, 0)
	return err
}

// program is where a program of the base image lies on the host.
func (w *World) program(bin string) string { return filepath.Join(w.programs, bin) }

// runc adds the runtime to compare with, or notes that the host has none.
func (w *World) runc(ctx context.Context) (contestant, error) {
	r, err := newRunc(ctx, filepath.Join(w.dir, "runc"), w.base)
	return w.admit(r, err)
}

func (w *World) podman(ctx context.Context) (contestant, error) {
	p, err := newPodman(ctx, filepath.Join(w.dir, "podman"), w.base)
	return w.admit(p, err)
}

// admit gives nil for a contestant that the host does not have.
func (w *World) admit(c contestant, err error) (contestant, error) {
	if dsec.KindOf(err) == dsec.Unsupported {
		w.note("%v", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	w.others = append(w.others, c)
	return c, nil
}

func (w *World) note(format string, args ...any) {
	w.notes = append(w.notes, fmt.Sprintf(format, args...))
}

func (w *World) say(format string, args ...any) { fmt.Fprintf(w.log, "bench: "+format+"\n", args...) }

// report begins a report with what is known of the run.
func (w *World) report(name string) *Report {
	r := NewReport(name)
	r.Notes = append(r.Notes, w.notes...)
	return r
}

// quietLoad is how many processes may want to run on each CPU of a host that
// can be called quiet.
const quietLoad = 0.5

// Close destroys everything that the run made, but for the folder itself.
func (w *World) Close() error {
	var errs []error
	for _, c := range w.others {
		errs = append(errs, c.close())
	}
	if w.ours != nil {
		errs = append(errs, w.ours.close())
	}
	if w.floor != nil {
		errs = append(errs, w.floor.Close())
	}
	return errors.Join(errs...)
}

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

var _ driver.Forker = (*machine)(nil)

// forkAtOnce is how many children are loaded at a time.
const forkAtOnce = 4

// forkDir is what holds a fork's state while its children start; it begins so.
const forkDir = "fork-"

// Fork implements driver.Forker. The parent stands still while its memory is
// copied into a file that all children map privately, and its disks once; what
// follows takes place beside it.
func (m *machine) Fork(ctx context.Context, children []driver.Config) ([]driver.Machine, error) {
	if len(children) == 0 {
		return nil, nil
	}
	if err := m.fits(children); err != nil {
		return nil, err
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	dir, err := os.MkdirTemp(m.driver.config.Dir, forkDir)
	if err != nil {
		return nil, noSpace(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // the next Adopt tries again
	mem, man, err := m.freezeFrame(ctx, dir)
	if err != nil {
		return nil, m.judge(fmt.Errorf("fork: %w", err))
	}
	defer mem.Close()
	out := make([]driver.Machine, len(children))
	errs := make([]error, len(children))
	turn := make(chan struct{}, forkAtOnce)
	ctx, give := context.WithCancelCause(ctx)
	defer give(nil)
	var all sync.WaitGroup
	for i, c := range children {
		all.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			child, err := m.driver.spawn(ctx, c, man, saved{
				memory: mem, device: filepath.Join(dir, savedDevice),
				disk: func(to, name string) error { return copyDisk(to, filepath.Join(dir, name)) },
			}, driver.NewTimer())
			if err != nil {
				errs[i] = fmt.Errorf("child %d: %w", i, err)
				give(errs[i]) // the others need not go on
				return
			}
			out[i] = child
		})
	}
	all.Wait()
	if first := slices.IndexFunc(errs, func(e error) bool { return e != nil && !errors.Is(e, context.Canceled) }); first >= 0 || errors.Join(errs...) != nil {
		err := errors.Join(errs...)
		if first >= 0 {
			err = errs[first]
		}
		undo, cancel := context.WithTimeout(context.Background(), undoTimeout)
		defer cancel()
		for _, c := range out {
			if c != nil {
				err = errors.Join(err, c.Stop(undo))
			}
		}
		return nil, m.judge(fmt.Errorf("fork: %w", err))
	}
	return out, nil
}

// fits is Invalid where a child is not what its parent is.
func (m *machine) fits(children []driver.Config) error {
	var man manifest
	for _, l := range m.state().Layers {
		man.Layers = append(man.Layers, l.Digest)
	}
	for i, c := range children {
		err := checkRoot(c.Root)
		if err == nil {
			err = man.fits(c.Root)
		}
		if err != nil {
			return fmt.Errorf("child %d: %w", i, err)
		}
	}
	return nil
}

// freezeFrame keeps a moment of the machine: memory in a sealed file, devices
// and disks in dir. The machine runs on, or stays paused.
func (m *machine) freezeFrame(ctx context.Context, dir string) (mem *os.File, man manifest, err error) {
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return nil, man, err
	}
	st := m.state()
	man.Shape = st.Shape
	for i, l := range st.Layers {
		man.Layers = append(man.Layers, l.Digest)
		if slices.Contains(st.Pmem, pmemName(l)) {
			man.Pmem = append(man.Pmem, i)
		}
	}
	if st.Paused {
		saved := m.slot.path(savedDir)
		var base *fileInfo
		if base, err = checkSaved(saved); err == nil {
			mem, err = m.whole(saved, base)
		}
		if err == nil {
			_, err = copyFile(filepath.Join(dir, savedDevice), filepath.Join(saved, savedDevice))
		}
	} else {
		mem, err = m.frame(ctx, dir)
		defer func() { err = errors.Join(err, m.goOn()) }()
	}
	if err == nil {
		err = m.copyDisks(dir)
	}
	if err == nil {
		err = seal(mem)
	}
	if err != nil && mem != nil {
		mem.Close()
	}
	return mem, man, err
}

// frame stops a running machine and copies its memory. Requires: m.moving held.
func (m *machine) frame(ctx context.Context, dir string) (*os.File, error) {
	m.stand()
	if err := m.slot.process().Stop(ctx); err != nil {
		return nil, err
	}
	if err := m.slot.saveDevices(ctx, filepath.Join(dir, savedDevice)); err != nil {
		return nil, err
	}
	mem, err := newMemory("fork", m.slot.shape.RAM)
	if err != nil {
		return nil, err
	}
	if err := m.slot.eachPage(allPages, memoryFile{mem}); err != nil {
		mem.Close()
		return nil, dsec.Errorf(dsec.Exhausted, "copy guest memory: %w", err)
	}
	return mem, nil
}

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/fncall"
)

// fnDir is the folder of the machines for function calls.
const fnDir = "fncall"

// fnFirstSlot keeps the ids of machines for function calls apart from those of
// containers, which are given out from the lowest on.
const fnFirstSlot = container.MaxSlots - 4096

// fnDriver gives the driver of kind fncall: containers of its own, decorated.
// It costs nothing until a function is called.
func (n *node) fnDriver(guest string) driver.Driver {
	dir := n.data.at(fnDir)
	return fncall.New(&lazyDriver{
		gone: func() {
			os.Remove(filepath.Join(dir, "trash")) // fails if something is left
			os.Remove(dir)
		},
		there: func() bool { _, err := os.Stat(dir); return err == nil },
		open: func() (driver.Driver, error) {
			guestLog, err := os.OpenFile(n.data.at("guest.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
			if err != nil {
				return nil, fmt.Errorf("open guest log: %w", err)
			}
			defer guestLog.Close()
			return container.Open(container.Config{
				Dir: dir, Guest: guest, Name: "dsec-" + n.data.instance + "-fn", Pool: -1, First: fnFirstSlot, Log: guestLog,
			})
		},
	})
}

// lazyDriver is a driver that is opened when it is first needed.
type lazyDriver struct {
	there func() bool // an earlier process may have left something
	open  func() (driver.Driver, error)
	gone  func() // it was closed: what is empty need not be found again

	mu     sync.Mutex
	driver driver.Driver
	closed bool
}

func (l *lazyDriver) get(ctx context.Context, fresh func(context.Context, driver.Driver) error) (driver.Driver, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, dsec.Errorf(dsec.Unavailable, "the node is closing")
	}
	if l.driver != nil {
		return l.driver, nil
	}
	d, err := l.open()
	if err != nil {
		return nil, err
	}
	if fresh != nil {
		if err := fresh(ctx, d); err != nil {
			d.Close()
			return nil, err
		}
	}
	l.driver = d
	return d, nil
}

// Kind is that of containers.
func (l *lazyDriver) Kind() dsec.Kind { return dsec.Container }

// Start opens the driver if it is the first.
func (l *lazyDriver) Start(ctx context.Context, c driver.Config) (driver.Machine, error) {
	d, err := l.get(ctx, func(ctx context.Context, d driver.Driver) error {
		_, err := d.Adopt(ctx) // nothing was there: this says so
		return err
	})
	if err != nil {
		return nil, err
	}
	return d.Start(ctx, c)
}

// Adopt opens the driver if there may be something to adopt.
func (l *lazyDriver) Adopt(ctx context.Context) ([]driver.Machine, error) {
	if !l.there() {
		return nil, nil
	}
	d, err := l.get(ctx, nil)
	if err != nil {
		return nil, err
	}
	return d.Adopt(ctx)
}

// Close closes the driver if it was opened.
func (l *lazyDriver) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.driver == nil {
		return nil
	}
	if err := l.driver.Close(); err != nil {
		return err
	}
	l.gone()
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/journal"
)

// downCmd ends a node and its sandboxes.
type downCmd struct {
	Data  string `help:"The node's data folder (default that of the context file, else /var/lib/dsec)." placeholder:"DIR"`
	Guest string `hidden:"" placeholder:"FILE"`
}

// Help says what happens without a node.
func (c *downCmd) Help() string {
	return `Sandboxes that were left running by a node that is gone are ended too. Images
and everything else in the data folder stay.`
}

// Run ends them. Without anything to end it succeeds.
func (c *downCmd) Run(ctx context.Context, a *app) error {
	data, err := a.dataFolder(c.Data)
	if err != nil {
		return err
	}
	if c.Data != "" && !hasNode(data) {
		return dsec.Errorf(dsec.NotFound, "%s is not the data folder of a node", data)
	}
	contextFile, _ := a.contextPath() // without one there is nothing to remove
	ctx, cancel := context.WithTimeout(ctx, downLimit+drainLimit)
	defer cancel()
	return takeDown(ctx, Up{Data: data, Guest: c.Guest, Context: contextFile, Pool: -1, Log: newLog(a.Stderr, slog.LevelWarn)})
}

// dataFolder is the folder that a flag names, else that of the context file.
func (a *app) dataFolder(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	known, err := a.readContext()
	if err != nil || known.Data != "" {
		return known.Data, err
	}
	return defaultData, nil
}

// hasNode reports whether a folder was ever a node's.
func hasNode(data string) bool {
	_, err := os.Stat(filepath.Join(data, formatFile))
	return !errors.Is(err, fs.ErrNotExist)
}

// takeDown ends the node that u describes: the process that has its data
// folder open is asked; if there is none, the sandboxes it left are ended from
// here.
func takeDown(ctx context.Context, u Up) error {
	data, err := filepath.Abs(u.Data)
	if err != nil {
		return fmt.Errorf("take node down: %w", err)
	}
	if !hasNode(data) {
		removeContext(u.Context, data)
		return nil // never was a node
	}
	for {
		err := askForDown(ctx, data)
		if err == nil {
			// The lock is released when the process is gone, not before.
			return awaitUnlocked(ctx, data)
		}
		if !errors.Is(err, errNoNode) {
			return fmt.Errorf("take node down: %w", err)
		}
		n, err := openNode(ctx, u)
		if errors.Is(err, errInUse) && ctx.Err() == nil {
			// It is just starting, or just ending.
			if err := awaitChange(ctx, data); err != nil {
				return fmt.Errorf("take node down: %w", err)
			}
			continue
		}
		if errors.Is(err, journal.ErrCorrupt) {
			// Its sandboxes must not outlive everybody who could end them.
			u.Log.Warn("the node's journal cannot be read and stays as it is; its sandboxes are ended without it", logErr, err)
			err = endUnread(ctx, u)
			removeContext(u.Context, data)
			return err
		}
		if err != nil {
			return fmt.Errorf("take node down: %w", err)
		}
		err = n.down(ctx)
		removeContext(u.Context, data)
		return err
	}
}

// endUnread ends the machines of a node without looking at its records.
func endUnread(ctx context.Context, u Up) (err error) {
	if u.Guest == "" {
		if u.Guest, err = guestBeside(); err != nil {
			return err
		}
	}
	data, err := openData(u.Data)
	if err != nil {
		return err
	}
	defer data.close()
	k, err := openKinds(kindConfig{data: data.path, instance: data.instance, guest: u.Guest, pool: u.Pool, log: u.Log})
	if err != nil {
		return err
	}
	functions := (&node{data: data}).fnDriver(u.Guest)
	var errs []error
	for _, d := range append(k.drivers, functions) {
		machines, err := d.Adopt(ctx)
		errs = append(errs, err)
		for _, m := range machines {
			errs = append(errs, m.Stop(ctx))
		}
	}
	return errors.Join(append(errs, functions.Close(), k.close(), endLazyData(data.path))...)
}

// removeContext deletes a context file that names the node of data.
func removeContext(path, data string) {
	if path == "" {
		return
	}
	c, err := readContextFile(path)
	if err != nil || c.Data != data {
		return
	}
	os.Remove(path) // a stale one does no harm
}

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// dataFormat is the version of what a node keeps in its data folder. A node
// opens no other.
const dataFormat = "1"

// Names in a data folder.
const (
	lockFile      = "lock"     // held while a node has the folder open
	formatFile    = "format"   // dataFormat
	instanceFile  = "instance" // random: tells this node from another of its name
	tokenFile     = "token"    // secret of the operator's token, mode 0600
	upLog         = "up.log"   // of dsec up --detach
	controlSocket = "control"  // where dsec down asks
	etcdDir       = "etcd"
	blobDir       = "blobs"
	cacheDir      = "cache" // of a store elsewhere
	journalDir    = "journal"
	logDir        = "logs" // segments of trajectories, and outputs in them
	containerDir  = "container"
	swapDir       = "swap"     // see package swap; made by dsec doctor too
	verifiedDir   = "verified" // which layers were checked
	indexDir      = "files"    // which files the store has; may be lost
	tempDir       = "temp"
	knownStore    = "store"     // where the store that the node has used last lies
	snapshotDir   = "snapshots" // saved states of sandboxes
	draftDir      = "drafts"    // of such that are being put there
	diskDir       = "disks"     // disk images as virtual machines read them
)

// dataFolder is a locked data folder.
type dataFolder struct {
	path     string
	instance string
	lock     *os.File
}

// errInUse says that another process has the folder.
var errInUse = errors.New("in use by another dsec process")

// openData makes the folder if it is missing, locks it, and refuses one of
// another format. Its content is for this account alone: it holds secrets.
func openData(path string) (*dataFolder, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	if err := checkEmpty(path); err != nil { // before anything in it is touched
		return nil, fmt.Errorf("open data folder %s: %w", path, err)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	lock, err := takeLock(path)
	if err != nil {
		return nil, fmt.Errorf("open data folder %s: %w", path, err)
	}
	d := &dataFolder{path: path, lock: lock}
	if err := d.check(); err != nil {
		d.close()
		return nil, fmt.Errorf("open data folder %s: %w", path, err)
	}
	return d, nil
}

func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(path, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errInUse
		}
		return nil, fmt.Errorf("lock: %w", err)
	}
	return f, nil
}

// checkEmpty refuses a folder that holds something else than a node's data: it
// is somebody's, and may be a whole system's.
func checkEmpty(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil // missing, or a reason that opening it tells better
	}
	other := ""
	for _, e := range entries {
		switch strings.TrimSuffix(e.Name(), ".new") {
		case formatFile:
			return nil
		case lockFile, instanceFile, upLog, upLog + ".1", swapDir:
		default:
			other = e.Name()
		}
	}
	if other != "" {
		return fmt.Errorf("it holds %s and is no data folder of dsec", other)
	}
	return nil
}

// check compares the format, or sets it in a folder that is new.
func (d *dataFolder) check() error {
	got, err := os.ReadFile(d.at(formatFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := checkEmpty(d.path); err != nil { // again, with the lock
			return err
		}
	case err != nil:
		return err
	case strings.TrimSpace(string(got)) != dataFormat:
		return fmt.Errorf("its format is %q, this dsec reads %q", strings.TrimSpace(string(got)), dataFormat)
	}
	if err := os.Chmod(d.path, 0o700); err != nil {
		return err
	}
	if d.instance, err = d.keep(instanceFile, func() string { return randomHex(8) }); err != nil {
		return err
	}
	_, err = d.keep(formatFile, func() string { return dataFormat })
	return err
}

// keep gives the content of a small file, writing what fresh gives if there is
// none.
func (d *dataFolder) keep(name string, fresh func() string) (string, error) {
	b, err := os.ReadFile(d.at(name))
	if err == nil && len(b) > 0 {
		return strings.TrimSpace(string(b)), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	value := fresh()
	return value, d.write(name, value)
}

// write replaces a small file as one.
func (d *dataFolder) write(name, value string) error {
	f, err := os.OpenFile(d.at(name+".new"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(d.at(name+".new"), d.at(name))
}

// at gives the path of what is called name in the folder.
func (d *dataFolder) at(name string) string { return filepath.Join(d.path, name) }

// close gives the folder to the next.
func (d *dataFolder) close() { d.lock.Close() }

// isOpen reports whether a process has the data folder open.
func isOpen(path string) bool {
	if !hasNode(path) {
		return false
	}
	f, err := takeLock(path)
	if err == nil {
		f.Close()
	}
	return errors.Is(err, errInUse)
}

// awaitUnlocked returns once no process has the folder open.
func awaitUnlocked(ctx context.Context, path string) error {
	for {
		f, err := takeLock(path)
		if err == nil {
			return f.Close()
		}
		if !errors.Is(err, errInUse) {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaitChange returns after a moment in which the process that has the folder
// may have begun to answer or ended.
func awaitChange(ctx context.Context, path string) error {
	select {
	case <-time.After(100 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s is %w, which does not answer", path, errInUse)
	}
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails: the runtime ends the program instead
	return hex.EncodeToString(b)
}

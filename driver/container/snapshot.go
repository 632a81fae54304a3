package container

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/jail"
)

var (
	_ driver.Snapshotter = (*machine)(nil)
	_ driver.Forker      = (*machine)(nil)
	_ driver.Restorer    = (*Driver)(nil)
)

// The files of a snapshot: the writable layer in the form of package erofs, with
// the ids of the sandbox rather than the slot's, and what there must be.
const (
	snapshotFile    = "snapshot.json"
	snapshotMeta    = "meta"
	snapshotData    = "data"
	snapshotVersion = 1
)

// snapshotTimeout bounds how long a sandbox stands still for its snapshot.
const snapshotTimeout = time.Minute

// snapshot is what snapshotFile holds.
type snapshot struct {
	Version int         `json:"version"`
	Kind    dsec.Kind   `json:"kind"`
	Files   []savedFile `json:"files"`
}

type savedFile struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Snapshot implements driver.Snapshotter: the writable layer, while the workload
// stands still. Processes are not in it.
func (m *machine) Snapshot(ctx context.Context, dir string) (driver.SnapshotInfo, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, snapshotTimeout,
		dsec.Errorf(dsec.Timeout, "the files of the sandbox are not read within %v", snapshotTimeout))
	defer cancel()
	if err := m.gone(nil); err != nil {
		return driver.SnapshotInfo{}, err
	}
	thaw, err := m.Freeze(ctx)
	if err != nil {
		return driver.SnapshotInfo{}, err
	}
	bytes, err := m.save(ctx, dir)
	if terr := thaw(); terr != nil && m.gone(nil) == nil {
		err = errors.Join(err, fmt.Errorf("thaw: %w", terr))
	}
	if err != nil {
		return driver.SnapshotInfo{}, m.gone(snapshotError(ctx, fmt.Errorf("save writable layer: %w", err)))
	}
	if err := m.gone(nil); err != nil {
		return driver.SnapshotInfo{}, err // what was read while it went is not what it was
	}
	return driver.SnapshotInfo{Bytes: bytes}, nil
}

// snapshotError gives err the kind that the contracts ask for.
func snapshotError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return context.Cause(ctx)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, erofs.ErrTooBig):
		return &dsec.Error{Kind: dsec.Exhausted, Err: err}
	case errors.Is(err, erofs.ErrChanged):
		return &dsec.Error{Kind: dsec.Conflict, Err: err}
	}
	return err
}

func (m *machine) save(ctx context.Context, dir string) (int64, error) {
	path, idBase := m.Upper()
	root, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	data, err := os.OpenFile(filepath.Join(dir, snapshotData), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer data.Close()
	hash := sha256.New()
	blob := erofs.NewBlob(io.MultiWriter(data, hash), erofs.BlobOptions{})
	tree, err := erofs.FromDir(ctx, root, blob, erofs.DirOptions{IDs: erofs.IDRange{Base: idBase, Count: jail.IDRange}, Source: erofs.Upper})
	if err != nil {
		return 0, err
	}
	size, _, err := blob.Finish()
	if err == nil {
		err = data.Close()
	}
	if err != nil {
		return 0, err
	}
	blob.SetTag(snapshotData)
	image, err := tree.Encode()
	if err != nil {
		return 0, err
	}
	meta := sha256.Sum256(image.Meta)
	s := snapshot{Version: snapshotVersion, Kind: dsec.Container, Files: []savedFile{
		{snapshotMeta, int64(len(image.Meta)), hex.EncodeToString(meta[:])},
		{snapshotData, size, hex.EncodeToString(hash.Sum(nil))},
	}}
	b, err := json.Marshal(s)
	if err != nil {
		return 0, err
	}
	if err := os.WriteFile(filepath.Join(dir, snapshotMeta), image.Meta, 0o600); err != nil {
		return 0, err
	}
	if err := os.WriteFile(filepath.Join(dir, snapshotFile), b, 0o600); err != nil {
		return 0, err
	}
	return size + int64(len(image.Meta)+len(b)), nil
}

// opened is a snapshot that was found to be whole.
type opened struct {
	tree *erofs.Tree
	data *os.File
}

// openSnapshot checks all of a snapshot before anything is made of it.
func openSnapshot(dir string) (opened, error) {
	invalid := func(format string, args ...any) (opened, error) {
		return opened{}, dsec.Errorf(dsec.Invalid, "snapshot: "+format, args...)
	}
	b, err := os.ReadFile(filepath.Join(dir, snapshotFile))
	if err != nil {
		return invalid("%w", err)
	}
	// Of another version nothing else is known.
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return invalid("read %s: %w", snapshotFile, err)
	}
	if v.Version != snapshotVersion {
		return invalid("it has version %d, this build reads %d", v.Version, snapshotVersion)
	}
	var s snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		return invalid("read %s: %w", snapshotFile, err)
	}
	if s.Kind != dsec.Container || len(s.Files) != 2 || s.Files[0].Name != snapshotMeta || s.Files[1].Name != snapshotData {
		return invalid("it is of kind %q with %d files", s.Kind, len(s.Files))
	}
	meta, err := s.Files[0].open(dir)
	if err != nil {
		return invalid("%w", err)
	}
	defer meta.Close()
	if b, err = io.ReadAll(meta); err != nil {
		return invalid("%w", err)
	}
	tree, err := erofs.Decode(b)
	if err != nil {
		return invalid("%w", err)
	}
	data, err := s.Files[1].open(dir)
	if err != nil {
		return invalid("%w", err)
	}
	return opened{tree, data}, nil
}

// open opens a file and compares its content.
func (s savedFile) open(dir string) (*os.File, error) {
	f, err := os.Open(filepath.Join(dir, s.Name))
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	n, err := io.Copy(hash, f)
	if err == nil && (n != s.Size || hex.EncodeToString(hash.Sum(nil)) != s.SHA256) {
		err = fmt.Errorf("file %s of %d bytes is not what was saved", s.Name, n)
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Restore implements driver.Restorer.
func (d *Driver) Restore(ctx context.Context, c driver.Config, dir string) (driver.Machine, error) {
	t := driver.NewTimer()
	from, err := openSnapshot(dir)
	if err != nil {
		return nil, err
	}
	defer from.data.Close()
	t.Mark("checksums")
	return d.start(ctx, c, t, &from)
}

// plant fills a slot's writable layer.
func (o *opened) plant(ctx context.Context, s *shell) error {
	root, err := os.Open(filepath.Join(s.dir, "upper"))
	if err != nil {
		return err
	}
	defer root.Close()
	err = o.tree.WriteDir(ctx, root, map[string]io.ReaderAt{snapshotData: o.data},
		erofs.WriteOptions{IDs: erofs.IDRange{Base: base(s.slot), Count: jail.IDRange}})
	if err != nil {
		return snapshotError(ctx, fmt.Errorf("write writable layer: %w", err))
	}
	return nil
}

// forkAtOnce is how many children are made at the same time.
const forkAtOnce = 4

// Fork implements driver.Forker by a snapshot that nobody keeps.
func (m *machine) Fork(ctx context.Context, children []driver.Config) (_ []driver.Machine, err error) {
	// What a crash leaves of it goes with the trash.
	dir := filepath.Join(m.driver.config.Dir, trashDir, "fork-"+strconv.FormatInt(time.Now().UnixNano(), 36))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, snapshotError(ctx, err)
	}
	defer func() {
		if e := os.RemoveAll(dir); err == nil && e != nil {
			err = e
		}
	}()
	if _, err := m.Snapshot(ctx, dir); err != nil {
		return nil, err
	}
	out := make([]driver.Machine, len(children))
	errs := make([]error, len(children))
	slots := make(chan struct{}, forkAtOnce)
	var wg sync.WaitGroup
	for i, c := range children {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out[i], errs[i] = m.driver.Restore(ctx, c, dir)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, c := range out {
			if c != nil {
				err = errors.Join(err, c.Stop(context.WithoutCancel(ctx)))
			}
		}
		return nil, err
	}
	return out, nil
}

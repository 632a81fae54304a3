package snapshot

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// Index lists the states of a cluster. A node of another cluster that shares the
// store finds a state by its ID alone.
type Index interface {
	AddSnapshot(ctx context.Context, s dsec.Snapshot) error
	DropSnapshot(ctx context.Context, s dsec.Snapshot) error // one that is not there is no error
	Snapshots(ctx context.Context) ([]dsec.Snapshot, error)  // newest first
}

// Store keeps states. It is safe for concurrent use.
type Store struct {
	blobs  blob.Store
	index  Index
	drafts string
}

// Open gives the states in a blob store that nothing else is kept in. drafts is a
// folder of this node, which tells of a Put that was not finished.
func Open(ctx context.Context, blobs blob.Store, index Index, drafts string) (*Store, error) {
	s := &Store{blobs: blobs, index: index, drafts: drafts}
	if err := os.MkdirAll(drafts, 0o700); err != nil {
		return nil, fmt.Errorf("open snapshots: %w", err)
	}
	old, err := os.ReadDir(drafts)
	if err != nil {
		return nil, fmt.Errorf("open snapshots: %w", err)
	}
	for _, e := range old {
		if err := s.undo(ctx, filepath.Join(drafts, e.Name())); err != nil {
			return nil, fmt.Errorf("open snapshots: %w", err)
		}
	}
	return s, nil
}

// Put stores the files of a folder as a state. ID and Size of st are set in what
// it returns.
func (s *Store) Put(ctx context.Context, st State, dir string) (State, error) {
	m := &manifest{Format: manifestFormat, Version: manifestVersion, Secret: make([]byte, secretBytes)}
	rand.Read(m.Secret) // never fails: the runtime ends the program instead
	if st.Created.IsZero() {
		st.Created = time.Now()
	}
	st.Created = st.Created.UTC().Round(0)
	m.State = stateJSON{
		Project: st.Project, Sandbox: st.Sandbox, Spec: st.Spec, Layers: st.Layers, Created: st.Created,
		Memory: st.Memory, Sequence: st.Sequence, Key: st.Key, Guest: st.Guest,
	}
	draft, err := os.CreateTemp(s.drafts, "put-")
	if err != nil {
		return State{}, storeError("put snapshot", err)
	}
	defer draft.Close()
	out, err := s.put(ctx, m, dir, draft)
	if err != nil {
		err = errors.Join(err, s.undo(context.WithoutCancel(ctx), draft.Name()))
		return State{}, storeError("put snapshot", err)
	}
	return out, storeError("put snapshot", os.Remove(draft.Name()))
}

func (s *Store) put(ctx context.Context, m *manifest, dir string, draft *os.File) (State, error) {
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		f := file{Name: name}
		if err := s.putFile(ctx, m, &f, path, draft); err != nil {
			return fmt.Errorf("file %s: %w", name, err)
		}
		m.Files = append(m.Files, f)
		return nil
	})
	if err != nil {
		return State{}, err
	}
	b, err := json.Marshal(m)
	if err != nil {
		return State{}, err
	}
	if len(b) > maxManifest {
		return State{}, dsec.Errorf(dsec.Exhausted, "the manifest of the snapshot has %d bytes, more than %d", len(b), maxManifest)
	}
	d := blob.Of(b)
	if err := s.putBlob(ctx, d, b, draft); err != nil {
		return State{}, err
	}
	st := m.state(dsec.SnapshotIDOf(d.Sum()))
	return st, s.index.AddSnapshot(ctx, st.Snapshot)
}

// putFile stores the ranges of a file that are data, in chunks that hold more
// than zeros.
func (s *Store) putFile(ctx context.Context, m *manifest, f *file, path string, draft *os.File) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	f.Size = fi.Size()
	buf := make([]byte, prefixBytes+chunkBytes)
	copy(buf, m.Secret)
	binary.BigEndian.PutUint64(buf[secretBytes:], uint64(len(m.Files)))
	for at := int64(0); at < f.Size; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		start, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO):
			return nil
		case err == nil:
			at = max(at, start/chunkBytes*chunkBytes)
		}
		n, err := in.ReadAt(buf[prefixBytes:], at)
		if err != nil && err != io.EOF {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		if data := buf[prefixBytes : prefixBytes+n]; len(bytes.TrimLeft(data, "\x00")) > 0 {
			binary.BigEndian.PutUint64(buf[secretBytes+8:], uint64(at))
			whole := buf[:prefixBytes+n]
			c := chunk{At: at, Size: int64(n), Blob: blob.Of(whole)}
			if err := s.putBlob(ctx, c.Blob, whole, draft); err != nil {
				return err
			}
			f.Chunks = append(f.Chunks, c)
		}
		at += int64(n)
	}
	return nil
}

// putBlob notes a blob in the draft, and stores it.
func (s *Store) putBlob(ctx context.Context, d blob.Digest, b []byte, draft *os.File) error {
	if _, err := fmt.Fprintln(draft, d); err != nil {
		return err
	}
	return s.blobs.Put(ctx, d, bytes.NewReader(b))
}

// undo deletes what a draft names, the last first, unless it is a state that is
// listed already; then the draft.
func (s *Store) undo(ctx context.Context, draft string) error {
	f, err := os.Open(draft)
	if err != nil {
		return err
	}
	defer f.Close()
	var names []blob.Digest
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if d, err := blob.Parse(strings.TrimSpace(lines.Text())); err == nil { // a torn last line was not stored
			names = append(names, d)
		}
	}
	if len(names) > 0 {
		id := dsec.SnapshotIDOf(names[len(names)-1].Sum())
		all, err := s.index.Snapshots(ctx)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(all, func(x dsec.Snapshot) bool { return x.ID == id }) {
			names = nil
		}
	}
	for _, d := range slices.Backward(names) {
		if err := s.blobs.Delete(ctx, d); err != nil {
			return err
		}
	}
	return os.Remove(draft)
}

// Get finds a state. One that is not there is NotFound, one that cannot be used
// Invalid.
func (s *Store) Get(ctx context.Context, id dsec.SnapshotID) (State, error) {
	m, err := s.manifest(ctx, id)
	if err != nil {
		return State{}, err
	}
	return m.state(id), nil
}

func (s *Store) manifest(ctx context.Context, id dsec.SnapshotID) (*manifest, error) {
	sum, err := id.Sum()
	if err != nil {
		return nil, err
	}
	d := blob.FromSum(sum)
	info, err := s.blobs.Stat(ctx, d)
	if errors.Is(err, blob.ErrNotFound) {
		return nil, dsec.Errorf(dsec.NotFound, "no snapshot has the id %s", id)
	}
	if err != nil {
		return nil, storeError("get snapshot", err)
	}
	if info.Size > maxManifest {
		return nil, dsec.Errorf(dsec.Invalid, "snapshot %s: its manifest has %d bytes", id, info.Size)
	}
	b, err := blob.ReadAll(ctx, blob.NewVerified(s.blobs), d)
	if err != nil {
		return nil, storeError("get snapshot", err)
	}
	m, err := decode(b)
	if err != nil {
		return nil, dsec.Errorf(dsec.Invalid, "snapshot %s: %w", id, err)
	}
	return m, nil
}

// Fetch writes the files of a state into an empty folder.
func (s *Store) Fetch(ctx context.Context, id dsec.SnapshotID, dir string) error {
	m, err := s.manifest(ctx, id)
	if err != nil {
		return err
	}
	for _, f := range m.Files {
		if err := s.fetchFile(ctx, m, f, filepath.Join(dir, f.Name)); err != nil {
			return storeError("fetch snapshot", fmt.Errorf("file %s: %w", f.Name, err))
		}
	}
	return nil
}

func (s *Store) fetchFile(ctx context.Context, m *manifest, f file, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(f.Size); err != nil {
		return err
	}
	verified := blob.NewVerified(s.blobs)
	for _, c := range f.Chunks {
		b, err := blob.ReadAll(ctx, verified, c.Blob)
		if err != nil {
			return err
		}
		if int64(len(b)) != prefixBytes+c.Size || !bytes.HasPrefix(b, m.Secret) {
			return fmt.Errorf("chunk %s: %w", c.Blob, blob.ErrCorrupt)
		}
		if _, err := out.WriteAt(b[prefixBytes:], c.At); err != nil {
			return err
		}
	}
	return out.Close()
}

// List gives the states of the cluster, newest first, with no environment
// variables in their Specs.
func (s *Store) List(ctx context.Context) ([]dsec.Snapshot, error) {
	all, err := s.index.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b dsec.Snapshot) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
}

// Remove deletes a state. Another node that is fetching it then fails. One whose manifest is gone
// or damaged is taken from the list; nobody knows its chunks any more.
func (s *Store) Remove(ctx context.Context, id dsec.SnapshotID) error {
	m, err := s.manifest(ctx, id)
	if k := dsec.KindOf(err); err != nil && (k == dsec.NotFound || k == dsec.Invalid) {
		return s.forget(ctx, id, err)
	}
	if err != nil {
		return err
	}
	sum, err := id.Sum()
	if err != nil {
		return err
	}
	if err := s.blobs.Delete(ctx, blob.FromSum(sum)); err != nil {
		return storeError("remove snapshot", err)
	}
	// From here on it cannot be found. What an interruption leaves is space.
	ctx = context.WithoutCancel(ctx)
	err = s.index.DropSnapshot(ctx, m.state(id).Snapshot)
	for _, f := range m.Files {
		for _, c := range f.Chunks {
			err = errors.Join(err, s.blobs.Delete(ctx, c.Blob))
		}
	}
	return storeError("remove snapshot", err)
}

// forget removes a state that cannot be read for the reason why from the list.
func (s *Store) forget(ctx context.Context, id dsec.SnapshotID, why error) error {
	all, err := s.index.Snapshots(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(x dsec.Snapshot) bool { return x.ID == id })
	if i < 0 {
		return why
	}
	sum, err := id.Sum()
	if err != nil {
		return err
	}
	if err := s.blobs.Delete(ctx, blob.FromSum(sum)); err != nil {
		return storeError("remove snapshot", err)
	}
	return storeError("remove snapshot", s.index.DropSnapshot(context.WithoutCancel(ctx), all[i]))
}

// storeError gives err the kind that the contracts ask for.
func storeError(what string, err error) error {
	var typed *dsec.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &typed):
		return err
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &dsec.Error{Kind: dsec.Exhausted, Err: fmt.Errorf("%s: %w", what, err)}
	case errors.Is(err, blob.ErrCorrupt), errors.Is(err, blob.ErrNotFound):
		return &dsec.Error{Kind: dsec.Invalid, Err: fmt.Errorf("%s: it is damaged: %w", what, err)}
	}
	return fmt.Errorf("%s: %w", what, err)
}

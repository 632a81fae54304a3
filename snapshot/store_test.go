package snapshot_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/snapshot"
)

// index is an Index in memory.
type index struct {
	mu   sync.Mutex
	all  []dsec.Snapshot
	fail error
}

func (x *index) AddSnapshot(_ context.Context, s dsec.Snapshot) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.fail == nil {
		x.all = append(x.all, s)
	}
	return x.fail
}

func (x *index) DropSnapshot(_ context.Context, s dsec.Snapshot) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = slices.DeleteFunc(x.all, func(o dsec.Snapshot) bool { return o.ID == s.ID })
	return nil
}

func (x *index) Snapshots(context.Context) ([]dsec.Snapshot, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.all), nil
}

// broken is a store whose nth Put from now fails.
type broken struct {
	blob.Store
	left int
	err  error
}

func (b *broken) Put(ctx context.Context, d blob.Digest, r io.Reader) error {
	if b.left--; b.left == 0 {
		return b.err
	}
	return b.Store.Put(ctx, d, r)
}

func open(t *testing.T, blobs blob.Store, x *index, drafts string) *snapshot.Store {
	t.Helper()
	s, err := snapshot.Open(t.Context(), blobs, x, drafts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// folder makes files: small, large with holes, empty, and one below another
// folder.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, b []byte) {
		p := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o700), os.WriteFile(p, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("small", []byte("abc"))
	write("empty", nil)
	random := make([]byte, 9<<20)
	rand.NewChaCha8([32]byte{1}).Read(random) //nolint:errcheck // never fails
	write("sub/large", random)
	f, err := os.Create(filepath.Join(dir, "holes"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = f.WriteAt([]byte("in the middle"), 5<<30)
	if err := errors.Join(err, f.Truncate(10<<30)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func count(t *testing.T, s blob.Store) (n int, bytes int64) {
	t.Helper()
	for info, err := range s.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		bytes += info.Size
	}
	return n, bytes
}

func state() snapshot.State {
	return snapshot.State{
		Snapshot: dsec.Snapshot{
			Project: "p", Sandbox: "sb1", Layers: []string{"sha256:a"}, Memory: true, Sequence: 7, Key: "k",
			Spec: dsec.Spec{Kind: dsec.MicroVM, Environment: dsec.Environment{Base: "debian"}, Env: map[string]string{"A": "b"}},
		},
		Guest: snapshot.Guest{Env: []string{"A=b"}, Cwd: "/w", User: "u"},
	}
}

func TestPutFetchRemove(t *testing.T) {
	blobs, x := &blob.Memory{}, &index{}
	s := open(t, blobs, x, t.TempDir())
	dir := folder(t)
	a, err := s.Put(t.Context(), state(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if n, size := count(t, blobs); size > 10<<20+4<<20 || a.Size < 9<<20 || a.Size > size {
		t.Errorf("a state of %d bytes is %d blobs of %d bytes", a.Size, n, size)
	}
	b, err := s.Put(t.Context(), state(), dir)
	if err != nil || a.ID == b.ID {
		t.Fatalf("the same files again: %s and %s, %v", a.ID, b.ID, err)
	}

	// Another node with the store and no list finds it.
	other := open(t, blobs, &index{}, t.TempDir())
	got, err := other.Get(t.Context(), b.ID)
	if err != nil || got.Guest.Cwd != "/w" || got.Layers[0] != "sha256:a" || !got.Memory || got.Sequence != 7 || got.Size != b.Size ||
		got.Spec.Kind != dsec.MicroVM || got.Spec.Env["A"] != "b" || got.Created.IsZero() || got.Project != "p" || got.ID != b.ID {
		t.Errorf("found %+v, %v", got, err)
	}
	// Removing one takes nothing from the other.
	if err := s.Remove(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), a.ID); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("a removed state: %v", err)
	}
	if err := s.Remove(t.Context(), a.ID); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("removed again: %v", err)
	}
	to := t.TempDir()
	if err := other.Fetch(t.Context(), b.ID, to); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"small", "empty", "sub/large"} {
		want, _ := os.ReadFile(filepath.Join(dir, name))
		if got, err := os.ReadFile(filepath.Join(to, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("file %s has %d bytes, want %d (%v)", name, len(got), len(want), err)
		}
	}
	f, err := os.Open(filepath.Join(to, "holes"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	middle := make([]byte, 13)
	fi, _ := f.Stat()
	if _, err := f.ReadAt(middle, 5<<30); err != nil || string(middle) != "in the middle" || fi.Size() != 10<<30 {
		t.Errorf("the file of holes has %d bytes and %q, %v", fi.Size(), middle, err)
	}
	if list, err := s.List(t.Context()); err != nil || len(list) != 1 || list[0].ID != b.ID {
		t.Errorf("listed %v, %v", list, err)
	}
	if err := s.Remove(t.Context(), b.ID); err != nil {
		t.Fatal(err)
	}
	if n, _ := count(t, blobs); n != 0 {
		t.Errorf("%d blobs are left", n)
	}
}

// TestRemoveWithoutManifest: what is listed and cannot be read can be removed all the same.
func TestRemoveWithoutManifest(t *testing.T) {
	blobs, x := &blob.Memory{}, &index{}
	s := open(t, blobs, x, t.TempDir())
	a, err := s.Put(t.Context(), state(), folder(t))
	if err != nil {
		t.Fatal(err)
	}
	sum, err := a.ID.Sum()
	if err != nil {
		t.Fatal(err)
	}
	if err := blobs.Delete(t.Context(), blob.FromSum(sum)); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), a.ID); err != nil {
		t.Errorf("remove: %v", err)
	}
	if list, err := s.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("listed %v, %v", list, err)
	}
	if err := s.Remove(t.Context(), a.ID); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("removed again: %v", err)
	}
}

func TestPutFails(t *testing.T) {
	dir := folder(t)
	for nth := 1; nth <= 6; nth++ { // chunks, manifest
		blobs, drafts := &blob.Memory{}, t.TempDir()
		s := open(t, &broken{blobs, nth, errors.New("boom")}, &index{}, drafts)
		if _, err := s.Put(t.Context(), state(), dir); err == nil && nth < 6 {
			t.Errorf("put %d failed, and the state is there", nth)
		} else if err == nil {
			continue
		}
		if n, _ := count(t, blobs); n != 0 {
			t.Errorf("put %d failed, and %d blobs are left", nth, n)
		}
		if left, _ := os.ReadDir(drafts); len(left) != 0 {
			t.Errorf("drafts are left: %v", left)
		}
	}
	blobs := &blob.Memory{}
	s := open(t, blobs, &index{fail: errors.New("boom")}, t.TempDir())
	if _, err := s.Put(t.Context(), state(), dir); err == nil {
		t.Error("a state that is not listed is there")
	}
	if n, _ := count(t, blobs); n != 0 {
		t.Errorf("%d blobs are left", n)
	}
}

// TestCrash opens a store after a process that died while it put a state: before
// it was listed all of it goes, and behind that it stays.
func TestCrash(t *testing.T) {
	blobs, x, drafts := &blob.Memory{}, &index{}, t.TempDir()
	whole, err := open(t, blobs, x, drafts).Put(t.Context(), state(), folder(t))
	if err != nil {
		t.Fatal(err)
	}
	before, _ := count(t, blobs)
	orphan, err := blob.PutBytes(t.Context(), blobs, []byte("a chunk"))
	if err != nil {
		t.Fatal(err)
	}
	sum, _ := whole.ID.Sum()
	for name, text := range map[string]string{
		"put-1": string(orphan) + "\n" + string(orphan[:20]), // torn
		"put-2": string(blob.FromSum(sum)) + "\n",            // it was listed
	} {
		if err := os.WriteFile(filepath.Join(drafts, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, blobs, x, drafts)
	if n, _ := count(t, blobs); n != before {
		t.Errorf("%d blobs, want %d", n, before)
	}
	if err := s.Fetch(t.Context(), whole.ID, t.TempDir()); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(drafts); len(left) != 0 {
		t.Errorf("drafts are left: %v", left)
	}
}

func TestDamaged(t *testing.T) {
	folderStore, err := blob.OpenFolder(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, folderStore, &index{}, t.TempDir())
	st, err := s.Put(t.Context(), state(), folder(t))
	if err != nil {
		t.Fatal(err)
	}
	for info, err := range folderStore.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		path, err := folderStore.LocalPath(t.Context(), info.Digest)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		flipped := bytes.Clone(whole)
		flipped[len(whole)/2] ^= 1
		os.Chmod(path, 0o600) //nolint:errcheck // the write says it
		if err := os.WriteFile(path, flipped, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.Fetch(t.Context(), st.ID, t.TempDir()); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("with a damaged blob of %d bytes: %v, want invalid", info.Size, err)
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []dsec.SnapshotID{"", "sn", "snapshot", st.ID[:len(st.ID)-1], dsec.SnapshotIDOf([32]byte{1})} {
		if _, err := s.Get(t.Context(), id); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("id %q: %v, want not found", id, err)
		}
	}
}

// FuzzManifest fetches states whose manifest anybody could have put into the
// store.
func FuzzManifest(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"format":"dsec-snapshot","version":2}`,
		`{"format":"dsec-snapshot","version":1,"secret":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","files":[{"name":"../x","size":1}]}`,
		`{"format":"dsec-snapshot","version":1,"secret":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","files":[{"name":"x","size":4,"chunks":[{"at":3,"size":2,"blob":"sha256:x"}]}]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		blobs := &blob.Memory{}
		d, err := blob.PutBytes(t.Context(), blobs, b)
		if err != nil {
			t.Fatal(err)
		}
		parent := t.TempDir()
		dir := filepath.Join(parent, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		s := open(t, blobs, &index{}, t.TempDir())
		s.Fetch(t.Context(), dsec.SnapshotIDOf(d.Sum()), dir) //nolint:errcheck // any error is right
		if left, _ := os.ReadDir(parent); len(left) != 1 {
			t.Errorf("files outside of the folder: %v", left)
		}
	})
}

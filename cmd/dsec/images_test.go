package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/image"
)

// shelf is the images of a cluster of its own, over a folder.
func shelf(t *testing.T) (*images, *cluster.Cluster, string) {
	t.Helper()
	c, err := cluster.OpenEmbedded(t.Context(), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	dir := t.TempDir()
	s, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	return newImages(image.New(s, image.LibraryOptions{Temp: t.TempDir()}), c), c, dir
}

// as gives a context whose calls are a project's.
func as(t *testing.T, p dsec.ProjectID) context.Context {
	return dsec.WithCaller(t.Context(), dsec.Caller{Project: p, Token: "t", Rights: []dsec.Right{dsec.RightImages}})
}

// tarOf is a tar of one file.
func tarOf(t *testing.T, name string, data []byte) *bytes.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))})
	if err == nil {
		_, err = w.Write(data)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(b.Bytes())
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) //nolint:errcheck // never fails
	return b
}

// age makes all blobs look as if nobody had used them since long.
func old(t *testing.T, dir string) {
	t.Helper()
	past := time.Now().Add(-48 * time.Hour)
	err := filepath.WalkDir(filepath.Join(dir, "sha256"), func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			err = os.Chtimes(path, past, past)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestImageQuota(t *testing.T) {
	s, c, _ := shelf(t)
	if _, err := c.Projects().Create(t.Context(), dsec.Project{Name: "p", Quota: dsec.Quota{Images: 3 << 20}}); err != nil {
		t.Fatal(err)
	}
	up := func(name string, data []byte) error {
		_, err := s.Upload(as(t, "p"), dsec.ImportOptions{Name: name}, tarOf(t, "file", data))
		return err
	}
	first := noise(2 << 20)
	if err := up("one@1", first); err != nil {
		t.Fatal(err)
	}
	// The same again is nothing more.
	if err := up("same@1", first); err != nil {
		t.Error(err)
	}
	err := up("two@1", noise(1<<20+512<<10))
	if dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), "of the 3 MiB of images of its quota") {
		t.Errorf("beyond the quota: %v", err)
	}
	if _, err := s.names.Of("p").Resolve("two"); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("what was refused has a name: %v", err)
	}
	// What alone is larger than the quota ends on the way.
	if err := up("huge@1", noise(8<<20)); dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("larger than the quota: %v", err)
	}
	list, err := stocked{c.Projects(), s.stock}.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		if used := p.Used.Images; p.Name == "p" && (used < 2<<20 || used > 2<<20+64<<10) || p.Name != "p" && used != 0 {
			t.Errorf("project %s uses %d bytes", p.Name, used)
		}
	}
	if err := c.Projects().SetQuota(t.Context(), "p", dsec.Quota{Images: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	// Nothing is read of an import that cannot be.
	_, err = s.Upload(as(t, "p"), dsec.ImportOptions{Name: "x@1"}, unreadable{t})
	if dsec.KindOf(err) != dsec.Exhausted {
		t.Errorf("into a full project: %v", err)
	}
	for _, err := range s.Pull(as(t, "p"), "127.0.0.1:1/x", dsec.ImportOptions{Name: "x@1"}) {
		if dsec.KindOf(err) != dsec.Exhausted {
			t.Errorf("pull into a full project: %v", err)
		}
	}
}

// unreadable fails the test when it is read.
type unreadable struct{ t *testing.T }

func (u unreadable) Read([]byte) (int, error) {
	u.t.Error("it was read")
	return 0, errors.New("read")
}

func TestImageUsage(t *testing.T) {
	s, _, _ := shelf(t)
	ctx := t.Context()
	img, err := s.Upload(ctx, dsec.ImportOptions{Name: "a@1"}, tarOf(t, "file", noise(1<<20)))
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Inspect(ctx, "a")
	if err != nil || got.Usage == nil || got.Usage.Unique != img.Stored || got.Usage.Cached != img.Stored || len(got.Usage.Parts) < 3 {
		t.Fatalf("inspect: %+v, %+v, %v", got, got.Usage, err)
	}
	var sum int64
	for _, p := range got.Usage.Parts {
		if p.Names != 1 || p.Kind == "other" {
			t.Errorf("part %+v", p)
		}
		sum += p.Size
	}
	if sum != img.Stored {
		t.Errorf("the parts have %d bytes, stored are %d", sum, img.Stored)
	}
	if _, err := s.Adopt(ctx, img.Digest, dsec.ImportOptions{Name: "b@1"}); err != nil {
		t.Fatal(err)
	}
	page, err := s.List(ctx, dsec.ImageQuery{Usage: true})
	if err != nil || len(page.Images) != 2 || page.Images[0].Usage.Unique != 0 || page.Images[0].Usage.Parts != nil {
		t.Errorf("list: %+v, %v", page, err)
	}
	// A store without the layer: the name is there, figures are not.
	s.names.Put(ctx, cluster.Entry{Image: dsec.Image{Name: "gone", Version: "1", Role: dsec.Base, Digest: "sha256:" + strings.Repeat("0", 64)}}) //nolint:errcheck // seen below
	if got, err := s.Inspect(ctx, "gone"); err != nil || got.Usage != nil {
		t.Errorf("without a layer: %+v, %v", got, err)
	}
	if _, err := s.List(ctx, dsec.ImageQuery{Limit: -1}); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("a page of -1: %v", err)
	}
}

func TestAdopt(t *testing.T) {
	s, _, dir := shelf(t)
	ctx := t.Context()
	img, err := s.Upload(ctx, dsec.ImportOptions{Name: "a@1", Role: dsec.Toolkit}, tarOf(t, "file", noise(1<<20)))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(ctx, "a@1"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ctx          context.Context
		digest, name string
		role         dsec.Role
		want         dsec.ErrorKind
	}{
		{as(t, "p"), img.Digest, "b@1", "", dsec.Denied},
		{ctx, "sha256:1", "b@1", "", dsec.Invalid},
		{ctx, "sha256:" + strings.Repeat("1", 64), "b@1", "", dsec.NotFound},
		{ctx, img.Digest, "B", "", dsec.Invalid},
		{ctx, img.Digest, "b@1", dsec.Base, dsec.Invalid},
	} {
		if _, err := s.Adopt(c.ctx, c.digest, dsec.ImportOptions{Name: c.name, Role: c.role}); dsec.KindOf(err) != c.want {
			t.Errorf("adopt %s as %s: %v, want %v", c.digest, c.name, err, c.want)
		}
	}
	got, err := s.Adopt(ctx, img.Digest, dsec.ImportOptions{Name: "b@1"})
	if err != nil || got.Digest != img.Digest || got.Role != dsec.Toolkit {
		t.Fatalf("adopt: %+v, %v", got, err)
	}
	old(t, dir)
	if _, err := s.Collect(ctx, dsec.CollectOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.library.Stat(ctx, blob.Digest(img.Digest)); err != nil {
		t.Errorf("after a collection: %v", err)
	}
}

// Where others may use the store, nothing is deleted unless somebody says that
// there are none.
func TestCollectOfASharedStore(t *testing.T) {
	s, _, dir := shelf(t)
	s.shared = true
	ctx := t.Context()
	if _, err := s.library.Upload(ctx, tarOf(t, "theirs", noise(1<<20)), image.Options{}); err != nil {
		t.Fatal(err)
	}
	s.library = image.New(must(blob.OpenFolder(dir)), image.LibraryOptions{}) // it has not seen the import
	old(t, dir)
	if _, err := s.Collect(ctx, dsec.CollectOptions{}); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("collect: %v", err)
	}
	if got, err := s.Collect(ctx, dsec.CollectOptions{Alone: true}); err != nil || got.Bytes < 1<<20 {
		t.Errorf("collect alone: %+v, %v", got, err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Creates that find their image by name while names go and collections run never
// lose the layer, however old it is: until they are among the sandboxes it is
// pinned.
func TestCollectAgainstCreates(t *testing.T) {
	s, _, dir := shelf(t)
	ctx := t.Context()
	const layers = 12
	for i := range layers {
		if _, err := s.Upload(ctx, dsec.ImportOptions{Name: fmt.Sprintf("i%d@1", i)}, tarOf(t, "file", noise(300<<10))); err != nil {
			t.Fatal(err)
		}
	}
	old(t, dir)
	s.library = image.New(must(blob.OpenFolder(dir)), image.LibraryOptions{Temp: t.TempDir()}) // it remembers no import
	inTable := map[string]int{}
	var mu sync.Mutex
	s.inUse = func(context.Context) (map[string]int, error) {
		mu.Lock()
		defer mu.Unlock()
		used := map[string]int{}
		for d := range inTable {
			used[d]++
		}
		return used, nil
	}
	var creates, others sync.WaitGroup
	stop := make(chan struct{})
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := s.Collect(ctx, dsec.CollectOptions{}); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	found := make(chan string, layers)
	for i := range layers {
		creates.Go(func() {
			img, err := names{s}.Resolve(ctx, "", fmt.Sprintf("i%d", i))
			if err != nil {
				if dsec.KindOf(err) != dsec.NotFound {
					t.Error(err)
				}
				return // its name went first
			}
			// A create takes its time to mount what it has found.
			for range 20 {
				if _, err := s.Layer(ctx, img.Digest); err != nil {
					t.Errorf("layer of i%d: %v", i, err)
					return
				}
			}
			mu.Lock()
			inTable[img.Digest]++
			mu.Unlock()
			found <- img.Digest
		})
		creates.Go(func() {
			if err := s.Remove(ctx, fmt.Sprintf("i%d@1", i)); err != nil {
				t.Error(err)
			}
		})
	}
	creates.Wait()
	close(stop)
	others.Wait()
	close(found)
	if _, err := s.Collect(ctx, dsec.CollectOptions{}); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for d := range found {
		kept++
		if _, err := s.Layer(ctx, d); err != nil {
			t.Errorf("layer %s of a sandbox: %v", d, err)
		}
	}
	// What nobody found before its name went is gone, once pins are over.
	if kept == layers {
		t.Logf("every create was faster than its removal")
	}
}

func TestExportOfImages(t *testing.T) {
	s, _, dir := shelf(t)
	ctx := t.Context()
	for name, role := range map[string]dsec.Role{"base": dsec.Base, "task": dsec.Workspace} {
		if _, err := s.Upload(ctx, dsec.ImportOptions{Name: name + "@1", Role: role}, tarOf(t, name, noise(1<<20))); err != nil {
			t.Fatal(err)
		}
	}
	r, err := s.Export(ctx, dsec.Environment{Base: "base", Workspace: "task"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	img, err := s.Upload(ctx, dsec.ImportOptions{Name: "again@1"}, r)
	if err != nil || img.Size != 2<<20 {
		t.Errorf("import of what was exported: %+v, %v", img, err)
	}
	for _, bad := range []struct {
		env  dsec.Environment
		want dsec.ErrorKind
	}{
		{dsec.Environment{}, dsec.Invalid}, {dsec.Environment{Base: "task"}, dsec.Invalid}, {dsec.Environment{Base: "base", Workspace: "again"}, dsec.Invalid},
		{dsec.Environment{Base: "none"}, dsec.NotFound}, {dsec.Environment{Base: "base", Toolkits: []string{"task"}}, dsec.Invalid},
	} {
		if _, err := s.Export(ctx, bad.env); dsec.KindOf(err) != bad.want {
			t.Errorf("export %+v: %v, want %v", bad.env, err, bad.want)
		}
	}
	// One who goes away ends it; a store that fails is no end of the archive.
	r, err = s.Export(ctx, dsec.Environment{Base: "base"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	got, err := s.Inspect(ctx, "base")
	if err != nil || got.Usage == nil {
		t.Fatal(err)
	}
	for _, p := range got.Usage.Parts {
		if p.Kind == "data" {
			if err := os.Truncate(filepath.Join(dir, "sha256", p.Digest[7:9], p.Digest[7:]), 4096); err != nil {
				t.Fatal(err)
			}
		}
	}
	r, err = s.Export(ctx, dsec.Environment{Base: "base"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); err == nil {
		t.Errorf("an image whose data are cut off is exported whole, with %d bytes", n)
	}
}

// A profile is kept once, found by others, stays as long as its layer, and is
// given up when it is damaged.
func TestProfilesOfLayers(t *testing.T) {
	s, c, dir := shelf(t)
	ctx := t.Context()
	store := must(blob.OpenFolder(dir))
	s.profiles = profiles{c.Profiles(), store}
	img, err := s.Upload(ctx, dsec.ImportOptions{Name: "a@1"}, tarOf(t, "file", noise(1<<20)))
	if err != nil {
		t.Fatal(err)
	}
	p := s.profiles
	if b, err := p.get(ctx, img.Digest); b != nil || err != nil {
		t.Errorf("before: %q, %v", b, err)
	}
	profile := func(pages string) string { // of these pages
		pack := must(blob.PutBytes(ctx, store, []byte(pages)))
		return fmt.Sprintf(`{"v":2,"pack":"%s"}`, pack)
	}
	first, second := profile("pages"), profile("other pages")
	if err := p.add(ctx, img.Digest, []byte("no profile")); err == nil {
		t.Error("what is no profile was added")
	}
	for _, text := range []string{"", first, second} { // the first that says anything stays
		if err := p.add(ctx, img.Digest, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := p.get(ctx, img.Digest); string(b) != first || err != nil {
		t.Errorf("profile %q, %v", b, err)
	}
	collect := func() {
		t.Helper()
		old(t, dir)
		s.library = image.New(store, image.LibraryOptions{Temp: t.TempDir()})
		if _, err := s.Collect(ctx, dsec.CollectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	collect()
	if b, err := p.get(ctx, img.Digest); string(b) != first || err != nil {
		t.Errorf("after a collection: %q, %v", b, err)
	}
	// One that reads wrongly is none, and another takes its place.
	if err := os.WriteFile(filepath.Join(dir, "sha256", blobPath(first)), []byte("FIRST"), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err := p.get(ctx, img.Digest); b != nil || err != nil {
		t.Errorf("damaged: %q, %v", b, err)
	}
	// As is one whose pages are gone: the last collection took those that nobody named.
	if err := p.add(ctx, img.Digest, []byte(second)); err != nil {
		t.Fatal(err)
	}
	if b, err := p.get(ctx, img.Digest); b != nil || err != nil {
		t.Errorf("without pages: %q, %v", b, err)
	}
	third := profile("pages of a third")
	if err := p.add(ctx, img.Digest, []byte(third)); err != nil {
		t.Fatal(err)
	}
	if b, err := p.get(ctx, img.Digest); string(b) != third || err != nil {
		t.Errorf("its successor: %q, %v", b, err)
	}
	// With the layer it goes.
	if err := s.Remove(ctx, "a@1"); err != nil {
		t.Fatal(err)
	}
	collect()
	if all, err := c.Profiles().All(ctx); err != nil || len(all) != 0 {
		t.Errorf("profiles of nothing: %v, %v", all, err)
	}
	for info := range store.List(ctx) {
		t.Errorf("left in the store: %v", info)
	}
}

// blobPath is where a folder keeps some text.
func blobPath(text string) string {
	d := blob.Of([]byte(text))
	return filepath.Join(d.Hex()[:2], d.Hex())
}

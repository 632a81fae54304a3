package image_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/image"
)

// mixed is a tar with data of all kinds of chunks: some shrink, some do not, and
// the last is short.
func mixed(t testing.TB) []byte {
	return tarOf(t,
		entry{name: "text", body: bytes.Repeat([]byte("all work and no play "), 60000)},
		entry{name: "noise", body: pattern("noise", 3*erofs.ChunkSize+77)},
		entry{name: "more", body: bytes.Repeat([]byte("0123456789abcdef"), 5000)},
		entry{name: "small", body: []byte("x")})
}

func packedLibrary(t testing.TB, opts image.LibraryOptions) (*image.Library, *blob.Folder) {
	t.Helper()
	store, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	opts.Pack, opts.Temp = image.Zstd, t.TempDir()
	return image.New(store, opts), store
}

func TestPackedIsPlain(t *testing.T) {
	plain, plainStore := newLibrary(t)
	copies, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	packed, packedStore := packedLibrary(t, image.LibraryOptions{Plain: copies})
	a, err := plain.Upload(t.Context(), bytes.NewReader(mixed(t)), image.Options{})
	must(t, err)
	b, err := packed.Upload(t.Context(), bytes.NewReader(mixed(t)), image.Options{})
	must(t, err)

	// They differ in how the data is stored and in nothing else.
	if a.Manifest.Meta != b.Manifest.Meta || len(b.Manifest.Data) != 1 || a.Manifest.Data[0].Part != b.Manifest.Data[0].Part {
		t.Fatalf("plain %+v, packed %+v", a.Manifest, b.Manifest)
	}
	d := b.Manifest.Data[0]
	if _, err := packedStore.Stat(t.Context(), d.Digest); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("plain blob beside the packed one: %v", err)
	}
	if d.Packed == nil || d.Stored() != *d.Packed || d.Stored().Size > d.Size*2/3 {
		t.Fatalf("data %+v", d)
	}
	want, err := blob.ReadAll(t.Context(), plainStore, d.Digest)
	must(t, err)
	var got bytes.Buffer
	must(t, packed.Unpack(t.Context(), d, &got))
	if !bytes.Equal(got.Bytes(), want) {
		t.Error("unpacked data differs")
	}
	got.Reset()
	must(t, plain.Unpack(t.Context(), a.Manifest.Data[0], &got))
	if !bytes.Equal(got.Bytes(), want) {
		t.Error("plain data differs")
	}

	// Chunk by chunk, as a reader of parts does.
	table, err := image.ReadTable(t.Context(), packedStore, d)
	must(t, err)
	stored, err := blob.ReadAll(t.Context(), packedStore, d.Stored().Digest)
	must(t, err)
	raw := 0
	for i := range table.Len() {
		off, n := table.Range(i)
		chunk, err := table.Open(i, stored[off:off+n], nil)
		must(t, err)
		at := i * erofs.ChunkSize
		if !bytes.Equal(chunk, want[at:at+table.Size(i)]) {
			t.Errorf("chunk %d differs", i)
		}
		if int(n) == table.Size(i) {
			raw++
		}
		if _, err := table.Open(i, damaged(stored[off:off+n], int(n)/2), nil); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("damaged chunk %d: %v", i, err)
		}
		if _, err := table.Open(i, stored[off:off+n-1], nil); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("short chunk %d: %v", i, err)
		}
	}
	if raw == 0 || raw == table.Len() {
		t.Errorf("%d of %d chunks are stored as they are", raw, table.Len())
	}

	same(t, describe(t, mounted(t, packed, b)), describe(t, mounted(t, plain, a)))
	// A copy that is damaged is made again.
	path, err := copies.LocalPath(t.Context(), d.Digest)
	must(t, err)
	must(t, os.Chmod(path, 0o600))
	must(t, os.WriteFile(path, damaged(want, 5), 0o600))
	same(t, describe(t, mounted(t, packed, b)), describe(t, mounted(t, plain, a)))
}

func TestPackedWithoutCopies(t *testing.T) {
	lib, _ := packedLibrary(t, image.LibraryOptions{})
	l, err := lib.Upload(t.Context(), bytes.NewReader(mixed(t)), image.Options{})
	must(t, err)
	if _, err := lib.Open(t.Context(), l.Digest); dsec.KindOf(err) != dsec.Unsupported {
		t.Errorf("open without a place for plain data: %v", err)
	}
}

// The digest must not depend on how many cores there are or who is faster.
func TestPackingIsReproducible(t *testing.T) {
	archive := mixed(t)
	var first blob.Digest
	for _, cores := range []int{1, 2, 7, 1} {
		before := runtime.GOMAXPROCS(cores)
		lib, _ := packedLibrary(t, image.LibraryOptions{})
		l, err := lib.Upload(t.Context(), bytes.NewReader(archive), image.Options{})
		runtime.GOMAXPROCS(before)
		must(t, err)
		if first == "" {
			first = l.Digest
		}
		if l.Digest != first {
			t.Errorf("on %d cores: %s, before %s", cores, l.Digest, first)
		}
	}
}

func TestPackedCommitAndCollect(t *testing.T) {
	copies, err := blob.OpenFolder(t.TempDir())
	must(t, err)
	lib, store := packedLibrary(t, image.LibraryOptions{Plain: copies})
	base, err := lib.Upload(t.Context(), bytes.NewReader(mixed(t)), image.Options{Role: dsec.Workspace})
	must(t, err)
	upper := t.TempDir()
	must(t, os.WriteFile(upper+"/new", pattern("new", 300000), 0o644))
	dir, err := os.Open(upper)
	must(t, err)
	defer dir.Close()
	top, err := lib.Commit(t.Context(), image.CommitSource{Upper: dir, Over: base.Digest})
	must(t, err)
	if len(top.Manifest.Data) != 2 {
		t.Fatalf("data %+v", top.Manifest.Data)
	}
	tree := mounted(t, lib, top)
	b, err := os.ReadFile(tree + "/noise")
	if err != nil || !bytes.Equal(b, pattern("noise", 3*erofs.ChunkSize+77)) {
		t.Errorf("file of the layer below: %v", err)
	}
	if _, err := lib.Collect(t.Context(), []blob.Digest{top.Digest}, image.CollectOptions{MinAge: 1}); err != nil {
		t.Fatal(err)
	}
	if n := len(blobs(t, store)); n != 1+len(top.Manifest.Parts()) {
		t.Errorf("%d blobs are left", n)
	}
	if n := len(blobs(t, copies)); n != 2 {
		t.Errorf("%d plain copies are left", n)
	}
	if _, err := lib.Collect(t.Context(), nil, image.CollectOptions{MinAge: 1}); err != nil {
		t.Fatal(err)
	}
	if n := len(blobs(t, store)) + len(blobs(t, copies)); n != 0 {
		t.Errorf("%d blobs are left of nothing", n)
	}
}

// A store whose packed blob is cut off or other than its table says.
func TestUnpackDamaged(t *testing.T) {
	lib, store := packedLibrary(t, image.LibraryOptions{})
	l, err := lib.Upload(t.Context(), bytes.NewReader(mixed(t)), image.Options{})
	must(t, err)
	d := l.Manifest.Data[0]
	path, err := store.LocalPath(t.Context(), d.Packed.Digest)
	must(t, err)
	good, err := os.ReadFile(path)
	must(t, err)
	must(t, os.Chmod(path, 0o600))
	for name, b := range map[string][]byte{"cut off": good[:len(good)-1], "empty": {}, "changed": damaged(good, len(good)-1)} {
		must(t, os.WriteFile(path, b, 0o600))
		var out bytes.Buffer
		if err := lib.Unpack(t.Context(), d, &out); !errors.Is(err, image.ErrCorrupt) || dsec.KindOf(err) != dsec.Lost {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzTable(f *testing.F) {
	lib, store := packedLibrary(f, image.LibraryOptions{})
	l, err := lib.Upload(context.Background(), bytes.NewReader(mixed(f)), image.Options{})
	must(f, err)
	d := l.Manifest.Data[0]
	table, err := blob.ReadAll(context.Background(), store, d.Chunks.Digest)
	must(f, err)
	data, err := blob.ReadAll(context.Background(), store, d.Stored().Digest)
	must(f, err)
	f.Add(table, data, d.Size, true)
	f.Add(table[:32], data[:100], int64(4096), false)
	f.Add(damaged(table, len(table)-3), data, d.Size, true)
	f.Add(table, damaged(data, 9), d.Size, true)
	f.Fuzz(func(t *testing.T, b, data []byte, size int64, packed bool) {
		d := image.Data{Part: image.Part{Size: size}}
		if packed {
			d.Packed = &image.Part{Size: int64(len(data))}
		}
		table, err := image.ParseTable(d, b)
		if err != nil {
			if !errors.Is(err, image.ErrCorrupt) {
				t.Fatalf("%v is not corruption", err)
			}
			return
		}
		end := int64(0)
		for i := range table.Len() {
			off, n := table.Range(i)
			if off != end || n <= 0 || n > int64(table.Size(i)) {
				t.Fatalf("chunk %d: %d bytes at %d after %d", i, n, off, end)
			}
			end = off + n
			if end > int64(len(data)) {
				return // a plain blob that is short
			}
			chunk, err := table.Open(i, data[off:end], nil)
			if err == nil && len(chunk) != table.Size(i) {
				t.Fatalf("chunk %d of %d bytes", i, len(chunk))
			}
		}
	})
}

package depot

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/lazy"
)

// TestLayersAreForgotten: beyond a number of layers those that were told longest ago go, for
// successors too, but for those in use, and with them the blobs that no other has.
func TestLayersAreForgotten(t *testing.T) {
	dir := t.TempDir()
	cache, err := lazy.Open(lazy.Config{Dir: filepath.Join(dir, "parts"), Store: new(blob.Memory)})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	open := func() *registry {
		r, err := openRegistry(filepath.Join(dir, "layers"), new(blob.Memory), cache, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	name := func(what string, i int) blob.Digest { return blob.Of(fmt.Append(nil, what, i)) }
	data := func(i int) image.Data {
		d := name("data", i)
		return image.Data{Part: image.Part{Digest: d, Size: 5}, Chunks: image.Part{Digest: d, Size: 32}}
	}
	r := open()
	shared := data(100)
	for i := range 6 {
		if err := r.add(name("layer", i), []image.Data{data(i), shared}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if err := r.add(name("layer", 1), nil); err != nil { // told again
		t.Fatal(err)
	}
	released := 0
	for range 2 {
		r.hold(name("layer", 2), func() { released++ })
	}
	if released != 1 {
		t.Errorf("%d of 2 holds on a layer were given back, want 1", released)
	}
	if n := r.forget(nil, 3, time.Hour); n != 0 {
		t.Errorf("%d layers that were told just now are forgotten", n)
	}
	if n := r.forget(map[blob.Digest]bool{name("layer", 0): true}, 3, 0); n != 3 || released != 2 {
		t.Errorf("%d layers are forgotten, %d holds given back", n, released)
	}
	for life, r := range []*registry{r, open()} {
		for i := range 6 {
			known := slices.Contains([]int{0, 1, 5}, i)
			if got := r.data(name("layer", i)) != nil; got != known {
				t.Errorf("life %d: layer %d is known: %v", life, i, got)
			}
			if got := r.get(node(data(i).Digest)) != nil; got != known {
				t.Errorf("life %d: the blob of layer %d is known: %v", life, i, got)
			}
		}
		if r.get(node(shared.Digest)) == nil {
			t.Errorf("life %d: a blob that others have is forgotten", life)
		}
	}
}

// TestFailedReadsAreTold in the log, by the blob, and not each of many.
func TestFailedReadsAreTold(t *testing.T) {
	var out bytes.Buffer
	f := &folder{log: slog.New(slog.NewTextHandler(&out, nil))}
	one, two := blob.Of([]byte("one")), blob.Of([]byte("two"))
	for range 3 {
		f.tell(one, errors.New("chunk 7 is damaged"))
		f.tell(two, errors.New("away"))
	}
	if n := strings.Count(out.String(), "a read of layer data failed"); n != 2 || !strings.Contains(out.String(), string(one)) || !strings.Contains(out.String(), "chunk 7") {
		t.Errorf("%d lines:\n%s", n, &out)
	}
}

package store_test

import (
	"bytes"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
	"github.com/dsec-go/dsec/blob/s3/s3test"
	"github.com/dsec-go/dsec/blob/store"
)

var hasty = blob.Retry{For: 300 * time.Millisecond, First: 5 * time.Millisecond, Max: 50 * time.Millisecond}

func open(t *testing.T, c store.Config) store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestFolder(t *testing.T) {
	for name, form := range map[string]func(dir string) string{
		"Path": func(dir string) string { return dir },
		"URL":  func(dir string) string { return (&url.URL{Scheme: "file", Path: dir}).String() },
	} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(t *testing.T) blob.Store { return open(t, store.Config{URL: form(t.TempDir())}) })
		})
	}
}

func TestBucket(t *testing.T) {
	server := s3test.Gateway(t, t.TempDir())
	n := 0
	blobtest.Run(t, func(t *testing.T) blob.Store {
		n++
		return open(t, store.Config{URL: server.URL("p" + string(rune('a'+n))), Cache: t.TempDir(), CacheBytes: 64 << 20})
	})

	// Two nodes: what one writes the other reads, from its own disk the second time.
	a := open(t, store.Config{URL: server.URL("shared"), Cache: t.TempDir()})
	b := open(t, store.Config{URL: server.URL("shared"), Cache: t.TempDir()})
	data := blobtest.Data(1, 300_000)
	d, err := blob.PutBytes(t.Context(), a, data)
	if err != nil {
		t.Fatal(err)
	}
	path, err := b.LocalPath(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, data) {
		t.Errorf("file has %d bytes, %v", len(got), err)
	}
}

func TestOpenErrors(t *testing.T) {
	for _, c := range []store.Config{
		{}, {URL: "relative/path"}, {URL: "file://host/path"}, {URL: "file:///x?y=z"}, {URL: "ftp://x"}, {URL: "s3://bucket"},
		{URL: "s3://key:hush@bucket", Cache: "/c"}, {URL: "file:relative"},
	} {
		if s, err := store.Open(t.Context(), c); err == nil {
			t.Errorf("%+v opens %v", c, s)
		}
	}
	server := s3test.Gateway(t, t.TempDir())
	wrong := *server
	wrong.Keys = s3test.Keys(t, "other")
	if _, err := store.Open(t.Context(), store.Config{URL: wrong.URL("p"), Cache: t.TempDir()}); !errors.Is(err, blob.ErrDenied) {
		t.Errorf("wrong key: %v, want ErrDenied", err)
	}
	// A server that is away now may come back.
	wire := blobtest.NewWire(t, server.Addr)
	wire.CutAfter(0, -1)
	away := *server
	away.Addr = wire.Addr()
	s := open(t, store.Config{URL: away.URL("p"), Cache: filepath.Join(t.TempDir(), "new"), Retry: hasty})
	if _, err := s.Stat(t.Context(), blob.Of(nil)); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("stat: %v, want ErrUnavailable", err)
	}
	wire.Heal()
	if _, err := blob.PutBytes(t.Context(), s, []byte("x")); err != nil {
		t.Errorf("put after it came back: %v", err)
	}
}

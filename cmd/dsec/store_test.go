package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

func TestStoreOptions(t *testing.T) {
	tests := []struct {
		url      string
		way      storeWay
		rest     string
		compress string
		limit    time.Duration
	}{
		{"", wayOwn, "/d/blobs", "none", defaultReadLimit},
		{"/mnt/a?b=c", wayLazy, "/mnt/a?b=c", "none", defaultReadLimit},
		{"file:///mnt/a", wayLazy, "file:///mnt/a", "none", defaultReadLimit},
		{"file:///mnt/a?in-place=true", wayInPlace, "file:///mnt/a", "none", defaultReadLimit},
		{"file:///mnt/a?compress=zstd&timeout=5s", wayLazy, "file:///mnt/a", "zstd", 5 * time.Second},
		{"s3://b/p?endpoint=http://h:1&timeout=1m", wayLazy, "s3://b/p?endpoint=http%3A%2F%2Fh%3A1", "zstd", time.Minute},
		{"s3://b?compress=none", wayLazy, "s3://b", "none", defaultReadLimit},
	}
	for _, tt := range tests {
		c, err := openStore(Up{Data: "/d", Store: tt.url, Cache: 7})
		if err != nil {
			t.Errorf("%s: %v", tt.url, err)
			continue
		}
		if c.way != tt.way || c.URL != tt.rest || c.compress != tt.compress || c.readLimit != tt.limit || c.lazyBytes != 7 {
			t.Errorf("%s is %+v", tt.url, c)
		}
	}
	c, err := openStore(Up{Data: "/d", Store: "file:///mnt/a?latency=1ms&rate=200M"})
	if want := (blob.Limits{Latency: time.Millisecond, BytesPerSecond: 200 << 20, Exact: true}); err != nil || c.limits != want {
		t.Errorf("limits are %+v (%v)", c.limits, err)
	}
}

func TestBadStoreIsRefused(t *testing.T) {
	for _, url := range []string{
		"mnt", "ftp://a", "file://host/a", "file:///a?x=1", "file:///a?compress=lz4", "file:///a?in-place=yes", "s3://b?in-place=true",
		"file:///a?in-place=true&compress=zstd", "file:///a?timeout=0s", "file:///a?timeout=1s&timeout=2s", "s3://b?bogus=1", "s3://u:hunter2@b/",
	} {
		_, err := openStore(Up{Data: "/d", Store: url})
		if dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%s: %v, want invalid", url, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error repeats a password: %v", err)
		}
	}
}

func TestStoreFeature(t *testing.T) {
	dir := t.TempDir()
	f, err := storeFeature(t.Context(), "file://"+dir)
	if err != nil || !f.OK || !strings.Contains(f.Detail, dir) {
		t.Errorf("a folder: %+v, %v", f, err)
	}
	s, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	for info, err := range s.List(t.Context()) {
		t.Errorf("left behind: %v, %v", info, err)
	}
	f, err = storeFeature(t.Context(), "file:///proc/nothing")
	if err != nil || f.OK || f.Cost == "" {
		t.Errorf("a folder that cannot be: %+v, %v", f, err)
	}
	if _, err := storeFeature(t.Context(), "ftp://x"); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("no store at all: %v", err)
	}
}

// A node keeps to the store that its layers are in, however it is written.
func TestStoreStays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "place")
	for _, c := range []struct {
		store string
		kind  dsec.ErrorKind
	}{
		{"file:///mnt/a%20b?compress=zstd", dsec.Internal}, {"/mnt/a b", dsec.Internal}, {"file:///mnt/a%20b/", dsec.Internal},
		{"", dsec.Conflict}, {"/mnt/b", dsec.Conflict}, {"s3://bucket/a", dsec.Conflict}, {"/mnt/a b?1", dsec.Conflict},
	} {
		s, err := openStore(Up{Data: "/data", Store: c.store})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.same(file); (err != nil) != (c.kind == dsec.Conflict) || err != nil && dsec.KindOf(err) != c.kind {
			t.Errorf("--store %q: %v", c.store, err)
		}
		if err := s.note(file); err != nil { // the first is what stays
			t.Fatal(err)
		}
	}
}

// What up was given reaches the process that runs detached.
func TestDetachedArgs(t *testing.T) {
	c := upCmd{Listen: "127.0.0.1:1", Name: "n", Guest: "g", Verbose: true, Swap: 5, Store: "file:///s", Cache: 7, Snapshots: "sn"}
	args, err := c.args(&app{Dir: "/here"}, "/data")
	want := "up --data /data --listen 127.0.0.1:1 --ready-fd 3 --guest /here/g --snapshots /here/sn --name n --store file:///s --swap 5 --cache 7 --verbose --no-record"
	if got := strings.Join(args, " "); err != nil || got != want {
		t.Errorf("args %q, %v, want %q", got, err, want)
	}
}

// A bad store is refused before anything is made.
func TestUpRefusesBadStore(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("feature root: a node makes namespaces and mounts")
	}
	data := filepath.Join(t.TempDir(), "data")
	for _, detach := range []bool{false, true} {
		c := upCmd{Data: data, Listen: "127.0.0.1:0", Store: "s3://user:hunter2@bucket", Detach: detach, Record: true}
		err := c.Run(t.Context(), &app{Dir: "/", Getenv: func(string) string { return "" }})
		if dsec.KindOf(err) != dsec.Invalid || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("detach %v: %v", detach, err)
		}
	}
	if _, err := os.Stat(data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the data folder is made: %v", err)
	}
}

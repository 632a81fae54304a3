package image_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// A chain of commits stays one layer with a bounded number of blobs, and has what
// each of them wrote.
func TestChainOfCommits(t *testing.T) {
	lib, store := newLibrary(t)
	const depth = 45
	var last image.Layer
	want := map[string][]byte{}
	most := 0
	for i := range depth {
		dir := t.TempDir()
		write := func(name string, data []byte) {
			must(t, os.WriteFile(filepath.Join(dir, name), data, 0o644))
			want[name] = data
		}
		write(fmt.Sprint("file", i), pattern(fmt.Sprint(i), 9000+i))
		write("same", []byte("overwritten by each"))
		write("count", fmt.Append(nil, i))
		if i == 3 {
			// Several names of one file, with a hole in it.
			f, err := os.Create(filepath.Join(dir, "holes"))
			must(t, err)
			_, err = f.WriteAt(pattern("end", 5000), 5<<20)
			must(t, err)
			must(t, f.Close())
			must(t, os.Link(filepath.Join(dir, "holes"), filepath.Join(dir, "link")))
			want["holes"] = append(make([]byte, 5<<20), pattern("end", 5000)...)
			want["link"] = want["holes"]
		}
		if i == depth-2 { // gone, as overlayfs says it
			must(t, unix.Mknod(filepath.Join(dir, "file1"), unix.S_IFCHR, 0))
			delete(want, "file1")
		}
		upper, err := os.Open(dir)
		must(t, err)
		last, err = lib.Commit(t.Context(), image.CommitSource{Upper: upper, Over: last.Digest})
		must(t, err)
		must(t, upper.Close())
		most = max(most, len(last.Manifest.Data))
	}
	// Half of 32 stay when there are more than that, beside the new one.
	if n := len(last.Manifest.Data); most != 33 || n > 33 {
		t.Errorf("a layer has %d blobs, one had %d", n, most)
	}
	root := mounted(t, lib, last)
	for name, data := range want {
		if got, err := os.ReadFile(filepath.Join(root, name)); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s has %d bytes, %v, want %d", name, len(got), err, len(data))
		}
	}
	var one, two unix.Stat_t
	must(t, unix.Stat(filepath.Join(root, "holes"), &one))
	must(t, unix.Stat(filepath.Join(root, "link"), &two))
	if one.Ino != two.Ino || one.Nlink != 2 {
		t.Errorf("a file of two names has %d; inodes %d and %d", one.Nlink, one.Ino, two.Ino)
	}
	if stored := last.Manifest.Stored(); stored > 3<<20 {
		t.Errorf("%d bytes are stored: the hole is filled", stored)
	}
	// What was laid anew does not hang on the older blobs.
	_, err := lib.Collect(t.Context(), []blob.Digest{last.Digest}, image.CollectOptions{MinAge: 1})
	must(t, err)
	for _, p := range last.Manifest.Parts() {
		if _, err := store.Stat(t.Context(), p.Digest); err != nil {
			t.Errorf("after a collection: %v", err)
		}
	}
}

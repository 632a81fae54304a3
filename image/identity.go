package image

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// identity names what a layer means: its files and how things are to be run in
// them, however its data is stored and whichever older blobs it points into. Two
// layers of one identity are the same to who uses them.
//
// Requires: t was read from tars or a folder, so that it knows contents.
func identity(t *erofs.Tree, m *Manifest) blob.Digest {
	h := sha256.New()
	w := bufio.NewWriterSize(h, 64<<10)
	head, err := json.Marshal(struct {
		What   string
		Role   any
		Config Config
		Origin *Origin
	}{"dsec content 1", m.Role, m.Config, m.Origin})
	if err != nil {
		panic(err) // plain data marshals
	}
	fmt.Fprintf(w, "%s\n", head)
	links := map[*erofs.Inode]int{}
	for path, n := range t.Walk() {
		first, again := links[n]
		if again {
			fmt.Fprintf(w, "%q =%d\n", path, first)
			continue
		}
		links[n] = len(links)
		fmt.Fprintf(w, "%q %o %d:%d %d.%d %d:%d %d %q %x", path, n.Mode, n.UID, n.GID,
			n.ModTime.Unix(), n.ModTime.Nanosecond(), n.Major, n.Minor, n.Size, n.Target, n.Contents)
		for _, name := range slices.SortedFunc(maps.Keys(n.Xattrs), cmp.Compare[string]) {
			fmt.Fprintf(w, " %q=%q", name, n.Xattrs[name])
		}
		w.WriteByte('\n') //nolint:errcheck // a hash takes everything
	}
	w.Flush() //nolint:errcheck // see above
	return blob.FromHash(h)
}

// ociIdentity is the identity of a layer made of an OCI image, as far as it
// is known before anything but the image's config was read: what the config names
// is what the layer holds.
func (w *work) ociIdentity(config blob.Digest) blob.Digest {
	return blob.Of(fmt.Appendf(nil, "dsec content 1 of image %s as %s", config, w.opts.Role))
}

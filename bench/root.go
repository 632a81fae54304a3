package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// What the base image holds: the floor's own binary under the names that it
// acts on, and the folders that every root has.
const (
	binTrue  = "/bin/true"
	binPause = "/bin/pause"
	binBurn  = "/bin/burn"
	binWrite = "/bin/write"
	binHold  = "/bin/hold"
)

var rootFolders = []string{"bin", "dev", "etc", "proc", "root", "sys", "tmp"}

// baseTar gives the base image as a tar stream.
func baseTar(program string) ([]byte, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	put := func(h tar.Header, b []byte) {
		h.Size = int64(len(b))
		if err == nil {
			err = w.WriteHeader(&h)
		}
		if err == nil {
			_, err = w.Write(b)
		}
	}
	for _, d := range rootFolders {
		put(tar.Header{Typeflag: tar.TypeDir, Name: d + "/", Mode: 0o755}, nil)
	}
	put(tar.Header{Typeflag: tar.TypeReg, Name: binTrue[1:], Mode: 0o755}, content)
	for _, l := range []string{binPause, binBurn, binWrite, binHold} {
		put(tar.Header{Typeflag: tar.TypeLink, Name: l[1:], Linkname: binTrue[1:], Mode: 0o755}, nil)
	}
	if err == nil {
		err = w.Close()
	}
	return buf.Bytes(), err
}

// workspaceTar gives a small image that no other number has.
func workspaceTar(n int) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	text := fmt.Appendf(nil, "workspace %d\n", n)
	// Writes to memory of well-formed headers do not fail.
	w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "work/", Mode: 0o755})                               //nolint:errcheck
	w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "work/README", Mode: 0o644, Size: int64(len(text))}) //nolint:errcheck
	w.Write(text)                                                                                               //nolint:errcheck
	w.Close()                                                                                                   //nolint:errcheck
	return buf.Bytes()
}

// writeLayer writes the content of a tar as an EROFS layer into dir and gives
// it as the floor wants it: META,DATA.
func writeLayer(ctx context.Context, dir, name string, content []byte) (string, error) {
	meta, data := filepath.Join(dir, name+".meta"), filepath.Join(dir, name+".data")
	f, err := os.Create(data)
	if err != nil {
		return "", err
	}
	defer f.Close()
	blob := erofs.NewBlob(f, erofs.BlobOptions{})
	tree, err := erofs.FromTar(ctx, bytes.NewReader(content), blob, erofs.TarOptions{})
	if err != nil {
		return "", err
	}
	if _, _, err := blob.Finish(); err != nil {
		return "", err
	}
	blob.SetTag(name)
	image, err := tree.Encode()
	if err != nil {
		return "", err
	}
	layer := meta
	if len(image.Devices) > 0 {
		layer += "," + data
	}
	return layer, os.WriteFile(meta, image.Meta, 0o644)
}

// unpack writes the content of one of this file's tars to a folder, owned by
// id.
func unpack(content []byte, dir string, id int) error {
	r := tar.NewReader(bytes.NewReader(content))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		to := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(to, 0o755)
		case tar.TypeLink:
			err = os.Link(filepath.Join(dir, h.Linkname), to)
		default:
			err = writeFrom(r, to, os.FileMode(h.Mode))
		}
		if err == nil {
			err = os.Lchown(to, id, id)
		}
		if err != nil {
			return err
		}
	}
}

func writeFrom(r io.Reader, path string, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, r); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// fileTar gives an image of one file.
func fileTar(name string, content []byte) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}) //nolint:errcheck // as above
	w.Write(content)                                                                                      //nolint:errcheck
	w.Close()                                                                                             //nolint:errcheck
	return buf.Bytes()
}

// dropCache lets the host forget a file's pages that nobody maps.
func dropCache(path string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	f.Sync()                                            //nolint:errcheck // what is dirty stays, and counts
	unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) //nolint:errcheck // as above
}

package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/rootfs"
)

// Busybox is Debian's static busybox, which the make targets install.
const Busybox = "/bin/busybox"

// Root mounts a small layer for tests: busybox with all its applets, users
// root, alice (1000, groups 1000 and 2000) and nobody. The mount ends with the
// test.
func Root(t testing.TB) *os.File {
	t.Helper()
	return MountTar(t, BusyboxTar(t))
}

// RootFiles gives the layer of Root as files, for drivers that want FormFiles.
func RootFiles(t testing.TB) driver.LayerFiles {
	t.Helper()
	return TarFiles(t, BusyboxTar(t))
}

// MountTar mounts the layer made of a tar.
func MountTar(t testing.TB, archive []byte) *os.File {
	t.Helper()
	f := TarFiles(t, archive)
	m, err := rootfs.MountLayer(rootfs.Layer{Digest: f.Digest, Meta: f.Meta, Data: f.Data})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// TarFiles makes a layer of a tar. The files end with the test.
func TarFiles(t testing.TB, archive []byte) driver.LayerFiles {
	t.Helper()
	dir := t.TempDir()
	l := driver.LayerFiles{Meta: filepath.Join(dir, "meta")}
	data, err := os.Create(filepath.Join(dir, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	blob := erofs.NewBlob(data, erofs.BlobOptions{})
	tree, err := erofs.FromTar(context.Background(), bytes.NewReader(archive), blob, erofs.TarOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := blob.Finish(); err != nil {
		t.Fatal(err)
	}
	image, err := tree.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if len(image.Devices) > 0 {
		l.Data = []string{data.Name()}
	}
	l.Digest = fmt.Sprintf("sha256:%x", sha256.Sum256(image.Meta))
	if err := os.WriteFile(l.Meta, image.Meta, 0o600); err != nil {
		t.Fatal(err)
	}
	return l
}

// rootOf gives a root of a tar in the form that the driver wants.
func (e Env) rootOf(t *testing.T, archive []byte) driver.Root {
	t.Helper()
	switch r := e.Root(t); {
	case len(r.Files) > 0:
		return driver.Root{Files: []driver.LayerFiles{TarFiles(t, archive)}}
	case r.Disk != "":
		t.Fatal("a disk image is not made of a tar: declare it in Env.Lacks")
	}
	return driver.Root{Layers: []*os.File{MountTar(t, archive)}}
}

// BusyboxTar is the tar of Root's layer.
func BusyboxTar(t testing.TB) []byte {
	t.Helper()
	program, err := os.ReadFile(Busybox)
	if err != nil {
		t.Fatalf("%v: the make targets install busybox-static", err)
	}
	applets, err := exec.Command(Busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, content string) {
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte(content)) //nolint:errcheck // to memory
	}
	for _, d := range []string{"bin", "etc", "root", "home", "var", "usr", "proc", "dev", "sys"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, "")
	}
	put(tar.Header{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777}, "")
	put(tar.Header{Name: "home/alice", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000, Gid: 1000}, "")
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, string(program))
	for _, a := range strings.Fields(string(applets)) {
		if a != "busybox" {
			put(tar.Header{Name: "bin/" + a, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, "")
		}
	}
	file := func(name, content string) {
		put(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content)
	}
	file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
	file("etc/group", "root:x:0:\nalice:x:1000:\nteam:x:2000:alice\n")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

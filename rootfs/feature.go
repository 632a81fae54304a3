package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/erofs"
)

// Features probes what this package needs of the host by doing it once: a tiny
// layer is written below dir, mounted, mapped and put under an overlay.
func Features(dir string) []dsec.FeatureStatus {
	tmp, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return []dsec.FeatureStatus{{Name: "layers", Detail: err.Error(), Cost: "no sandbox can be made"}}
	}
	defer os.RemoveAll(tmp)
	var out []dsec.FeatureStatus
	add := func(name, ok, cost string, err error) bool {
		f := dsec.FeatureStatus{Name: name, OK: err == nil, Detail: ok}
		if err != nil {
			f.Detail, f.Cost = err.Error(), cost
		}
		out = append(out, f)
		return err == nil
	}
	l, err := tinyLayer(tmp)
	if !add("EROFS writer", "a layer was written", "no sandbox can be made", err) {
		return out
	}
	m, err := mountErofs(l.Meta, l.Data)
	if !add("EROFS on files", "mounted without a loop device (Linux 6.12 or newer)", "layers are mounted through loop devices: slower to mount, and as many as the host has", err) {
		if m, err = mountErofsLoop(l); !add("EROFS on loop devices", "mounted", "no sandbox can be made", err) {
			return out
		}
	}
	defer Unmount(m) //nolint:errcheck // a probe's
	o := Overlay{Lowers: []*os.File{m}, Upper: filepath.Join(tmp, "upper"), Work: filepath.Join(tmp, "work")}
	for _, d := range []string{o.Upper, o.Work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			add("overlay", "", "no sandbox can be made", err)
			return out
		}
	}
	r, err := o.mount()
	if add("overlay on descriptors", "lower layers by descriptor (Linux 6.15 or newer)", "lower layers are named by path in a mount namespace of the node's: about a millisecond more", err) {
		r.Close()
	}
	add("idmapped mounts", "of EROFS (Linux 5.19 or newer)", "no sandbox can be made", probeIDMap(m))
	out = append(out, dsec.FeatureStatus{Name: "disk quota", Detail: "none used on this file system",
		Cost: "disk limits are watched every two seconds: a sandbox may write beyond its limit for that long before it is ended"})
	return out
}

// probeIDMap asks for an ID mapping with the mount's own user namespace, which
// a kernel that knows the call refuses with EPERM and no other.
func probeIDMap(layer *os.File) error {
	ns, err := os.Open("/proc/self/ns/user")
	if err != nil {
		return err
	}
	defer ns.Close()
	m, err := mapped(layer, ns)
	if err == nil {
		m.Close()
	}
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// tinyLayer writes a layer of one file.
func tinyLayer(dir string) (Layer, error) {
	l := Layer{Digest: "probe", Meta: filepath.Join(dir, "meta"), Data: []string{filepath.Join(dir, "data")}}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	content := []byte("probe\n")
	err := w.WriteHeader(&tar.Header{Name: "probe", Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg})
	if err != nil {
		return l, err
	}
	w.Write(content) //nolint:errcheck // to memory
	w.Close()        //nolint:errcheck
	data, err := os.Create(l.Data[0])
	if err != nil {
		return l, err
	}
	defer data.Close()
	blob := erofs.NewBlob(data, erofs.BlobOptions{})
	tree, err := erofs.FromTar(context.Background(), &archive, blob, erofs.TarOptions{})
	if err != nil {
		return l, err
	}
	if _, _, err := blob.Finish(); err != nil {
		return l, err
	}
	image, err := tree.Encode()
	if err != nil {
		return l, err
	}
	return l, os.WriteFile(l.Meta, image.Meta, 0o600)
}

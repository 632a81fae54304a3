package qemu

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// fullDisk reports whether the file system of an open file has no room.
func fullDisk(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && st.Bavail*uint64(st.Bsize) < 1<<20
}

// Sector is the unit of disks.
const Sector = 512

// Extent is a part of a disk that lies in a file.
type Extent struct {
	File   string // path, or the text of Files.Set
	Offset int64  // in the file
	Size   int64
}

// Concat describes a disk that is put together from extents, one behind the
// other, without a copy: the content of a file that QEMU's vmdk driver reads.
// There are no holes between extents; room to a fixed size is a further extent
// in an empty sparse file. Offsets and sizes are multiples of Sector.
//
// QEMU saves no machine that has such a disk, but restores one to it. So a
// machine that is to be saved is stopped, its disk swapped for a plain file of
// the same size, see Swap, and after it swapped back: a matter of milliseconds
// of which the guest learns nothing.
func Concat(extents []Extent) ([]byte, error) {
	var b strings.Builder
	// No empty line may stand here: QEMU would count the extent behind it twice.
	b.WriteString("# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"twoGbMaxExtentFlat\"\n")
	for _, e := range extents {
		switch {
		case e.Offset%Sector != 0 || e.Size%Sector != 0 || e.Offset < 0 || e.Size <= 0:
			return nil, dsec.Errorf(dsec.Invalid, "the extent of %s is not made of whole sectors", e.File)
		case strings.ContainsAny(e.File, "\"\n\r") || len(e.File) > maxExtentPath:
			return nil, dsec.Errorf(dsec.Invalid, "the path %q cannot be part of a disk", e.File)
		}
		fmt.Fprintf(&b, "RW %d FLAT \"%s\" %d\n", e.Size/Sector, e.File, e.Offset/Sector)
	}
	if b.Len() >= maxDescriptor {
		return nil, dsec.Errorf(dsec.Invalid, "a disk of %d extents has too long a description", len(extents))
	}
	return []byte(b.String()), nil
}

// Limits of QEMU's reader.
const (
	maxExtentPath = 511
	maxDescriptor = 1<<20 - 1
)

// ConcatFile is Concat in a file without a name, opened for reading as a
// read-only block device wants it.
func ConcatFile(extents []Extent) (*os.File, error) {
	b, err := Concat(extents)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("dsec-disk", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make disk description: %w", err)
	}
	w := os.NewFile(uintptr(fd), "disk")
	defer w.Close()
	if _, err := w.Write(b); err != nil {
		return nil, fmt.Errorf("make disk description: %w", err)
	}
	return os.Open("/proc/self/fd/" + strconv.Itoa(int(w.Fd())))
}

// Swap puts another child under a raw node of a running machine: what the guest
// reads from the device changes from one request to the next, and its own
// caches do not know. The child that the machine was started with must be named
// NODE.0, for a node NODE; child says everything but its node name, as
// blockdev-add wants it. Sizes must be equal.
func (p *Process) Swap(ctx context.Context, node string, child map[string]any) error {
	old, next, err := p.children(ctx, node)
	if err != nil {
		return err
	}
	add := map[string]any{}
	for k, v := range child {
		add[k] = v
	}
	name := node + "." + strconv.Itoa(next)
	add["node-name"] = name
	if err := p.Execute(ctx, "blockdev-add", add, nil); err != nil {
		return fmt.Errorf("swap disk: %w", err)
	}
	readOnly, _ := child["read-only"].(bool)
	reopen := map[string]any{"driver": "raw", "node-name": node, "file": name, "read-only": readOnly}
	if err := p.Execute(ctx, "blockdev-reopen", map[string]any{"options": []any{reopen}}, nil); err != nil {
		p.Execute(ctx, "blockdev-del", map[string]any{"node-name": name}, nil) //nolint:errcheck // the first error says more
		return fmt.Errorf("swap disk: %w", err)
	}
	for _, o := range old {
		if err := p.Execute(ctx, "blockdev-del", map[string]any{"node-name": o}, nil); err != nil {
			return fmt.Errorf("swap disk: %w", err)
		}
	}
	return nil
}

// children lists the nodes NODE.n, and the next free n. QEMU is the one who
// knows, also for a process of the node that did not start it.
func (p *Process) children(ctx context.Context, node string) (names []string, next int, err error) {
	var nodes []struct {
		Name string `json:"node-name"`
	}
	if err := p.Execute(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &nodes); err != nil {
		return nil, 0, err
	}
	for _, n := range nodes {
		rest, ok := strings.CutPrefix(n.Name, node+".")
		if i, err := strconv.Atoi(rest); ok && err == nil {
			names = append(names, n.Name)
			next = max(next, i+1)
		}
	}
	return names, next, nil
}

// Resize makes the device over a node larger; the guest is told.
func (p *Process) Resize(ctx context.Context, node string, size int64) error {
	return p.Execute(ctx, "block_resize", map[string]any{"node-name": node, "size": size}, nil)
}

// Balloon asks the guest's balloon device, if there is one, to leave the guest
// size bytes. It may take its time, or not obey.
func (p *Process) Balloon(ctx context.Context, size int64) error {
	return p.Execute(ctx, "balloon", map[string]any{"value": size}, nil)
}

package fullvm

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// image is a disk image that was looked at.
type image struct {
	Path   string `json:"path"`
	Format string `json:"format"` // raw or qcow2
	Size   int64  `json:"size"`   // of the disk
	UEFI   bool   `json:"uefi,omitempty"`
}

// key names the file's content, as far as its metadata does: an image does not
// change while a machine that was started from it is alive.
func (i image) key() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(i.Path, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d-%d-%d-%d", st.Dev, st.Ino, st.Size, time.Unix(st.Mtim.Unix()).UnixNano()), nil
}

// headSize is how much of a disk is looked at: up to behind the volume
// descriptor of a compact disc.
const headSize = 34 << 10

// Probe looks at a disk image: Invalid for what is none, cannot be booted, or
// names further files of the host. size is that of the disk.
func Probe(f *os.File) (size int64, err error) {
	i, err := probe(f)
	return i.Size, err
}

// open looks at the disk image of a path.
func open(path string) (image, error) {
	if path == "" {
		return image{}, dsec.Errorf(dsec.Invalid, "a full VM needs a disk image as its root")
	}
	f, err := os.Open(path)
	if err != nil {
		return image{}, dsec.Errorf(dsec.Invalid, "open disk image: %w", err)
	}
	defer f.Close()
	i, err := probe(f)
	i.Path = path
	return i, err
}

func probe(f *os.File) (image, error) {
	st, err := f.Stat()
	if err != nil {
		return image{}, err
	}
	if !st.Mode().IsRegular() {
		return image{}, dsec.Errorf(dsec.Invalid, "the disk image is no file")
	}
	i := image{Format: "raw", Size: st.Size()}
	head := make([]byte, headSize)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return image{}, err
	}
	head = head[:n]
	if bytes.HasPrefix(head, []byte(qcow2Magic)) {
		i.Format = "qcow2"
		if i.Size, head, err = readQcow2(f); err != nil {
			return image{}, dsec.Errorf(dsec.Invalid, "the qcow2 image %w", err)
		}
	} else if i.Size%qemuSector != 0 {
		return image{}, dsec.Errorf(dsec.Invalid, "the file is no disk image: %d bytes are not whole sectors", i.Size)
	}
	bootable := false
	if bootable, i.UEFI = readTable(head); !bootable {
		return image{}, dsec.Errorf(dsec.Invalid, "the file is no disk image: it has no boot sector and no partition table")
	}
	return i, nil
}

const qemuSector = 512

// readTable says whether the beginning of a disk is one, and whether only UEFI
// firmware boots it: it has a system partition for that and no boot program.
func readTable(head []byte) (bootable, uefi bool) {
	if len(head) >= 32774 && string(head[32769:32774]) == "CD001" {
		bootable = true
	}
	if len(head) < 1024 || head[510] != 0x55 || head[511] != 0xaa {
		return bootable, false
	}
	program := !bytes.Equal(head[:440], make([]byte, 440))
	if string(head[512:520]) != "EFI PART" {
		if !program { // an old-style table with a system partition
			for e := head[446:510]; len(e) > 0; e = e[16:] {
				uefi = uefi || e[4] == 0xef
			}
		}
		return true, uefi
	}
	entries := binary.LittleEndian.Uint64(head[584:])
	count, size := binary.LittleEndian.Uint32(head[592:]), binary.LittleEndian.Uint32(head[596:])
	system, legacy := false, false
	for n := range uint64(min(count, 128)) {
		at := entries*qemuSector + n*uint64(size)
		if size < 128 || at+16 > uint64(len(head)) || entries > 64 {
			break
		}
		switch [16]byte(head[at : at+16]) {
		case efiSystem:
			system = true
		case biosBoot:
			legacy = true
		}
	}
	return true, system && !legacy && !program
}

// Types of partitions, as they lie on the disk.
var (
	efiSystem = [16]byte{0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b}
	biosBoot  = [16]byte{0x48, 0x61, 0x68, 0x21, 0x49, 0x64, 0x6f, 0x6e, 0x74, 0x4e, 0x65, 0x65, 0x64, 0x45, 0x46, 0x49}
)

// qcow2Magic begins an image in QEMU's own format.
const qcow2Magic = "QFI\xfb"

// Features of qcow2 that QEMU must know to read an image; the only ones taken
// are the mark of one that was not closed, and another compression.
const (
	qcowDirty       = 1 << 0
	qcowExternal    = 1 << 2
	qcowCompression = 1 << 3
	qcowKnown       = qcowDirty | qcowCompression
)

// readQcow2 checks the header of an image and reads the beginning of its disk.
func readQcow2(f io.ReaderAt) (size int64, head []byte, err error) {
	var h [104]byte
	if n, err := f.ReadAt(h[:], 0); n < 72 {
		return 0, nil, fmt.Errorf("is cut off: %w", err)
	}
	be := binary.BigEndian
	version, bits := be.Uint32(h[4:]), be.Uint32(h[20:])
	usize := be.Uint64(h[24:])
	var features uint64
	if version >= 3 {
		features = be.Uint64(h[72:])
	}
	switch {
	case version != 2 && version != 3:
		return 0, nil, fmt.Errorf("has the unknown version %d", version)
	case be.Uint64(h[8:]) != 0 || be.Uint32(h[16:]) != 0:
		return 0, nil, errors.New("has a backing file, which would be one of the host: flatten it first")
	case features&qcowExternal != 0:
		return 0, nil, errors.New("keeps its data in another file, which would be one of the host: convert it first")
	case features&^qcowKnown != 0:
		return 0, nil, fmt.Errorf("needs features that are not known: %#x", features&^qcowKnown)
	case be.Uint32(h[32:]) != 0:
		return 0, nil, errors.New("is encrypted")
	case bits < 9 || bits > 21 || usize == 0 || usize > 1<<56:
		return 0, nil, errors.New("has a damaged header")
	}
	cluster := int64(1) << bits
	var l1 [8]byte
	if _, err := f.ReadAt(l1[:], int64(be.Uint64(h[40:])&qcowOffset)); err != nil {
		return 0, nil, fmt.Errorf("is cut off: %w", err)
	}
	head = make([]byte, headSize)
	table := int64(be.Uint64(l1[:]) & qcowOffset)
	for n := int64(0); table != 0 && n*cluster < headSize; n++ {
		var e [8]byte
		if _, err := f.ReadAt(e[:], table+8*n); err != nil {
			return 0, nil, fmt.Errorf("is cut off: %w", err)
		}
		to := head[n*cluster : min((n+1)*cluster, headSize)]
		entry := be.Uint64(e[:])
		switch {
		case entry&qcowCompressed != 0:
			shift := 62 - (bits - 8)
			sectors := entry >> shift & (1<<(bits-8) - 1)
			at := int64(entry & (1<<shift - 1))
			r := flate.NewReader(io.NewSectionReader(f, at, int64(sectors+1)*qemuSector))
			if _, err := io.ReadFull(r, to); err != nil {
				return 0, nil, fmt.Errorf("begins with what cannot be read: %w", err)
			}
		case entry&qcowOffset != 0 && entry&1 == 0:
			if _, err := f.ReadAt(to, int64(entry&qcowOffset)); err != nil && !errors.Is(err, io.EOF) {
				return 0, nil, err
			}
		}
	}
	return int64(usize), head, nil
}

const (
	qcowOffset     = 0x00ff_ffff_ffff_fe00
	qcowCompressed = 1 << 62
)

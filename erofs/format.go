package erofs

import (
	"encoding/binary"
	"hash/crc32"
)

// The on-disk format, little endian throughout. An image is: block 0 with the
// superblock at 1024 followed by the device table; inodes, each at a multiple
// of 32 from the metadata start, followed by its extended attributes and then
// by its chunk indexes (aligned to 8) or its inline tail; whole blocks of
// directories and of symlinks that did not fit inline.
const (
	blockBits = 12
	// BlockSize is the unit of space in images and blobs.
	BlockSize = 1 << blockBits

	superMagic  = 0xe0f5e1e2
	superOffset = 1024
	superSize   = 128

	compatChecksum = 0x1
	compatMtime    = 0x2

	incompatChunked = 0x4
	incompatDevices = 0x8

	slotBits      = 5 // an inode number counts slots of 32 bytes
	compactSize   = 32
	extendedSize  = 64
	direntSize    = 12
	indexSize     = 8
	deviceSize    = 128
	xattrHeadSize = 12

	layoutPlain  = 0
	layoutInline = 2
	layoutChunk  = 4

	chunkBitsMask = 0x1f
	chunkIndexes  = 0x20
	// maxChunkBits keeps a chunk at 1 GiB. The format allows more, which
	// saves nothing and is untrodden ground in readers.
	maxChunkBits = 18

	nullBlock = 0xffffffff // a chunk that is a hole

	maxName    = 255
	maxTarget  = 4095
	maxDevices = 65535
	// maxDepth bounds recursion and open descriptors; Linux cannot reach a
	// path this deep in one call either.
	maxDepth = 4096
	// maxFile is far above what ext4 holds (16 TiB) and far below overflow.
	maxFile = 64 << 40
)

// File types and permissions in Inode.Mode, as in stat(2).
const (
	typeMask    = 0o170000
	typeSocket  = 0o140000
	typeSymlink = 0o120000
	typeRegular = 0o100000
	typeBlock   = 0o060000
	typeDir     = 0o040000
	typeChar    = 0o020000
	typeFIFO    = 0o010000
)

var le = binary.LittleEndian

// direntType is the type byte that goes beside a name, 0 for an invalid mode.
func direntType(mode uint32) byte {
	switch mode & typeMask {
	case typeRegular:
		return 1
	case typeDir:
		return 2
	case typeChar:
		return 3
	case typeBlock:
		return 4
	case typeFIFO:
		return 5
	case typeSocket:
		return 6
	case typeSymlink:
		return 7
	}
	return 0
}

// xattrPrefixes are the namespaces the format can express, by index. The two
// ACL names are complete; the others are followed by the rest of the name.
var xattrPrefixes = []struct {
	index  byte
	prefix string
	whole  bool
}{
	{1, "user.", false},
	{2, "system.posix_acl_access", true},
	{3, "system.posix_acl_default", true},
	{4, "trusted.", false},
	{6, "security.", false},
}

// splitXattr returns the namespace index and the rest of an attribute's name.
func splitXattr(name string) (index byte, rest string, ok bool) {
	for _, p := range xattrPrefixes {
		if p.whole && name == p.prefix {
			return p.index, "", true
		}
		if n := len(p.prefix); !p.whole && len(name) > n && name[:n] == p.prefix {
			return p.index, name[n:], len(name)-n <= maxName
		}
	}
	return 0, "", false
}

// joinXattr is the inverse of splitXattr.
func joinXattr(index byte, rest string) (string, bool) {
	for _, p := range xattrPrefixes {
		if p.index == index {
			return p.prefix + rest, p.whole == (rest == "")
		}
	}
	return "", false
}

// encodeDev packs a device number as the kernel's new_encode_dev does.
func encodeDev(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | (minor&^0xff)<<12
}

func decodeDev(d uint32) (major, minor uint32) {
	return d >> 8 & 0xfff, d&0xff | d>>12&0xfff00
}

// checksum is the kernel's: CRC32C without the final inversion, from the
// superblock to the end of its block, with the checksum field zero.
func checksum(block []byte) uint32 {
	crc := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	crc.Write(block[superOffset : superOffset+4])
	crc.Write([]byte{0, 0, 0, 0})
	crc.Write(block[superOffset+8 : BlockSize])
	return ^crc.Sum32()
}

func alignUp(n, to int64) int64   { return (n + to - 1) &^ (to - 1) }
func blocksOf(bytes int64) uint64 { return uint64(alignUp(bytes, BlockSize)) >> blockBits }
